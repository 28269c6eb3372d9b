"""The programs of the 2x2 study: LHS[M_X, K_Y] . RHS[K_X, N] -> O[M_X, N], in its variants and in
an overlapped one.

They exist to be simulated, because the player is compared with their published times. The
all-gather, alone and with the matmul in one kernel, and the all-reduce are as published, one step
after the other; a matmul's step and the overlapped kernel are those of the package. Each variant is
a function of local shards on a ("x", "y") mesh of 2 x 2 devices. `program` makes the jitted
function and its arguments for any m, k and n.

    x [m/2, k/2]  rows of mesh row, columns of mesh column      (LHS)
    w [k/2, n]    the half of the rows that mesh row holds      (RHS)
    o [m/2, n]
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.programs import array
from flaxasync.hardware import MIB
from flaxasync.kernels.engine import operands, ring
from flaxasync.kernels.gemm import gemm, grid, specs, step
from flaxasync.kernels.mesh_matmul.overlapped import overlapped

STUDY = (16384, 16384, 8192)  # m, k, n of the published figures, bf16
ANYWHERE = pl.BlockSpec(memory_space=pl.ANY)


@dataclasses.dataclass(frozen=True)
class Tiles:
    """The sides of a matmul tile, whose rows the overlapped kernel doubles, and the side of an
    all-reduce tile.
    """

    m: int = 512
    k: int = 1024
    n: int = 1024
    reduce: int = 1024

    def matmul(self, rows: int = 1) -> operands.Tiles:
        return operands.Tiles(rows * self.m, self.k, self.n)


DEFAULT_TILES = Tiles()


def all_gather(w: jax.Array) -> jax.Array:
    """Returns both halves of w. The own half is copied, and then sent to the neighbour on x."""

    def body(w_ref: Any, o_ref: Any, copy_sem: Any, send_sem: Any, recv_sem: Any) -> None:
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
    """Returns the sum of x and the x of the neighbour on y, tile by tile through VMEM."""
    bm = min(tiles.reduce, x.shape[0])
    bn = min(tiles.reduce, x.shape[1])

    def body(
        x_ref: Any, o_ref: Any, send_sem: Any, recv_sem: Any, copy_sem: Any, mine: Any, theirs: Any
    ) -> None:
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
        compiler_params=pltpu.CompilerParams(vmem_limit_bytes=32 * MIB),
        name="all_reduce",
    )(x)


def gather_gemm(x: jax.Array, w: jax.Array, tiles: operands.Tiles) -> jax.Array:
    """Returns x @ the half of w that this mesh column multiplies, in one kernel.

    Every device sends its half to the other device of its mesh column. A device on the diagonal
    multiplies with its own half meanwhile; the others wait for all of theirs, and multiply with it.
    """
    m, k = x.shape
    n = w.shape[1]
    tiles = tiles.within(m, k, n)
    x_spec, w_spec, o_spec = specs(tiles)

    def body(
        x_ref: Any,
        w_ref: Any,
        o_ref: Any,
        received: Any,
        send_sem: Any,
        recv_sem: Any,
        accumulator: Any,
    ) -> None:
        holds = lax.axis_index("x") == lax.axis_index("y")
        other = _other("x")
        send = pltpu.make_async_remote_copy(w_ref, received, send_sem, recv_sem, device_id=other)
        multiply = pltpu.emit_pipeline(
            lambda x, w, o: step(x, w, o, accumulator, depth=k),
            grid=grid(tiles, m, k, n),
            in_specs=[x_spec, w_spec],
            out_specs=[o_spec],
        )
        ring.enter("gather_gemm", [other], None)
        send.start()

        @pl.when(holds)
        def _() -> None:
            multiply(x_ref, w_ref, o_ref)
            send.wait()

        @pl.when(jnp.logical_not(holds))
        def _() -> None:
            with jax.named_scope("wait"):
                send.wait()
            multiply(x_ref, received, o_ref)

    return pl.pallas_call(
        body,
        out_shape=[jax.ShapeDtypeStruct((m, n), x.dtype), jax.ShapeDtypeStruct(w.shape, w.dtype)],
        in_specs=[ANYWHERE] * 2,
        out_specs=[ANYWHERE] * 2,
        scratch_shapes=[pltpu.SemaphoreType.DMA] * 2
        + [pltpu.VMEM((tiles.m, tiles.n), jnp.float32)],
        compiler_params=pltpu.CompilerParams(vmem_limit_bytes=32 * MIB),
        name="fused",
    )(x, w)[0]


def collectives_and_gemm(x: jax.Array, w: jax.Array, tiles: Tiles) -> jax.Array:
    return lax.psum(
        gemm(x, _needed(lax.all_gather(w, "x", axis=0, tiled=True)), tiles=tiles.matmul()), "y"
    )


def series(x: jax.Array, w: jax.Array, tiles: Tiles) -> jax.Array:
    return all_reduce(gemm(x, _needed(all_gather(w)), tiles=tiles.matmul()), tiles)


def fused_then_reduce(x: jax.Array, w: jax.Array, tiles: Tiles) -> jax.Array:
    return all_reduce(gather_gemm(x, w, tiles.matmul()), tiles)


def all_overlapped(x: jax.Array, w: jax.Array, tiles: Tiles) -> jax.Array:
    return overlapped(x, w, tiles=tiles.matmul(rows=2))


VARIANTS = {
    "collectives_and_gemm": collectives_and_gemm,
    "series": series,
    "fused": fused_then_reduce,
    "overlapped": all_overlapped,
}


def program(
    variant: str, mesh: Mesh, shape: tuple[int, int, int] = STUDY, tiles: Tiles = DEFAULT_TILES
) -> tuple:
    """Returns the jitted function of a variant, or of "xla", and its two arguments, without
    values.
    """
    m, k, n = shape
    specs = (P("x", "y"), P("x", None))
    out = P("x", None)
    arguments = array((m, k), mesh, specs[0]), array((k, n), mesh, specs[1])
    if variant == "xla":
        return jax.jit(jnp.matmul, out_shardings=NamedSharding(mesh, out)), *arguments
    local = functools.partial(VARIANTS[variant], tiles=tiles)
    return jax.jit(
        jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=out, check_vma=False)
    ), *arguments


def _other(axis: str) -> dict:
    """Returns the id of the neighbour on one axis of the 2 x 2 mesh."""
    return {
        name: 1 - lax.axis_index(name) if name == axis else lax.axis_index(name)
        for name in ("x", "y")
    }


def _needed(w: jax.Array) -> jax.Array:
    """Returns the half of the gathered rows that this mesh column multiplies."""
    rows = w.shape[0] // 2
    return lax.dynamic_slice(w, (lax.axis_index("y") * rows, 0), (rows, w.shape[1]))
