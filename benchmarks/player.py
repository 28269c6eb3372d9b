"""What the player predicts for the published 2x2 study on v5e, phase by phase, beside what was measured there.

    python benchmarks/player.py [--write docs/player.md] [--pictures docs/img]      about two minutes

The study is "Thinking in Pallas - Sharded MatMuls" (considerthebulldog.com), with m, k, n = 16384, 16384, 8192 in bf16
on four v5e chips. Figures marked "calibrates" fixed a constant of the chip table and prove nothing. Figures marked "by
difference" are a published total less published phases. Nothing here ran on a TPU. The command ends with status 1 if a
prediction is further from its figure than `TOLERANCE` allows.
"""

import dataclasses
import pathlib
import sys

import jax
from jax.sharding import PartitionSpec as P

from benchmarks.player_kernels import Tiles, program
from benchmarks.programs import array
from benchmarks.table import command_line, print_table, write_between_markers
from flaxasync.check import save_picture, topology_mesh
from flaxasync.check.player import Result, play
from flaxasync.kernels.gemm import gemm

TOPOLOGY = "v5e:2x2"
DIAGONAL = 0  # a device that holds the rows of the right-hand side that it needs
OFF_DIAGONAL = 1  # one that does not
TITLES = {
    "xla": "XLA (jnp.matmul)",
    "collectives_and_gemm": "XLA collectives + Pallas GEMM",
    "series": "Pallas all-gather, GEMM, all-reduce in series",
    "fused": "fused all-gather + GEMM, then all-reduce",
    "overlapped": "overlapped: all three in one kernel",
}
DRAWN = ("fused", "overlapped")


@dataclasses.dataclass(frozen=True)
class Row:
    variant: str  # the program
    label: str
    phases: tuple[str, ...] = ()  # whose times are added; empty for the total
    device: int = OFF_DIAGONAL  # whose phases are taken
    measured: float | None = None  # the published time in ms
    calibrates: str = ""  # the constant of the chip table that this figure fixed
    by_difference: bool = False  # whether `measured` is a published total less published phases
    waiting: bool = False  # whether only the waits for other devices are added


ROWS = (
    Row("xla", "total", measured=12.05),
    Row("xla", "permute", ("collective-permute",), measured=2.877, calibrates="links"),
    Row("xla", "matmul fusion", ("fusion",), measured=5.88),
    Row("xla", "all-reduce", ("all-reduce",), measured=12.05 - 2.877 - 5.88, by_difference=True),
    Row("collectives_and_gemm", "total", measured=12.5),
    Row("collectives_and_gemm", "all-gather", ("all-gather",)),
    Row("collectives_and_gemm", "slice", ("constant_dynamic-slice",)),
    Row("collectives_and_gemm", "GEMM kernel", ("gemm",), measured=5.93),
    Row("collectives_and_gemm", "all-reduce", ("psum",)),
    Row("collectives_and_gemm", "these three together", ("all-gather", "constant_dynamic-slice", "psum"),
        measured=12.5 - 5.93, by_difference=True),
    Row("series", "total", measured=13.17),
    Row("series", "all-gather kernel", ("all_gather",), measured=3.32),
    Row("series", "slice", ("constant_dynamic-slice",), measured=13.17 - 3.32 - 5.93 - 3.07 - 0.4087,
        by_difference=True),
    Row("series", "GEMM kernel", ("gemm",), measured=5.93),
    Row("series", "all-reduce kernel", ("all_reduce",), measured=3.07),
    Row("series", "exit copy", ("copy.",), measured=0.4087, calibrates="HBM"),
    Row("fused", "total", measured=12.3),
    Row("fused", "fused kernel, diagonal device", ("fused",), device=DIAGONAL, measured=6.15),
    Row("fused", "fused kernel, off the diagonal", ("fused",), measured=8.84),
    Row("fused", "of it the all-gather wait", ("fused",), measured=8.84 - 5.93, by_difference=True, waiting=True),
    Row("fused", "all-reduce kernel", ("all_reduce",), measured=12.3 - 8.84 - 0.4087, by_difference=True),
    Row("overlapped", "total"),
    Row("overlapped", "kernel", ("overlapped",)),
)  # fmt: skip
STEP = Row("step", "one step over k", measured=5.59e-3)  # of 512 x 1024 x 1024
TOLERANCE = {"total": 0.02, "phase": 0.1, "step": 0.01}


