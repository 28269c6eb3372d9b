"""What a kernel for attention between one block of queries and one block of keys computes:
`BlockKernel`.

The softmax is exact over any number of blocks, in any order. A carry holds, in float32, the sum of
the values weighted by 2**(score - maximum), the maximum, and the sum of the weights. Scores are
kept in units of log 2, because the hardware's exponential is exp2.

```
q        [b, n, g, s, d]     queries of n groups of g heads
kv       [2, b, n, t, d]     keys and values; every head of a group shares them, and none is repeated
acc      [b, n, g, s, d]     float32: sum of 2**(score - maximum) * v
stats    [b, n, g, 2, s]     float32: maximum; sum of 2**(score - maximum)
rows     [b, n, g, 2, s]     float32, for the gradient: log2 of the sum of 2**score; sum of o * do
segments [b, s], [b, t]      int32; rows of different segments do not attend to each other
```

`flaxasync.kernels.flash_attention` computes this on TPUs, `flaxasync.ops.attention.blocks` on every
device.
"""

import dataclasses
import functools
import operator
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax.numpy as jnp
from jax import Array, lax

from flaxasync.ring import Index

LOG2_E = 1.4426950408889634
# below every score, and differences of two such values are finite
LOWEST = -0.7 * float(jnp.finfo(jnp.float32).max)

type Carry = tuple[Array, Array]  # acc, stats
# dq as acc, dkv as kv; float32, before they are multiplied by the scale
type Gradients = tuple[Array, Array]
type Segments = tuple[Array, Array] | None  # of the rows of q, of the rows of kv


@dataclasses.dataclass(frozen=True)
class Mask:
    """Which rows a row attends to, by position. Segments restrict it further."""

    causal: bool  # whether a row attends only to itself and to earlier rows
    # a row attends only to rows fewer than `window` positions away; None for any distance
    window: int | None

    @property
    def by_position(self) -> bool:
        """Whether positions decide anything."""
        return self.causal or self.window is not None

    def allows(self, q: Index, k: Index) -> Any:
        """Says whether row q attends to row k; arrays of positions broadcast."""
        return self.reaches(q, 1, k, 1)

    def covers(self, q: Index, q_rows: int, k: Index, k_rows: int) -> Any:
        """Says whether all of the `q_rows` rows from q on attend to all of the `k_rows` rows from k
        on.
        """
        last_q = q + (q_rows - 1)
        last_k = k + (k_rows - 1)
        conditions = []
        if self.causal:
            conditions.append(last_k <= q)
        if self.window is not None:
            conditions.append(last_q - k < self.window)
        if self.window is not None and not self.causal:
            conditions.append(last_k - q < self.window)
        return functools.reduce(operator.and_, conditions, True)

    def reaches(self, q: Index, q_rows: int, k: Index, k_rows: int) -> Any:
        """Says whether any of the `q_rows` rows from q on attends to any of the `k_rows` rows from
        k on.
        """
        conditions = []
        if self.causal:
            conditions.append(k <= q + (q_rows - 1))
        if self.window is not None:
            conditions.append(q - (k + (k_rows - 1)) < self.window)
        if self.window is not None and not self.causal:
            conditions.append(k - (q + (q_rows - 1)) < self.window)
        return functools.reduce(operator.and_, conditions, True)


@dataclasses.dataclass(frozen=True)
class Product:
    """One block of queries with one block of keys and values. Indices and positions may be traced
    values.
    """

    q_block: Index  # index of the block of `q_rows` rows among this device's rows
    q_rows: int
    q_start: Index  # position in the sequence of its first row
    # index of the block of `k_rows` rows among the keys and values that this device holds now
    k_block: Index
    k_rows: int
    k_start: Index  # position in the sequence of its first row
    # whether the mask forbids some row of the one block to attend to some row of the other
    masked: bool
    # whether the mask lets any row attend to another; None where it always does
    needed: bool | Array | None


@dataclasses.dataclass(frozen=True)
class Scores:
    """What turns the product of a query and a key into a score. Hashable: it is a static
    argument.
    """

    mask: Mask
    scale: float  # the factor of the products
    # of the matmuls, as in `lax.dot_general`; they accumulate in float32
    precision: lax.PrecisionLike = None


class BlockOperands(NamedTuple):
    """What the products of this device's queries with the keys and values that it holds read."""

    scores: Scores
    q: Array  # [b, n, g, s, d]
    kv: Array  # [2, b, n, t, d]
    segments: Segments


@runtime_checkable
class BlockKernel(Protocol):
    """An implementation of the product and its gradient. Hashable. Carries and gradients keep their
    dtypes.
    """

    def forward(self, operands: BlockOperands, product: Product, carry: Carry) -> Carry:
        """Adds the rows of kv that `product` names to the carry of the rows of q that `product`
        names.
        """

    def backward(
        self,
        operands: BlockOperands,
        do: Array,
        rows: Array,
        product: Product,
        gradients: Gradients,
    ) -> Gradients:
        """Adds what the product contributes to the gradients of q and of kv; `do` has the shape of
        q.
        """
