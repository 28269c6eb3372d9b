"""The VJP rules of the collective matmuls, over an `Executor` that sends and multiplies the blocks.

```
all_gather_matmul        x [..., m, k]     w [k, n]   y [..., R*m, n]
    forward   y  = all_gather(x) @ w
              dx = reduce_scatter(dy @ w.T)             the dual ring
              dw = all_gather(x).T @ dy                 x travels again, or was kept
matmul_reduce_scatter    x [..., R*m, k]   w [k, n]   y [..., m, n]
    forward   y  = reduce_scatter(x @ w)
              dx = all_gather(dy) @ w.T                 the dual ring
              dw = x.T @ all_gather(dy)                 of the dy that the ring of dx brought
matmul_all_reduce        x [..., m, k]     w [k, n]   y [..., m, n]
    forward   y  = all_reduce(x @ w)
              dx = dy @ w.T                             no communication
              dw = x.T @ dy                             no communication
```

The rules assume valid input in which all operands vary over the same mesh axes. Saved are x and w
as they were given, both of them shards; or all_gather(x) instead of x, where that is kept. Several
w share one trip of x, and several products are summed before they travel. `ops.saved` has the names
of what is computed. With a quantization, x and w stand for their values in 8 bits with scales,
which travel, are multiplied and are saved (`ops.quantization`).

`all_gather_matmul` has nothing but the products of dw to hide the second trip of x behind, so it
multiplies each block while the next one travels. `matmul_reduce_scatter` has the products of dx for
that. It keeps the blocks of dy and multiplies once, because each addition to a float32 accumulator
reads and writes all of it.

The algebra follows Wang et al., "Overlap Communication with Dependent Computation via Decomposition
in Large Deep Learning Models" (ASPLOS 2023).
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name

from flaxasync.ops.matmul.products import (
    Arrays,
    Operands,
    dot,
    rows_like,
    sum_of_products,
    weight_gradient,
    weight_gradients,
)
from flaxasync.ops.quantization import (
    Operand,
    Quantization,
    Quantized,
    backward_operands,
    cotangents,
    dequantize,
    forward_operands,
    weight_operands,
)
from flaxasync.ops.saved import GATHERED, PRODUCT


class Executor(Protocol):
    """What sends and multiplies the blocks of a call. Hashable: it is the static argument of the
    rules.
    """

    @property
    def axis_name(self) -> str: ...

    @property
    def precision(self) -> lax.PrecisionLike: ...

    @property
    def quantization(self) -> Quantization | None: ...

    def gather(
        self, x: Operand, ws: Operands, *, transposed: bool = False, keep: bool = False
    ) -> tuple[Arrays, Operand | None]:
        """Returns all_gather(x) @ w for each w [k, n], or @ w.T for w [n, k], and all_gather(x) if
        `keep`, else None.

        The rows of all_gather(x) [..., R*m, k] are in the order in which a weight gradient is
        fastest on them; see `rows_like`.
        """

    def reduce(
        self,
        xs: Operands,
        ws: Operands,
        local: Sequence[tuple[Operand, Operands]] = (),
        *,
        transposed: bool = False,
    ) -> tuple[Array, Arrays]:
        """Returns reduce_scatter(sum of x @ w), or of x @ w.T, for x [..., R*m, k], and products of
        `local`.

        These are x.T @ dy for each (x, dys) and each of its dys, in x's dtype. They need only the
        rows that are here, and can be computed while sums travel.
        """

    def all_reduce(self, xs: Operands, ws: Operands) -> Array:
        """Returns all_reduce(sum of x @ w), whose type says that it does not vary over the axis."""

    def weight_gradient(self, x: Operand, dys: Operands) -> Arrays:
        """Returns all_gather(x).T @ dy for each dy [..., R*m, n], over all rows of all batches, in
        x's dtype.

        Operands that are quantised are those of `weight_operands`.
        """


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def gather_and_multiply(executor: Executor, keep: bool, x: Operand, ws: Operands) -> Arrays:
    with jax.named_scope("all_gather_matmul"):
        (x,), ws = forward_operands(executor.quantization, (x,), ws)
        return executor.gather(x, ws)[0]


def _gather_and_multiply_fwd(
    executor: Executor, keep: bool, x: Operand, ws: Operands
) -> tuple[Arrays, tuple[Operand, Operands]]:
    (x,), ws = forward_operands(executor.quantization, (x,), ws)
    if not keep:
        return checkpoint_name(gather_and_multiply(executor, keep, x, ws), PRODUCT), (x, ws)
    ys, gathered = _gather_and_keep(executor, x, ws)
    return checkpoint_name(ys, PRODUCT), (checkpoint_name(gathered, GATHERED), ws)


def _gather_and_multiply_bwd(
    executor: Executor, keep: bool, saved: tuple[Operand, Operands], dys: Arrays
) -> tuple[Array, tuple[Any, ...]]:
    return gradients_of_gather(executor, keep, saved, dys)[:2]


def gradients_of_gather(
    executor: Executor,
    keep: bool,
    saved: tuple[Operand, Operands],
    dys: Arrays,
    local: Sequence[tuple[Operand, Operands]] = (),
    most: Array | None = None,
) -> tuple[Array, tuple[Any, ...], Arrays]:
    """Returns dx and the dw of `all_gather_matmul`, and the products of `local`; see
    `Executor.reduce`.

    `saved` are all_gather(x) if `keep`, and x if not, and ws; `most` is what `backward_operands`
    takes. Products in 8 bits are often shorter than the trip of their sums in 16 bits. So the dw of
    an x that is here is computed beside it.
    """
    x, ws = saved
    with jax.named_scope("all_gather_matmul_dx"):
        of_dx = backward_operands(executor.quantization, dys, ws, most)
    with jax.named_scope("all_gather_matmul_dw"):
        axis_name: str | None = executor.axis_name
        if keep:
            dys = tuple(rows_like(dy, x) for dy in dys)
            axis_name = None
        x, dys_given = weight_operands(
            executor.quantization, x, dys, axis_name=axis_name, others_are_cotangents=True
        )
    beside = [*local]
    is_beside = keep and isinstance(x, Quantized)  # whether dw is computed beside the sums of dx
    if is_beside:
        beside.append((x, dys_given))
    with jax.named_scope("all_gather_matmul_dx"):
        dx, found = executor.reduce(*of_dx, beside, transposed=True)
    if is_beside:
        count = len(found) - len(dys_given)
        return dx, cotangents(ws, found[count:]), found[:count]
    with jax.named_scope("all_gather_matmul_dw"):
        if keep:
            dws = weight_gradients(x, dys_given, executor.precision)
        else:
            dws = executor.weight_gradient(x, dys_given)
    return dx, cotangents(ws, dws), found


gather_and_multiply.defvjp(_gather_and_multiply_fwd, _gather_and_multiply_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gather_and_keep(executor: Executor, x: Operand, ws: Operands) -> tuple[Arrays, Operand]:
    """Returns the products and all_gather(x).

    It has a rule of its own, which is that of automatic differentiation, so that a policy of
    `jax.checkpoint` sees one operation, as it does where nothing is kept. Otherwise a policy that
    saves products would save each block's product and drop the gathered rows, which would then
    travel again.
    """
    with jax.named_scope("all_gather_matmul"):
        ys, gathered = executor.gather(x, ws, keep=True)
    assert gathered is not None
    return ys, gathered


def _gather_and_keep_fwd(
    executor: Executor, x: Operand, ws: Operands
) -> tuple[Any, Callable[[Any], Any]]:
    return jax.vjp(lambda x, ws: executor.gather(x, ws, keep=True), x, ws)


_gather_and_keep.defvjp(_gather_and_keep_fwd, lambda executor, pull, gradients: pull(gradients))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def multiply_and_scatter(executor: Executor, xs: Operands, ws: Operands) -> Array:
    with jax.named_scope("matmul_reduce_scatter"):
        return executor.reduce(*forward_operands(executor.quantization, xs, ws))[0]


def _multiply_and_scatter_fwd(
    executor: Executor, xs: Operands, ws: Operands
) -> tuple[Array, tuple[Operands, Operands]]:
    saved = forward_operands(executor.quantization, xs, ws)
    return checkpoint_name(multiply_and_scatter(executor, *saved), PRODUCT), saved


def _multiply_and_scatter_bwd(
    executor: Executor, saved: tuple[Operands, Operands], dy: Array
) -> tuple[Arrays, tuple[Any, ...]]:
    xs, ws = saved
    with jax.named_scope("matmul_reduce_scatter_dx"):
        (dy_given,), ws_given = backward_operands(executor.quantization, (dy,), ws)
        dxs, gathered = executor.gather(dy_given, ws_given, transposed=True, keep=True)
    assert gathered is not None
    with jax.named_scope("matmul_reduce_scatter_dw"):
        alike = tuple(rows_like(dequantize(x), gathered) for x in xs)
        gathered, alike_given = weight_operands(executor.quantization, gathered, alike)
        dws = tuple(
            weight_gradient(x, gathered, executor.precision).astype(dy.dtype) for x in alike_given
        )
        return dxs, cotangents(ws, dws)


multiply_and_scatter.defvjp(_multiply_and_scatter_fwd, _multiply_and_scatter_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def multiply_and_reduce(executor: Executor, xs: Operands, ws: Operands) -> Array:
    with jax.named_scope("matmul_all_reduce"):
        return executor.all_reduce(*forward_operands(executor.quantization, xs, ws))


def _multiply_and_reduce_fwd(
    executor: Executor, xs: Operands, ws: Operands
) -> tuple[Array, tuple[Operands, Operands]]:
    saved = forward_operands(executor.quantization, xs, ws)
    return checkpoint_name(multiply_and_reduce(executor, *saved), PRODUCT), saved


def _multiply_and_reduce_bwd(
    executor: Executor, saved: tuple[Operands, Operands], dy: Array
) -> tuple[Arrays, tuple[Any, ...]]:
    if executor.axis_name not in jax.typeof(jax.tree.leaves(saved)[0]).mat.varying:
        # Under check_vma=False no type says that y is the same everywhere, and shard_map hands each
        # device a share of dy.
        dy = lax.psum(dy, executor.axis_name)
    return local_gradients(executor.quantization, executor.precision, saved, dy)


multiply_and_reduce.defvjp(_multiply_and_reduce_fwd, _multiply_and_reduce_bwd)


def local_gradients(
    quantization: Quantization | None,
    precision: lax.PrecisionLike,
    saved: tuple[Operands, Operands],
    dy: Array,
) -> tuple[Arrays, tuple[Any, ...]]:
    """Returns the gradients of the sum of x @ w over all pairs, which need no communication."""
    xs, ws = saved
    (dy_of_dx,), ws_given = backward_operands(quantization, (dy,), ws)
    dxs = tuple(dot(dy_of_dx, w, precision, transposed=True).astype(dy.dtype) for w in ws_given)
    of_dw = [weight_operands(quantization, x, (dy,), others_are_cotangents=True) for x in xs]
    dws = tuple(
        weight_gradient(x, dy_of_dw, precision).astype(dy.dtype) for x, (dy_of_dw,) in of_dw
    )
    return dxs, cotangents(ws, dws)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def multiply(
    quantization: Quantization, precision: lax.PrecisionLike, x: Operand, w: Operand
) -> Array:
    """Returns the quantised product x @ w of one device, in the dtype of x."""
    return sum_of_products(*forward_operands(quantization, (x,), (w,))).astype(x.dtype)


def _multiply_fwd(
    quantization: Quantization, precision: lax.PrecisionLike, x: Operand, w: Operand
) -> tuple[Array, tuple[Operands, Operands]]:
    (x,), (w,) = saved = forward_operands(quantization, (x,), (w,))
    return checkpoint_name(multiply(quantization, precision, x, w), PRODUCT), saved


def _multiply_bwd(
    quantization: Quantization,
    precision: lax.PrecisionLike,
    saved: tuple[Operands, Operands],
    dy: Array,
) -> tuple[Array, Any]:
    (dx,), (dw,) = local_gradients(quantization, precision, saved, dy)
    return dx, dw


multiply.defvjp(_multiply_fwd, _multiply_bwd)
