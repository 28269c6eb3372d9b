"""Which products each device computes, on plain ints: together they cover the mask once, and zigzag
balances them.
"""

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

import flaxasync as fa
from flaxasync.kernels.attention_block import Mask
from flaxasync.ops.attention.layouts import Sequence, positions, sequence_order
from flaxasync.ring import gathered_owner, shifts, split_rows


def rows_of(sequence, device):
    """Returns the positions that a device holds."""
    order = sequence_order(sequence.layout, sequence.rows * sequence.size, sequence.size)
    return order[device * sequence.rows : (device + 1) * sequence.rows]


def products_of(sequence, device, directions):
    """Yields (hop, product, positions of the keys that are on the device) in the order of the
    forward pass.
    """
    chunk = sequence.rows // sequence.chunks
    block_shifts = (1,) if sequence.one_way or sequence.size == 1 else shifts(directions, chunk)
    for hop in range(sequence.hops + 1):
        for shift, (start, count) in zip(
            block_shifts, split_rows(chunk, len(block_shifts)), strict=True
        ):
            owner = int(gathered_owner(device, hop, size=sequence.size, shift=shift))
            k_rows = (
                rows_of(sequence, owner)
                .reshape(sequence.chunks, -1)[:, start : start + count]
                .reshape(-1)
            )
            for product in sequence.products(
                device, owner, own=hop == 0, offset=start, count=count
            ):
                if product.needed is None or product.needed:
                    yield hop, product, k_rows


def pairs_of(sequence, device, directions):
    """Counts how often a device multiplies each pair of positions that the mask allows."""
    total = sequence.rows * sequence.size
    pairs, mine = np.zeros((total, total), int), rows_of(sequence, device)
    for _, product, k_positions in products_of(sequence, device, directions):
        q = mine[product.q_block * product.q_rows :][: product.q_rows]
        k = k_positions[product.k_block * product.k_rows :][: product.k_rows]
        if sequence.mask.by_position:
            assert (q == product.q_start + np.arange(product.q_rows)).all()
            assert (k == product.k_start + np.arange(product.k_rows)).all()
        allowed = sequence.mask.allows(q[:, None], k[None]) if product.masked else True
        pairs[np.ix_(q, k)] += np.broadcast_to(allowed, (len(q), len(k)))
    return pairs


@given(
    layout=st.sampled_from(["contiguous", "zigzag"]),
    causal=st.booleans(),
    window=st.one_of(st.none(), st.integers(1, 40)),
    half=st.integers(1, 4),
    size=st.integers(1, 6),
    directions=st.sampled_from([1, 2]),
)
def test_the_products_cover_the_mask_once(layout, causal, window, half, size, directions):
    sequence = Sequence(layout, Mask(causal, window), 2 * half, size)
    position = np.arange(sequence.rows * size)
    wanted = np.broadcast_to(
        sequence.mask.allows(position[:, None], position[None]), (len(position),) * 2
    )
    got = sum(pairs_of(sequence, device, directions) for device in range(size))
    np.testing.assert_array_equal(got, wanted)


def test_a_product_left_out_is_seen():
    """Negative test: with one hop fewer the mask is not covered."""
    sequence = Sequence("zigzag", Mask(True, None), 4, 4)
    missing = sum(p.q_rows * p.k_rows for hop, p, _ in products_of(sequence, 0, 1) if hop == 3)
    covered = sum(p.q_rows * p.k_rows for hop, p, _ in products_of(sequence, 0, 1) if hop < 3)
    assert missing > 0
    # the halves of two diagonal products are masked
    assert covered < pairs_of(sequence, 0, 1).sum() + 2 * 4


@pytest.mark.parametrize("directions", [1, 2])
@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_zigzag_gives_every_device_the_same_work_in_every_hop(size, directions):
    def work(layout):
        sequence = Sequence(layout, Mask(True, None), 8, size)
        table = np.zeros((size, size), int)  # scores by device and hop
        for device in range(size):
            for hop, product, _ in products_of(sequence, device, directions):
                table[device, hop] += product.q_rows * product.k_rows
        return table

    assert (work("zigzag") == work("zigzag")[:1]).all()
    contiguous = work("contiguous").sum(axis=1)  # the last device has R blocks, the first has one
    assert directions == 2 or contiguous.tolist() == [64 * (device + 1) for device in range(size)]
    assert contiguous[-1] == size * contiguous[0]
    assert work("zigzag").sum(axis=1).max() <= 0.5 * contiguous[-1] + 64


@pytest.mark.parametrize(("window", "hops"), [(1, 0), (2, 1), (5, 1), (6, 2), (100, 7), (None, 7)])
def test_a_window_ends_the_ring_early(window, hops):
    assert Sequence("contiguous", Mask(True, window), 4, 8).hops == hops
    assert Sequence("zigzag", Mask(True, window), 4, 8).hops == 7


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_positions_on_devices_are_the_order(layout):
    mesh = jax.make_mesh((4,), ("x",), devices=jax.devices()[:4])
    with jax.set_mesh(mesh):
        got = jax.jit(
            jax.shard_map(lambda: positions(layout, 6, "x"), in_specs=(), out_specs=P("x"))
        )()
    np.testing.assert_array_equal(got, sequence_order(layout, 24, 4))


def test_rows_that_cannot_be_shared_out():
    with pytest.raises(
        ValueError,
        match="two equal chunks of the sequence: got 20 rows, needed a multiple of 8; pad",
    ):
        fa.sequence_order("zigzag", 20, 4)
    with pytest.raises(
        ValueError, match="an equal share of the sequence: got 5 rows, needed a multiple of 4"
    ):
        fa.sequence_order("contiguous", 5, 4)
    with pytest.raises(
        ValueError, match="layout='striped': it must be one of 'contiguous', 'zigzag'"
    ):
        fa.sequence_order("striped", 8, 4)
