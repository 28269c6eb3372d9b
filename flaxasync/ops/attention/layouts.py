"""Which rows of a sequence each device of a ring holds, and which of their products with other rows attention needs.

A sequence of R*s rows lies on R devices, s rows each. With causal attention a row needs all rows before it, so where
rows lie decides how work is shared:

```
contiguous   device i holds rows i*s .. (i+1)*s           the last device has R blocks to multiply, the first has one
zigzag       device i holds chunks i and 2R-1-i of 2R     every device has two chunk products a hop
```

Everything here is arithmetic on positions, on Python ints and on traced ones alike. It knows nothing of transfers.

Source of the zigzag layout: Brandon et al., "Striped Attention" (2023), balanced by stripes; Llama 3 (Grattafiori et
al., 2024, section 3.3.2) by pairs of chunks, as here.
"""

import dataclasses
import functools
import operator
from typing import Any, Literal, get_args

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Int

type AttentionLayout = Literal["contiguous", "zigzag"]
LAYOUTS: tuple[str, ...] = get_args(AttentionLayout.__value__)


@dataclasses.dataclass(frozen=True)
class Mask:
    """Which rows a row attends to, by position. Segments come on top of it.

    Attributes:
      causal: itself and earlier ones.
      window: those fewer than so many rows away; None for any distance.
    """

    causal: bool
    window: int | None

    @property
    def by_position(self) -> bool:
        """Whether positions decide anything."""
        return self.causal or self.window is not None

    def allows(self, q: Any, k: Any) -> Any:
        """Whether row q attends to row k; arrays of positions broadcast."""
        return self.reaches(q, 1, k, 1)

    def reaches(self, q: Any, q_rows: int, k: Any, k_rows: int) -> Any:
        """Whether any of `q_rows` rows from q on attends to any of `k_rows` rows from k on."""
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
    """One block of queries with one block of keys and values.

    Attributes:
      q_block: index of the run of `q_rows` rows among this device's rows.
      q_rows: rows of it.
      q_start: position in the sequence of its first row.
      k_block, k_rows, k_start: likewise, among the rows in hand.
      masked: whether some row of the one may not attend to some row of the other by position.
      needed: whether any row may; None where it is always so.
    """

    q_block: Any
    q_rows: int
    q_start: Any
    k_block: Any
    k_rows: int
    k_start: Any
    masked: bool
    needed: Any


