"""What the player predicts for the published 2x2 study on v5e, row by row, beside what was measured
there.

    python benchmarks/player.py [--write docs/player.md] [--pictures docs/img]      about two minutes

The study is "Thinking in Pallas - Sharded MatMuls" (considerthebulldog.com), with m, k, n = 16384,
16384, 8192 in bf16 on four v5e chips. Rows are all of its published times, waits and counts.
Figures marked "calibrates" fixed a constant of the chip table and prove nothing. Nothing here ran
on a TPU. The command ends with status 1 if a prediction is further from its figure than the row
allows.
"""

import dataclasses
import itertools
import pathlib
import sys
from collections.abc import Callable, Iterable, Mapping

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from benchmarks.player_kernels import STUDY, Tiles, program
from benchmarks.programs import array
from benchmarks.table import command_line, print_table, without_repeats, write_between_markers
from flaxasync.check import save_picture, topology_mesh
from flaxasync.check.player import Result, play, played_chip
from flaxasync.check.player.result import CAUSES, WaitTimes
from flaxasync.kernels.gemm import gemm

type Value = Callable[[Result], float]
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
ONE_CHIP = "xla on one chip"  # the matmul fusion that the study counts is that of the whole product
STEP = "one step of the GEMM kernel"  # of 512 x 1024 x 1024
ALL_TITLES = TITLES | {
    ONE_CHIP: "XLA's fusion of the whole product, on one v5e",
    STEP: "GEMM kernel",
}
FLOPS = 2 * STUDY[0] * STUDY[1] * STUDY[2] / 4  # of one device
DRAWN = ("fused", "overlapped")
# how many of them are a second; counts have none
UNITS = {"ms": 1e3, "us": 1e6, "ns": 1e9, "": 1.0}


@dataclasses.dataclass(frozen=True)
class Row:
    variant: str  # the program
    label: str
    measured: float | None  # as published; None for a program that the study does not have
    # of the simulated program, in seconds or a count; None if the player cannot give it
    value: Value | None
    unit: str = "ms"
    allowed: float = 0.1  # the largest error
    remark: str = ""  # beside the error, or in place of the prediction


def total(variant: str, measured: float | None) -> Row:
    return Row(variant, "total", measured, lambda result: result.seconds, allowed=0.01)


def phases(device: int, *names: str) -> Value:
    """Adds up the phases of a device whose names begin so, without those in loops."""
    return lambda result: sum(
        p.seconds for p in result.devices[device].phases if p.name.startswith(names) and not p.depth
    )


def waits(device: int, name: str, *causes: str) -> Value:
    """Adds up a device's waits with these causes in a phase."""
    return lambda result: sum(
        result.devices[device].phase(name).waits.get(cause, 0.0) for cause in causes
    )


def busy_share(result: Result) -> float:
    fusion = result.devices[OFF_DIAGONAL].phase("fusion")
    return fusion.matrix_busy / fusion.seconds


def without(whole: Value, part: Value) -> Value:
    return lambda result: whole(result) - part(result)


OTHERS = tuple(cause for cause in CAUSES if cause != "memory")  # waits for other devices
GEMM_OFF = without(phases(OFF_DIAGONAL, "fused"), waits(OFF_DIAGONAL, "fused", *OTHERS))


def tile_waits(
    device: int, of: Callable[[WaitTimes], float], arriving: bool | None = None
) -> Value:
    """Returns a figure of the fused kernel's waits for tiles: all, those while data arrive, or the
    later ones.
    """

    def value(result: Result) -> float:
        arrived = max(
            w.start + w.seconds
            for w in result.all_waits
            if w.kind == "hbm to remote hbm" and w.seconds
        )
        begin = arrived if arriving is False else 0.0
        end = arrived if arriving else result.seconds
        return of(result.waits(device, "fused", "hbm to vmem", begin=begin, end=end))

    return value


def percentile(share: float) -> Callable[[WaitTimes], float]:
    return lambda found: found.percentile(share)


def spent(found: WaitTimes) -> float:
    return sum(found.seconds)


def reduced_tile(share: float) -> Value:
    """Returns a percentile of the waits for a tile in the all-reduce: until it has left, then for
    the other's.
    """

    def value(result: Result) -> float:
        device = OFF_DIAGONAL
        kind = "vmem to remote vmem"
        in_order = [w.seconds for w in result.all_waits if w.device == device and w.kind == kind]
        return WaitTimes(tuple(sorted(map(sum, itertools.batched(in_order, 2))))).percentile(share)

    return value


