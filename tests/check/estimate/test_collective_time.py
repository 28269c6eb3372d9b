"""How long a collective takes on idle links."""

import pytest

from flaxasync.check import CHIPS
from flaxasync.check.estimate.collective_time import collective_seconds

V5E = CHIPS["v5e"]


def test_times():
    mib = 1 << 20
    assert collective_seconds("all-gather", mib, 2 * mib, 2, V5E) == pytest.approx(mib / 45e9 + 1e-6)
    assert collective_seconds("all-gather", mib, 8 * mib, 8, V5E) == pytest.approx(7 * mib / 90e9 + 4e-6)
    gather = collective_seconds("all-gather", mib, 8 * mib, 8, V5E)
    scatter = collective_seconds("reduce-scatter", 8 * mib, mib, 8, V5E)
    assert collective_seconds("all-reduce", 8 * mib, 8 * mib, 8, V5E) == pytest.approx(gather + scatter)
    assert collective_seconds("all-reduce", mib, mib, 1, V5E) == 0
    assert collective_seconds("collective-permute", mib, mib, 8, V5E) == pytest.approx(mib / 45e9 + 1e-6)
