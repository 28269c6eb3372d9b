"""The order of tiles; ragged tiling: tiles cover everything, and dimensions of odd length have no
small tiles.
"""

import itertools

import hypothesis.strategies as st
import jax
import pytest
from hypothesis import given, settings

from flaxasync.kernels.engine.operands import LANES, largest_divisor
from flaxasync.kernels.engine.tiling import NEAR, IterationGrid, RowTiling, Tiling, cost

LENGTH = st.integers(1, 200).map(lambda units: units * LANES)


@given(st.lists(st.integers(1, 3), min_size=1, max_size=4))
@settings(max_examples=10)
def test_the_innermost_loop_advances_first(sizes):
    grid = IterationGrid(tuple(sizes))
    visited = [tuple(map(int, grid.coordinates(step))) for step in range(grid.steps)]
    assert visited == list(itertools.product(*map(range, sizes)))
    assert int(grid.coordinates(grid.steps)[0]) == sizes[0]  # beyond the last step


@given(st.lists(LENGTH, min_size=1, max_size=3), st.integers(1, 4096))
def test_tiles_cover_their_dimensions(lengths, most):
    tiling = Tiling.of(lengths, most)
    assert tiling.size <= max(LANES, most)
    assert len(tiling.sizes) == tiling.count
    assert sum(tiling.sizes) == sum(lengths)
    if min(most, max(lengths)) >= 2 * LANES:
        # which a prime number of units would have, were tiles to divide it
        assert tiling.size > LANES


@given(st.lists(LENGTH, min_size=1, max_size=3), st.integers(1024, 4096))
@settings(max_examples=10)
def test_every_tile_is_on_one_slice_and_has_one_size(lengths, most):
    tiling = Tiling.of(lengths, most)
    slices, sizes = [], []
    with jax.disable_jit():  # or else both sides of every condition would be traced
        for tile in range(tiling.count):
            tiling.on_slice(
                tile, lambda number, where: slices.append((number, int(where.start), where.size))
            )
            tiling.on_size(tile, sizes.append)
    assert sizes == list(tiling.sizes) == [size for _, _, size in slices]
    ends = dict.fromkeys(range(len(lengths)), 0)
    for number, first, size in slices:
        assert first == ends[number]
        ends[number] += size
    assert list(ends.values()) == lengths


@given(st.integers(1, 12), st.integers(1, 300), st.sampled_from((8, 16)), st.integers(512, 2048))
def test_tiles_of_rows_cover_their_batches(batches, units, unit, most):
    rows = RowTiling.of(batches, units * unit, most, unit)
    assert rows.size < max(most, units * unit) + 512, (
        "a tile hangs over the end by less than a sub-block"
    )
    assert len(rows.sizes) == rows.count
    assert sum(rows.sizes) == batches * units * unit == sum(rows.flattened().lengths)
    in_sub_blocks = rows.batches if rows.batches.size > 1 else rows.rows
    assert in_sub_blocks.size % in_sub_blocks.sub_block == 0
    assert rows.count <= max(2, 5 * batches * units * unit / most)


@given(st.integers(1, 300), st.integers(128, 2048))
def test_sub_blocks_cover_every_tile(units, most):
    tiling = Tiling.in_sub_blocks(units * 8, most, 512, 8)
    for tile, size in enumerate(tiling.sizes):
        assert 0 <= int(tiling.sub_blocks(tile)) * tiling.sub_block - size < tiling.sub_block


@given(st.integers(1, 300), st.integers(8, 2048))
def test_overhanging_tiles_cost_no_more_than_dividing_ones(units, most):
    tiling = Tiling.overhanging(units * 8, most, 8)
    even = Tiling((units * 8,), largest_divisor(units * 8, most, 8), 8)
    assert cost(tiling) <= NEAR * cost(even)


@pytest.mark.parametrize("size", [1024, 3584, 8192, 28672, 5 * 1024, 11 * 512])
def test_tiles_divide_where_that_costs_little(size):
    assert Tiling.of((size,), 1024).size == largest_divisor(size, 1024, LANES)
    assert RowTiling.of(1, size, 1024, 16).rows.size == largest_divisor(size, 1024, 16)


@pytest.mark.parametrize(("side", "most", "unit", "tile"), [
    (4096, 1024, 8, 1024), (2560, 1024, 8, 640), (1536, 1024, 128, 768),  # they divide
    (5504, 1024, 128, 512), (1072, 1024, 16, 544), (384, 1024, 256, 256), (40, 16, 8, 16),
])  # fmt: skip
def test_sides_of_tiles(side, most, unit, tile):
    assert Tiling.overhanging(side, most, unit).size == tile
