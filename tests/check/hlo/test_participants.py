"""The groups of a collective in each notation, and the names of the mesh axes along which they
differ.
"""

import math
import re

import jaxlib._hlo as hlo
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flaxasync.check import CHIPS, HloError, Instruction, Shape, parse, timeline
from flaxasync.check.estimate.costs import collective_seconds
from flaxasync.check.hlo.participants import AxisNames, groups_in, permute_pairs, replica_groups
from tests.check.hlo_texts import ADD, module


def collective(attribute, devices=8):
    """Returns the text of a module whose root is a collective with an attribute."""
    more = "channel_id=1, use_global_device_ids=true, to_apply=%add"
    return module(
        f"ROOT %c = f32[64] all-reduce(%operand0), {attribute}, {more}",
        wrapped=ADD,
        partitions=devices,
    )


def groups(text):
    return replica_groups(parse(collective(f"replica_groups={text}")).entry.root, 8)


def in_xla(text):
    """Returns the groups as XLA's own parser reads them, from its text for fingerprints, which
    lists all devices.
    """
    read = hlo.hlo_module_from_text(collective(f"replica_groups={text}"))
    printed = read.to_string(hlo.HloPrintOptions.fingerprint())
    lists = re.search(r"all-reduce.*replica_groups=\{(.*?)\}, use", printed)[1]
    return tuple(tuple(map(int, group.split(","))) for group in re.findall(r"\{([\d,]+)\}", lists))


@st.composite
def meshes(draw):
    """Draws groups of a mesh of at most 64 devices, in any order, along axes and sub-axes."""
    some = st.lists(st.sampled_from([1, 2, 3, 4, 6, 8]), min_size=1, max_size=3)
    sizes = draw(some.filter(lambda s: math.prod(s) <= 64))
    names = draw(st.permutations(["x", "y", "an axis"]))[: len(sizes)]
    ids = draw(st.permutations(range(math.prod(sizes))))
    devices = (
        f", device_ids=({','.join(map(str, ids))})"
        if draw(st.booleans()) and sorted(ids) != list(ids)
        else ""
    )
    if not devices and draw(st.booleans()):
        dims, order = draw(st.permutations(sizes)), draw(st.permutations(range(len(sizes))))
        transpose = f"T({','.join(map(str, order))})" if len(sizes) > 1 else ""
        devices = f", device_ids=([{','.join(map(str, dims))}]{transpose})"
    chosen = []
    for name, size in draw(st.permutations(list(zip(names, sizes, strict=True))))[
        : draw(st.integers(0, len(sizes)))
    ]:
        parts = [(a, b) for a in range(1, size) for b in range(2, size) if size % (a * b) == 0]
        one = draw(st.sampled_from([None, *parts]))
        chosen.append(f"'{name}'" if one is None else f"'{name}':({one[0]}){one[1]}")
        beyond = (
            []
            if one is None
            else [(a, b) for a, b in parts if a > one[0] * one[1] and a % (one[0] * one[1]) == 0]
        )
        chosen += [f"'{name}':({a}){b}" for a, b in beyond[:1]]
    axes = ",".join(f"'{name}'={size}" for name, size in zip(names, sizes, strict=True))
    return f"mesh[{axes}]{devices} {{{','.join(chosen)}}}"


@pytest.mark.parametrize(("text", "expected"), [
    ("{{0,1},{2,3}}", ((0, 1), (2, 3))),
    ("{{0,1},{2}}", ((0, 1), (2,))),
    ("[2,4]<=[8]", ((0, 1, 2, 3), (4, 5, 6, 7))),
    ("[4,2]<=[2,4]T(1,0)", ((0, 4), (1, 5), (2, 6), (3, 7))),
    ("mesh['x'=2,'y'=4] {'y':(1)2}", ((0, 2), (1, 3), (4, 6), (5, 7))),
    ("{}", (tuple(range(8)),)),
])  # fmt: skip
def test_groups(text, expected):
    assert groups(text) == expected
    assert in_xla(text) in (expected, ())


@given(meshes())
def test_groups_of_a_mesh_are_those_of_xla(text):
    assert groups(text) == in_xla(text)