def addition(result: Result) -> float:
    """Returns the time from the arrival of a tile in the all-reduce to the next wait."""
    in_order = [
        w for w in result.all_waits if w.device == OFF_DIAGONAL and w.phase.startswith("all_reduce")
    ]
    found = [
        after.start - before.start - before.seconds
        for before, after in itertools.pairwise(in_order)
        if before.kind == "vmem to remote vmem" and after.kind == "signal"
    ]
    return WaitTimes(tuple(sorted(found))).percentile(50)


def count(*names: str) -> Value:
    """Adds up counts of the operations in the fusion."""
    return lambda result: sum(getattr(result.operations["fusion"], name) for name in names)


def steps(result: Result) -> float:
    """Returns how often the multiplies of the fusion are executed. Each occupies its unit, of four,
    for 16 cycles.
    """
    chip = played_chip("v5e")
    (device,) = result.devices
    return round(
        chip.cycles(device.matrix_busy)
        / (result.operations["fusion"].multiplies / 4 * chip.occupancy["bf16"])
    )


def step(result: Result) -> float:
    """Returns what one more step over k costs in the steady state of the GEMM kernel, in
    seconds.
    """
    # two tiles a step
    begins = [wait.start for wait in result.all_waits if wait.kind == "hbm to vmem"][::2]
    return (begins[12] - begins[4]) / 8


def both(label: str, measured: tuple[float, float], variant: str, name: str) -> list[Row]:
    """Returns the rows of a phase in which the study tells its device 0 from the others."""
    return [
        Row(variant, f"{label}, {who}", known, phases(device, name), "us")
        for who, known, device in zip(
            ("device 0", "the others"), measured, (DIAGONAL, OFF_DIAGONAL), strict=True
        )
    ]


# percentiles of waits, as published
TILES = {DIAGONAL: (7.5, 416, 1870, 3535), OFF_DIAGONAL: (7.5, 8.7, 440, 2575)}
NO_WAIT = "the player gives no time to a wait that is over"
TILE = 0.3  # the largest error of a wait for a tile
IS_OVER = 1.0  # of a wait that is over, for which the player has 0
LATE = 2.0  # of waits after a store, which the order of transfers makes too long
ROUGH = 0.5  # of a figure that rests on few waits, or on the difference of two times


def tile_rows(device: int) -> list[Row]:
    rows = []
    for name, share, known in zip(
        ("p50", "p90", "p99", "max"), (50, 90, 99, 100), TILES[device], strict=True
    ):
        label = f"waits for tiles, device {device}: {name}"
        value = tile_waits(device, percentile(share))
        over = known < 10
        allowed = IS_OVER if over else TILE
        if (device, name) == (OFF_DIAGONAL, "p99"):
            allowed = LATE
        rows.append(Row("fused", label, known, value, "ns", allowed, NO_WAIT if over else ""))
    return rows


