"""The groups of a collective, in each notation."""

import math
import re

import jaxlib._hlo as hlo
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flaxasync.check.hlo.error import HloError
from flaxasync.check.hlo.module import Instruction
from flaxasync.check.hlo.participants import permute_pairs, replica_groups
from flaxasync.check.hlo.reader import parse
from flaxasync.check.hlo.shapes import Shape

PROGRAM = """HloModule m, num_partitions=8

add {
  x = f32[] parameter(0)
  y = f32[] parameter(1)
  ROOT sum = f32[] add(x, y)
}

ENTRY main {
  operand = f32[8]{0} parameter(0)
  ROOT a = f32[8]{0} all-reduce(operand), replica_groups=GROUPS, channel_id=1, use_global_device_ids=true, to_apply=add
}
"""


def groups(text, devices=8):
    return replica_groups(Instruction("a", Shape("f32"), "all-reduce", attributes={"replica_groups": text}), devices)


def parsed_groups(text):
    return replica_groups(parse(PROGRAM.replace("GROUPS", text)).entry.root, 8)


def in_xla(text):
    """Returns the groups as XLA's own parser reads them, from its text for fingerprints, which lists all devices."""
    module = hlo.hlo_module_from_text(PROGRAM.replace("GROUPS", text))
    line = next(
        line for line in module.to_string(hlo.HloPrintOptions.fingerprint()).split("\n") if "all-reduce" in line
    )
    lists = re.search(r"replica_groups=\{(.*?)\}, use", line)[1]
    return tuple(tuple(map(int, group.split(","))) for group in re.findall(r"\{([\d,]+)\}", lists))


@st.composite
def meshes(draw):
    """Draws groups of a mesh of at most 64 devices, in any order, along axes and sub-axes."""
    sizes = draw(
        st.lists(st.sampled_from([1, 2, 3, 4, 6, 8]), min_size=1, max_size=3).filter(lambda s: math.prod(s) <= 64)
    )
    names = draw(st.permutations(["x", "y", "an axis"]))[: len(sizes)]
    ids = draw(st.permutations(range(math.prod(sizes))))
    devices = f", device_ids=({','.join(map(str, ids))})" if draw(st.booleans()) and sorted(ids) != list(ids) else ""
    if not devices and draw(st.booleans()):
        dims, order = draw(st.permutations(sizes)), draw(st.permutations(range(len(sizes))))
        transpose = f"T({','.join(map(str, order))})" if len(sizes) > 1 else ""
        devices = f", device_ids=([{','.join(map(str, dims))}]{transpose})"
    chosen = []
    for name, size in draw(st.permutations(list(zip(names, sizes, strict=True))))[: draw(st.integers(0, len(sizes)))]:
        parts = [(a, b) for a in range(1, size) for b in range(2, size) if size % (a * b) == 0]
        one = draw(st.sampled_from([None, *parts]))
        chosen.append(f"'{name}'" if one is None else f"'{name}':({one[0]}){one[1]}")
        beyond = [] if one is None else [(a, b) for a, b in parts if a > one[0] * one[1] and a % (one[0] * one[1]) == 0]
        chosen += [f"'{name}':({a}){b}" for a, b in beyond[:1]]
    axes = ",".join(f"'{name}'={size}" for name, size in zip(names, sizes, strict=True))
    return f"mesh[{axes}]{devices} {{{','.join(chosen)}}}"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{{0,1},{2,3}}", ((0, 1), (2, 3))),
        ("{{0,1},{2}}", ((0, 1), (2,))),
        ("[2,4]<=[8]", ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("[4,2]<=[2,4]T(1,0)", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("mesh['x'=2,'y'=4] {'y'}", ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("mesh['x'=2,'y'=4] {'x'}", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("mesh['x'=2,'y'=4] {'y','x'}", ((0, 4, 1, 5, 2, 6, 3, 7),)),
        ("mesh['x'=8] {'x'}", (tuple(range(8)),)),
        ("mesh['x'=2,'y'=2] {}", ((0,), (1,), (2,), (3,))),
        ("mesh['x'=2,'y'=4] {'y':(2)2}", ((0, 1), (2, 3), (4, 5), (6, 7))),
        ("mesh['x'=2,'y'=4] {'y':(1)2}", ((0, 2), (1, 3), (4, 6), (5, 7))),
        ("mesh['x'=2,'y'=4], device_ids=(0,4,1,5,2,6,3,7) {'y'}", ((0, 4, 1, 5), (2, 6, 3, 7))),
        ("mesh['x'=2,'y'=4], device_ids=([4,2]T(1,0)) {'y'}", ((0, 2, 4, 6), (1, 3, 5, 7))),
        ("{}", (tuple(range(8)),)),
    ],
)
def test_groups(text, expected):
    assert groups(text) == expected
    assert parsed_groups(text) == expected
    assert in_xla(text) in (expected, ())


@pytest.mark.parametrize(
    "text",
    [
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
    ],
)
def test_groups_that_cannot_be_read_are_refused(text):
    with pytest.raises(HloError, match=r"replica_groups of 'a' cannot be read: got"):
        groups(text)


def test_an_instruction_whose_groups_cannot_be_read_is_refused_with_its_line():
    with pytest.raises(HloError, match=r"line 11, column 1: replica_groups of 'a'"):
        parse(PROGRAM.replace("GROUPS", "[3,4]<=[8]"))


@given(meshes())
def test_groups_of_a_mesh_are_those_of_xla(text):
    assert parsed_groups(text) == in_xla(text)


def test_pairs_that_cannot_be_read_are_refused():
    pairs = {"source_target_pairs": "{{0,1},{1}}"}
    with pytest.raises(HloError, match="source_target_pairs of 'p' cannot be read"):
        permute_pairs(Instruction("p", Shape("f32"), "collective-permute", attributes=pairs))


def test_pairs():
    pairs = {"source_target_pairs": "{{0,1},{1,0}}"}
    assert permute_pairs(Instruction("p", Shape("f32"), "collective-permute", attributes=pairs)) == ((0, 1), (1, 0))
