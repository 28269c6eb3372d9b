"""The fixture `check_overlap`, in a run of pytest of its own, as a project uses it and as
docs/gate.md shows it.
"""

import pathlib
import re
import sys
import tomllib

import pytest

from flaxasync.check.gate import pytest_plugin
from tests.check.hlo_texts import STEP, changed

ROOT = pathlib.Path(__file__).parents[3]
TEST = """
def test_step(check_overlap):
    check_overlap(open("step.txt").read(), axes={"data": 2, "model": 4}, exposed=0.05)
"""


@pytest.fixture
def run(tmp_path, capsys, monkeypatch):
    """Runs pytest in this process and in a folder, because a process of its own takes seconds to
    start.
    """
    # looking for other plugins takes longer than the test
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")

    def run(file, content, *options):
        (tmp_path / file).write_text(content)
        status = pytest.main(
            [
                file,
                "-q",
                "-W",
                "ignore",
                "-p",
                pytest_plugin.__name__,
                "-p",
                "no:cacheprovider",
                "-p",
                "no:faulthandler",
                # at the end it collects the garbage of this whole process five times
                "-p",
                "no:unraisableexception",
                *options,
            ]
        )
        sys.modules.pop(file.removesuffix(".py"), None)
        return status, capsys.readouterr().out

    return run


def test_the_fixture(tmp_path, run):
    baseline = tmp_path / "overlap" / "test_mine" / "test_step.json"

    def on(program, *options):
        (tmp_path / "step.txt").write_text(program)
        return run("test_mine.py", TEST, *options)

    def fails(program, message):
        status, output = on(program)
        assert status == 1
        assert message in output

    fails(STEP, f"No such file or directory: {str(baseline)!r}: pytest --update-overlap makes it")
    assert on(STEP, "--update-overlap")[0] == 0
    assert baseline.exists()
    assert on(STEP)[0] == 0
    longer = changed(STEP, ("constant(4)", "constant(8)"))
    fails(
        longer,
        "worse: more transfers: collective-permute over model (forward loop): 16 MiB of bf16 in a "
        "step",
    )
    fails(changed(STEP, ("jit_step", "jit_other")), "the baseline is of another program")


CLASSES = """
AXES = {"data": 2, "model": 4}
STEP = open("step.txt").read()

class TestFirst:
    def test_step(self, check_overlap):
        check_overlap(STEP, axes=AXES)

class TestSecond:
    def test_step(self, check_overlap):
        check_overlap(STEP.replace("jit_step", "jit_other"), axes=AXES)

def test_names(check_overlap):
    check_overlap(STEP, "one", axes=AXES)
    check_overlap(STEP.replace("jit_step", "jit_other"), "two", axes=AXES)
"""
TWICE = """
def test_twice(check_overlap):
    for _ in range(2):
        check_overlap(STEP, axes=AXES)

def test_names_(check_overlap):
    check_overlap(STEP, "a/b", axes=AXES)
    check_overlap(STEP, "a b", axes=AXES)
"""


def test_each_program_has_a_baseline_of_its_own(tmp_path, run):
    (tmp_path / "step.txt").write_text(STEP)
    assert run("test_mine.py", CLASSES, "--update-overlap")[0] == 0
    names = {"TestFirst-test_step", "TestSecond-test_step", "test_names-one", "test_names-two"}
    assert {f.stem for f in (tmp_path / "overlap" / "test_mine").iterdir()} == names
    (tmp_path / "step.txt").write_text(changed(STEP, ("copy(%sum)", "negate(%sum)")))
    status, output = run("test_mine.py", CLASSES, "-rP")
    assert status == 0
    assert "better: fewer loop-copies: a loop copies a buffer that it carries" in output
    status, output = run("test_mine.py", CLASSES + TWICE, "--update-overlap")
    assert status == 1
    assert "test_twice.json is the baseline of another program already" in output
    assert "1 failed, 4 passed" in output
    assert (tmp_path / "overlap" / "test_mine" / "test_names_-a%2Fb.json").exists()
    assert (tmp_path / "overlap" / "test_mine" / "test_names_-a b.json").exists()


PAGE = (ROOT / "docs" / "gate.md").read_text()
PYTHON = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


@pytest.mark.slow
def test_the_worked_example_of_the_page(tmp_path, run):
    """It passes, and fails on the regression with the message on the page."""
    test, regression = PYTHON[:2]
    output = re.search(r"```\n(jit_mlp on .*?)```", PAGE, re.DOTALL)[1]
    assert run("test_mlp.py", test, "--update-overlap")[0] == 0
    assert (tmp_path / "overlap" / "test_mlp" / "test_mlp.json").exists()
    assert run("test_mlp.py", test)[0] == 0
    before = re.search(r"def mlp\(.*?\n\n", test, re.DOTALL)[0]
    status, printed = run("test_mlp.py", test.replace(before, regression + "\n"))
    assert status == 1
    for line in output.splitlines():
        assert line in printed


def test_pytest_finds_the_plugin_where_flaxasync_is_installed():
    """The name is that of the module, so that `-p` with it and the installed entry point are one
    plugin.
    """
    entries = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"][
        "pytest11"
    ]
    assert entries == {pytest_plugin.__name__: pytest_plugin.__name__}
