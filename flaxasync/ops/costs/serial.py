"""Backend "none" of the collective matmuls: one collective, then one product of all rows; or the other way around.

```
gather, ring of 3 or more   all-gather beside the copy of w, product
gather, ring of 2           copy of w, all-gather, product           of a pair, XLA's collective waits for the copy
reduce                      product, reduce-scatter                  where it comes first, after the copy of w or x
```
"""

from collections.abc import Sequence

from flaxasync.hardware import Chip
from flaxasync.ops.costs.cost import Cost
from flaxasync.ops.costs.passes import Pass, directions, first_operand, hbm, product

SUMS_MOVED = 1.5
"""Blocks that a reduce-scatter moves in HBM for each block; flaxasync/check/player/analytic.py takes so many."""
ALL_REDUCED = 11.5e-6
"""Seconds of a device's share of a block on a link, from which on XLA reduces all sums to all devices and takes a part:
twice the transfers. Seen in compiled programs: of rings of four always, of eight in some layouts."""


def serial(chip: Chip, ring: int, passes: Sequence[Pass], itemsize: int) -> Cost:
    """Predicts the passes of one op; a ring of one device has nothing to transfer."""
    compute, exposed, held = 0.0, 0.0, 0
    copy, weights = first_operand(chip, ring, passes, itemsize)
    for one in passes:
        compute += product(chip, one, ring if one.travels else 1, itemsize, "none", weights=weights)
        if ring == 1 or one.kind not in ("gather", "reduce"):  # of "outer", XLA sees that x was gathered before
            continue
        seconds = _collective(chip, ring, one.sent)
        if one.kind == "reduce":
            if ring > 2 and one.sent / ring / chip.link_bandwidth >= ALL_REDUCED:
                seconds *= 2
            seconds += SUMS_MOVED * ring * one.sent / hbm(chip)
        elif ring > 2:
            copy -= seconds
        exposed += seconds
        held = max(held, ring * one.sent)
    exposed += max(0.0, copy)
    return Cost(compute, exposed, len(passes), held, 0.0, {"directions": directions(ring)})


def _collective(chip: Chip, ring: int, sent: int) -> float:
    """An all-gather, or a reduce-scatter: blocks both ways around the ring, the farthest half of it away."""
    ways = directions(ring)
    return ring // 2 * chip.hop_latency + (ring - 1) * sent / (ways * chip.link_bandwidth)
