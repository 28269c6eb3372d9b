"""The order of nested loops that are one flat loop."""

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from flaxasync.kernels.engine.tiling import IterationGrid


@given(st.lists(st.integers(1, 3), min_size=1, max_size=4))
@settings(max_examples=10)
def test_the_innermost_loop_advances_first(sizes):
    grid = IterationGrid(tuple(sizes))
    visited = [tuple(map(int, grid.coordinates(step))) for step in range(grid.steps)]
    assert visited == list(itertools.product(*map(range, sizes)))
    assert int(grid.coordinates(grid.steps)[0]) == sizes[0]  # beyond the last step
