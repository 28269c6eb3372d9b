"""Fixtures of the tests of the fault table."""

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.train.lifecycle.faults.workplace import Workplace, after_step, ends


@pytest.fixture
def place(launcher, preset, compile_little, tmp_path) -> Iterator[Workplace]:
    place = Workplace(launcher, preset(), dict(os.environ) | compile_little, tmp_path / "run")
    yield place
    place.kill()


@pytest.fixture(scope="session")
def undisturbed() -> dict[str, list[float]]:
    return {}


@pytest.fixture
def expected(undisturbed, place, tmp_path) -> list[float]:
    """The losses of the run that nothing disturbs."""
    if not undisturbed:
        elsewhere = Workplace(place.launcher, place.preset, place.environment, tmp_path / "undisturbed")
        assert elsewhere.completes() == ""
        undisturbed["losses"] = elsewhere.losses()
    return undisturbed["losses"]


@pytest.fixture(scope="session")
def kept(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("stopped") / "run"


@pytest.fixture
def stopped(place, kept) -> Workplace:
    """A workplace whose run was stopped after some checkpoints: a copy of one run, which is stopped once."""
    if kept.exists():
        shutil.copytree(kept, place.work)
        return place
    process = place.start()
    after_step(process, 16)
    process.send_signal(signal.SIGTERM)
    ends(process, 75)
    shutil.copytree(place.work, kept)
    return place
