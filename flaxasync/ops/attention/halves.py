"""An attention block on GPUs for a batch in parts, such as two halves: the rows of one part travel
while another part is computed with.

```
x       [b, m, k]      for each part, this device's rows                    (R devices on the axis)
w       [k, n]         the projections to the queries, keys and values of this device's heads
z       [b, R*m, n]    all_gather(x) @ w
heads   [b, R*m, f]    attention
out     [f, k]         this device's rows of the output projection
y       [b, m, k]      reduce_scatter(heads @ out)

forward    gather of the next part     beside   z, heads and the product of the output of this part
           sum of this part            beside   the same of the next part
backward   gather of the next part     beside   dheads and dz of this part
           sum of this part            beside   dheads and dz of the next part; the last one beside dw and dout
```

A ring hides transfers behind its own products. Those of attention are short where many devices
share its heads, so that the rest of the block has to hide them, too. Here each transfer is one
collective of NCCL and each product one call; see `flaxasync.ops.matmul.switch.WholeExecutor`. Only
the first gather and the last sum of the forward pass have nothing beside them.

Ties say what runs beside what. Each collective waits for the one before, which has the same links;
otherwise XLA joins them to one, which waits for all parts.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import PyTree

from flaxasync.ops.matmul.products import Arrays, dot, in_order, rows_like
from flaxasync.ops.matmul.switch import WholeExecutor, add_gradient
from flaxasync.ops.saved import GATHERED, PRODUCT
from flaxasync.transport.schedule import tie


@dataclasses.dataclass(frozen=True)
class HalvedAttention:
    """What is static in a block. Hashable."""

    executor: WholeExecutor
    # (z [b, R*m, n], constants, shared) -> heads [b, R*m, f] of one part
    attend: Callable[[Array, PyTree, PyTree], Array]
    keep: bool  # whether all_gather(x) is kept for the backward pass

    def gathered(self, xs: Arrays) -> Arrays:
        """Returns all_gather(x) [R, ..., m, k] of each part, one after another."""
        found: list[Array] = []
        for x in xs:
            x = _tie_to_last(found, x)
            found.append(lax.all_gather(x, self.executor.axis_name))
        return tuple(found)

    def product(self, rows: Array, w: Array, *, transposed: bool = False) -> Array:
        """Returns rows @ w, or rows @ w.T, in the order of the rows, of rows by device."""
        precision = self.executor.precision
        return in_order(dot(rows, w, precision, transposed=transposed, dtype=rows.dtype))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def halved_attention(
    block: HalvedAttention,
    xs: Arrays,
    w: Array,
    out: Array,
    constants: tuple[PyTree, ...],
    shared: PyTree,
) -> Arrays:
    """Returns y [b, m, k] of this device's rows of each part; the head of this file has w and out.

    `attend` is given `constants`, which have no gradient, beside each part, and `shared` beside all
    of them.
    """
    return _forward(block, xs, w, out, constants, shared)[0]


def _forward(
    block: HalvedAttention,
    xs: Arrays,
    w: Array,
    out: Array,
    constants: tuple[PyTree, ...],
    shared: PyTree,
) -> tuple[Arrays, tuple]:
    with jax.named_scope("project_inputs"):
        gathered = block.gathered(xs)
    found: list[Array] = []
    all_heads = []
    pulls = []
    for rows, constant in zip(gathered, constants, strict=True):
        with jax.named_scope("project_inputs"):
            z = checkpoint_name(block.product(rows, w), PRODUCT)
        heads, pull = jax.vjp(
            lambda z, shared, constant=constant: block.attend(z, constant, shared), z, shared
        )
        all_heads.append(heads)
        pulls.append(pull)
        with jax.named_scope("project_output"):
            addend = _tie_to_last(found, block.executor.addend((heads,), (out,)))
            y = lax.psum_scatter(addend, block.executor.axis_name)
            found.append(y.astype(heads.dtype))
    # named at the end: a policy that keeps them keeps nothing that they were tied to
    ys = checkpoint_name(tuple(found), PRODUCT)
    kept = xs
    if block.keep:
        kept = checkpoint_name(gathered, GATHERED)
    return ys, (kept, w, out, tuple(all_heads), tuple(pulls))


def _backward(
    block: HalvedAttention, saved: tuple, dys: Arrays
) -> tuple[Arrays, Array, Array, None, PyTree]:
    kept, w, out, all_heads, pulls = saved
    with jax.named_scope("project_output_dx"):
        gathered_dys = list(block.gathered(dys))
    dxs: list[Array] = []
    dzs: list[Array] = []
    dshareds = []
    for part, pull in enumerate(pulls):
        with jax.named_scope("project_output_dx"):
            dheads = block.product(gathered_dys[part], out, transposed=True)
        dz, dshared = pull(dheads)
        # the next gather, and the sum before, run beside what made dz
        if part + 1 < len(pulls):
            dz, gathered_dys[part + 1] = tie(dz, gathered_dys[part + 1])
        if part > 0:
            dz, dxs[part - 1] = tie(dz, dxs[part - 1])
        dzs.append(dz)
        dshareds.append(dshared)
        with jax.named_scope("project_inputs_dx"):
            addend = block.executor.addend((dz,), (w,), transposed=True)
            if part + 1 == len(pulls):  # dw and dout run beside the last sum
                addend, dzs, all_heads = tie(addend, dzs, all_heads)
            dx = lax.psum_scatter(addend, block.executor.axis_name)
            dxs.append(dx.astype(dz.dtype))
    with jax.named_scope("project_inputs_dw"):
        gathered = kept
        if not block.keep:
            gathered = block.gathered(kept)
        in_rows = [rows_like(dz, rows) for dz, rows in zip(dzs, gathered, strict=True)]
        dw = _summed(block, gathered, in_rows)
    with jax.named_scope("project_output_dw"):
        in_rows = [rows_like(x, dy) for x, dy in zip(all_heads, gathered_dys, strict=True)]
        dout = _summed(block, in_rows, gathered_dys)
    dxs, dw, dout = tie(dxs, dw, dout)
    dshared = jax.tree.map(lambda *each: functools.reduce(jnp.add, each), *dshareds)
    return tuple(dxs), dw.astype(w.dtype), dout.astype(out.dtype), None, dshared


halved_attention.defvjp(_forward, _backward)


def _summed(block: HalvedAttention, xs: Arrays | list[Array], dys: Arrays | list[Array]) -> Array:
    """Returns the sum of x.T @ dy over all parts."""
    sums: Array | None = None
    for x, dy in zip(xs, dys, strict=True):
        sums = add_gradient(sums, x, dy, block.executor.precision)
    assert sums is not None
    return sums


def _tie_to_last(found: list[Array], x: Array) -> Array:
    """Ties x to the last of `found`, which is replaced in the list, and returns it: XLA drops a tie
    whose results are not all used.
    """
    if not found:
        return x
    x, found[-1] = tie(x, found[-1])
    return x
