"""Every measured program that predictions are compared with, and how far they are from it.

    python benchmarks/measured.py [--write docs/check.md]

The figures are those of the tables of docs/, which the benchmarks of these tables make; nothing is
compiled. With --write, flaxasync/check/estimate/measured.csv is written as well, from which the
line "known error" of each estimate comes. A row that a constant of `flaxasync.hardware` or of the
player was fitted to is marked. The table leaves out the training steps, which have one of their own.
"""

import csv
import pathlib
from collections.abc import Iterator
from typing import NamedTuple

from benchmarks.table import command_line, print_table, write_between_markers
from flaxasync.check.estimate import measured
from flaxasync.check.estimate.measured import Measurement
from flaxasync.check.units import time_text

DOCS = pathlib.Path(__file__).parents[1] / "docs"
FILE = pathlib.Path(measured.__file__).with_name("measured.csv")
UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0}
HEADER = ("program", "chips", "predicted by", "measured", "predicted", "error", "fitted to it")
STEP = "training step"
RATE_OF_PCIE = "PCIe"
LINKS_AND_HBM = "HBM, links"


class Row(NamedTuple):
    """A row of the table."""

    measurement: Measurement
    topology: str
    fitted: str  # the constants that were fitted to it; "" for none


def table_of(page: str, name: str) -> list[dict[str, str]]:
    """Returns the rows of the table between the markers `name` of a page, by their headers."""
    text = (DOCS / page).read_text()
    block = text.partition(f"<!-- {name} -->")[2].partition(f"<!-- /{name} -->")[0]
    lines = [line for line in block.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [dict(zip(cells[0], row, strict=True)) for row in cells[2:]]


def seconds(text: str) -> float:
    """Returns the seconds of "12.05 ms"."""
    number, unit = text.split()
    return float(number) * UNITS[unit]


def rows() -> Iterator[Row]:
    for row in table_of("check.md", "timeline"):
        if row["measured ms"] != "-":
            found = Measurement(
                row["program"],
                "v5e",
                "timeline",
                float(row["measured ms"]) / 1e3,
                float(row["ms"]) / 1e3,
            )
            yield Row(found, "v5e:2x2", "")
    for number, row in enumerate(table_of("scaling.md", "recipes")):
        for method, column in (("timeline", "estimated s"), ("simulated", "simulated s")):
            if row[column] == "-":
                continue
            found = Measurement(
                f"{STEP}, {row['model']}",
                row["chips"].partition(":")[0],
                method,
                float(row["measured s"]),
                float(row[column]),
            )
            yield Row(found, row["chips"], RATE_OF_PCIE if number == 0 else "")
    for row in table_of("player.md", "player study"):
        if row["row"] == "total" and "-" not in (row["measured"], row["predicted"]):
            measured_seconds = seconds(row["measured"])
            found = Measurement(
                row["program"], "v5e", "play", measured_seconds, seconds(row["predicted"])
            )
            yield Row(found, "v5e:2x2", LINKS_AND_HBM)
    kernel = table_of("player.md", "player v6e")[0]
    found = Measurement(
        "Pallas matmul in float32",
        "v6e",
        "play",
        seconds(kernel["measured"]),
        seconds(next(value for name, value in kernel.items() if name.startswith("predicted"))),
    )
    yield Row(found, "v6e:1x1", "")


def main() -> None:
    chosen = command_line(__doc__).parse_args()
    found = list(rows())
    cells = [
        (
            row.measurement.program,
            row.topology,
            row.measurement.method,
            time_text(row.measurement.measured, digits=4),
            time_text(row.measurement.predicted, digits=4),
            f"{row.measurement.error:+.1%}",
            row.fitted,
        )
        for row in found
        if not row.measurement.program.startswith(STEP)
    ]
    write_between_markers(chosen.write, "measured", print_table(HEADER, cells))
    if chosen.write:
        with FILE.open("w", newline="") as stream:
            writer = csv.writer(stream, lineterminator="\n")
            writer.writerow(Measurement._fields)
            for program, chip, method, *values in (row.measurement for row in found):
                writer.writerow([program, chip, method, *(f"{value:.6g}" for value in values)])


if __name__ == "__main__":
    main()
