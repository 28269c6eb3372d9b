"""Backend "none" of the collective matmuls: one collective, then one product of all rows; or the other way around.

```
gather, ring of 3 or more   all-gather beside the copy of w, product
gather, ring of 2           copy of w, all-gather, product           on a pair, XLA's collective waits for the copy
reduce                      product, reduce-scatter                  after the copy of w or x, where it comes first
```
"""

from collections.abc import Sequence

from flaxasync.hardware import Chip
from flaxasync.ops.costs.cost import Cost
from flaxasync.ops.costs.trips import Trip, directions, first_operand, hbm, product

REDUCE_SCATTER_TRAFFIC = 1.5
"""How many blocks a reduce-scatter moves in HBM for each block that it reduces; `fa.check.play` assumes the same."""
ALL_REDUCED = 11.5e-6
"""The seconds of a device's share of a block on a link from which on XLA reduces all sums to all devices and takes a
part, which doubles the transfers. Seen in compiled programs: on rings of four always, on rings of eight in some
layouts."""


def serial(chip: Chip, ring: int, trips: Sequence[Trip], itemsize: int) -> Cost:
    """Predicts the trips of one op. A ring of one device has nothing to transfer."""
    compute, exposed, held = 0.0, 0.0, 0
    copy, weights = first_operand(chip, ring, trips, itemsize)
    for trip in trips:
        compute += product(chip, trip, ring if trip.travels else 1, itemsize, "none", weights=weights)
        if ring == 1 or trip.kind not in ("gather", "reduce"):  # for "dw", XLA sees that x was gathered before
            continue
        seconds = _collective(chip, ring, trip.sent)
        if trip.kind == "reduce":
            if ring > 2 and trip.sent / ring / chip.link_bandwidth >= ALL_REDUCED:
                seconds *= 2
            seconds += REDUCE_SCATTER_TRAFFIC * ring * trip.sent / hbm(chip)
        elif ring > 2:
            copy -= seconds
        exposed += seconds
        held = max(held, ring * trip.sent)
    exposed += max(0.0, copy)
    return Cost(compute, exposed, len(trips), held, 0.0)


def _collective(chip: Chip, ring: int, sent: int) -> float:
    """Returns the seconds of an all-gather or a reduce-scatter.

    Blocks travel in both directions, and the farthest comes from half of the ring away.
    """
    return ring // 2 * chip.hop_latency + (ring - 1) * sent / (directions(ring) * chip.link_bandwidth)
