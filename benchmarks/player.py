"""What the player predicts for the published 2x2 v5e study, phase by phase, beside what was measured there.

    python benchmarks/player.py                        prints the table (about two minutes; no TPU)
    python benchmarks/player.py --small                the same programs, 1/8 a side: nothing to compare with
    python benchmarks/player.py --write docs/player.md --pictures docs/img
                                                       also puts it between the markers there, and draws the runs

The study: Thinking in Pallas - Sharded MatMuls (considerthebulldog.com), m, k, n = 16384, 16384, 8192 in bf16 on four
v5e chips. Figures marked "calibrates" fixed a constant of the chip table and prove nothing. Nothing here ran on a TPU.
"""

import argparse
import dataclasses
import json
import pathlib
import resource
import time

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.player_kernels import STUDY, Tiles, gemm, program
from benchmarks.table import print_table, write_between_markers
from flaxasync.check import topology_mesh
from flaxasync.check.player import Result, play
from flaxasync.check.player.picture import save_picture

SMALL, SMALL_TILES = (2048, 2048, 1024), Tiles(256, 256, 256, 256, 2)
TOPOLOGY = "v5e:2x2"
DIAGONAL, OFF_DIAGONAL = 0, 1  # devices that hold the rows of the right-hand side that they need, and that do not
TITLES = {
    "xla": "XLA (jnp.matmul)",
    "collectives_and_gemm": "XLA collectives + Pallas GEMM",
    "series": "Pallas all-gather, GEMM, all-reduce in series",
    "fused": "fused all-gather + GEMM, then all-reduce",
    "overlapped": "overlapped: all three in one kernel",
}


@dataclasses.dataclass(frozen=True)
class Row:
    """A published figure: which phases of which device of which variant; no phases for the total. Measured in ms."""

    variant: str
    label: str
    phases: tuple[str, ...] = ()
    device: int = OFF_DIAGONAL
    measured: float | None = None
    calibrates: str = ""


ROWS = (
    Row("xla", "total", measured=12.05),
    Row("xla", "permute", ("collective-permute",), measured=2.877, calibrates="links"),
    Row("xla", "matmul fusion", ("fusion",), measured=5.88),
    Row("xla", "all-reduce", ("all-reduce",)),
    Row("collectives_and_gemm", "total", measured=12.5),
    Row("collectives_and_gemm", "all-gather", ("all-gather",)),
    Row("collectives_and_gemm", "slice", ("constant_dynamic-slice",)),
    Row("collectives_and_gemm", "GEMM kernel", ("gemm",), measured=5.93),
    Row("collectives_and_gemm", "all-reduce", ("psum",)),
    Row("series", "total", measured=13.17),
    Row("series", "all-gather kernel", ("all_gather",), measured=3.32),
    Row("series", "all-reduce kernel", ("all_reduce",), measured=3.07),
    Row("series", "exit copy", ("copy.",), measured=0.4087, calibrates="HBM"),
    Row("fused", "total", measured=12.3),
    Row("fused", "fused kernel, diagonal device", ("fused",), device=DIAGONAL, measured=6.15),
    Row("fused", "fused kernel, off the diagonal", ("fused",), measured=8.84),
    Row("overlapped", "total"),
    Row("overlapped", "kernel", ("overlapped",)),
)
STEP_MEASURED = 5.59e-3  # ms of one 512 x 1024 x 1024 step


def study(shape: tuple[int, int, int], tiles: Tiles) -> dict[str, tuple[Result, float]]:
    """Plays every variant; returns its result and the seconds that took, compilation included."""
    mesh = topology_mesh(TOPOLOGY, (2, 2), ("x", "y"))
    totals = {row.variant: row.measured for row in ROWS if not row.phases}
    played = {}
    for variant in TITLES:
        fn, *arguments = program(variant, mesh, shape, tiles)
        begin = time.perf_counter()
        measured = totals[variant] if shape == STUDY else None
        result = play(fn, *arguments, topology=TOPOLOGY, measured=measured and measured / 1e3)
        played[variant] = result, time.perf_counter() - begin
    return played


def value_ms(row: Row, result: Result) -> float:
    """Returns the time of a row: the total of the slowest device, or phases of one device."""
    if not row.phases:
        return result.seconds * 1e3
    device = result.devices[row.device]
    return sum(p.seconds for p in device.phases if p.name.startswith(row.phases) and p.depth == 0) * 1e3


def step_ms(tiles: Tiles) -> float:
    """Returns what one more step over k costs in the GEMM kernel, in its steady state on one chip."""
    mesh = topology_mesh("v5e:1x1", (1,), ("x",))
    place = NamedSharding(mesh, P(None, None))
    seconds = []
    for steps in (8, 16):
        shapes = ((tiles.m, steps * tiles.k), (steps * tiles.k, tiles.n))
        arguments = [jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=place) for shape in shapes]
        result = play(jax.jit(lambda x, w: gemm(x, w, tiles)), *arguments, topology="v5e:1x1")
        seconds.append(result.devices[0].phase("gemm").seconds)
    return (seconds[1] - seconds[0]) / 8 * 1e3


def table_rows(played: dict[str, tuple[Result, float]], tiles: Tiles, *, compare: bool) -> list[tuple[str, ...]]:
    rows = []
    for row in ROWS:
        value = value_ms(row, played[row.variant][0])
        rows.append(_row(TITLES[row.variant], row.label, row.measured if compare else None, value, row.calibrates))
    rows.append(_row("GEMM kernel", "one step over k", STEP_MEASURED if compare else None, step_ms(tiles), ""))
    return rows


def _row(program_name: str, label: str, measured: float | None, value: float, calibrates: str) -> tuple[str, ...]:
    digits = 3 if value > 0.1 else 5
    error = "" if measured is None else f"{value / measured - 1:+.1%}"
    if calibrates and error:
        error = f"{error} (calibrates {calibrates})"
    known = "-" if measured is None and program_name == TITLES["overlapped"] else "not at hand"
    if measured is not None:
        known = f"{measured:g}"
    return program_name, label, known, f"{value:.{digits}f}", error


def main() -> None:
    """Prints the table; writes it and draws the pictures where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="small sizes: seconds, and nothing to compare with")
    parser.add_argument("--write", metavar="FILE", help="put the table between the markers of this file")
    parser.add_argument("--pictures", type=pathlib.Path, metavar="FOLDER", help="draw player_study.png there")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="write totals and phases")
    chosen = parser.parse_args()
    shape, tiles = (SMALL, SMALL_TILES) if chosen.small else (STUDY, Tiles())
    played = study(shape, tiles)
    rows = table_rows(played, tiles, compare=not chosen.small)
    table = print_table(("program", "phase", "measured ms", "predicted ms", "error"), rows)
    spent = ", ".join(f"{variant} {seconds:.1f} s" for variant, (_, seconds) in played.items())
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"\ncompiled and played in: {spent}; peak memory of the player {memory:.2f} GiB")
    if chosen.write:
        write_between_markers(chosen.write, "player study", table)
    if chosen.pictures:
        names = ("fused", "overlapped")
        save_picture(
            [played[n][0] for n in names], chosen.pictures / "player_study.png", titles=[TITLES[n] for n in names]
        )
    if chosen.json:
        chosen.json.write_text(json.dumps({n: json.loads(r.to_json()) for n, (r, _) in played.items()}, indent=1))


if __name__ == "__main__":
    main()
