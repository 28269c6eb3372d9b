"""The line about work that takes long: it comes while the work is under way, and never for what
ends sooner.
"""

import queue
import threading

import pytest

from flaxasync.check import progress as module
from flaxasync.check.progress import progress

WAIT = 60.0  # seconds after which a line that has not come never will


@pytest.fixture
def said(monkeypatch):
    """The lines, which come every ten milliseconds."""
    lines = queue.Queue()
    monkeypatch.setattr(module, "SILENT_SECONDS", 0.01)
    monkeypatch.setattr(module, "say", lines.put)
    return lines


def test_what_takes_long_is_named_with_its_time_until_it_ends(said):
    with progress("compiling for v5e:2x4"):
        first = said.get(timeout=WAIT)
        second = said.get(timeout=WAIT)
    assert first == "flaxasync: compiling for v5e:2x4, 0 s so far"
    assert second.startswith("flaxasync: compiling for v5e:2x4, ")
    assert not [thread for thread in threading.enumerate() if thread.name == "flaxasync progress"]


def test_what_ends_sooner_says_nothing(capsys):
    with progress("compiling"):
        pass
    assert capsys.readouterr() == ("", "")


def test_an_inner_block_says_how_far_the_outer_one_has_come(said):
    steps = iter(range(10**9))
    with progress("playing"):
        assert said.get(timeout=WAIT).startswith("flaxasync: playing, ")
        with progress(lambda: f"step {next(steps)}"):
            while not said.get(timeout=WAIT).startswith("flaxasync: playing: step 1, "):
                pass
        with pytest.raises(ValueError, match="over"), progress("failing"):
            raise ValueError("over")
        while not said.get(timeout=WAIT).startswith("flaxasync: playing, "):
            pass


def test_threads_speak_for_themselves(said):
    def work(name):
        with progress(name):
            lines.wait(WAIT)

    lines = threading.Event()
    threads = [threading.Thread(target=work, args=(name,)) for name in ("one", "other")]
    for thread in threads:
        thread.start()
    heard = set()
    while heard != {"one", "other"}:
        heard.add(said.get(timeout=WAIT).removeprefix("flaxasync: ").partition(",")[0])
    lines.set()
    for thread in threads:
        thread.join()
