"""Groups of a collective in each notation, and the time its bytes need."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flaxasync.check import CHIPS
from flaxasync.check.hlo.module import Instruction, Shape
from flaxasync.check.hlo.participants import collective_seconds, permute_pairs, replica_groups

V5E = CHIPS["v5e"]


def groups(text, devices=8):
    return replica_groups(Instruction("a", Shape("f32"), "all-reduce", attributes={"replica_groups": text}), devices)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{{0,1},{2,3}}", ((0, 1), (2, 3))),
        ("[2,4]<=[8]", ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("[4,2]<=[2,4]T(1,0)", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("mesh['x'=2,'y'=4] {'y'}", ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("mesh['x'=2,'y'=4] {'x'}", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("mesh['x'=8] {'x'}", (tuple(range(8)),)),
        ("{}", (tuple(range(8)),)),
        ("", (tuple(range(8)),)),
        ("[3,4]<=[8]", (tuple(range(8)),)),  # nonsense is one group
    ],
)
def test_groups(text, expected):
    assert groups(text) == expected


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4))
def test_groups_split_the_devices(a, b, c):
    for text in (f"[{a * b},{c}]<=[{a},{b},{c}]T(0,1,2)", f"[{a * c},{b}]<=[{a},{b},{c}]T(0,2,1)"):
        found = groups(text, a * b * c)
        assert sorted(d for group in found for d in group) == list(range(a * b * c))


def test_pairs():
    pairs = {"source_target_pairs": "{{0,1},{1,0}}"}
    assert permute_pairs(Instruction("p", Shape("f32"), "collective-permute", attributes=pairs)) == ((0, 1), (1, 0))


def test_times():
    mib = 1 << 20
    assert collective_seconds("all-gather", mib, 2 * mib, 2, V5E) == pytest.approx(mib / 45e9 + 1e-6)
    assert collective_seconds("all-gather", mib, 8 * mib, 8, V5E) == pytest.approx(7 * mib / 90e9 + 4e-6)
    gather = collective_seconds("all-gather", mib, 8 * mib, 8, V5E)
    scatter = collective_seconds("reduce-scatter", 8 * mib, mib, 8, V5E)
    assert collective_seconds("all-reduce", 8 * mib, 8 * mib, 8, V5E) == pytest.approx(gather + scatter)
    assert collective_seconds("all-reduce", mib, mib, 1, V5E) == 0
    assert collective_seconds("collective-permute", mib, mib, 8, V5E) == pytest.approx(mib / 45e9 + 1e-6)
