"""Addresses of buffers, and the memory spaces that transfers are recognized by."""

import dataclasses

import pytest

from flaxasync.check.hlo.shape_reader import read_shape
from flaxasync.check.player.bundle_text import parse_operation
from flaxasync.check.player.errors import OutOfBoundsError, PlayerError
from flaxasync.check.player.memory import Addresses, padded_bytes
from flaxasync.check.player.transfers import MemoryClaims, read_transfer


@pytest.mark.parametrize(
    ("shape", "size"),
    [
        ("bf16[8192,8192]{1,0:T(8,128)(2,1)}", 8192 * 8192 * 2),
        ("bf16[3,5]{1,0:T(8,128)(2,1)}", 8 * 128 * 2),
        ("f32[3,5]{0,1:T(8,128)}", 8 * 128 * 4),
        ("s32[8]{0:T(128)}", 512),
        ("(f32[2]{0}, pred[3]{0})", 11),
        ("u32[]{:S(2)}", 4),
    ],
)
def test_bytes_of_shapes(shape, size):
    assert padded_bytes(read_shape(shape)) == size


def test_buffers_do_not_share_addresses():
    addresses = Addresses(512)
    first, second = addresses.new("hbm", 1000, "a"), addresses.new("hbm", 1, "b")
    assert first.address + first.size <= second.address
    assert addresses.at("hbm", first.address + 1) is first
    assert addresses.at("hbm", first.address + first.size) is None
    assert addresses.at_granule("hbm", second.address * 16 + 15) is second


GENERAL = parse_operation("%1 = dma.general %s1_s0, 4, %s2_s1, [#allocation3], [#allocation4], [#allocation5], 0")


def transfer_from(source, target):
    """Returns a transfer between two buffers, whose text does not name the memory spaces."""
    return read_transfer(GENERAL, (source.address * 16, 4, target.address * 16, 1, 0, 1, 0), "here", "kernel")


@pytest.mark.parametrize("before", [0, 600 << 20])  # bytes of other values in vmem, of which no two share memory
def test_a_memory_space_is_recognized_by_its_addresses(before):
    addresses = Addresses(512)
    addresses.new("vmem", before, "other values")
    in_vmem, in_hbm = addresses.new("vmem", 4096, "window"), addresses.new("hbm", 4096, "array")
    transfer = transfer_from(in_hbm, in_vmem)
    assert (transfer.source, transfer.target) == ("hbm", "vmem")
    claims = MemoryClaims(addresses).claim(dataclasses.replace(transfer, strided=False), 0, 0)
    assert [claim.space for claim in claims] == ["hbm", "vmem"]
    past = dataclasses.replace(transfer, strided=False, target_address=transfer.target_address + 4096 // 32)
    with pytest.raises(OutOfBoundsError, match="writes outside every buffer"):
        MemoryClaims(addresses).claim(past, 0, 0)


@pytest.mark.parametrize(
    ("space", "size"), [("vmem", 8 << 30), ("sflag", 4 << 13), ("smem", 8 << 20), ("hbm", 1 << 37)]
)
def test_a_space_ends_before_the_next_begins(space, size):
    with pytest.raises(PlayerError, match=f"buffers in {space} need addresses up to"):
        Addresses(512).new(space, size, "too large")
