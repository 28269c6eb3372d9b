"""The pytest fixture `check_overlap`, which compares a compiled program with the baseline of the
test.

pytest finds this plugin where flaxasync is installed. It imports nothing else of flaxasync until
the fixture is used.
"""

import urllib.parse
from collections.abc import Callable, Mapping
from typing import Any

import pytest

# Characters beside letters, digits and "_.-~" that names of files keep; others become %xx.
KEPT = "[]=,+@ "


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("flaxasync").addoption(
        "--update-overlap",
        action="store_true",
        help="write the baselines of check_overlap instead of comparing",
    )


@pytest.fixture
def check_overlap(request: pytest.FixtureRequest) -> Callable:
    """Compares a compiled program with the baseline of this test, and fails the test if something
    is worse.

    The baseline is `overlap/FILE/TEST.json` beside the file of the test, or
    `overlap/FILE/CLASS-TEST.json` for a test of a class. `pytest --update-overlap` writes it.
    Differences for the better are printed: `pytest -rP` shows them.

        def test_step(check_overlap):
            check_overlap(fa.check.compile_for("v5e:2x4", step, *arguments))

    The function that it returns takes a compiled program, or its text; a name of this program, for
    a test that checks several, which is added to the name of the file; `chip` and `axes` of
    `summarize`; and the tolerances of `compare`.
    """
    test = request.node.nodeid.partition("::")[2].replace("::", "-")
    folder = request.node.path.parent / "overlap" / request.node.path.stem
    used = set()  # files of programs that this test checked

    def check(
        compiled: Any,
        name: str = "",
        *,
        chip: str | None = None,
        axes: Mapping[str, int] | None = None,
        **tolerances: float,
    ) -> None:
        from flaxasync.check.gate.comparison import compare
        from flaxasync.check.gate.snapshot import read_baseline, summarize, write_baseline

        file = folder / f"{urllib.parse.quote(f'{test}-{name}' if name else test, KEPT)}.json"
        if file in used:
            pytest.fail(
                f"{file} is the baseline of another program already: give each program a name of "
                "its own, as in check_overlap(compiled, 'step')",
                pytrace=False,
            )
        used.add(file)
        program = summarize(compiled, chip=chip, axes=axes)
        if request.config.getoption("--update-overlap"):
            write_baseline(program, file)
            return
        try:
            comparison = compare(read_baseline(file), program, **tolerances)
        except FileNotFoundError as error:
            pytest.fail(f"{error}: pytest --update-overlap makes it", pytrace=False)
        except ValueError as error:
            pytest.fail(
                f"{file}: {error}".replace("--update", "pytest --update-overlap"), pytrace=False
            )
        if not comparison.ok:
            pytest.fail(
                f"{comparison}\nto accept the differences: pytest --update-overlap", pytrace=False
            )
        if comparison.changes:
            print(comparison)

    return check