@dataclasses.dataclass(frozen=True)
class Sequence:
    """How a sequence lies on a ring.

    Attributes:
      layout: see the head of this file.
      mask: which rows attend to which.
      rows: s, rows of a device.
      size: R, devices of the ring.
    """

    layout: AttentionLayout
    mask: Mask
    rows: int
    size: int

    @property
    def chunks(self) -> int:
        """Runs of consecutive positions on a device, which are products of their own. Without a mask, one is enough."""
        return 2 if self.layout == "zigzag" and self.mask.by_position else 1

    @property
    def hops(self) -> int:
        """Hops in one direction after which every device has seen all rows that its rows attend to."""
        window = self.mask.window
        if self.one_way and window is not None:
            return min(self.size - 1, -(-(window - 1) // self.rows))
        return self.size - 1

    @property
    def one_way(self) -> bool:
        """Whether all rows that a device needs lie a few devices before it: then they travel forward only."""
        window = self.mask.window
        return (
            self.layout == "contiguous"
            and self.mask.causal
            and window is not None
            and -(-(window - 1) // self.rows) < self.size - 1
        )

    def start(self, device: Any, chunk: Any) -> Any:
        """The position of the first row of a device's chunk."""
        if self.chunks == 1:
            return device * self.rows
        return (device + chunk * (2 * self.size - 1 - 2 * device)) * (self.rows // 2)

    def products(
        self, device: Any, owner: Any, *, own: bool, offset: int = 0, count: int | None = None
    ) -> list[Product]:
        """What a device computes with the rows of `owner`.

        Args:
          device: whose queries.
          owner: whose keys and values.
          own: whether the two are the same; they are not otherwise.
          offset: first row in hand of every chunk of the owner.
          count: rows in hand of every chunk; all of them by default.
        """
        q_rows = self.rows // self.chunks
        k_rows = q_rows if count is None else count

        def product(q: Any, k: Any, *, masked: bool, known: bool) -> Product:
            q_start, k_start = self.start(device, q), self.start(owner, k) + offset
            needed = None if known else self.mask.reaches(q_start, q_rows, k_start, k_rows)
            return Product(q, q_rows, q_start, k, k_rows, k_start, masked, needed)

        windowed = self.mask.window is not None
        if not self.mask.by_position:
            return [product(0, 0, masked=False, known=True)]
        if self.chunks == 1:
            return [product(0, 0, masked=own or windowed, known=own and not windowed)]
        if not self.mask.causal:
            return [product(q, k, masked=True, known=False) for q in (0, 1) for k in (0, 1)]
        # The first chunk never attends to a second one, and a second one always to a first one.
        late_early = product(1, 0, masked=windowed, known=not windowed)
        if own:
            return [late_early, *(product(c, c, masked=True, known=not windowed) for c in (0, 1))]
        # Of an earlier owner both chunks need its first; of a later one the second chunk needs both: two products, with
        # no branch.
        which = jnp.where(owner < device, 0, 1) if not isinstance(owner, int | np.integer) else int(owner > device)
        return [late_early, product(which, which, masked=windowed, known=not windowed)]


def sequence_order(layout: AttentionLayout, rows: int, devices: int) -> np.ndarray:
    """The order in which a sequence is laid out, so that equal shares of it are the devices' rows.

    `x[:, sequence_order("zigzag", rows, devices)]` is what a model is given; `np.argsort` of it leads back.

    Args:
      layout: "contiguous" leaves the sequence as it is.
      rows: of the whole sequence.
      devices: of the ring.

    Returns:
      int [rows]: the position of every row of the layout.

    Raises:
      ValueError: an unknown layout, or rows that cannot be shared out.

    >>> sequence_order("zigzag", 8, 2).tolist()
    [0, 1, 6, 7, 2, 3, 4, 5]
    """
    check_layout("sequence_order", layout)
    check_rows("sequence_order", layout, rows, devices)
    order = np.arange(rows)
    if layout == "contiguous":
        return order
    chunks = order.reshape(2 * devices, -1)
    return np.concatenate([chunks[[device, 2 * devices - 1 - device]].reshape(-1) for device in range(devices)])


def positions(layout: AttentionLayout, rows: int, axis_name: str) -> Int[Array, "*rows"]:
    """The positions of this device's `rows` rows, inside `jax.shard_map`."""
    device, size, row = lax.axis_index(axis_name), lax.axis_size(axis_name), jnp.arange(rows)
    if layout == "contiguous":
        return device * rows + row
    half = rows // 2
    return jnp.where(row < half, device * half + row, (2 * size - 1 - device) * half + (row - half))


def check_layout(caller: str, layout: str) -> None:
    """Raises ValueError for an unknown layout."""
    if layout not in LAYOUTS:
        raise ValueError(f"{caller} got layout={layout!r}: it must be one of {', '.join(map(repr, LAYOUTS))}")


def check_rows(caller: str, layout: str, rows: int, devices: int) -> None:
    """Raises ValueError where `rows` rows of a sequence cannot be shared out over a ring."""
    parts = devices * (2 if layout == "zigzag" else 1)
    if rows % parts:
        raise ValueError(
            f"{caller} with layout={layout!r} gives each of {devices} devices "
            f"{'two equal chunks' if layout == 'zigzag' else 'an equal share'} of the sequence: got {rows} rows, "
            f"needed a multiple of {parts}; pad the sequence to {-(-rows // parts) * parts}"
            ", with a segment id of its own for the padding"
        )
