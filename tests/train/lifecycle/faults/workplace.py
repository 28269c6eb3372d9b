"""What the tests of the fault table share: the registry of its rows, and a run that is started again and again."""

import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.train.launcher import checkpoints_of, lines_of

STEPS = 40
QUIET = ("--eval.every", 0, "--eval.sample_tokens", 4)
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


class Workplace:
    """Starts the same run again and again in one workdir, with or without a fault in its process."""

    def __init__(self, launcher, preset: Path, environment: dict[str, str], work: Path):
        self.launcher, self.preset, self.environment, self.work = launcher, preset, environment, work
        self._runs = []

    def start(self, *options: object, code: str = ""):
        """Starts the run; `code` is Python that its process runs first."""
        path = self.preset.with_name("with_fault.py")
        path.write_text(self.preset.read_text() + SLOW_DATA + code)
        command = [str(path), "--steps", STEPS, "--workdir", self.work, "--checkpoint.every", 5, *QUIET, *options]
        run = self.launcher.start(list(map(str, command)), environment=self.environment)
        self._runs.append(run)
        return run

    def run(self, *options: object, code: str = "") -> tuple[int, str, str]:
        """Runs to the end; returns the exit code and what was printed."""
        process = self.start(*options, code=code)
        out, err = process.communicate(timeout=120)
        assert "Traceback" not in err, out + err
        return process.returncode, out, err

    def fails(self, exit_code: int, says: str, *options: object, code: str = "") -> str:
        """Runs to the end, checks that it fails with one paragraph that says something, and returns that."""
        ended, _, err = self.run(*options, code=code)
        assert ended == exit_code, err
        assert err.startswith("error: ")
        assert err.count("\n") == 1, err
        assert says in err
        return err

    def completes(self, *options: object) -> str:
        """Runs to the end, checks that it completes, and returns what it printed to standard error."""
        code, out, err = self.run(*options)
        assert code == 0, out + err
        return err

    def goes_on(self, expected: list[float], *options: object) -> None:
        """Runs to the end, and checks that it says nothing and that its losses are those of the undisturbed run."""
        assert self.completes(*options) == ""
        assert self.losses() == expected

    def kill(self) -> None:
        for run in self._runs:
            run.kill()
            run.communicate()

    def losses(self) -> list[float]:
        lines = lines_of(self.work)
        assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
        return [line["loss"] for line in lines]

    def steps_saved(self) -> list[int]:
        return sorted(int(name) for name in checkpoints_of(self.work) if name.isdigit())


def ends(process, code: int, err: str = "") -> str:
    """Waits for the end of a run, checks its exit code and what it said, and returns what else it printed."""
    out, said = process.communicate(timeout=60)
    assert (process.returncode, said) == (code, err)
    return out


def error_of(process, code: int) -> str:
    """Waits for the end of a run, checks its exit code, and returns what it said."""
    _, said = process.communicate(timeout=90)
    assert process.returncode == code, said
    assert "Traceback" not in said
    return said


def after_step(process, step: int) -> None:
    """Waits until a run has reported a step."""
    for line in process.stdout:
        found = re.match(r"step (\d+)/", line)
        if found and int(found[1]) >= step:
            return
    raise AssertionError(f"the run ended: {process.communicate()}")


def after_checkpoint(place: Workplace, process) -> None:
    """Waits until a run has reported step 7 and its checkpoint of step 5, written beside the steps, is complete."""
    after_step(process, 7)
    latest = time.monotonic() + 30
    while not place.steps_saved():
        assert time.monotonic() < latest, "no checkpoint was completed"
        time.sleep(0.01)
