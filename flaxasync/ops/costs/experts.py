"""What `expert_mlp` is predicted to take: products of rows that are spread evenly over the experts,
and their trips.

A block is the rows of one device. Each device multiplies, for every block, the rows that chose its
experts: three products forward, and eight backward, because two are computed again.
"""

from flaxasync.hardware import Chip
from flaxasync.ops.costs.cost import Cost, Shape, hbm, hop_seconds

EFFICIENCY = 0.9
"""The share of the peak FLOP/s, or of HBM's rate, that the grouped kernels reach: assumed for all
shapes.
"""
EACH_ROW = 35e-9
"""The seconds that a row which chose an expert takes beside its bytes, in a pass: it is sorted,
taken and added by itself. Fitted to the rows "xla" of docs/moe.md, where nearly nothing is
exposed."""


def expert_mlp_costs(
    chip: Chip,
    ring: int,
    x: Shape,
    ids: Shape,
    weights: Shape,
    *kernels: Shape,
    itemsize: int = 2,
    split: str = "experts",
    capacity: int | None = None,
    backward: bool = True,
) -> dict[str, Cost]:
    """Returns the cost of each backend, from the shapes of one device: a ring of blocks, one
    gather, or an exchange.

    Forward, rows travel, and sums of the same size behind them. Backward, rows and cotangents
    travel, and one sum. An exchange is among them where a capacity bounds what a device sends to
    another one to less than all of its rows.
    """
    (*batch, rows, features), (e, _, hidden) = x, kernels[0]
    for size in batch:
        rows *= size
    # rows of a block that a device multiplies
    chosen = rows * ids[-1] // (ring if split == "experts" else 1)
    weight_bytes = len(kernels) * e * features * hidden * itemsize
    block = rows * features * itemsize
    products = len(kernels)

    def passes(sent: int) -> float:
        """Returns the seconds in which the rows of a block are taken, and added to as many as were
        sent.
        """
        return 4 * (chosen + sent) * features * itemsize / hbm(chip)

    def work(count: int, streamed: float, blocks: int) -> float:
        """Returns the seconds of `count` products of the rows of some blocks, in which HBM streams
        so many bytes.
        """
        flops = 2 * count * chosen * features * hidden * blocks
        return max(flops / chip.flops, streamed / hbm(chip)) / EFFICIENCY

    def forward(blocks: int, sent: int = rows) -> float:
        return work(products, weight_bytes, blocks) + blocks * (passes(sent) + EACH_ROW * chosen)

    def gradient(blocks: int, sent: int = rows) -> float:
        """The gradients of the weights are float32: written once, or read and written in every
        other turn of a ring.
        """
        sums = 4 * weight_bytes / itemsize
        products_of_rows = work(2 * products - 1, 2 * weight_bytes, blocks)
        return (
            products_of_rows
            + work(products, sums, blocks)
            + 2 * blocks * (passes(sent) + EACH_ROW * chosen)
        )

    def hop(arrays: int) -> float:
        return hop_seconds(chip, arrays * block, 2 if ring > 2 else 1)

    # what a pass computes, and the arrays that travel in a turn
    trips = [(forward, 2)] + [(gradient, 3)] * backward
    at_once, in_turns = (sum(turns * one(ring // turns) for one, _ in trips) for turns in (1, ring))
    gathered = sum((ring - 1) * hop(moved) for _, moved in trips)
    exposed = sum((ring - 1) * max(0.0, hop(moved) - one(1)) for one, moved in trips)
    held = 2 * block + 2 * weight_bytes
    costs = {
        "none": Cost(at_once, gathered, len(trips), held + ring * (2 + backward) * block),
        "xla": Cost(in_turns, exposed, len(trips) * (ring + 1), held + 4 * block),
    }
    sent = rows if capacity is None or split == "hidden" else min(rows, e * 2 * -(-capacity // 2))
    if sent == rows or ring == 1:
        return costs
    # A block goes by the shorter way, so min(s, R - s) blocks of each shift s cross a link; half of
    # them each way.
    crossings = sum(min(shift, ring - shift) for shift in range(1, ring)) / (2 if ring > 2 else 1)
    home = sent * features * itemsize / chip.link_bandwidth
    turns = [1] + [2] * ((ring - 1) // 2) + [1] * (1 - ring % 2)
    seconds = 0.0
    waits = 0.0
    for one, moved in trips:
        computed = sum(one(blocks, sent) for blocks in turns) + 2 * (ring - 1) * passes(sent)
        seconds = seconds + computed
        waits = waits + home + max(0.0, moved * crossings * home - computed)
    held += 2 * ring * sent * features * itemsize
    return costs | {"exchange": Cost(seconds, waits, len(trips) * len(turns), held)}
