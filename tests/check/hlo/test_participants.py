"""The groups of a collective, in each notation."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flaxasync.check.hlo.module import Instruction
from flaxasync.check.hlo.participants import permute_pairs, replica_groups
from flaxasync.check.hlo.shapes import Shape


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
        ("[3,4]<=[8]", (tuple(range(8)),)),  # groups that do not fit the devices are read as one group
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
