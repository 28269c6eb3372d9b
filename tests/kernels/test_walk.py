"""The order of the overlapped kernel: every product once, sums in order, no tile of w from a wrong slot."""

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from flaxasync.kernels.walk import Place, Walk

SIDE = st.integers(1, 3)


def places(walk):
    return [
        Place(*(int(getattr(place, name)) for name in Place.__annotations__))
        for place in map(walk.at, range(walk.steps))
    ]


@given(SIDE, SIDE, SIDE, SIDE)
@settings(max_examples=15)
def test_the_walk(chunks, groups, rows, depth):
    walk = Walk(chunks, groups, rows, depth)
    steps = places(walk)
    for give in (True, False):
        some = [(p.chunk, p.group, p.i, p.t) for p in steps if p.give == give]
        assert sorted(some) == [
            (c, g, i, t) for c in range(chunks) for g in range(groups) for i in range(rows) for t in range(depth)
        ]
        sums = {}
        for c, g, i, t in some:  # each sum in the order of the contraction, of which t = 0 begins it
            assert sums.setdefault((c, g, i), 0) == t
            sums[c, g, i] += 1
    finished = set()
    for p in steps:
        if p.t == depth - 1:
            assert p.give or (p.chunk, p.group, p.i) in finished  # given before it is kept, by both neighbours
            finished.add((p.chunk, p.group, p.i))
    slots = [None, None]
    for p in steps:
        if p.w_new:
            slots[p.w_slot] = (p.chunk, p.t)
        assert slots[p.w_slot] == (p.chunk, p.t)
    for before, after in itertools.pairwise(steps):  # the next tile of w never lands on this step's
        assert not after.w_new or after.w_slot != before.w_slot
