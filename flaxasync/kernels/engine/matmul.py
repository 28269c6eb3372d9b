"""The tiles of x [batches, rows, k] @ w: their way into vector memory, and the product of two of
them.

w is [k, n], or [n, k] if `transposed`. A kernel may have several pairs of x and w whose products
are added up: then the contraction has the length of each pair. Or it may have several w for one x,
side by side: then the columns have the length of each w. Or it needs the same tile of the products
of all w at once: then the w are `joined`, the columns have the length of one of them, and a tile of
w has the tiles of all of them, one beside the other.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from flaxasync.kernels.engine.operands import (
    LANES,
    SUBLANES,
    Condition,
    DType,
    Index,
    Ref,
    Scalar,
    sides_of_w,
)
from flaxasync.kernels.engine.slots import IncomingTiles, OutgoingTiles
from flaxasync.kernels.engine.tiling import RowTiling, Tiling, remainder
from flaxasync.kernels.engine.vector_memory import available

# bytes of vector memory that a w which stays leaves to products on their way to a sum
MARGIN = 16 * 2**20
W_SLOTS = 16  # tiles of w that stay, at most: each has a semaphore, and a kernel has few of them

type Values = tuple[jax.Array, ...]


class Epilogue(Protocol):
    """An elementwise function of the products of one x with several w, and of further operands of
    their shape.

    A kernel calls it for one sub-block of the result at a time, with float32 values of the same
    shape. The products are not rounded; operands are tiles that the kernel fetches from HBM. What
    the function returns is rounded to the dtype of the kernel and stored, and of the products
    nothing else is.

    To add one, write a frozen dataclass with these two members; Pallas must be able to lower the
    function for a TPU. It sees no arrays but its arguments.
    """

    @property
    def results(self) -> int:
        """The number of results."""

    def __call__(self, products: Values, operands: Values) -> Values:
        """Returns the results, each of the shape of a product."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MatmulScratch:
    x: IncomingTiles  # [2, batches, rows, k]
    w: IncomingTiles  # [w_slots, k, joined * n], or [w_slots, joined * n, k] if transposed
    outgoing: OutgoingTiles  # [outgoing, batches, rows, n] finished tiles of the result, rounded
    # [accumulators, batches, rows, joined * n] VMEM, of 32 bits; if there are none, one small tile
    accumulators: Ref


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Scales:
    """The scales of a tile of the result, if x and w are 8-bit values: sums are multiplied with
    both.

    Scales of rows lie in HBM as [.., rows, LANES], each in all lanes of its row, and those of
    columns as [SUBLANES, n]. So no value has to move between lanes.
    """

    rows: IncomingTiles  # [slots, batches, rows, LANES] float32
    columns: IncomingTiles  # [slots, SUBLANES, joined * n] float32

    @classmethod
    def allocate(cls, slots: int, rows: tuple[int, int], columns: int) -> "Scales":
        """Returns what to allocate for tiles of (batches, rows), and of the columns of all joined
        w.
        """
        return cls(
            IncomingTiles.allocate(slots, (*rows, LANES), jnp.float32),
            IncomingTiles.allocate(slots, (SUBLANES, columns), jnp.float32),
        )

    @staticmethod
    def nbytes(slots: int, rows: int, columns: int) -> int:
        """Returns the bytes that `slots` of them take, for tiles of all these rows and columns."""
        return 4 * slots * (rows * LANES + SUBLANES * columns)

    def start(self, slot: Scalar, rows: Ref, columns: Sequence[Ref]) -> None:
        """Starts to fetch the scales of a tile: of its rows, and of its columns of each joined
        w.
        """
        self.rows.start(slot, rows)
        for part, source in enumerate(columns):
            self.columns.start(slot, source, offset=part * source.shape[1], axis=1)

    def wait(self, slot: Scalar, batches: Scalar, rows: Scalar, columns: Scalar) -> None:
        """Waits for the scales of a tile of this size; the columns are those of all joined w."""
        self.rows.wait(slot, batches, rows, LANES)
        self.columns.wait(slot, SUBLANES, columns)

    def apply(self, slot: Scalar, sums: jax.Array, index: tuple[Index, ...]) -> jax.Array:
        """Returns the float32 products of a sub-block [batches, rows, n] of sums, whose index in
        the tile is given.
        """
        rows = self.rows.tiles[slot, *index[:2]]
        columns = self.columns.tiles[slot, :1, : sums.shape[-1]]
        of_rows = jnp.concatenate([rows] * (sums.shape[-1] // LANES), axis=-1)
        return sums.astype(jnp.float32) * of_rows * columns[None]


@dataclasses.dataclass(frozen=True)
class MatmulTiles:
    """The tiles of a matmul. Tile (i, t) of x times tile (t, j) of w is added to tile (i, j) of the
    result.
    """

    rows: RowTiling
    columns: Tiling
    contraction: Tiling
    transposed: bool
    joined: int = 1  # arrays w whose tiles lie side by side in one
    w_stays: bool = False  # whether every tile of w is fetched once and stays in vector memory

    @property
    def w_slots(self) -> int:
        """Slots for tiles of w: this step's and the next one's, or all of them."""
        if self.w_stays:
            return self.columns.count * self.contraction.count
        return 2

    def keeping_w(self, used_bytes: int, dtype: DType) -> tuple["MatmulTiles", int]:
        """Returns the tiles of a kernel whose buffers take `used_bytes` of vector memory, and what
        they take then.

        If all of w fits beside them, it stays. Then HBM brings it once, and not for every tile of
        rows.
        """
        stays = dataclasses.replace(self, w_stays=True)
        tile = self.contraction.size * self.joined * self.columns.size * jnp.dtype(dtype).itemsize
        need = used_bytes + (stays.w_slots - 2) * tile
        if need <= available() - MARGIN and stays.w_slots <= W_SLOTS:
            return stays, need
        return self, used_bytes

    def w_slot(self, t: Scalar, j: Scalar, number: Scalar) -> Scalar:
        """Returns the slot of tile (t, j) of w, which is used as the `number`-th one."""
        if self.w_stays:
            return j * self.contraction.count + t
        return remainder(number, 2)

    @property
    def result(self) -> tuple[int, int, int]:
        """Batches, rows and columns of a tile of the result that is not partial."""
        return (*self.rows.shape, self.columns.size)

    def scratch(
        self,
        dtype: DType,
        w_dtype: DType,
        *,
        outgoing: int,
        accumulators: int,
        result: DType | None = None,
    ) -> MatmulScratch:
        k = self.contraction.size
        n = self.columns.size
        sums = (1, 1, 8, LANES)  # as small as can be
        if accumulators:
            sums = (accumulators, *self.rows.shape, self.joined * n)
        return MatmulScratch(
            IncomingTiles.allocate(2, (*self.rows.shape, k), dtype),
            IncomingTiles.allocate(self.w_slots, self._w_shape(k, n), w_dtype),
            OutgoingTiles.allocate(outgoing, self.result, result or dtype),
            pltpu.VMEM(sums, sums_dtype(dtype)),
        )

    def start_x(
        self, x: IncomingTiles, slot: Scalar, i: Scalar, t: Scalar, source: Callable[..., Ref]
    ) -> None:
        """Starts to fetch tile (i, t) of x; source(pair, batches, rows, depth) is that part of x in
        HBM.
        """

        def on_rows(batches: pl.Slice, rows: pl.Slice) -> None:
            def start(pair: int, depth: pl.Slice) -> None:
                x.start(slot, source(pair, batches, rows, depth))

            self.contraction.on_slice(t, start)

        self.rows.on_slice(i, on_rows)

    def start_w(
        self, w: IncomingTiles, slot: Scalar, t: Scalar, j: Scalar, ws: Sequence[Ref]
    ) -> None:
        """Starts to fetch tile (t, j) of w from one of `ws` in HBM."""

        if self.transposed:
            axis = 0
        else:
            axis = 1

        def on_depth(pair: int, depth: pl.Slice) -> None:
            def start(number: int, columns: pl.Slice) -> None:
                if len(self.contraction.lengths) > 1:
                    first = pair
                else:
                    first = number
                for part, source in enumerate(ws[first : first + self.joined]):
                    tile = source.at[sides_of_w(self.transposed, depth, columns)]
                    w.start(slot, tile, offset=part * columns.size, axis=axis)

            self.columns.on_slice(j, start)

        self.contraction.on_slice(t, on_depth)

    def wait_x(self, x: IncomingTiles, slot: Scalar, i: Scalar, t: Scalar) -> None:
        def on_depth(k: int) -> None:
            def wait_for(batches: pl.Slice, rows: pl.Slice) -> None:
                x.wait(slot, batches.size, rows.size, k)

            self.rows.on_slice(i, wait_for)

        self.contraction.on_size(t, on_depth)

    def wait_w(self, w: IncomingTiles, slot: Scalar, t: Scalar, j: Scalar) -> None:
        def on_depth(k: int) -> None:
            def wait_for(n: int) -> None:
                w.wait(slot, *self._w_shape(k, n))

            self.columns.on_size(j, wait_for)

        self.contraction.on_size(t, on_depth)

    def multiply(
        self,
        i: Scalar,
        t: Scalar,
        j: Scalar,
        x_tile: Ref,
        w_tile: Ref,
        accumulator: Ref,
        finish: Callable[..., None],
    ) -> None:
        """Adds the product of two tiles to the sum of tile (i, j) of the result, [batches, rows, n]
        in VMEM.

        finish(sum, index) puts a sub-block of a finished sum where it leaves from; index is that of
        the sub-block in a tile of the result. Of joined w the sum has the columns of all products,
        side by side.
        """

        def on_columns(of_one: int) -> None:
            n = self.joined * of_one

            def product(depth: int, index: tuple[Index, ...], rows: int) -> jax.Array:
                x = x_tile[*index[:2], :depth].reshape(rows, depth)
                w = w_tile[sides_of_w(self.transposed, slice(0, depth), slice(0, n))]
                y = dot(x, w, transposed=self.transposed)
                return y.reshape(-1, min(rows, self.rows.rows.size), n)

            def for_each_sub_block(use: Callable[..., None]) -> None:
                def on_rows(index: tuple[Index, ...], rows: int) -> None:
                    use((*index, slice(0, n)), rows)

                self.rows.for_each_sub_block(i, on_rows)

            def finish_sub_block(value: jax.Array, index: tuple[Index, ...], _: int) -> None:
                finish(value, index)

            accumulate(
                self.contraction,
                t,
                first=t == 0,
                last=t == self.contraction.count - 1,
                accumulator=accumulator,
                for_each_sub_block=for_each_sub_block,
                product=product,
                finish=finish_sub_block,
            )

        with jax.named_scope("multiply"):
            self.columns.on_size(j, on_columns)

    def on_result(self, i: Scalar, j: Scalar, use: Callable[..., None]) -> None:
        """Calls `use(number of the w, batches, rows, columns)` with the slices of tile (i, j) of
        the result.
        """

        def on_rows(batches: pl.Slice, rows: pl.Slice) -> None:
            def on_columns(number: int, columns: pl.Slice) -> None:
                use(number, batches, rows, columns)

            self.columns.on_slice(j, on_columns)

        self.rows.on_slice(i, on_rows)

    def wait_result(
        self, slots: IncomingTiles | OutgoingTiles | Scales, slot: Scalar, i: Scalar, j: Scalar
    ) -> None:
        """Waits until tile (i, j) of the result, or its scales, has come into a slot, or has left
        it.
        """

        def wait_for(_: int, *tile: pl.Slice) -> None:
            slots.wait(slot, *(side.size for side in tile))

        self.on_result(i, j, wait_for)

    def _w_shape(self, k: int, n: int) -> tuple[int, int]:
        return sides_of_w(self.transposed, k, self.joined * n)


def laid_out_scales(rows: jax.Array, columns: Sequence[jax.Array]) -> list[jax.Array]:
    """Returns scales of rows [..., m] and of the columns [n] of each w as a kernel fetches them;
    see `Scales`.
    """
    in_lanes = jnp.broadcast_to(rows[..., None], (*rows.shape, LANES))
    return [in_lanes, *(jnp.broadcast_to(one, (SUBLANES, *one.shape)) for one in columns)]


def dot(x: jax.Array, w: jax.Array, *, transposed: bool = False) -> jax.Array:
    """Returns x @ w, or x @ w.T, in the dtype of sums."""
    if transposed:
        of_w = 1
    else:
        of_w = 0
    dimensions = (((1,), (of_w,)), ((), ()))
    return lax.dot_general(x, w, dimensions, preferred_element_type=sums_dtype(x.dtype))


def sums_dtype(dtype: DType) -> DType:
    """Returns the dtype in which products are added up: int32 for integers, else float32."""
    if jnp.issubdtype(dtype, jnp.integer):
        return jnp.int32
    return jnp.float32


def accumulate(
    tiles: Tiling,
    tile: Scalar,
    *,
    repeats: int = 1,
    first: Condition,
    last: Condition,
    accumulator: Ref,
    for_each_sub_block: Callable[[Callable[..., None]], None],
    product: Callable[..., jax.Array],
    finish: Callable[..., None],
) -> None:
    """Adds the product of one tile of the contraction to the float32 sum of a tile of the result.

    A sub-block of the result is handed on as it comes from `for_each_sub_block`: (index, ...).

    Args:
      tiles, tile: the tiles of the contraction, and the one of this step.
      repeats: how many times all tiles are gone through, once for every block that arrives.
      first, last: whether this is the first or the last step of the sum. Both hold if there is one
        step only.
      accumulator: [*tile of the result] VMEM, float32. It is not used if there is one step only.
      for_each_sub_block: calls its argument for each sub-block, in a loop of the kernel.
      product: product(elements of the tile of the contraction, *sub-block) returns the product, in
        float32. It reads its operands itself: values that cross a branch would be copied first.
      finish: finish(sum, *sub-block) puts a finished sum where it leaves from.
    """
    steps = tiles.count * repeats

    def store(depth: int, index: Any, *rest: Any) -> None:
        accumulator[index] = product(depth, index, *rest)

    def add(depth: int, index: Any, *rest: Any) -> None:
        accumulator[index] += product(depth, index, *rest)

    def end(depth: int, index: Any, *rest: Any) -> None:
        value = product(depth, index, *rest)
        if steps > 1:
            value = value + accumulator[index]
        finish(value, index, *rest)

    def do(use: Callable[..., None], among: Sequence[int], condition: Condition) -> None:
        def on_depth(depth: int) -> None:
            for_each_sub_block(functools.partial(use, depth))

        tiles.on_size(tile, on_depth, among, condition)

    if steps > 1:
        do(store, [0], first)
    if steps > 2:
        middle = range(1, tiles.count - 1)
        if repeats > 1:
            middle = range(tiles.count)
        do(add, middle, jnp.logical_not(jnp.logical_or(first, last)))
    do(end, [tiles.count - 1], last)
