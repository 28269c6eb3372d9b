"""Addresses of buffers, the memory spaces that transfers are recognized by, and the words of
integer constants.
"""

import dataclasses

import pytest

from flaxasync.check.hlo.reader import parse
from flaxasync.check.hlo.shapes import read_shape
from flaxasync.check.player import OutOfBoundsError, PlayerError
from flaxasync.check.player.bundle_text import parse_operation
from flaxasync.check.player.memory import Addresses, integer_elements, padded_bytes, words
from flaxasync.check.player.transfers import MemoryClaims, read_transfer


def test_bytes_of_shapes():
    for shape, size in (
        ("bf16[8192,8192]{1,0:T(8,128)(2,1)}", 8192 * 8192 * 2),
        ("bf16[3,5]{1,0:T(8,128)(2,1)}", 8 * 128 * 2),
        ("f32[3,5]{0,1:T(8,128)}", 8 * 128 * 4),
        ("s32[8]{0:T(128)}", 512),
        ("(f32[2]{0}, pred[3]{0})", 11),
        ("u32[]{:S(2)}", 4),
    ):
        assert padded_bytes(read_shape(shape)) == size


def test_buffers_do_not_share_addresses():
    addresses = Addresses(512)
    first, second = addresses.new("hbm", 1000, "a"), addresses.new("hbm", 1, "b")
    assert first.address + first.size <= second.address
    assert addresses.at("hbm", first.address + 1) is first
    assert addresses.at("hbm", first.address + first.size) is None
    assert addresses.at_granule("hbm", second.address * 16 + 15) is second


# bytes of other values in vmem, of which no two share memory
@pytest.mark.parametrize("before", [0, 600 << 20])
def test_a_memory_space_is_recognized_by_its_addresses(before):
    addresses = Addresses(512)
    addresses.new("vmem", before, "other values")
    window, array = addresses.new("vmem", 4096, "window"), addresses.new("hbm", 4096, "array")
    operation = parse_operation(
        "%1 = dma.general %s1_s0, 4, %s2_s1, [#allocation3], [#allocation4], [#allocation5], 0"
    )
    # the text does not name the memory spaces
    values = (array.address * 16, 4, window.address * 16, 1, 0, 0, 0)
    transfer = read_transfer(operation, values, "here", "kernel")
    assert (transfer.source, transfer.target) == ("hbm", "vmem")
    assert [claim.space for claim in MemoryClaims(addresses).claim(transfer, 0, 0)] == [
        "hbm",
        "vmem",
    ]
    past = dataclasses.replace(transfer, target_address=transfer.target_address + 4096 // 32)
    with pytest.raises(OutOfBoundsError, match="writes outside every buffer"):
        MemoryClaims(addresses).claim(past, 0, 0)


@pytest.mark.parametrize(("space", "size"), [
    ("vmem", 8 << 30), ("sflag", 4 << 13), ("smem", 8 << 20), ("hbm", 1 << 37),
])  # fmt: skip
def test_a_space_ends_before_the_next_begins(space, size):
    with pytest.raises(PlayerError, match=f"buffers in {space} need addresses up to"):
        Addresses(512).new(space, size, "too large")


TEXT = """HloModule m, is_scheduled=true
ENTRY main {
  a = f32[8,128]{1,0:T(8,128)} parameter(0)
  four = s32[4]{0:T(128)} constant({4, 1, -3, 0})
  zero = s32[]{:T(128)} constant(0)
  same = s32[2,2]{1,0:T(2,128)} bitcast(four)
  zeros = s32[4]{0:T(128)} broadcast(zero), dimensions={}
  moved = s32[4]{0:T(128)} copy(zeros)
  long = s32[4]{0:T(128)} constant({...})
  ROOT n = f32[8,128]{1,0:T(8,128)} negate(a)
}
"""


def test_the_text_determines_constants_and_what_is_copied_from_them():
    elements = {
        "same": [4, 1, -3, 0],
        "moved": [0],
        "long": None,
        "a": None,
        "n": None,
        "absent": None,
    }
    instructions = parse(TEXT).entry.by_name
    assert {name: integer_elements(instructions, name) for name in elements} == elements


@pytest.mark.parametrize(
    ("text", "elements", "expected"),
    [
        ("s32[3]{0:T(128)}", [7, -1, 2], {0: 7, 1: 2**32 - 1, 2: 2}),
        ("s32[]{:T(128)}", [5], {0: 5}),
        ("s32[3]{0:T(128)}", [5], {0: 5, 1: 5, 2: 5}),  # repeated
        # two tiles
        ("s32[2,129]{1,0:T(2,128)}", [*[0] * 128, 1, 2, *[0] * 127, 3], {256: 1, 128: 2, 384: 3}),
        ("s32[2,3]{0,1:T(4,128)}", [1, 2, 3, 4, 0, 0], {0: 1, 1: 4, 128: 2, 256: 3}),  # turned
        ("s8[10]{0:T(512)(128)(4,1)}", [1, -1, *[0] * 8], {0: 1, 1: 255}),
        # four rows in a word
        ("s8[4,2]{1,0:T(4,128)(4,1)}", [*range(8)], {0: 0x06040200, 1: 0x07050301}),
        ("u16[2,1]{1,0:T(2,128)(2,1)}", [3, 4], {0: 0x00040003}),  # two rows in a word
        ("bf16[4]{0:T(512)(128)(2,1)}", [1, 2], None),  # no integers
        ("s32[4]", [1, 2], None),  # from here on, what lies in another way
        ("s8[4]{0:T(128)}", [1, 2], None),
        ("s64[4]{0:T(128)}", [1, 2], None),
    ],
)
def test_words_lie_tile_by_tile(text, elements, expected):
    found = words(read_shape(text), elements)
    assert (
        found and {n: word for n, word in enumerate(found) if word or n in expected}
    ) == expected
