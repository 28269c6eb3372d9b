"""The fixture `check_overlap`, in a run of pytest of its own, as a project that uses it would run it."""

import pathlib
import sys
import tomllib

import pytest

from flaxasync.check.gate import pytest_plugin
from tests.check.gate.step_text import STEP
from tests.check.hlo_texts import changed

ROOT = pathlib.Path(__file__).parents[3]
TEST = """
def test_step(check_overlap):
    check_overlap(open({text!r}).read(), axes={{"data": 2, "model": 4}}, exposed=0.05)
"""


@pytest.fixture
def run(capsys, monkeypatch):
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # looking for other plugins takes longer than the test

    def run(folder, *options):
        """Runs pytest in this process, because a process of its own takes seconds to start."""
        status = pytest.main([str(folder), "-q", "-W", "ignore", "-p", pytest_plugin.__name__,
                              "-p", "no:cacheprovider", "-p", "no:faulthandler", *options])  # fmt: skip
        sys.modules.pop("test_mine", None)
        return status, capsys.readouterr().out

    return run


def test_the_fixture(tmp_path, run):
    text, baseline = tmp_path / "step.txt", tmp_path / "overlap" / "test_mine" / "test_step.json"
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "test_mine.py").write_text(TEST.format(text=str(text)))

    def fails(program, message):
        text.write_text(program)
        status, output = run(tmp_path)
        assert status == 1
        assert message in output

    fails(STEP, f"there is no baseline {baseline}: pytest --update-overlap writes it")
    assert run(tmp_path, "--update-overlap")[0] == 0
    assert baseline.exists()
    assert run(tmp_path)[0] == 0
    longer = changed(STEP, ("constant(4)", "constant(8)"))
    fails(longer, "worse: runs: 1 collective-permute of 2 MiB over model in the forward loop: 8 runs in a step")
    fails(changed(STEP, ("jit_step", "jit_other")), "the baseline is of another program")


CLASSES = """
AXES = {{"data": 2, "model": 4}}
STEP = open({text!r}).read()

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
    text, file = tmp_path / "step.txt", tmp_path / "test_mine.py"
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    text.write_text(STEP)
    file.write_text(CLASSES.format(text=str(text)))
    assert run(tmp_path, "--update-overlap")[0] == 0
    names = {"TestFirst-test_step", "TestSecond-test_step", "test_names-one", "test_names-two"}
    assert {f.stem for f in (tmp_path / "overlap" / "test_mine").iterdir()} == names
    text.write_text(changed(STEP, ("copy(%sum)", "negate(%sum)")))
    status, output = run(tmp_path, "-rP")
    assert status == 0
    assert "better: removed copy in a loop: 1 fewer copy of 2 MiB in the forward loop" in output
    file.write_text(CLASSES.format(text=str(text)) + TWICE)
    status, output = run(tmp_path, "--update-overlap")
    assert status == 1
    assert "test_twice.json is the baseline of another program already, which test_mine.py::test_twice checks" in output
    assert "test_names_-a_b.json is the baseline of another program already" in output
    assert "2 failed, 3 passed" in output


def test_pytest_finds_the_plugin_where_flaxasync_is_installed():
    """The name is that of the module, so that `-p` with it and the installed entry point are one plugin."""
    entries = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["pytest11"]
    assert entries == {pytest_plugin.__name__: pytest_plugin.__name__}
