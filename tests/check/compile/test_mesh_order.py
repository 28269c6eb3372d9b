"""The paths on which a mesh axis visits chips."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from flaxasync.check.compile.mesh_order import closed_path


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4))
def test_a_path_visits_every_point_by_single_steps(sizes):
    path = closed_path(sizes)
    assert sorted(path) == list(itertools.product(*(range(size) for size in sizes)))
    steps = [sum(abs(a - b) for a, b in zip(p, q, strict=True)) for p, q in itertools.pairwise([*path, path[0]])]
    closed = sum(size > 1 for size in sizes) > 1 and any(size % 2 == 0 for size in sizes)
    assert set(steps[:-1]) <= {1}
    assert not closed or steps[-1] == 1
