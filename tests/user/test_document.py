"""A type checker finds wrong arguments in a program of a user."""

import pathlib
import shutil
import subprocess
import sys

import pytest

import flaxasync

PROGRAM = """\
import flaxasync as fa
from flax import nnx

right = fa.nn.RowParallelLinear(8, 8, layout="sequence", rngs=nnx.Rngs(0))
fa.nn.RowParallelLinear(8, 8, layout="diagonal", rngs=nnx.Rngs(0))
fa.nn.ColumnParallelLinear(8, 8, axis=3, rngs=nnx.Rngs(0))
fa.nn.parallelize(right, {"up": "colum"})
"""


@pytest.mark.slow
def test_wrong_arguments_are_found(tmp_path):
    """What the wheel holds is the folder of the package, py.typed included."""
    package = pathlib.Path(flaxasync.__file__).parent
    assert (package / "py.typed").exists()
    shutil.copytree(
        package, tmp_path / "site" / "flaxasync", ignore=shutil.ignore_patterns("__pycache__")
    )
    (tmp_path / "program.py").write_text(PROGRAM)
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--config-file=",
        "--cache-dir",
        str(tmp_path / "cache"),
        "program.py",
    ]
    environment = {"MYPYPATH": str(tmp_path / "site"), "PATH": "", "HOME": str(tmp_path)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    found = [
        line
        for line in done.stdout.splitlines()
        if line.startswith("program.py") and "error" in line
    ]
    assert [int(line.split(":")[1]) for line in found] == [5, 6, 7], done.stdout + done.stderr
    assert "expected \"Literal['sequence', 'replicated']\"" in found[0]
