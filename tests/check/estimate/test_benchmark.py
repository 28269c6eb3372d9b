"""benchmarks/timeline.py: the order of the MLP's forms, and the table in docs/check.md."""

import itertools
import pathlib

import pytest

from benchmarks import timeline as benchmark

PAGE = (pathlib.Path(__file__).parents[3] / "docs" / "check.md").read_text()
SECTION = PAGE.partition("<!-- timeline -->")[2].partition("<!-- /timeline -->")[0]
ROWS = {line.split("|")[1].strip(): line for line in SECTION.splitlines() if line.startswith("|")}
NAMES = (*benchmark.MEASURED_MS, *benchmark.MLPS)
ORDER = ("flaxasync, backend pallas", "XLA, post_spmd collective matmul", "XLA default", "XLA, windowed einsum off")
SMALL = benchmark.tp_mlp.Shape(model=1024, hidden=7168)


@pytest.mark.slow
def test_the_order_of_two_forms_of_a_small_mlp(monkeypatch):
    monkeypatch.setattr(benchmark, "SHAPE", SMALL)
    windowed, whole = (benchmark.run(name) for name in ("XLA default", "XLA, windowed einsum off"))
    assert windowed.best.seconds < whole.best.seconds


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in benchmark.MEASURED_MS else pytest.mark.slow) for name in NAMES]
)
def test_the_page_has_these_figures(name):
    cells = [cell.strip() for cell in ROWS[name].strip("|").split("|")]
    assert cells == list(benchmark.run(name).cells())


def test_the_page_has_every_form_in_its_order():
    assert list(ROWS)[2:] == list(NAMES)
    times = [float(ROWS[name].split("|")[2]) for name in ORDER]
    assert all(a < b for a, b in itertools.pairwise(times)), times
