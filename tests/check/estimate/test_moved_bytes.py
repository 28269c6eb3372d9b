"""The bytes that an instruction moves: of stacked layers, those of one layer."""

import pytest

from flaxasync.check import CHIPS, parse, timeline
from flaxasync.check.estimate.moved_bytes import moved_bytes
from flaxasync.check.hlo.shapes import HBM, VMEM

LAYER = 64 * 128 * 2  # bytes of one of the layers [64, 128] in bfloat16
CYCLES = 'backend_config={"window_config":{"estimated_cycles":"1000000"}}'


def text(layers=4, space="", after=""):
    """A fusion that stores the result of one layer in an array of all layers, and one that reads a layer from it."""
    stacked, one = f"bf16[{layers},64,128]{{2,1,0}}", f"bf16[64,128]{{1,0{space}}}"
    return f"""HloModule m, is_scheduled=true

%store (a: {stacked}, n: s32[], x: {one}) -> {stacked} {{
  %a = {stacked} parameter(0)
  %n = s32[] parameter(1)
  %x = {one} parameter(2)
  %zero = s32[] constant(0)
  %y = bf16[1,64,128]{{2,1,0}} bitcast(%x)
  ROOT %u = {stacked} dynamic-update-slice(%a, %y, %n, %zero, %zero)
}}

%load (a: {stacked}, n: s32[]) -> {one} {{
  %a = {stacked} parameter(0)
  %n = s32[] parameter(1)
  %zero = s32[] constant(0)
  %s = bf16[1,64,128]{{2,1,0}} dynamic-slice(%a, %n, %zero, %zero), dynamic_slice_sizes={{1,64,128}}
  ROOT %b = {one} bitcast(%s)
}}

ENTRY %e {{
  %all = {stacked} parameter(0)
  %n = s32[] parameter(1)
  %x = {one} parameter(2)
  %stored = {stacked} fusion(%all, %n, %x), kind=kLoop, calls=%store, {CYCLES}
  %loaded = {one} fusion(%stored, %n), kind=kLoop, calls=%load, {CYCLES}
  {after}
  ROOT %t = ({stacked}, {one}) tuple(%stored, %loaded)
}}
"""


def moved(program, name):
    """Returns the bytes in HBM and in vector memory, without the index, which is a scalar of 4 bytes."""
    module = parse(program)
    found = moved_bytes(module, module.entry, module.entry.by_name[name])
    return tuple(sum(size for space, size in found if space == wanted and size > 4) for wanted in (HBM, VMEM))


def test_one_layer_counts_and_not_the_array_of_all_layers_each_in_its_own_memory():
    for name in ("stored", "loaded"):
        assert moved(text(), name) == (2 * LAYER, 0)
        assert moved(text(space=":S(1)"), name) == (LAYER, LAYER)


def test_an_array_that_is_read_later_is_not_updated_in_place():
    """XLA then copies the old array, so that all of it is read and written."""
    later = text(after="%old = bf16[4,64,128]{2,1,0} negate(%all)")
    assert moved(later, "stored") == (2 * 4 * LAYER + LAYER, 0)


def test_an_array_that_is_also_read_whole_counts_as_a_whole():
    whole = text().replace(
        "ROOT %b = bf16[64,128]{1,0} bitcast(%s)",
        "%r = bf16[4,64,128]{2,1,0} negate(%a)\n  ROOT %b = bf16[64,128]{1,0} bitcast(%s)",
    )
    assert moved(whole, "loaded") == (4 * LAYER + LAYER, 0)


def test_the_estimate_does_not_grow_with_the_number_of_layers():
    """The compiler's cycles do: they count the array of all layers."""
    few, many = (timeline(text(layers), chip="v5e").seconds for layers in (4, 64))
    v5e = CHIPS["v5e"]
    assert few == many
    assert few == pytest.approx(4 * LAYER / (v5e.hbm_bandwidth * v5e.hbm_efficiency), rel=1e-3)
