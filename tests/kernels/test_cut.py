"""How sides and rows are cut into tiles: nothing is left out, and odd sides have no small tiles."""

import hypothesis.strategies as st
import pytest
from hypothesis import given

from flaxasync.kernels.cut import Cut
from flaxasync.kernels.row_tiles import RowTiles
from flaxasync.kernels.tiles import LANES, largest_side

UNITS = st.integers(1, 200).map(lambda units: units * LANES)


@given(st.lists(UNITS, min_size=1, max_size=3), st.integers(1, 4096))
def test_tiles_cover_their_sides(sides, most):
    cut = Cut.of(sides, most)
    assert cut.size <= max(LANES, most)
    assert len(cut.widths) == cut.count
    assert sum(cut.widths) == sum(sides)
    if min(most, max(sides)) >= 2 * LANES:
        assert cut.size > LANES  # which a prime number of units would have, were tiles to divide it


@given(st.integers(1, 12), st.integers(1, 300), st.sampled_from((8, 16)), st.integers(512, 2048))
def test_row_tiles_cover_their_rows(batch, units, unit, most):
    rows = RowTiles.of(batch, units * unit, most, unit)
    assert rows.size <= max(most, units * unit + 512)
    assert len(rows.sizes) == rows.count
    assert sum(rows.sizes) == batch * units * unit
    assert (rows.batches if rows.batches > 1 else rows.rows) % rows.held == 0
    assert rows.count <= max(2, 4 * batch * units * unit / most)


@pytest.mark.parametrize("size", [1024, 3584, 8192, 28672, 5 * 1024, 11 * 512])
def test_tiles_divide_where_that_costs_little(size):
    assert Cut.of((size,), 1024).size == largest_side(size, 1024, LANES)
    assert RowTiles.of(1, size, 1024, 16).rows == largest_side(size, 1024, 16)
