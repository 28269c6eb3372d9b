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
        dtype = arrays[0].dtype
        sums = self.sums(w, dtype, transposed=transposed)
        for hop in range(self.size):
            sums.add(self.rows_of_owner(arrays, hop))
        return sums.total().astype(dtype), local_gradients(local, self.precision)

    def all_reduce(self, xs: Operands, ws: Operands) -> Array:
        return products.scatter_then_gather(lambda xs: self.reduce(xs, ws)[0], xs, self.axis_name)

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
        return multiply(x, w, dtype, self.precision, transposed=transposed)

    def beside[T](self, made: T, block: Array) -> tuple[T, Array]:
        """Returns what was made of a block once the next block has arrived, and the next block.

        So the next block travels beside the work that made it.
        """
        return tie(made, self.permute(block, 1))

    def sums(self, w: Array, dtype: DTypeLike, *, transposed: bool = False) -> "OwnersSums":
        """Returns what multiplies blocks of rows by w, and adds up what arrives from all devices."""
        return OwnersSums(self, w, self.reduce_dtype or dtype, transposed)

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


class OwnersSums:
    """The products of blocks of rows, each sent to the device that owns the rows."""

    def __init__(self, executor: SwitchExecutor, w: Array, dtype: DTypeLike, transposed: bool):
        self._executor = executor
        self._w = w
        self._multiply = functools.partial(executor.product, dtype=dtype, transposed=transposed)
        self._own: Array | None = None  # this device's block
        self._last: Array | None = None  # the last product that was sent
        self._arrived: list[Array] = []

    def add(self, block: Array) -> None:
        """Takes the block of this device first, which waits for `total`, then those of the devices
        1, 2, ... places before it, whose products are sent.
        """
        if self._own is None:
            self._own = block
            return
        addend = self._multiply(block, self._w)
        hop = len(self._arrived) + 1
        self._last = addend
        self._arrived.append(self._executor.permute(addend, -hop))

    def total(self) -> Array:
        """Returns the sum for the rows of this device, in the dtype in which addends are
        accumulated.

        The product of its own block is made last, beside the last transfer.
        """
        own = self._own
        assert own is not None
        if self._last is not None:
            own, _ = tie(own, self._last)
        addend = self._multiply(own, self._w)
        dtype = accumulator_dtype(addend)
        found = addend.astype(dtype)
        for arrived in self._arrived:
            found = found + arrived.astype(dtype)
        return found


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
        gathered = self.rows_of_devices(values_of(x))
        w = join_columns(ws, transposed)
        y = multiply(gathered, w, gathered.dtype, self.precision, transposed=transposed)
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
        y = self.sum_of_devices(self.addend(xs, ws, transposed=transposed))
        return y.astype(xs[0].dtype), local_gradients(local, self.precision)

    def all_reduce(self, xs: Operands, ws: Operands) -> Array:
        x = join_columns(xs, False)
        sent = self.reduce_dtype or x.dtype
        addend = multiply(x, join_rows(ws, False), sent, self.precision)
        return lax.psum(addend, self.axis_name).astype(x.dtype)

    def weight_gradient(self, x: Operand, dys: Operands) -> Arrays:
        gathered = self.rows_of_devices(values_of(x))
        alike = tuple(products.rows_like(dy, gathered) for dy in dys)
        return products.weight_gradients(gathered, alike, self.precision)

    def rows_of_devices(self, x: Array) -> Array:
        """Returns all_gather(x) of x [..., m, k], as [R, ..., m, k]."""
        return lax.all_gather(x, self.axis_name)

    def addend(self, xs: Operands, ws: Operands, *, transposed: bool = False) -> Array:
        """Returns this device's part of the sum of x @ w, or of x @ w.T, as [R, ..., m, n]."""
        x = by_device(join_columns(xs, False), lax.axis_size(self.axis_name))
        sent = self.reduce_dtype or x.dtype
        return multiply(x, join_rows(ws, transposed), sent, self.precision, transposed=transposed)

    def sum_of_devices(self, addend: Array) -> Array:
        """Returns this device's rows [..., m, n] of the sum of all devices' [R, ..., m, n]."""
        return lax.psum_scatter(addend, self.axis_name)


def multiply(
    x: Array, w: Array, dtype: DTypeLike, precision: lax.PrecisionLike, *, transposed: bool = False
) -> Array:
    """Returns x @ w, or x @ w.T, accumulated in float32 and rounded to a dtype as it is written."""
    contracting = ((x.ndim - 1,), (1 if transposed else 0,))
    return lax.dot_general(
        x, w, (contracting, ((), ())), precision=precision, preferred_element_type=dtype
    )


def add_gradient(sums: Array | None, x: Array, dy: Array, precision: lax.PrecisionLike) -> Array:
    """Returns x.T @ dy over all rows of all batches, added to the sums of other blocks.

    The product adds to the sums as it writes them. The barrier keeps XLA from adding in another
    order, which takes additions of their own.
    """
    rows = tuple(range(x.ndim - 1))
    gradient = lax.dot_general(
        x,
        dy,
        ((rows, rows), ((), ())),
        precision=precision,
        preferred_element_type=accumulator_dtype(x),
    )
    if sums is None:
        return gradient
    return tie(sums) + gradient


def local_gradients(
    local: Sequence[tuple[Operand, Operands]], precision: lax.PrecisionLike
) -> Arrays:
    """Returns x.T @ dy for each (x, dys) and each of its dys."""
    return tuple(dw for x, dys in local for dw in products.weight_gradients(x, dys, precision))


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
