"""How far predictions are from measurements: the file of the package is what the tables of docs/
say, and estimates name it.
"""

import pytest

from benchmarks import measured as benchmark
from flaxasync.check.estimate import measured
from flaxasync.check.estimate.measured import Measurement, known_error
from flaxasync.check.units import time_text


def test_the_file_is_what_the_tables_say():
    for stored, row in zip(measured.measurements(), benchmark.rows(), strict=True):
        assert stored[:3] == row.measurement[:3]
        assert stored[3:] == pytest.approx(row.measurement[3:], rel=1e-5)


def test_each_table_of_a_comparison_is_read():
    topologies = {row.topology for row in benchmark.rows()}
    assert {"v5e:2x2", "v6e:1x1", "v6e:2x4", "v6e:8x8"} <= topologies
    assert {row.fitted for row in benchmark.rows()} == {
        "",
        benchmark.RATE_OF_PCIE,
        benchmark.LINKS_AND_HBM,
    }


@pytest.mark.parametrize(
    ("errors", "said"),
    [
        ([], "none measured on v5p"),
        ([0.024], "+2.4% on the one measured program on v5p (docs/check.md)"),
        ([0.057, -0.049, 0.0], "-4.9% to +5.7% on 3 measured programs on v5p (docs/check.md)"),
    ],
)
def test_known_errors_in_words(monkeypatch, errors, said):
    """Those of another chip, or of another way to predict, do not count."""
    found = [Measurement("", "v5p", "timeline", 2.0, 2.0 * (1 + error)) for error in errors]
    others = [Measurement("", "v5e", "timeline", 1, 9), Measurement("", "v5p", "play", 1, 9)]
    monkeypatch.setattr(measured, "measurements", lambda: (*others, *found))
    assert known_error("v5p", "timeline") == said


@pytest.mark.parametrize("value", [90, 3.495, 0.01234, 7.4e-5])
def test_times_in_the_tables_are_read(value):
    assert benchmark.seconds(time_text(value, digits=4)) == pytest.approx(value)
