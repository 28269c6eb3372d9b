"""The collective matmuls on GPUs, each of which a switch connects with every other one.

XLA for GPUs takes a permute apart into a start and a done, as it does for TPUs, and chooses less
well what runs between them. So three things differ from `flaxasync.ops.matmul.ring`:

* Blocks go around the ring, and what is made of a block is tied to the arrival of the next one.
  Without the tie XLA begins with all transfers, one after another, and nothing beside them.
* Sums do not go around. A product is sent straight to the device that owns its rows, which adds all
  of them at once. Of a ring of sums XLA makes what arrives the accumulator of the next product,
  which then waits for it.
* The operands of a product are behind a barrier. Otherwise XLA joins the products of two blocks,
  which share a weight, into one that waits for both.

Products are rounded as they are written, and added in float32. All is written out, because each
block is then an array of its own: a loop copies blocks into the array of all rows, and slices them
from it. docs/gpu.md has the times of both forms.
"""

import dataclasses
import functools
from collections.abc import Sequence

import jax
from jax import Array, lax
from jax.typing import DTypeLike

from flaxasync.ops.matmul import products
from flaxasync.ops.matmul.products import (
    Arrays,
    Operands,
    accumulator_dtype,
    by_device,
    in_order,
)
from flaxasync.ops.quantization import Operand, values_of
from flaxasync.ring import gathered_owner, permutation
from flaxasync.transport.schedule import tie

LARGEST = 16  # devices; a larger ring is a loop


