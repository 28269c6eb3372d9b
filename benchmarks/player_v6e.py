"""What the player predicts for a matmul kernel that a v6e ran, and what was measured there.

    python benchmarks/player_v6e.py [--write docs/player.md]      a few seconds

The profile is public (the repository vlasenkoalexey/xprof-cli, tests/fixtures): three runs on one
v6e, with jaxlib 0.10.0 and libtpu of April 2026, of a Pallas matmul in float32. Its bundles say how
it is tiled: tiles of 512 x 512 x 1024, three buffers for tiles of x, and one for tiles of w, whose
copies therefore overlap with nothing. The kernel here has the same tiles and buffers, and is
compiled here. Nothing here ran on a TPU.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import PartitionSpec as P

from benchmarks.programs import array
from benchmarks.table import command_line, print_table, write_between_markers
from flaxasync.check import topology_mesh
from flaxasync.check.player import Result, play
from flaxasync.check.player.result import Phase
from flaxasync.check.tested_libtpu import installed_libtpu

TOPOLOGY = "v6e:1x1"
M = 2048
K = 1024
N = 2048
TILE_M = 512
TILE_K = 512
TILE_N = 1024
X_BUFFERS = 3
W_BUFFERS = 1
NAME = "matmul"


@dataclasses.dataclass(frozen=True)
class Row:
    label: str
    # microseconds in the profile: of the total the median of its runs, of parts their mean
    measured: float
    value: Callable[[Result], float]  # of the simulated program, in seconds


def kernel(result: Result) -> Phase:
    return result.slowest.phase(NAME)


def issued(result: Result) -> float:
    return kernel(result).issue + kernel(result).matrix_stall


def waited(result: Result, kind: str) -> float:
    return sum(result.waits(0, NAME, kind).seconds)


ROWS = (
    Row("total (75.57, 75.79 and 75.92)", 75.79, lambda result: result.seconds),
    Row("waits for tiles of x and w", 57.8, lambda result: waited(result, "hbm to vmem")),
    Row("products", 14.5, issued),
    Row("the end: the last tile of the result", 1.9, lambda result: waited(result, "vmem to hbm")),
)


def matmul(x: jax.Array, w: jax.Array) -> jax.Array:
    """Returns x @ w, with the tiles and the buffers of the kernel in the profile."""

    def step(x_tile: jax.Ref, w_tile: jax.Ref, o_tile: jax.Ref) -> None:
        product = jnp.dot(x_tile[...], w_tile[...], preferred_element_type=jnp.float32)

        @pl.when(pl.program_id(2) == 0)
        def _() -> None:
            o_tile[...] = product

        @pl.when(pl.program_id(2) != 0)
        def _() -> None:
            o_tile[...] += product

    def body(x_ref: jax.Ref, w_ref: jax.Ref, o_ref: jax.Ref) -> None:
        pltpu.emit_pipeline(
            step,
            grid=(M // TILE_M, N // TILE_N, K // TILE_K),
            in_specs=[
                pl.BlockSpec(
                    (TILE_M, TILE_K), lambda i, j, t: (i, t), pipeline_mode=pl.Buffered(X_BUFFERS)
                ),
                pl.BlockSpec(
                    (TILE_K, TILE_N), lambda i, j, t: (t, j), pipeline_mode=pl.Buffered(W_BUFFERS)
                ),
            ],
            out_specs=[pl.BlockSpec((TILE_M, TILE_N), lambda i, j, t: (i, j))],
        )(x_ref, w_ref, o_ref)

    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    return pl.pallas_call(
        body,
        out_shape=jax.ShapeDtypeStruct((M, N), x.dtype),
        in_specs=[anywhere, anywhere],
        out_specs=anywhere,
        name=NAME,
    )(x, w)


def play_matmul() -> Result:
    mesh = topology_mesh(TOPOLOGY, (1,), ("x",))
    with jax.set_mesh(mesh):  # a pipeline asks it for the chip
        operands = array((M, K), mesh, P(), jnp.float32), array((K, N), mesh, P(), jnp.float32)
        return play(jax.jit(matmul), *operands, topology=TOPOLOGY)


def cells(row: Row, result: Result) -> tuple[str, ...]:
    predicted = row.value(result) * 1e6
    return (
        row.label,
        f"{row.measured:g} us",
        f"{predicted:.1f} us",
        f"{predicted / row.measured - 1:+.1%}",
    )


def main() -> None:
    chosen = command_line(__doc__).parse_args()
    result = play_matmul()
    header = ("part of the time", "measured", f"predicted, libtpu {installed_libtpu()}", "error")
    write_between_markers(
        chosen.write, "player v6e", print_table(header, [cells(row, result) for row in ROWS])
    )


if __name__ == "__main__":
    main()
