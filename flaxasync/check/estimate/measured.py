"""How far predictions were from every measured program that they were compared with.

measured.csv is written by benchmarks/measured.py, from the tables in which docs/ compares
predictions with published measurements.
"""

import csv
import functools
import importlib.resources
from typing import Literal, NamedTuple


class Measurement(NamedTuple):
    """A program whose time was measured, and its prediction."""

    program: str
    chip: str
    # "timeline", from the text and kernels alone; "simulated", with products that were; or "play"
    method: str
    measured: float  # seconds
    predicted: float  # seconds

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


@functools.cache
def measurements() -> tuple[Measurement, ...]:
    """Returns all measurements that predictions were compared with."""
    text = importlib.resources.files(__package__).joinpath("measured.csv").read_text()
    return tuple(
        Measurement(
            row["program"],
            row["chip"],
            row["method"],
            float(row["measured"]),
            float(row["predicted"]),
        )
        for row in csv.DictReader(text.splitlines())
    )


def known_error(chip: str, method: Literal["timeline", "simulated", "play"]) -> str:
    """Says in words how far predictions for a chip were from what was measured."""
    errors = sorted(m.error for m in measurements() if (m.chip, m.method) == (chip, method))
    if not errors:
        return f"none measured on {chip}"
    if len(errors) == 1:
        return f"{errors[0]:+.1%} on the one measured program on {chip} (docs/check.md)"
    return (
        f"{errors[0]:+.1%} to {errors[-1]:+.1%} on {len(errors)} measured programs on {chip} "
        "(docs/check.md)"
    )
