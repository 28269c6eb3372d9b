"""The table in docs/async.md of JAX's own asynchronous collectives is what the installed compiler makes of them."""

import pathlib
import re

import pytest

from benchmarks import async_starts

PAGE = (pathlib.Path(__file__).parents[2] / "docs" / "async.md").read_text()
SECTION = PAGE.partition("<!-- async starts -->")[2].partition("<!-- /async starts -->")[0]
ROWS = [[cell.strip() for cell in line.strip("|").split("|")] for line in SECTION.splitlines() if line.startswith("|")]
COMMAND = "run python benchmarks/async_starts.py --write docs/async.md"


def test_the_page_has_every_program():
    header, _, *rows = ROWS
    assert header == ["start", *async_starts.OPTIONS], COMMAND
    assert len(rows) == len(async_starts.CASES), COMMAND
    assert re.search(r"Made with jax [\d.]+, jaxlib [\d.]+, libtpu [\d.]+\n", SECTION), COMMAND


@pytest.mark.slow
@pytest.mark.parametrize("column", async_starts.OPTIONS)
def test_the_page_agrees_with_the_compiler(column):
    written = [[row[0], row[ROWS[0].index(column)]] for row in ROWS[2:]]
    assert async_starts.table_rows([column]) == written, f"with {async_starts.versions()}: {COMMAND}"


@pytest.mark.parametrize(("message", "entry"), [("the TPU compiler died of SIGSEGV; its last lines:\n...", "crash"),
                                                ("the TPU compiler refused: INTERNAL", "refused")])  # fmt: skip
def test_a_crash_of_the_compiler_is_an_entry(message, entry, monkeypatch):
    """The first message is that of tests/check/compile/test_compile_for.py, whose child really dies."""

    def fails(*_, **__):
        raise RuntimeError(message)

    monkeypatch.setattr(async_starts.check, "compile_for", fails)
    assert {row[1] for row in async_starts.table_rows(["v5e"])} == {entry}
