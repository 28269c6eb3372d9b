"""Tests of the commands of train/ in an environment that has flaxasync as a wheel, as `pip install
.` makes it.
"""

import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def environment(tmp_path_factory) -> Path:
    """Python of a virtual environment with the wheel of this checkout, and the dependencies of the
    present one.
    """
    folder = tmp_path_factory.mktemp("installed")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    subprocess.run([*pip, "wheel", "--no-deps", "--wheel-dir", folder, CHECKOUT], check=True)
    (wheel,) = folder.glob("*.whl")
    venv.create(folder / "venv", with_pip=False)
    python = folder / "venv" / "bin" / "python"
    subprocess.run([*pip, "--python", python, "install", "--no-deps", wheel], check=True)
    show = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = subprocess.run(
        [python, "-c", show], check=True, capture_output=True, text=True
    ).stdout.strip()
    # Python reads no .pth files in a folder that is named so, and therefore finds no editable
    # install there.
    Path(site, "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python


@pytest.fixture
def call(environment, tmp_path, compile_little):
    """A function that runs a command of train/ in that environment, from another folder, and
    returns its output.
    """

    def call(script: str, *options: object) -> str:
        command = [environment, CHECKOUT / "train" / script, *options]
        inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        done = subprocess.run(
            list(map(str, command)),
            cwd=tmp_path,
            env=inherited | compile_little,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return call


@pytest.mark.slow
def test_every_command_runs_beside_a_wheel_and_from_another_folder(
    call, environment, preset, tmp_path
):
    where = [environment, "-c", "import flaxasync; print(flaxasync.__file__)"]
    found = subprocess.run(
        where, cwd=tmp_path, env={}, check=True, capture_output=True, text=True
    ).stdout
    assert environment.parents[1] in Path(found.strip()).parents, (
        "the wheel is not what is installed"
    )
    out = call(
        "run.py",
        preset(),
        "--steps",
        3,
        "--eval.every",
        0,
        "--workdir",
        "run",
    )
    assert "/checkpoints/3, run/metrics.jsonl" in out
    for script in ("sample.py", "export_checkpoint.py", "import_checkpoint.py"):
        assert f"usage: train/{script}" in call(script, "--help")
