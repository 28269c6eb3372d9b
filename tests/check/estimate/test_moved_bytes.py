"""The bytes that an instruction moves: of stacked layers, those of one layer."""

import pytest

from flaxasync.check import CHIPS, parse, timeline
from flaxasync.check.estimate.moved_bytes import moved_bytes
from flaxasync.check.hlo.shapes import HBM, VMEM
from tests.check.hlo_texts import module

LAYER = 64 * 128 * 2  # bytes of one of the layers [64, 128] in bfloat16
CYCLES = 'backend_config={"window_config":{"estimated_cycles":"1000000"}}'


def text(layers=4, space="", also=(), load=()):
    """A fusion that stores the result of one layer in an array of all layers, and one that reads a
    layer from it.

    `also` are more lines of the entry, and `load` of the second fusion.
    """
    stacked, one = f"bf16[{layers},64,128]{{2,1,0}}", f"bf16[64,128]{{1,0{space}}}"
    more = "".join(f"  {line}\n" for line in load)
    fusions = f"""%store (a: {stacked}, n: s32[], x: {one}) -> {stacked} {{
  %a = {stacked} parameter(0)
  %n = s32[] parameter(1)
  %x = {one} parameter(2)
  %y = bf16[1,64,128]{{2,1,0}} bitcast(%x)
  ROOT %u = {stacked} dynamic-update-slice(%a, %y, %n, %n, %n)
}}

%load (a: {stacked}, n: s32[]) -> {one} {{
  %a = {stacked} parameter(0)
  %n = s32[] parameter(1)
{more}  %s = bf16[1,64,128]{{2,1,0}} dynamic-slice(%a, %n, %n, %n), dynamic_slice_sizes={{1,64,128}}
  ROOT %b = {one} bitcast(%s)
}}
"""
    return module(
        f"%stored = {stacked} fusion(%operand0, %operand1, %operand2), kind=kLoop, calls=%store, "
        f"{CYCLES}",
        f"%loaded = {one} fusion(%stored, %operand1), kind=kLoop, calls=%load, {CYCLES}",
        *also,
        f"ROOT %t = ({stacked}, {one}) tuple(%stored, %loaded)",
        wrapped=fusions,
        inputs=(stacked, "s32[]", one),
    )


NEGATED = "%old = bf16[4,64,128]{2,1,0} negate(%NAME)"


@pytest.mark.parametrize(
    ("options", "name", "in_hbm", "in_vmem"),
    [
        ({}, "stored", 2, 0),
        ({}, "loaded", 2, 0),
        ({"space": ":S(1)"}, "stored", 1, 1),
        ({"space": ":S(1)"}, "loaded", 1, 1),
        # An array that is read later is not updated in place: XLA copies it, so that all of it is
        # read and written.
        ({"also": [NEGATED.replace("NAME", "operand0")]}, "stored", 2 * 4 + 1, 0),
        # An array that is also read whole counts as a whole.
        ({"load": [NEGATED.replace("NAME", "a")]}, "loaded", 4 + 1, 0),
    ],
)
def test_one_layer_counts_and_not_the_array_of_all_layers_each_in_its_own_memory(
    options, name, in_hbm, in_vmem
):
    program = parse(text(**options))
    found = moved_bytes(program.entry.by_name[name])
    for space, layers in ((HBM, in_hbm), (VMEM, in_vmem)):
        # an index has 4 bytes
        assert sum(size for at, size in found if at == space and size > 4) == layers * LAYER


def test_the_estimate_does_not_grow_with_the_number_of_layers():
    """The compiler's cycles do: they count the array of all layers."""
    few, many = (timeline(text(layers), chip="v5e").seconds for layers in (4, 64))
    v5e = CHIPS["v5e"]
    assert few == many
    assert few == pytest.approx(4 * LAYER / (v5e.hbm_bandwidth * v5e.hbm_efficiency), rel=1e-3)