ROWS = (
    total("xla", 12.05),
    Row(
        "xla",
        "permute, devices that send to themselves",
        731,
        phases(DIAGONAL, "collective-permute"),
        "us",
    ),
    Row(
        "xla",
        "permute, the others",
        2.877,
        phases(OFF_DIAGONAL, "collective-permute"),
        remark="calibrates links",
    ),
    Row("xla", "matmul fusion", 5.881, phases(OFF_DIAGONAL, "fusion")),
    Row(
        "xla",
        "of it TFLOP/s",
        187,
        lambda result: FLOPS / phases(OFF_DIAGONAL, "fusion")(result) / 1e12,
        "",
    ),
    Row("xla", "of it share of the peak, %", 95, lambda result: 100 * busy_share(result), ""),
    Row("xla", "all-reduce, early devices, with their wait", 5.4, phases(DIAGONAL, "all-reduce")),
    Row("xla", "all-reduce, late devices", 3.25, phases(OFF_DIAGONAL, "all-reduce")),
    total("collectives_and_gemm", 12.5),
    Row("collectives_and_gemm", "all-gather", 2.88, phases(OFF_DIAGONAL, "all-gather")),
    *both("dynamic slice", (415, 439), "collectives_and_gemm", "constant_dynamic-slice"),
    Row("collectives_and_gemm", "GEMM kernel", 5.93, phases(OFF_DIAGONAL, "gemm")),
    Row(
        "collectives_and_gemm",
        "zeroing the accumulator",
        348,
        None,
        "ns",
        remark="our kernel stores its first product instead",
    ),
    Row(
        "collectives_and_gemm",
        "starting a store",
        174,
        None,
        "ns",
        remark="part of a kernel, and the player times whole instructions of the program",
    ),
    Row("collectives_and_gemm", "psum", 3.25, phases(OFF_DIAGONAL, "psum")),
    total("series", 13.17),
    Row("series", "all-gather kernel", 3.32, phases(OFF_DIAGONAL, "all_gather")),
    Row("series", "of it the local copy", 437.8, waits(OFF_DIAGONAL, "all_gather", "memory"), "us"),
    Row("series", "of it the wait for the DMA", 2.88, waits(OFF_DIAGONAL, "all_gather", *OTHERS)),
    *both("dynamic slice", (415, 439), "series", "constant_dynamic-slice"),
    Row("series", "GEMM kernel", 5.93, phases(OFF_DIAGONAL, "gemm")),
    Row("series", "all-reduce kernel", 3.07, phases(OFF_DIAGONAL, "all_reduce")),
    Row("series", "of its waits for 64 tiles, the shorter ones", 45.47, reduced_tile(25), "us"),
    Row("series", "of its waits for 64 tiles, the longer ones", 46.5, reduced_tile(75), "us"),
    Row(
        "series",
        "one addition of 1024 x 1024",
        1.085,
        addition,
        "us",
        1.0,
        "ours is mixed with a copy of the sum",
    ),
    Row("series", "exit copy", 408.7, phases(OFF_DIAGONAL, "copy."), "us", remark="calibrates HBM"),
    total("fused", 12.3),
    Row(
        "fused", "wait for the DMA, off the diagonal", 2.877, waits(OFF_DIAGONAL, "fused", *OTHERS)
    ),
    Row("fused", "GEMM, on the diagonal", 6.15, phases(DIAGONAL, "fused")),
    Row("fused", "GEMM, off the diagonal", 5.96, GEMM_OFF),
    Row(
        "fused",
        "contention with arriving data",
        191,
        without(phases(DIAGONAL, "fused"), GEMM_OFF),
        "us",
        ROUGH,
    ),
    Row("fused", "all-reduce kernel", 3.064, phases(OFF_DIAGONAL, "all_reduce")),
    Row("fused", "stall before it, on the diagonal", 2.688, waits(DIAGONAL, "all_reduce", "sync")),
    Row("fused", "exit copy", 408.9, phases(OFF_DIAGONAL, "copy."), "us", remark="calibrates HBM"),
    *(row for device in TILES for row in tile_rows(device)),
    Row(
        "fused",
        "device 0 while data arrive: waits",
        924,
        tile_waits(DIAGONAL, lambda w: len(w.seconds), True),
        "",
    ),
    Row(
        "fused",
        "device 0 while data arrive: p90",
        606,
        tile_waits(DIAGONAL, percentile(90), True),
        "ns",
        ROUGH,
    ),
    Row(
        "fused",
        "device 0 while data arrive: sum",
        216,
        tile_waits(DIAGONAL, spent, True),
        "us",
        TILE,
    ),
    Row(
        "fused",
        "device 0 afterwards: p90",
        8.7,
        tile_waits(DIAGONAL, percentile(90), False),
        "ns",
        IS_OVER,
        NO_WAIT,
    ),
    Row(
        "fused",
        "device 0 afterwards: max",
        573,
        tile_waits(DIAGONAL, percentile(100), False),
        "ns",
        2.5,
    ),
    Row("fused", "device 0 afterwards: sum", 33, tile_waits(DIAGONAL, spent, False), "us", LATE),
    Row("fused", "device 1: sum", 58, tile_waits(OFF_DIAGONAL, spent), "us", LATE),
    total("overlapped", None),
    Row("overlapped", "kernel", None, phases(OFF_DIAGONAL, "overlapped")),
    Row(STEP, "one step over k", 5.593, step, "us", 0.01),
    Row(
        STEP,
        "one step over k, cycles",
        8390,
        lambda result: played_chip("v5e").cycles(step(result)),
        "",
        0.01,
    ),
    Row(ONE_CHIP, "VLIW bundles", 10117, count("bundles"), ""),
    Row(
        ONE_CHIP, "kinds of them", 115, None, "", remark="the study does not say what makes a kind"
    ),
    Row(ONE_CHIP, "vmatmul", 2624, count("multiplies"), ""),
    Row(ONE_CHIP, "vmatmul of one unit", 656, lambda result: count("multiplies")(result) / 4, ""),
    Row(ONE_CHIP, "vmatpush", 512, count("pushes"), ""),
    Row(ONE_CHIP, "pops of results", 5248, count("pops"), ""),
    Row(ONE_CHIP, "vector loads and stores", 7582, count("loads", "stores"), ""),
    Row(ONE_CHIP, "other vector operations", 7073, count("vector"), ""),
    Row(ONE_CHIP, "steps of 656 x 1024 x 1024", 3200, steps, ""),
)