def study() -> dict[str, Result]:
    mesh = topology_mesh(TOPOLOGY, (2, 2), ("x", "y"))
    totals = {row.variant: row.measured for row in ROWS if not row.phases}
    results = {}
    for variant in TITLES:
        fn, *arguments = program(variant, mesh)
        measured = totals[variant]
        results[variant] = play(fn, *arguments, topology=TOPOLOGY, measured=measured and measured / 1e3)
    return results


def value_ms(row: Row, result: Result) -> float:
    """Returns the time of a row in ms: the total of the slowest device, or the sum of phases of one device."""
    if not row.phases:
        return result.seconds * 1e3
    device = result.devices[row.device]
    phases = [p for p in device.phases if p.name.startswith(row.phases) and p.depth == 0]
    return sum(p.exposed if row.waiting else p.seconds for p in phases) * 1e3


def step_ms() -> float:
    """Returns what one more step over k costs in the GEMM kernel, in ms, in its steady state on one chip."""
    mesh = topology_mesh("v5e:1x1", (1,), ("x",))
    seconds, tiles = [], Tiles()
    for steps in (8, 16):
        shapes = ((tiles.m, steps * tiles.k), (steps * tiles.k, tiles.n))
        arguments = [array(shape, mesh, P()) for shape in shapes]
        result = play(jax.jit(lambda x, w: gemm(x, w, tiles=tiles.matmul())), *arguments, topology="v5e:1x1")
        seconds.append(result.devices[0].phase("gemm").seconds)
    return (seconds[1] - seconds[0]) / 8 * 1e3


def misses(predicted: list[tuple[Row, float]]) -> list[str]:
    """Returns what is further from its figure than TOLERANCE allows, and whether the totals are in another order."""
    found = []
    for row, value in predicted:
        kind = "step" if row is STEP else "phase" if row.phases else "total"
        if row.measured and abs(value / row.measured - 1) > TOLERANCE[kind]:
            found.append(f"{row.variant}, {row.label}: {value:.4g} ms, measured {row.measured:.4g} ms")
    totals = [(row, value) for row, value in predicted if row.measured and not row.phases and row is not STEP]
    by_prediction, by_measurement = sorted(totals, key=lambda t: t[1]), sorted(totals, key=lambda t: t[0].measured or 0)
    if by_prediction != by_measurement:
        found.append(f"the totals are in another order: {', '.join(row.variant for row, _ in by_prediction)}")
    return found


def table_rows(predicted: list[tuple[Row, float]]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for row, value in predicted:
        known, error = "-" if row.variant == "overlapped" else "not at hand", ""
        if row.measured is not None:
            known = f"{row.measured:.3f} by difference" if row.by_difference else f"{row.measured:g}"
            error = f"{value / row.measured - 1:+.1%}" + (f" (calibrates {row.calibrates})" if row.calibrates else "")
        title = TITLES.get(row.variant, "GEMM kernel")
        rows.append((title, row.label, known, f"{value:.{3 if value > 0.1 else 5}f}", error))
    return rows


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--pictures", type=pathlib.Path, metavar="FOLDER", help="draw player_study.png there")
    chosen = parser.parse_args()
    results = study()
    predicted = [*((row, value_ms(row, results[row.variant])) for row in ROWS), (STEP, step_ms())]
    table = print_table(("program", "phase", "measured ms", "predicted ms", "error"), table_rows(predicted))
    write_between_markers(chosen.write, "player study", table)
    if chosen.pictures:
        titles = [TITLES[variant] for variant in DRAWN]
        save_picture([results[variant] for variant in DRAWN], chosen.pictures / "player_study.png", titles=titles)
    if missed := misses(predicted):
        sys.exit("further from the measurements than allowed:\n  " + "\n  ".join(missed))


if __name__ == "__main__":
    main()
