"""Runs in processes of their own, with or without a fault, and the registry of the rows of the
fault table.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.train.runs import SCRIPT, checkpoints_of, lines_of, without_progress

STEPS = 40
QUIET = ("--eval.every", 0)
# The preset delays every batch, so that a fault hits a run that is under way.
SLOW_DATA = """
import itertools as _itertools
import time as _time
from train.data import batches as _data
_count = _itertools.count()
_next = _data.TrainingBatches.__next__
def _slowly(self):
    _time.sleep(_delay(next(_count)))
    return _next(self)
def _delay(batch):
    return 0.03
_data.TrainingBatches.__next__ = _slowly
"""
ROWS: dict[str, Callable] = {}


def fault(*names: str) -> Callable:
    """Registers a test as the rows of the fault table that have these names."""

    def register(test: Callable) -> Callable:
        assert not ROWS.keys() & set(names)
        ROWS.update(dict.fromkeys(names, test))
        return pytest.mark.slow(test)

    return register


@pytest.fixture
def start(preset, compile_little) -> Iterator[Callable[..., subprocess.Popen]]:
    """A function that starts train/run.py in a process, on the minuscule run unless it gets another
    preset.
    """
    runs = []
    # XLA says that a collective waits where the machine is busy
    quiet = {"TF_CPP_MIN_LOG_LEVEL": "3"}

    def start(*options: object, on: Path | None = None, **environment: str) -> subprocess.Popen:
        command = list(map(str, [sys.executable, SCRIPT, on or preset(), *options]))
        pipes = dict.fromkeys(("stdout", "stderr"), subprocess.PIPE)
        runs.append(
            subprocess.Popen(
                command, env=os.environ | compile_little | quiet | environment, text=True, **pipes
            )
        )
        return runs[-1]

    yield start
    for run in runs:
        run.kill()
        run.communicate()


class Workplace:
    """Starts the same run again and again in one workdir, with or without a fault in its
    process.
    """

    def __init__(self, start: Callable[..., subprocess.Popen], preset: Path, work: Path):
        self._start, self.preset, self.work = start, preset, work

    def start(self, *options: object, code: str = "", **environment: str) -> subprocess.Popen:
        """Starts the run; `code` is Python that its process runs first."""
        path = self.preset.with_name("with_fault.py")
        path.write_text(self.preset.read_text() + SLOW_DATA + code)
        options = (
            "--steps",
            STEPS,
            "--workdir",
            self.work,
            "--checkpoint.every",
            5,
            *QUIET,
            *options,
        )
        return self._start(*options, on=path, **environment)

    def run(self, *options: object, code: str = "") -> tuple[int, str, str]:
        """Runs to the end; returns the exit code and what was printed."""
        process = self.start(*options, code=code)
        out, err = process.communicate(timeout=120)
        assert "Traceback" not in err, out + err
        return process.returncode, out, without_progress(err)

    def fails(self, exit_code: int, says: str, *options: object, code: str = "") -> str:
        """Runs to the end, checks that it fails with one paragraph that says something, and returns
        that.
        """
        ended, _, err = self.run(*options, code=code)
        assert ended == exit_code, err
        assert err.startswith("error: ")
        assert err.count("\n") == 1, err
        assert says in err
        return err

    def completes(self, *options: object, code: str = "") -> str:
        """Runs to the end, checks that it completes, and returns what it printed to standard
        error.
        """
        exit_code, out, err = self.run(*options, code=code)
        assert exit_code == 0, out + err
        return err

    def goes_on(self, expected: list[float], *options: object, code: str = "") -> None:
        """Runs to the end, and checks that it says nothing and that its losses are those of the
        undisturbed run.
        """
        assert self.completes(*options, code=code) == ""
        assert self.losses() == expected

    def losses(self) -> list[float]:
        lines = lines_of(self.work)
        assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
        return [line["loss"] for line in lines]

    def steps_saved(self) -> list[int]:
        return sorted(int(name) for name in checkpoints_of(self.work) if name.isdigit())


def ends(process: subprocess.Popen, code: int, err: str = "") -> str:
    """Waits for the end of a run, checks its exit code and what it said, and returns what it has
    printed since.
    """
    out, said = process.communicate(timeout=60)
    assert (process.returncode, without_progress(said)) == (code, err)
    return out


def error_of(process: subprocess.Popen, code: int) -> str:
    """Waits for the end of a run, checks its exit code, and returns what it said."""
    _, said = process.communicate(timeout=90)
    assert process.returncode == code, said
    assert "Traceback" not in said
    return without_progress(said)


def after_step(process: subprocess.Popen, step: int) -> None:
    """Waits until a run has reported a step."""
    for line in process.stdout:
        found = re.match(r"step (\d+)/", line)
        if found and int(found[1]) >= step:
            return
    raise AssertionError(f"the run ended: {process.communicate()}")


def after_checkpoint(place: Workplace, process: subprocess.Popen) -> None:
    """Waits until a run has reported step 7 and its checkpoint of step 5, written beside the steps,
    is complete.
    """
    after_step(process, 7)
    latest = time.monotonic() + 30
    while not place.steps_saved():
        assert time.monotonic() < latest, "no checkpoint was completed"
        time.sleep(0.01)


@pytest.fixture
def place(start, preset, tmp_path) -> Workplace:
    return Workplace(start, preset(), tmp_path / "run")


@pytest.fixture(scope="session")
def undisturbed() -> dict[str, list[float]]:
    return {}


@pytest.fixture
def expected(undisturbed, start, preset, tmp_path) -> list[float]:
    """The losses of the run that nothing disturbs."""
    if not undisturbed:
        place = Workplace(start, preset(), tmp_path / "undisturbed")
        assert place.completes() == ""
        undisturbed["losses"] = place.losses()
    return undisturbed["losses"]


@pytest.fixture(scope="session")
def kept(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("stopped") / "run"


@pytest.fixture
def stopped(place, kept) -> Workplace:
    """A workplace whose run was stopped after some checkpoints: a copy of one run, which is stopped
    once.
    """
    if kept.exists():
        shutil.copytree(kept, place.work)
        return place
    process = place.start()
    after_step(process, 16)
    process.send_signal(signal.SIGTERM)
    ends(process, 75)
    shutil.copytree(place.work, kept)
    return place