def study() -> dict[str, Result]:
    """Simulates the programs of all rows."""
    mesh = topology_mesh(TOPOLOGY, (2, 2), ("x", "y"))
    results = {}
    for variant in TITLES:
        fn, *arguments = program(variant, mesh)
        results[variant] = play(fn, *arguments, topology=TOPOLOGY)
    results[ONE_CHIP] = play_on_one_chip()
    results[STEP] = play_gemm()
    return results


def play_on_one_chip() -> Result:
    """Simulates the whole product as one fusion of XLA."""
    mesh = topology_mesh("v5e:1x1", (1,), ("x",))
    m, k, n = STUDY
    operands = array((m, k), mesh, P()), array((k, n), mesh, P())
    return play(jax.jit(jnp.matmul), *operands, topology="v5e:1x1")


def play_gemm() -> Result:
    """Simulates the GEMM kernel with one tile of rows and columns, and 16 steps over k."""
    mesh = topology_mesh("v5e:1x1", (1,), ("x",))
    tiles = Tiles()
    operands = array((tiles.m, 16 * tiles.k), mesh, P()), array((16 * tiles.k, tiles.n), mesh, P())
    return play(
        jax.jit(lambda x, w: gemm(x, w, tiles=tiles.matmul())), *operands, topology="v5e:1x1"
    )


def misses(predicted: list[tuple[Row, float]]) -> list[str]:
    """Returns what is further from its figure than its row allows, and whether the totals are in
    another order.
    """
    found = []
    for row, value in predicted:
        if row.measured and abs(value / row.measured - 1) > row.allowed:
            found.append(
                f"{row.variant}, {row.label}: {value:.4g} {row.unit}, measured {row.measured:.4g} "
                f"{row.unit}"
            )
    totals = [(row, value) for row, value in predicted if row.label == "total" and row.measured]
    by_prediction = sorted(totals, key=lambda t: t[1])
    by_measurement = sorted(totals, key=lambda t: t[0].measured or 0)
    if by_prediction != by_measurement:
        found.append(
            f"the totals are in another order: {', '.join(row.variant for row, _ in by_prediction)}"
        )
    return found


def predict(rows: Iterable[Row], results: Mapping[str, Result]) -> list[tuple[Row, float]]:
    """Returns the rows that the player can give, each with its prediction in the unit of the
    row.
    """
    return [(row, row.value(results[row.variant]) * UNITS[row.unit]) for row in rows if row.value]


def table_row(row: Row, value: float | None) -> tuple[str, ...]:
    known = "-" if row.measured is None else f"{row.measured:g} {row.unit}".strip()
    if value is None:
        return ALL_TITLES[row.variant], row.label, known, "-", row.remark
    digits = {"ms": 3, "us": 1 if value > 100 else 3, "ns": 0, "": 0}[row.unit]
    error = "" if row.measured is None else f"{value / row.measured - 1:+.1%}"
    remark = f" ({row.remark})" if row.remark else ""
    return (
        ALL_TITLES[row.variant],
        row.label,
        known,
        f"{value:.{digits}f} {row.unit}".strip(),
        error + remark,
    )


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument(
        "--pictures", type=pathlib.Path, metavar="FOLDER", help="draw player_study.png there"
    )
    chosen = parser.parse_args()
    results = study()
    predicted = predict(ROWS, results)
    values = dict(predicted)
    rows = [table_row(row, values.get(row)) for row in ROWS]
    header = ("program", "row", "measured", "predicted", "error")
    table = print_table(header, without_repeats(rows))
    write_between_markers(chosen.write, "player study", table)
    if chosen.pictures:
        titles = [TITLES[variant] for variant in DRAWN]
        save_picture(
            [results[variant] for variant in DRAWN],
            chosen.pictures / "player_study.png",
            titles=titles,
        )
    if missed := misses(predicted):
        sys.exit("further from the measurements than allowed:\n  " + "\n  ".join(missed))


if __name__ == "__main__":
    main()
