"""The worked example of docs/gate.md: its test passes, and fails on the regression with the message on the page."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

from flaxasync.check.gate import pytest_plugin

ROOT = pathlib.Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "gate.md").read_text()
PYTHON = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


@pytest.mark.slow
def test_the_worked_example(tmp_path):
    test, regression = PYTHON[:2]
    output = re.search(r"```\n(jit_mlp on .*?)```", PAGE, re.DOTALL)[1]
    file = tmp_path / "test_mlp.py"
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", pytest_plugin.__name__, "-p", "no:cacheprovider"]

    def run(text, *options):
        file.write_text(text)
        done = subprocess.run(
            [*command, *options], cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True,
            text=True, check=False,
        )  # fmt: skip
        return done.returncode, done.stdout

    assert run(test, "--update-overlap")[0] == 0
    assert (tmp_path / "overlap" / "test_mlp" / "test_mlp.json").exists()
    assert run(test)[0] == 0
    before = re.search(r"def mlp\(.*?\n\n", test, re.DOTALL)[0]
    status, printed = run(test.replace(before, regression + "\n"))
    assert status == 1
    for line in output.splitlines():
        assert line in printed


def test_the_example_of_capture_runs(capsys):
    exec(compile(PYTHON[2], "docs/gate.md", "exec"), {})
    assert "jit__lambda" in capsys.readouterr().out
