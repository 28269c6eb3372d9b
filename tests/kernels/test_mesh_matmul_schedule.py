"""The orders of the overlapped mesh matmul: of the products, and of the blocks of w on any mesh."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flaxasync.kernels.engine.ring import Ring
from flaxasync.kernels.mesh_matmul.schedule import MeshSchedule, MeshStep
from flaxasync.kernels.mesh_matmul.weights import WeightBlocks

COUNT = st.integers(1, 3)


def all_coordinates(schedule):
    return [
        MeshStep(*(int(getattr(here, name)) for name in MeshStep.__annotations__))
        for here in map(schedule.at, range(schedule.grid.steps))
    ]


@given(COUNT, COUNT, COUNT, COUNT, COUNT)
@settings(max_examples=12)
def test_the_schedule(chunks, panels, rows, depth, phases):
    schedule = MeshSchedule(chunks, panels, rows, depth, phases)
    steps = all_coordinates(schedule)
    for phase in range(phases):
        products = [(c.chunk, c.panel, c.i, c.t) for c in steps if c.phase == phase]
        assert sorted(products) == list(
            itertools.product(range(chunks), range(panels), range(rows), range(depth))
        )
        sums = {}
        # each sum in the order of the contraction, of which t = 0 begins it
        for c, p, i, t in products:
            assert sums.setdefault((c, p, i), 0) == t
            sums[c, p, i] += 1
    finished = []
    for c in steps:
        # the partial sums that are added were sent in the phase before, by all devices
        if c.t == depth - 1:
            assert c.phase == 0 or (c.chunk, c.panel, c.phase - 1, c.i) in finished
            assert c.number == len(finished)
            finished.append((c.chunk, c.panel, c.phase, c.i))
            assert tuple(map(int, schedule.results.coordinates(c.number))) == finished[-1]
    slots = [None, None]
    for c in steps:
        if c.new_w:
            slots[c.w_slot] = (c.chunk, c.t)
        assert slots[c.w_slot] == (c.chunk, c.t)
    for before, after in itertools.pairwise(steps):  # the next tile of w never lands on this step's
        assert not after.new_w or after.w_slot != before.w_slot


@pytest.mark.parametrize(
    ("x", "y", "parts"), [(2, 2, 1), (4, 1, 1), (4, 2, 2), (2, 4, 1), (3, 2, 1), (4, 4, 2)]
)
def test_blocks_reach_every_device_of_the_columns_that_need_them(x, y, parts):
    whole = int(np.lcm(x, y)) * parts  # blocks of all of RHS
    for directions in {1, 1 + (x > 2)}:
        blocks = WeightBlocks(Ring("x", x, directions), "y", 128, whole // y, whole // x)
        for c in range(y):
            hops = np.array(
                [[int(blocks.hops_to(r, c, t)) for t in range(blocks.needed)] for r in range(x)]
            )
            for t in range(blocks.needed):
                owner = (c * blocks.needed + t) // blocks.held
                back = directions == 2 and t % 2 == 1
                assert [hops[(owner + (-h if back else h)) % x, t] for h in range(x)] == list(
                    range(x)
                )
            assert (
                max((hops[r] == h).sum() for r in range(x) for h in range(1, x))
                <= blocks.most_alike
            )
