"""The collective matmuls as single Pallas TPU kernels: backend "fused".

The kernels take [batches, rows, features] in whole hardware tiles. So leading dimensions are
merged, and what is not whole is padded with zeros, which costs a copy.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence

import jax.numpy as jnp
from jax import Array, lax

from flaxasync.kernels.all_gather_matmul import all_gather_matmul
from flaxasync.kernels.engine.beside import WeightGradient
from flaxasync.kernels.engine.matmul import Epilogue
from flaxasync.kernels.engine.operands import LANES, sublanes
from flaxasync.kernels.matmul_reduce_scatter import matmul_reduce_scatter
from flaxasync.kernels.weight_gradient import gather_weight_gradient
from flaxasync.kernels.weight_gradient_schedule import TILES
from flaxasync.ops.matmul import products
from flaxasync.ops.matmul.products import Arrays, Operands
from flaxasync.ops.quantization import Operand, Quantization, Quantized, dequantize, values_of
from flaxasync.ops.roofline import kernels_of_sums


@dataclasses.dataclass(frozen=True)
class FusedExecutor:
    """Calls one kernel for each method; see `flaxasync.ops.matmul.vjp.Executor`."""

    axis_name: str
    directions: int
    precision: None = None  # the matrix unit's default, the only one that the kernels have
    quantization: Quantization | None = None

    def gather(
        self,
        x: Operand,
        ws: Operands,
        *,
        transposed: bool = False,
        keep: bool = False,
        epilogue: Epilogue | None = None,
        operands: Arrays = (),
        measured: slice | None = None,
    ) -> tuple[Arrays, Operand | None]:
        """Returns what any executor does; with an epilogue, its results in place of the products.

        Its operands are [..., R*m, n], as are the products. Where these are padded, the epilogue
        sees zeros, and what it makes of them is dropped. The largest magnitudes [..., R*m] of the
        rows of results that are `measured` come last, and include what was dropped; the epilogues
        of an MLP make zeros of zeros.
        """
        size = lax.axis_size(self.axis_name)
        *batch, m, k = x.shape
        values = values_of(x)
        scales = None
        row_scales = None  # of all devices
        if isinstance(x, Quantized):  # scales are few, and travel ahead
            row_scales = lax.all_gather(x.scales, self.axis_name, axis=x.ndim - 2, tiled=True)
            of_columns = [_column_scales(w) for w in ws]
            scales = _row_scales(row_scales, size, values.dtype), of_columns
        unit = sublanes(values.dtype)
        block = _pad(values.reshape(-1, m, k), {1: unit, 2: LANES})
        # whether a block is two halves of whole tiles; otherwise it travels in one direction
        halves = block.shape[0] % 2 == 0 or block.shape[1] % (2 * unit) == 0
        ys, gathered = all_gather_matmul(
            block,
            tuple(_pad(values_of(w), {0: LANES, 1: LANES}) for w in ws),
            self.axis_name,
            transposed=transposed,
            keep_gathered=keep,
            epilogue=epilogue,
            operands=tuple(_pad_blocks(operand, size, unit) for operand in operands),
            measured=measured,
            scales=scales,
            result=x.dtype,
            directions=self.directions if halves else 1,
        )
        widths = [w.shape[0 if transposed else 1] for w in ws]
        if epilogue:  # whose results are all as wide as the first product
            widths = widths[:1] * epilogue.results
        count = len(widths)
        results = tuple(
            _unpad(y, size, m, n).reshape(*batch, size * m, n)
            for y, n in zip(ys[:count], widths, strict=True)
        )
        largest = tuple(
            _unpad(of_row[..., None], size, m, 1).reshape(*batch, size * m) for of_row in ys[count:]
        )
        if gathered is None:
            return results + largest, None
        # All rows in one dimension: for a product over batches and rows XLA changes the layout of
        # x, and of all that is computed beside it, with copies.
        rows = _unpad(gathered, size, m, k).reshape(-1, k)
        if row_scales is None:
            return results + largest, rows
        return results + largest, Quantized(rows, row_scales.reshape(-1), x.dtype)

    def reduce(
        self,
        xs: Operands,
        ws: Operands,
        local: Sequence[tuple[Operand, Operands]] = (),
        *,
        transposed: bool = False,
    ) -> tuple[Array, Arrays]:
        x, *more = xs
        *batch, rows, _ = x.shape
        size = lax.axis_size(self.axis_name)
        m = rows // size
        n = ws[0].shape[0 if transposed else 1]
        scales = None
        if isinstance(x, Quantized):
            if more:  # their sums have scales of their own, and cannot be added before
                y, dws = self.reduce((x,), ws[:1], local, transposed=transposed)
                others = (
                    self.reduce((x,), (w,), transposed=transposed)[0]
                    for x, w in zip(more, ws[1:], strict=True)
                )
                return functools.reduce(jnp.add, others, y), dws
            scales = _row_scales(x.scales, size, x.values.dtype), _column_scales(ws[0])
        blocks = tuple(_pad_blocks(values_of(x), size, sublanes(values_of(x).dtype)) for x in xs)
        gradients = [_weight_gradient(x, dy) for x, dys in local for dy in dys]
        padded_ws = tuple(_pad(values_of(w), {0: LANES, 1: LANES}) for w in ws)
        batches, padded_rows, _ = blocks[0].shape
        columns = padded_ws[0].shape[0 if transposed else 1]
        count = kernels_of_sums(batches, batches * padded_rows // size * columns)
        if count == 0:
            count = 1  # no number of kernels suffices, and one raises the error that says why
        each = batches // count
        ys = []
        made: list[Array] = []
        for first in range(0, batches, each):
            part, *found = matmul_reduce_scatter(
                blocks,
                padded_ws,
                self.axis_name,
                transposed=transposed,
                scales=scales,
                result=x.dtype,
                gradients=[] if made else gradients,
                batches=range(first, first + each),
                directions=self.directions,
            )
            ys.append(part)
            made += found
        y = lax.concatenate(ys, 0)
        return _unpad(y, 1, m, n).reshape(*batch, m, n), tuple(made)

    def all_reduce(self, xs: Operands, ws: Operands) -> Array:
        return products.scatter_then_gather(self.reduce, xs, ws, self.axis_name)

    def weight_gradient(self, x: Operand, dys: Operands) -> Arrays:
        size = lax.axis_size(self.axis_name)
        *_, m, k = x.shape
        both = isinstance(dys[0], Quantized)
        values = (values_of(x) if both else dequantize(x)).reshape(-1, m, k)
        batches = values.shape[0]
        unit = sublanes(values.dtype)  # to a multiple of which the rows of a batch are padded
        if _whole(m, unit) * batches % LANES:
            unit = math.lcm(unit, LANES // math.gcd(LANES, batches))
        # A tile has whole lanes of rows. Where lanes do not divide a batch, it has all rows of
        # several batches, which can be too many for vector memory.
        if math.lcm(_whole(m, unit), LANES) > TILES.k:
            unit = LANES
        if both:
            scales = (_column_scales(x), [_column_scales(dy) for dy in dys])
        else:
            scales = None
        dws = gather_weight_gradient(
            _pad(values, {1: unit, 2: LANES}),
            tuple(_pad_blocks(values_of(dy), size, unit) for dy in dys),
            self.axis_name,
            scales=scales,
            result=x.dtype,
            directions=self.directions,
        )
        return tuple(dw[:k, : dy.shape[-1]] for dw, dy in zip(dws, dys, strict=True))


def _whole(count: int, unit: int) -> int:
    """Returns the next multiple of a unit."""
    return -(-count // unit) * unit


def _weight_gradient(x: Operand, dy: Operand) -> WeightGradient:
    """Returns x.T @ dy over all rows as a kernel takes it. Where both are quantised, their scales
    are of columns.
    """
    rows_of_x, rows_of_dy = (values_of(one).reshape(-1, one.shape[-1]) for one in (x, dy))
    scales = None
    if isinstance(x, Quantized) and isinstance(dy, Quantized):
        scales = (x.scales.astype(jnp.float32), dy.scales.astype(jnp.float32))
    return WeightGradient(rows_of_x, rows_of_dy, scales)


def _row_scales(scales: Array, size: int, dtype: jnp.dtype) -> Array:
    """Returns the float32 scales [..., size * m] of rows of 8-bit values as [batches, size *
    m'].
    """
    blocks = scales.astype(jnp.float32).reshape(-1, size, scales.shape[-1] // size)
    return _pad(blocks, {2: sublanes(dtype)}).reshape(blocks.shape[0], -1)


def _column_scales(w: Operand) -> Array:
    assert isinstance(w, Quantized)
    return _pad(w.scales.astype(jnp.float32), {0: LANES})


def _pad(x: Array, units: dict[int, int]) -> Array:
    """Appends zeros to some dimensions of x, each up to a multiple of its unit."""
    more = [0] * x.ndim
    for axis, unit in units.items():
        more[axis] = -x.shape[axis] % unit
    if any(more):
        return lax.pad(x, jnp.zeros((), x.dtype), [(0, count, 0) for count in more])
    return x


def _pad_blocks(x: Array, size: int, unit: int) -> Array:
    """Reshapes [..., size * m, k] to [batches, size * m', k'], each device's rows padded to a
    multiple of `unit`.
    """
    *_, rows, k = x.shape
    blocks = _pad(x.reshape(-1, size, rows // size, k), {2: unit, 3: LANES})
    return blocks.reshape(blocks.shape[0], -1, blocks.shape[3])


def _unpad(y: Array, size: int, m: int, n: int) -> Array:
    """Returns the [batches, size * m, n] that were asked for."""
    if y.shape[1:] == (size * m, n):
        return y
    blocks = y.reshape(y.shape[0], size, -1, y.shape[2])[:, :, :m, :n]
    return blocks.reshape(y.shape[0], size * m, n)
