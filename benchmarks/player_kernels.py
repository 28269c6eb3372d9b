"""The 2x2 study's programs: LHS[M_X, K_Y] . RHS[K_X, N] -> O[M_X, N] in four published variants and an overlapped one.

They exist to be played: their published times are what the player is compared with. Each variant is a function of
local shards for a ("x", "y") mesh of 2 x 2 devices; `program` makes the jitted function and its arguments for any m,
k, n.

    x [m/2, k/2]  rows of mesh row, columns of mesh column      (LHS)
    w [k/2, n]    the half of the rows that mesh row holds      (RHS)
    o [m/2, n]
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

STUDY = (16384, 16384, 8192)  # m, k, n of the published figures, bf16
ANYWHERE = pl.BlockSpec(memory_space=pl.ANY)


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Sides of one step of a kernel, side of an all-reduce step, column chunks of the overlapped kernel."""

    m: int = 512
    k: int = 1024
    n: int = 1024
    reduce: int = 1024
    chunks: int = 8


def gemm(x: jax.Array, w: jax.Array, tiles: Tiles) -> jax.Array:
    """x @ w as one kernel: tiles stream from HBM, the accumulator stays."""
    (m, k), n = x.shape, w.shape[1]
    bm, bk, bn = min(tiles.m, m), min(tiles.k, k), min(tiles.n, n)
    return pl.pallas_call(
        _accumulate,
        out_shape=jax.ShapeDtypeStruct((m, n), x.dtype),
        grid=(m // bm, n // bn, k // bk),
        in_specs=[pl.BlockSpec((bm, bk), lambda i, j, t: (i, t)), pl.BlockSpec((bk, bn), lambda i, j, t: (t, j))],
        out_specs=pl.BlockSpec((bm, bn), lambda i, j, t: (i, j)),
        scratch_shapes=[pltpu.VMEM((bm, bn), jnp.float32)],
        name="gemm",
    )(x, w)


def all_gather(w: jax.Array) -> jax.Array:
    """Both halves of w: the own half is copied, then sent to the neighbour on x."""

    def body(w_ref, o_ref, copy_sem, send_sem, recv_sem):
        index = lax.axis_index("x")
        mine = o_ref.at[pl.ds(index * w_ref.shape[0], w_ref.shape[0]), :]
        copy = pltpu.make_async_copy(w_ref, mine, copy_sem)
        copy.start()
        copy.wait()
        send = pltpu.make_async_remote_copy(mine, mine, send_sem, recv_sem, device_id=_other("x"))
        send.start()
        send.wait()

    return pl.pallas_call(
        body,
        out_shape=jax.ShapeDtypeStruct((2 * w.shape[0], w.shape[1]), w.dtype),
        in_specs=[ANYWHERE],
        out_specs=ANYWHERE,
        scratch_shapes=[pltpu.SemaphoreType.DMA] * 3,
        name="all_gather",
    )(w)


def all_reduce(x: jax.Array, tiles: Tiles) -> jax.Array:
    """x + the other device's x, on y: tile by tile through VMEM."""
    bm, bn = min(tiles.reduce, x.shape[0]), min(tiles.reduce, x.shape[1])

    def body(x_ref, o_ref, send_sem, recv_sem, copy_sem, mine, theirs):
        copy = pltpu.make_async_copy(x_ref, mine, copy_sem)
        copy.start()
        copy.wait()
        send = pltpu.make_async_remote_copy(mine, theirs, send_sem, recv_sem, device_id=_other("y"))
        send.start()
        send.wait()
        mine[...] = mine[...] + theirs[...]
        copy = pltpu.make_async_copy(mine, o_ref, copy_sem)
        copy.start()
        copy.wait()

    return pl.pallas_call(
        body,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(x.shape[0] // bm, x.shape[1] // bn),
        in_specs=[pl.BlockSpec((bm, bn), lambda i, j: (i, j))],
        out_specs=pl.BlockSpec((bm, bn), lambda i, j: (i, j)),
        scratch_shapes=[pltpu.SemaphoreType.DMA] * 3 + [pltpu.VMEM((bm, bn), x.dtype)] * 2,
        name="all_reduce",
    )(x)


def fused(x: jax.Array, w: jax.Array, tiles: Tiles) -> jax.Array:
    """All-gather and matmul in one kernel: devices that hold the half they need multiply while it travels."""

    def body(x_ref, w_ref, o_ref, arrived, send_sem, recv_sem):
        on_diagonal = lax.axis_index("x") == lax.axis_index("y")
        send = pltpu.make_async_remote_copy(w_ref, arrived, send_sem, recv_sem, device_id=_other("x"))
        send.start()

        @pl.when(on_diagonal)
        def _():
            _pipelined(x_ref, w_ref, o_ref, None, tiles, store_first=False)

        send.wait()

        @pl.when(jnp.logical_not(on_diagonal))
        def _():
            _pipelined(x_ref, arrived, o_ref, None, tiles, store_first=False)

    return pl.pallas_call(
        body,
        out_shape=[jax.ShapeDtypeStruct((x.shape[0], w.shape[1]), x.dtype), jax.ShapeDtypeStruct(w.shape, w.dtype)],
        in_specs=[ANYWHERE] * 2,
        out_specs=[ANYWHERE] * 2,
        scratch_shapes=[pltpu.SemaphoreType.DMA] * 2,
        name="fused",
    )(x, w)[0]


def overlapped(x: jax.Array, w: jax.Array, tiles: Tiles, *, collective_id: int = 3) -> jax.Array:
    """All three in one kernel, column chunk by column chunk.

    First the rows that the neighbour on y owns, as chunks of w arrive, each partial sum leaving at once; then the own
    rows, with the neighbour's partial sum added as each tile is stored, each finished chunk leaving at once.
    """
    half, count = x.shape[0] // 2, tiles.chunks
    width = w.shape[1] // count

    def body(x_ref, w_ref, o_ref, w_in, part_in, w_send, w_recv, part_send, part_recv, o_send, o_recv):
        diagonal = lax.axis_index("x") == lax.axis_index("y")
        barrier = pltpu.get_barrier_semaphore()  # nobody writes into a device that has not entered
        for axis in ("x", "y"):
            pl.semaphore_signal(barrier, device_id=_other(axis))
        pl.semaphore_wait(barrier, 2)
        mine = pl.ds(pl.multiple_of(lax.axis_index("y") * half, half), half)
        theirs = pl.ds(pl.multiple_of((1 - lax.axis_index("y")) * half, half), half)

        def columns(j):
            return pl.ds(pl.multiple_of(j * width, width), width)

        def weights(j):
            return pltpu.make_async_remote_copy(
                w_ref.at[:, columns(j)], w_in.at[:, columns(j)], w_send, w_recv.at[j], device_id=_other("x")
            )

        def partial(j):
            return pltpu.make_async_remote_copy(
                o_ref.at[theirs, columns(j)],
                part_in.at[:, columns(j)],
                part_send,
                part_recv.at[j],
                device_id=_other("y"),
            )

        def final(j):
            chunk = o_ref.at[mine, columns(j)]
            return pltpu.make_async_remote_copy(chunk, chunk, o_send, o_recv, device_id=_other("y"))

        def multiply(rows, j, add):
            @pl.when(diagonal)
            def _():
                chunk = o_ref.at[rows, columns(j)]
                _pipelined(x_ref.at[rows, :], w_ref.at[:, columns(j)], chunk, add, tiles, store_first=True)

            @pl.when(jnp.logical_not(diagonal))
            def _():
                chunk = o_ref.at[rows, columns(j)]
                _pipelined(x_ref.at[rows, :], w_in.at[:, columns(j)], chunk, add, tiles, store_first=True)

        @pl.when(diagonal)
        def _():
            pl.loop(0, count)(lambda j: weights(j).start())

        @pl.loop(0, count)
        def _(j):
            pl.when(jnp.logical_not(diagonal))(lambda: weights(j).wait_recv())
            multiply(theirs, j, None)
            partial(j).start()

        @pl.loop(0, count)
        def _(j):
            partial(j).wait_recv()
            multiply(mine, j, part_in.at[:, columns(j)])
            final(j).start()

        @pl.loop(0, count)
        def _(j):
            partial(j).wait_send()
            final(j).wait()
            pl.when(diagonal)(lambda: weights(j).wait_send())

    shapes = [(x.shape[0], w.shape[1]), w.shape, (half, w.shape[1])]
    one, many = pltpu.SemaphoreType.DMA, pltpu.SemaphoreType.DMA((count,))
    return pl.pallas_call(
        body,
        out_shape=[jax.ShapeDtypeStruct(shape, x.dtype) for shape in shapes],
        in_specs=[ANYWHERE] * 2,
        out_specs=[ANYWHERE] * 3,
        scratch_shapes=[one, many, one, many, one, one],
        compiler_params=pltpu.CompilerParams(collective_id=collective_id, vmem_limit_bytes=32 << 20),
        name="overlapped",
    )(x, w)[0]


def collectives_and_gemm(x: jax.Array, w: jax.Array, tiles: Tiles) -> jax.Array:
    return lax.psum(gemm(x, _needed(lax.all_gather(w, "x", axis=0, tiled=True)), tiles), "y")


def series(x: jax.Array, w: jax.Array, tiles: Tiles) -> jax.Array:
    return all_reduce(gemm(x, _needed(all_gather(w)), tiles), tiles)


def fused_then_reduce(x: jax.Array, w: jax.Array, tiles: Tiles) -> jax.Array:
    return all_reduce(fused(x, w, tiles), tiles)


VARIANTS: dict[str, Callable | None] = {
    "xla": None,
    "collectives_and_gemm": collectives_and_gemm,
    "series": series,
    "fused": fused_then_reduce,
    "overlapped": overlapped,
}


def program(variant: str, mesh: Mesh, shape: tuple[int, int, int] = STUDY, tiles: Tiles = Tiles()) -> tuple:
    """Returns the jitted function of a variant and its two arguments, without values."""
    m, k, n = shape
    arguments = tuple(
        jax.ShapeDtypeStruct(s, jnp.bfloat16, sharding=NamedSharding(mesh, spec))
        for s, spec in (((m, k), P("x", "y")), ((k, n), P("x", None)))
    )
    local = VARIANTS[variant]
    if local is None:
        return jax.jit(jnp.matmul, out_shardings=NamedSharding(mesh, P("x", None))), *arguments
    sharded = jax.shard_map(
        functools.partial(local, tiles=tiles), mesh=mesh, in_specs=(P("x", "y"), P("x", None)), out_specs=P("x", None),
        check_vma=False,
    )  # fmt: skip
    return jax.jit(sharded), *arguments


def _other(axis: str) -> dict:
    """The id of the neighbour on one axis of the 2 x 2 mesh."""
    return {name: 1 - lax.axis_index(name) if name == axis else lax.axis_index(name) for name in ("x", "y")}


def _needed(w: jax.Array) -> jax.Array:
    """The half of the gathered rows that this mesh column multiplies."""
    rows = w.shape[0] // 2
    return lax.dynamic_slice(w, (lax.axis_index("y") * rows, 0), (rows, w.shape[1]))


def _accumulate(a_ref, b_ref, o_ref, accumulator):
    step = pl.program_id(2)

    @pl.when(step == 0)
    def _():
        accumulator[...] = jnp.zeros_like(accumulator)

    accumulator[...] += jnp.dot(a_ref[...], b_ref[...], preferred_element_type=jnp.float32)

    @pl.when(step == pl.num_programs(2) - 1)
    def _():
        o_ref[...] = accumulator[...].astype(o_ref.dtype)


def _pipelined(x_ref, w_ref, o_ref, add_ref, tiles: Tiles, *, store_first: bool) -> None:
    """o = x @ w (+ add), its tiles streamed from and to HBM within a kernel.

    The published kernels clear the accumulator before the first product (store_first=False); storing it instead saves
    a pass.
    """
    (m, k), n = x_ref.shape, w_ref.shape[1]
    bm, bk, bn = min(tiles.m, m), min(tiles.k, k), min(tiles.n, n)

    def run(accumulator):
        def step(a_ref, b_ref, *rest):
            added, o_tile = rest if add_ref is not None else (None, rest[0])
            if not store_first:
                _accumulate(a_ref, b_ref, o_tile, accumulator)
                return
            t = pl.program_id(2)

            @pl.when(t == 0)
            def _():
                accumulator[...] = jnp.dot(a_ref[...], b_ref[...], preferred_element_type=jnp.float32)

            @pl.when(t > 0)
            def _():
                accumulator[...] += jnp.dot(a_ref[...], b_ref[...], preferred_element_type=jnp.float32)

            @pl.when(t == pl.num_programs(2) - 1)
            def _():
                total = accumulator[...] if added is None else accumulator[...] + added[...].astype(jnp.float32)
                o_tile[...] = total.astype(o_tile.dtype)

        out = pl.BlockSpec((bm, bn), lambda i, j, t: (i, j))
        ins = [pl.BlockSpec((bm, bk), lambda i, j, t: (i, t)), pl.BlockSpec((bk, bn), lambda i, j, t: (t, j))]
        extra = [] if add_ref is None else [out]
        operands = [] if add_ref is None else [add_ref]
        pltpu.emit_pipeline(step, grid=(m // bm, n // bn, k // bk), in_specs=ins + extra, out_specs=[out])(
            x_ref, w_ref, *operands, o_ref
        )

    pl.run_scoped(run, pltpu.VMEM((bm, bn), jnp.float32))
