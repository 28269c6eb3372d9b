"""The rings of flaxasync in a compiled program, and which of them have lost their overlap.

The transfers of a ring are made to have work inside. XLA may still schedule them without: near the
limit of a chip's memory it gives overlap up, and on other platforms it joins the products of two
steps. The path of each transfer's name tells which function made the ring: it has the name of the
function, the loops around the transfer, and "hop".
"""

import collections
from collections.abc import Iterable, Sequence

from flaxasync.check.auditing.findings import Pair, Ring
from flaxasync.check.estimate.phases import scopes_of
from flaxasync.check.hlo.module import Instruction


def function_of(i: Instruction) -> str:
    """Returns the function of flaxasync whose ring a transfer belongs to; "" for none."""
    scopes = scopes_of(i.op_name.rpartition("/hop/")[0])  # none without a hop
    if not scopes:
        return ""
    return scopes[-1]


def rings_of(
    pairs: Iterable[Pair], synchronous: Sequence[tuple[Instruction, int]]
) -> tuple[Ring, ...]:
    """Returns the rings of a program, those with the most transfers without work first.

    `pairs` are the asynchronous operations, and `synchronous` the collectives without a start, each
    with the number of its runs.
    """
    transfers = collections.Counter[str]()
    empty = collections.Counter[str]()
    for pair in pairs:
        if pair.ring and pair.communicates:
            transfers[pair.ring] += pair.runs
            empty[pair.ring] += 0 if pair.overlapped else pair.runs
    for collective, runs in synchronous:
        function = function_of(collective)
        if function:
            transfers[function] += runs
            empty[function] += runs
    found = (Ring(function, count, empty[function]) for function, count in transfers.items())
    return tuple(sorted(found, key=lambda ring: (-ring.empty, ring.function)))
