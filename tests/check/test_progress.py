"""The line about work that takes long: it comes while the work is under way, and never for what ends sooner."""

import queue

from flaxasync.check.progress import progress

WAIT = 60.0  # seconds after which a line that has not come never will


def test_what_takes_long_is_named_with_its_time_until_it_ends():
    said = queue.Queue()
    with progress("compiling for v5e:2x4", silent=0.01, say=said.put):
        first = said.get(timeout=WAIT)
        second = said.get(timeout=WAIT)
    assert first == "flaxasync: compiling for v5e:2x4, 0 s so far"
    assert second.startswith("flaxasync: compiling for v5e:2x4, ")


def test_what_ends_sooner_says_nothing():
    said = []
    with progress("compiling", silent=WAIT, say=said.append):
        pass
    assert said == []


def test_only_the_innermost_block_speaks_and_says_how_far_it_has_come():
    outer, inner = queue.Queue(), queue.Queue()
    done = iter(range(10**9))
    with progress("playing", silent=0.01, say=outer.put):
        outer.get(timeout=WAIT)
        with progress(lambda: f"step {next(done)}", silent=0.01, say=inner.put):
            assert inner.get(timeout=WAIT) == "flaxasync: step 0, 0 s so far"
            while not outer.empty():
                outer.get()
            assert inner.get(timeout=WAIT).startswith("flaxasync: step 1, ")
            assert inner.get(timeout=WAIT).startswith("flaxasync: step 2, ")
            assert outer.empty()
        assert outer.get(timeout=WAIT).startswith("flaxasync: playing, "), "the outer one goes on"
