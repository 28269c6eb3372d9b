"""benchmarks/timeline.py: the order of the MLP's forms, and the table in docs/check.md.

Two forms of a smaller MLP stand for all forms at full size, whose tests are marked slow: they compile for a minute.
"""

import itertools
import pathlib
import re

import pytest

from benchmarks import timeline as benchmark

PAGE = pathlib.Path(__file__).parents[3] / "docs" / "check.md"
EXPECTED_ORDER = (
    "ring by hand, every step written out", "ring by hand, unroll=2", "XLA, post_spmd collective matmul",
    "XLA default", "ring by hand, unroll=1", "XLA, windowed einsum off",
)  # fmt: skip
FEW = ("XLA default", "XLA, windowed einsum off")
SMALL = {"MODEL": 1024, "HIDDEN": 7168}  # at this size the ring by hand is slowest: its hops outlast its products


@pytest.fixture(scope="module", params=["small", pytest.param("full", marks=pytest.mark.slow)])
def size(request):
    with pytest.MonkeyPatch.context() as patch:
        for name, side in SMALL.items() if request.param == "small" else ():
            assert getattr(benchmark, name) > side
            patch.setattr(benchmark, name, side)
        yield request.param


@pytest.fixture(scope="module")
def rows(size):
    return {name: benchmark.run(name) for name in (FEW if size == "small" else EXPECTED_ORDER)}


@pytest.mark.slow
def test_the_order_of_the_forms(rows):
    times = [row.best.seconds for row in rows.values()]
    assert all(a < b for a, b in itertools.pairwise(times)), times


@pytest.mark.parametrize("size", [pytest.param("full", marks=pytest.mark.slow)], indirect=True)
def test_timing_copies_by_their_bytes_moves_one_row_only(rows):
    """The ring with unroll=1 copies within vector memory, which the compiler estimates to be slow."""
    others = [row.by_bytes.seconds for name, row in rows.items() if name != "ring by hand, unroll=1"]
    assert all(a < b for a, b in itertools.pairwise(others)), others
    looped = rows["ring by hand, unroll=1"]
    assert rows["ring by hand, unroll=2"].by_bytes.seconds < looped.by_bytes.seconds < looped.best.seconds
    assert looped.by_bytes.seconds < rows["XLA, post_spmd collective matmul"].by_bytes.seconds, "the order changes"


def test_the_page_has_these_figures(size, request):
    """The page has the figures of the measured program, and of every program that was compiled at the page's size."""
    page = re.sub(" +", " ", PAGE.read_text())
    for row in (benchmark.run("2x2 jnp.matmul"), *(request.getfixturevalue("rows").values() if size == "full" else ())):
        assert f"| {row.name} | {row.best.seconds * 1e3:.2f} | {row.by_bytes.seconds * 1e3:.2f} |" in page