@dataclasses.dataclass(frozen=True)
class SwitchExecutor:
    """Sends and multiplies blocks on GPUs; see `flaxasync.ops.matmul.vjp.Executor`. Operands are not
    quantised.
    """

    axis_name: str
    precision: lax.PrecisionLike = None
    # of products while they travel; None for that of the operands
    reduce_dtype: DTypeLike | None = None
    quantization: None = None

    def gather(
        self, x: Operand, ws: Operands, *, transposed: bool = False, keep: bool = False
    ) -> tuple[Arrays, Operand | None]:
        block = values_of(x)
        axis = block.ndim - 2
        dtype = block.dtype
        w = join_columns(ws, transposed)
        ys: list[Array] = []
        blocks: list[Array] = []
        for hop in range(self.size):
            blocks.append(block)
            y = self.product(block, w, dtype, transposed=transposed)
            if hop + 1 < self.size:
                y, block = self.beside(y, block)
            ys.append(y)
        widths = [w.shape[0 if transposed else 1] for w in ws]
        results = split_columns(self.in_order(ys, axis), widths)
        if keep:
            return results, self.in_order(blocks, axis)
        return results, None

    def reduce(
        self,
        xs: Operands,
        ws: Operands,
        local: Sequence[tuple[Operand, Operands]] = (),
        *,
        transposed: bool = False,
    ) -> tuple[Array, Arrays]:
        arrays = tuple(map(values_of, xs))
        w = join_rows(ws, transposed)
        blocks = [self.rows_of_owner(arrays, hop) for hop in range(self.size)]
        y = self.sum_for_owners(blocks, w, arrays[0].dtype, transposed=transposed)
        return y, products.local_weight_gradients(local, self.precision)

    def all_reduce(self, xs: Operands, ws: Operands) -> Array:
        return products.scatter_then_gather(self.reduce, xs, ws, self.axis_name)

    def weight_gradient(self, x: Operand, dys: Operands) -> Arrays:
        block = values_of(x)
        arrays = tuple(map(values_of, dys))
        sums: Array | None = None
        for hop in range(self.size):
            dy = self.rows_of_owner(arrays, hop)
            sums = add_gradient(sums, block, dy, self.precision)
            if hop + 1 < self.size:
                sums, block = self.beside(sums, block)
        assert sums is not None
        widths = [dy.shape[-1] for dy in arrays]
        return split_columns(sums.astype(block.dtype), widths)

    @property
    def size(self) -> int:
        return lax.axis_size(self.axis_name)

    def product(self, x: Array, w: Array, dtype: DTypeLike, *, transposed: bool = False) -> Array:
        """Returns x @ w, or x @ w.T, in a dtype. XLA joins it with no other product."""
        x, w = tie(x, w)
        return products.dot(x, w, self.precision, transposed=transposed, dtype=dtype)

    def beside[T](self, made: T, block: Array) -> tuple[T, Array]:
        """Returns what was made of a block once the next block has arrived, and the next block.

        So the next block travels beside the work that made it.
        """
        return tie(made, self.permute(block, 1))

    def sum_for_owners(
        self, blocks: Sequence[Array], w: Array, dtype: DTypeLike, *, transposed: bool = False
    ) -> Array:
        """Returns the sum of all devices' products with w, or w.T, for the rows of this device.

        The first block has the rows of this device, the others those of the devices 1, 2, ...
        places before it, to which their products are sent. That of the first one is made last,
        beside the last transfer.
        """
        own, *others = blocks
        multiply = functools.partial(
            self.product, w=w, dtype=self.reduce_dtype or dtype, transposed=transposed
        )
        arrived = []
        for hop, block in enumerate(others, 1):
            addend = multiply(block)
            arrived.append(self.permute(addend, -hop))
            if hop == len(others):
                own, _ = tie(own, addend)
        addend = multiply(own)
        wide = accumulator_dtype(addend)
        found = addend.astype(wide)
        for addend in arrived:
            found = found + addend.astype(wide)
        return found.astype(dtype)

    def permute(self, x: Array, shift: int) -> Array:
        with jax.named_scope("hop"):
            return lax.ppermute(x, self.axis_name, permutation(self.size, shift))

    def rows_of_owner(self, arrays: Arrays, hop: int) -> Array:
        """Returns the rows of the device `hop` places before this one, of arrays [..., R*m, k] side
        by side.
        """
        axis = arrays[0].ndim - 2
        count = arrays[0].shape[axis] // self.size
        first = gathered_owner(lax.axis_index(self.axis_name), hop, size=self.size, shift=1) * count
        parts = [lax.dynamic_slice_in_dim(array, first, count, axis) for array in arrays]
        if len(parts) == 1:
            return parts[0]
        return lax.concatenate(parts, axis + 1)

    def in_order(self, blocks: Sequence[Array], axis: int) -> Array:
        """Returns the rows of all devices in their order, of the blocks of this device and of those
        1, 2, ... places before it.
        """
        if self.size == 1:
            return blocks[0]
        # Backwards from this device's block, the last block is that of device 0 on the last device.
        backwards = lax.concatenate(blocks[::-1], axis)
        rows = backwards.shape[axis]
        missing = self.size - 1 - lax.axis_index(self.axis_name)  # devices that come after this one
        first = missing * (rows // self.size)
        twice = lax.concatenate((backwards, backwards), axis)
        return lax.dynamic_slice_in_dim(twice, first, rows, axis)


@dataclasses.dataclass(frozen=True)
class WholeExecutor:
    """Gathers or scatters all rows by one collective of NCCL, before or after one product; see
    `flaxasync.ops.matmul.vjp.Executor`. Operands are not quantised.

    What NCCL moves lies in memory by device: [R, ..., m, k] for [..., R*m, k]. In the order of the
    rows XLA would transpose all that was gathered, and all that is sent, so only the other side of
    the product is put in order. It has the columns of one device.
    """

    axis_name: str
    precision: lax.PrecisionLike = None
    reduce_dtype: DTypeLike | None = None
    quantization: None = None

    def gather(
        self, x: Operand, ws: Operands, *, transposed: bool = False, keep: bool = False
    ) -> tuple[Arrays, Operand | None]:
        gathered = lax.all_gather(values_of(x), self.axis_name)
        w = join_columns(ws, transposed)
        y = products.dot(gathered, w, self.precision, transposed=transposed, dtype=gathered.dtype)
        widths = [w.shape[0 if transposed else 1] for w in ws]
        results = split_columns(in_order(y), widths)
        if not keep:
            return results, None
        if gathered.ndim == 3:  # without batches the rows are in order as they are
            return results, in_order(gathered)
        return results, gathered

    def reduce(
        self,
        xs: Operands,
        ws: Operands,
        local: Sequence[tuple[Operand, Operands]] = (),
        *,
        transposed: bool = False,
    ) -> tuple[Array, Arrays]:
        y = lax.psum_scatter(self.addend(xs, ws, transposed=transposed), self.axis_name)
        y = y.astype(xs[0].dtype)
        return y, products.local_weight_gradients(local, self.precision)

    def all_reduce(self, xs: Operands, ws: Operands) -> Array:
        x = join_columns(xs, False)
        sent = self.reduce_dtype or x.dtype
        addend = products.dot(x, join_rows(ws, False), self.precision, dtype=sent)
        return lax.psum(addend, self.axis_name).astype(x.dtype)

    def weight_gradient(self, x: Operand, dys: Operands) -> Arrays:
        gathered = lax.all_gather(values_of(x), self.axis_name)
        alike = tuple(products.rows_like(dy, gathered) for dy in dys)
        return products.weight_gradients(gathered, alike, self.precision)

    def addend(self, xs: Operands, ws: Operands, *, transposed: bool = False) -> Array:
        """Returns this device's part of the sum of x @ w, or of x @ w.T, as [R, ..., m, n]."""
        x = by_device(join_columns(xs, False), lax.axis_size(self.axis_name))
        sent = self.reduce_dtype or x.dtype
        w = join_rows(ws, transposed)
        return products.dot(x, w, self.precision, transposed=transposed, dtype=sent)


def add_gradient(sums: Array | None, x: Array, dy: Array, precision: lax.PrecisionLike) -> Array:
    """Returns x.T @ dy over all rows of all batches, added to the sums of other blocks.

    The product adds to the sums as it writes them. The barrier keeps XLA from adding in another
    order, which takes additions of their own.
    """
    gradient = products.sums_over_rows(x, dy, precision)
    if sums is None:
        return gradient
    return tie(sums) + gradient


def split_columns(y: Array, widths: Sequence[int]) -> Arrays:
    return tuple(lax.split(y, widths, axis=y.ndim - 1))


def join_columns(ws: Operands, transposed: bool) -> Array:
    """Returns arrays side by side, so that one product has the columns of all weights."""
    arrays = tuple(map(values_of, ws))
    if len(arrays) == 1:
        return arrays[0]
    return lax.concatenate(arrays, 0 if transposed else arrays[0].ndim - 1)


def join_rows(ws: Operands, transposed: bool) -> Array:
    """Returns weights of which one product sums the products of all."""
    return join_columns(ws, not transposed)