@pytest.mark.parametrize(
    ("header", "attributes", "expected"),
    [
        ("replica_count=4", "replica_groups={}", 4),
        ("replica_count=4", "replica_groups={}, channel_id=1", 4),
        ("replica_count=4", "dimensions={0}", 4),
        ("num_partitions=2", "replica_groups={}", 2),
        ("replica_count=4, num_partitions=2", "replica_groups={}", 4),
        (
            "replica_count=4, num_partitions=2",
            "replica_groups={}, channel_id=1, use_global_device_ids=true",
            8,
        ),
        ("replica_count=4", "replica_groups={{0,1},{2,3}}", 2),
    ],
)
def test_a_collective_that_names_no_groups_is_one_of_all_devices(header, attributes, expected):
    """They may be replicas or partitions of the program. A collective of one device would take no
    time.
    """
    text = module(
        f"ROOT %c = f32[4096,4096] all-reduce(%operand0), {attributes}, to_apply=%add", wrapped=ADD
    )
    text = text.replace("num_partitions=1", header).replace("f32[64]", "f32[4096,4096]")
    program = parse(text)
    (group, *_) = groups_in(program.entry.root)
    assert len(group) == expected
    seconds = collective_seconds("all-reduce", 64 << 20, 64 << 20, expected, CHIPS["v5e"])
    assert timeline(program, "v5e").exposed == pytest.approx(seconds)


UNREADABLE = (
    "[3,4]<=[8]",
    "[8]<=[8]",
    "[2,4]<=[8]T(1)",
    "[0,0]<=[0]",
    "[2,70000]<=[140000]",
    "{0,1}",
    "{{},{}}",
    "{{0,1},{1,2}}",
    "{{0,1}",
    "mesh[] {}",
    "mesh['x'=2,'y'=4]",
    "mesh['x'=2,'y'=4] {'z'}",
    "mesh['x'=2,'y'=4] {'y','y'}",
    "mesh['x'=2,'y'=4] {'y':(1)2,'y'}",
    "mesh['x'=2,'y'=4] {'y':(3)2}",
    "mesh['x'=2,'x'=4] {'x'}",
    "mesh['x'=2,'y'=4], device_ids=(0,1) {'y'}",
    "mesh['x'=2,'y'=4], device_ids=(0,0,1,5,2,6,3,7) {'y'}",
    "@mesh<x=2,y=4> {y}",
    "maximal_mesh[device_id=3] {}",
    "a notation of the future",
)


@pytest.mark.parametrize("text", UNREADABLE)
def test_groups_that_cannot_be_read_are_refused(text):
    with pytest.raises(HloError, match=r"replica_groups of 'a' cannot be read: got"):
        replica_groups(
            Instruction("a", Shape("f32"), "all-reduce", attributes={"replica_groups": text}), 8
        )


def test_pairs_and_the_line_of_an_error():
    with pytest.raises(HloError, match=r"line 11, column 1: replica_groups of 'c'"):
        groups("[3,4]<=[8]")
    assert permute_pairs(parse(collective("source_target_pairs={{0,1},{1,0}}")).entry.root) == (
        (0, 1),
        (1, 0),
    )
    with pytest.raises(HloError, match="source_target_pairs of 'c' cannot be read"):
        parse(collective("source_target_pairs={{0,1},{1}}"))


AXES = {"replica": 2, "data": 2, "model": 4}
RINGS = ",".join(f"{{{4 * row + n},{4 * row + (n + 1) % 4}}}" for row in range(4) for n in range(4))


@pytest.mark.parametrize(("attribute", "axes", "name"), [
    ("replica_groups=[4,4]<=[16]", AXES, "model"),
    ("replica_groups=[8,2]<=[2,2,4]T(0,2,1)", AXES, "data"),
    ("replica_groups=[8,2]<=[2,8]T(1,0)", AXES, "replica"),
    ("replica_groups=[2,8]<=[16]", AXES, "data and model"),
    ("replica_groups=[4,4]<=[2,2,4]T(2,0,1)", AXES, "replica and data"),
    ("replica_groups={}", AXES, "replica and data and model"),
    ("replica_groups=mesh['axis_0'=4,'axis_1'=4] {'axis_1'}", AXES, "model"),
    ("replica_groups={{3,2,1,0},{4,5,6,7},{8,9,10,11},{12,13,14,15}}", AXES, "model"),
    ("replica_groups=[8,2]<=[16]", AXES, "groups of 2"),
    ("replica_groups=[16,1]<=[16]", AXES, "no axis"),
    (f"source_target_pairs={{{RINGS}}}", AXES, "model"),
    ("source_target_pairs={{0,8}}", AXES, "replica"),
    ("source_target_pairs={{0,5}}", AXES, "data and model"),
    ("source_target_pairs={{0,5}}", None, "pairs"),
    ("replica_groups=mesh['x'=2,'y'=8] {'y'}", None, "y"),
    ("replica_groups=mesh['axis_0'=2,'axis_1'=8] {'axis_1'}", None, "groups of 8"),
    ("dimensions={0}", None, ""),
])  # fmt: skip
def test_names_of_axes(attribute, axes, name):
    program = parse(collective(attribute, devices=16))
    assert AxisNames(program, axes).of(program.entry.root) == name
