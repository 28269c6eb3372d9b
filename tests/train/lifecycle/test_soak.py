"""Tests of benchmarks/soak.py: how it draws faults and measures memory. The soak itself takes many
minutes.
"""

from collections import Counter

import pytest

from benchmarks.soak import Soak, settled_memory


@pytest.mark.parametrize("can_fill", [False, True])
def test_every_kind_of_fault_is_drawn_equally_often(can_fill, tmp_path):
    soak = Soak(tmp_path, can_fill, seed=0, every=60)
    kinds = {"SIGKILL", "SIGTERM", "SIGHUP"} | ({"full disk"} if can_fill else set())
    assert Counter(soak.draw() for _ in range(3 * len(kinds))) == dict.fromkeys(kinds, 3)


def test_the_memory_of_the_warm_up_does_not_count():
    sizes = [*range(30), *[100] * 30, *[103] * 30]
    assert settled_memory([(second, size << 20) for second, size in enumerate(sizes)]) == (100, 103)


def test_a_start_that_is_too_short_is_refused():
    with pytest.raises(SystemExit, match="no start lasted long enough"):
        settled_memory([])
