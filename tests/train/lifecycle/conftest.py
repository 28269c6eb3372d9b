"""Runs in processes of their own, with or without a fault, and the registry of the rows of the
fault table.
"""

import os
import re
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.train.lifecycle.warm_runs import Run
from tests.train.runs import checkpoints_of, lines_of, without_progress
from train.run import main

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


@pytest.fixture(scope="session")
def without_torch(tmp_path_factory) -> str:
    """A PYTHONPATH with which a process has no torch, as in an environment for training.

    tensorboardX imports torch where there is one, which is half of what starting a run takes, and
    train/run.py needs none of it. The process of the tests has what is installed.
    """
    folder = tmp_path_factory.mktemp("without_torch")
    (folder / "torch.py").write_text('raise ImportError("tests start runs without torch")\n')
    inherited = os.environ.get("PYTHONPATH")
    if not inherited:
        return str(folder)
    return os.pathsep.join((str(folder), inherited))


@pytest.fixture
def environment(compile_little, without_torch) -> dict[str, str]:
    """The environment of the runs that tests start."""
    # XLA says that a collective waits where the machine is busy
    quiet = {"TF_CPP_MIN_LOG_LEVEL": "3"}
    return os.environ | compile_little | quiet | {"PYTHONPATH": without_torch}


@pytest.fixture
def start(preset, environment) -> Iterator[Callable[..., Run]]:
    """A function that starts train/run.py in a process, on the minuscule run unless it gets another
    preset.
    """
    runs = []

    def start(*options: object, on: Path | None = None, **variables: str) -> Run:
        arguments = list(map(str, [on or preset(), *options]))
        runs.append(Run(arguments, environment, variables))
        return runs[-1]

    yield start
    for run in runs:
        run.kill()
        run.communicate()


class Workplace:
    """Starts the same run again and again in one workdir, with or without a fault in its
    process.

    A run with a fault has a process of its own. One without a fault runs in the process of the
    test, where importing all packages and tracing the steps took most of its time. That a new
    process continues a run is what the tests show that stop or kill it several times.
    """

    def __init__(
        self,
        start: Callable[..., Run],
        run_here: Callable[..., tuple[int, str, str]],
        preset: Path,
        work: Path,
    ):
        self._start, self._run_here, self.preset, self.work = start, run_here, preset, work

    def beside(self, name: str) -> "Workplace":
        """Returns a workplace for the same run in another workdir."""
        return Workplace(self._start, self._run_here, self.preset, self.work.with_name(name))

    def start(self, *options: object, code: str = "", **environment: str) -> Run:
        """Starts the run; `code` is Python that its process runs first."""
        path = self.preset.with_name("with_fault.py")
        path.write_text(self.preset.read_text() + SLOW_DATA + code)
        return self._start(*self.options, *options, on=path, **environment)

    @property
    def options(self) -> tuple[object, ...]:
        return ("--steps", STEPS, "--workdir", self.work, "--checkpoint.every", 5, *QUIET)

    def run(self, *options: object, code: str = "") -> tuple[int, str, str]:
        """Runs to the end; returns the exit code and what was printed."""
        if code:
            process = self.start(*options, code=code)
            out, err = process.communicate(timeout=120)
            ended = process.returncode
        else:
            ended, out, err = self._run_here(*self.options, *options)
        assert "Traceback" not in err, out + err
        return ended, out, without_progress(err)

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


def ends(process: Run, code: int, err: str = "") -> str:
    """Waits for the end of a run, checks its exit code and what it said, and returns what it has
    printed since.
    """
    out, said = process.communicate(timeout=60)
    assert (process.returncode, without_progress(said)) == (code, err)
    return out


def error_of(process: Run, code: int) -> str:
    """Waits for the end of a run, checks its exit code, and returns what it said."""
    _, said = process.communicate(timeout=90)
    assert process.returncode == code, said
    assert "Traceback" not in said
    return without_progress(said)


def after_step(process: Run, step: int) -> None:
    """Waits until a run has reported a step."""
    for line in process.stdout:
        found = re.match(r"step (\d+)/", line)
        if found and int(found[1]) >= step:
            return
    raise AssertionError(f"the run ended: {process.communicate()}")


def after_checkpoint(place: Workplace, process: Run) -> None:
    """Waits until a run has reported step 7 and its checkpoint of step 5, written beside the steps,
    is complete.
    """
    after_step(process, 7)
    latest = time.monotonic() + 30
    while not place.steps_saved():
        assert time.monotonic() < latest, "no checkpoint was completed"
        time.sleep(0.01)


@pytest.fixture
def place(start, run, preset, tmp_path) -> Workplace:
    return Workplace(start, run, preset(), tmp_path / "run")


@pytest.fixture
def refused(place, preset, refuses) -> Callable[..., str]:
    """A function that checks that the run is refused before it trains, and returns what it said.

    It calls the script in this process: importing all packages takes longer than a refusal.
    """

    def refused(says: str, *options: object) -> str:
        return refuses(main, says, preset("auto"), *place.options, *options)

    return refused


@pytest.fixture(scope="session")
def undisturbed() -> dict[str, list[float]]:
    return {}


@pytest.fixture
def expected(undisturbed, place) -> list[float]:
    """The losses of the run that nothing disturbs."""
    if not undisturbed:
        alone = place.beside("undisturbed")
        assert alone.completes() == ""
        undisturbed["losses"] = alone.losses()
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
