"""The orders of the overlapped kernel: of products, and of the pieces of w on any mesh."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flaxasync.kernels.mesh.pieces import Pieces
from flaxasync.kernels.mesh.walk import Place, Walk
from flaxasync.kernels.mesh.weights import window

SIDE = st.integers(1, 3)


def places(walk):
    return [
        Place(*(int(getattr(place, name)) for name in Place.__annotations__))
        for place in map(walk.at, range(walk.steps))
    ]


@given(SIDE, SIDE, SIDE, SIDE, SIDE)
@settings(max_examples=12)
def test_the_walk(chunks, groups, rows, depth, phases):
    walk = Walk(chunks, groups, rows, depth, phases)
    steps = places(walk)
    for phase in range(phases):
        some = [(p.chunk, p.group, p.i, p.t) for p in steps if p.phase == phase]
        assert sorted(some) == [
            (c, g, i, t) for c in range(chunks) for g in range(groups) for i in range(rows) for t in range(depth)
        ]
        sums = {}
        for c, g, i, t in some:  # each sum in the order of the contraction, of which t = 0 begins it
            assert sums.setdefault((c, g, i), 0) == t
            sums[c, g, i] += 1
    finished = set()
    for p in steps:
        if p.t == depth - 1:  # given in the phase before, by all devices
            assert p.phase == 0 or (p.round, p.phase - 1, p.i) in finished
            finished.add((p.round, p.phase, p.i))
    slots = [None, None]
    for p in steps:
        if p.w_new:
            slots[p.w_slot] = (p.chunk, p.t)
        assert slots[p.w_slot] == (p.chunk, p.t)
    for before, after in itertools.pairwise(steps):  # the next tile of w never lands on this step's
        assert not after.w_new or after.w_slot != before.w_slot


@pytest.mark.parametrize(("x", "y", "cuts"), [(2, 2, 1), (4, 1, 1), (4, 2, 2), (2, 4, 1), (3, 2, 1), (4, 4, 2)])
def test_pieces_reach_every_device_of_the_columns_that_need_them(x, y, cuts):
    whole = int(np.lcm(x, y)) * cuts  # pieces of all of RHS
    for ways in {1, 1 + (x > 2)}:
        pieces = Pieces(("x", "y"), x, 128, whole // y, whole // x, ways)
        for c in range(y):
            hops = np.array([[int(pieces.hops_to(r, c, t)) for t in range(pieces.depth)] for r in range(x)])
            for t in range(pieces.depth):
                owner = (c * pieces.depth + t) // pieces.held
                back = ways == 2 and t % 2 == 1
                assert [hops[(owner + (-h if back else h)) % x, t] for h in range(x)] == list(range(x))
            assert max((hops[r] == h).sum() for r in range(x) for h in range(1, x)) <= window(pieces)
