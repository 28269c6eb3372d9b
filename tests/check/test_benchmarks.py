"""The tables of docs/check.md, docs/async.md and docs/tpu.md are what their benchmarks make with
this compiler.
"""

import itertools
import pathlib
import re

import pytest

from benchmarks import async_starts, vector_memory
from benchmarks import timeline as benchmark

DOCS = pathlib.Path(__file__).parents[2] / "docs"
SLOW = pytest.mark.slow


def section(page, name):
    """Returns what a benchmark wrote on a page: all of it, and the cells of its table."""
    text = (
        (DOCS / page).read_text().partition(f"<!-- {name} -->")[2].partition(f"<!-- /{name} -->")[0]
    )
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return text, [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


FORMS = {cells[0]: cells for cells in section("check.md", "timeline")[1]}
ORDER = (
    "flaxasync, backend pallas",
    "XLA, post_spmd collective matmul",
    "XLA default",
    "XLA, windowed einsum off",
)


@pytest.mark.parametrize(
    "name", [*benchmark.MEASURED_MS, *(pytest.param(name, marks=SLOW) for name in benchmark.MLPS)]
)
def test_the_page_has_the_figures_of_each_form(name):
    assert FORMS[name] == list(benchmark.run(name).cells())


def test_the_page_has_every_form_in_its_order():
    assert list(FORMS)[2:] == [*benchmark.MEASURED_MS, *benchmark.MLPS]
    times = [float(FORMS[name][1]) for name in ORDER]
    assert all(a < b for a, b in itertools.pairwise(times)), times


STARTS, (HEADER, _, *ROWS) = section("async.md", "async starts")
COMMAND = "run python benchmarks/async_starts.py --write docs/async.md"


def test_the_page_has_every_asynchronous_start():
    assert ["start", *async_starts.OPTIONS] == HEADER, COMMAND
    assert len(ROWS) == len(async_starts.CASES), COMMAND
    assert re.search(r"Made with jax [\d.]+, jaxlib [\d.]+, libtpu [\d.]+\n", STARTS), COMMAND


@SLOW
@pytest.mark.parametrize("column", async_starts.OPTIONS)
def test_the_page_agrees_with_the_compiler(column):
    written = [[row[0], row[HEADER.index(column)]] for row in ROWS]
    assert async_starts.table_rows([column]) == written, (
        f"with {async_starts.versions()}: {COMMAND}"
    )


@pytest.mark.parametrize(
    ("message", "entry"),
    [
        ("the TPU compiler died of SIGSEGV; its last lines:\n...", "crash"),
        ("the TPU compiler refused: INTERNAL", "refused"),
    ],
)
def test_a_crash_of_the_compiler_is_an_entry(message, entry, monkeypatch):
    """The first message is that of tests/check/compile/test_compile_for.py, whose child really
    dies.
    """

    def fails(*_, **__):
        raise RuntimeError(message)

    monkeypatch.setattr(async_starts.check, "compile_for", fails)
    assert {row[1] for row in async_starts.table_rows(["v5e"])} == {entry}


@SLOW
@pytest.mark.parametrize("chip", vector_memory.TOPOLOGIES)
def test_the_page_has_the_vector_memory_that_the_compiler_gives(chip):
    assert vector_memory.row(chip) in section("tpu.md", "vector memory")[1]
