"""The names of the mesh axes of collectives, whatever notation the compiler chose for their groups."""

import pytest

from flaxasync.check import parse
from flaxasync.check.hlo.participants import AxisNames

AXES = {"replica": 2, "data": 2, "model": 4}


def names_of(attribute, axes=AXES, devices=16):
    text = f"HloModule m, num_partitions={devices}\n\nENTRY e {{\n  %x = f32[8] parameter(0)\n  ROOT %c = f32[8] "
    module = parse(f"{text}all-to-all(%x), {attribute}\n}}\n")
    return AxisNames(module, axes).of(module.entry.root)


@pytest.mark.parametrize(
    ("groups", "name"),
    [
        ("[4,4]<=[16]", "model"),
        ("[8,2]<=[2,2,4]T(0,2,1)", "data"),
        ("[8,2]<=[2,8]T(1,0)", "replica"),
        ("[2,8]<=[16]", "data and model"),
        ("[4,4]<=[2,2,4]T(2,0,1)", "replica and data"),
        ("{}", "replica and data and model"),
        ("mesh['axis_0'=4,'axis_1'=4] {'axis_1'}", "model"),
        ("{{3,2,1,0},{4,5,6,7},{8,9,10,11},{12,13,14,15}}", "model"),
        ("[8,2]<=[16]", "groups of 2"),
        ("[16,1]<=[16]", "no axis"),
    ],
)
def test_groups(groups, name):
    assert names_of(f"replica_groups={groups}") == name


def test_pairs():
    ring = [(4 * row + n, 4 * row + (n + 1) % 4) for row in range(4) for n in range(4)]
    pairs = ",".join(f"{{{a},{b}}}" for a, b in ring)
    assert names_of(f"source_target_pairs={{{pairs}}}") == "model"
    assert names_of("source_target_pairs={{0,8}}") == "replica"
    assert names_of("source_target_pairs={{0,5}}") == "data and model"
    assert names_of("source_target_pairs={{0,5}}", axes=None) == "pairs"


def test_the_axes_that_the_text_names():
    assert names_of("replica_groups=mesh['x'=2,'y'=8] {'y'}", axes=None) == "y"
    assert names_of("replica_groups=mesh['axis_0'=2,'axis_1'=8] {'axis_1'}", axes=None) == "groups of 8"
    assert names_of("dimensions={0}") == ""
