"""What `expert_mlp` is predicted to take: products of rows that are spread evenly over the experts, and their trips.

A block is the rows of one device. Each device multiplies, for every block, the rows that chose its experts: three
products forward, and eight backward, because two are computed again.
"""

from flaxasync.hardware import Chip
from flaxasync.ops.costs.cost import Cost, Shape, hbm, hop_seconds

EFFICIENCY = 0.9
"""The share of the peak FLOP/s, or of HBM's rate, that the grouped kernels reach: assumed for all shapes."""


def expert_mlp_costs(
    chip: Chip, ring: int, x: Shape, ids: Shape, weights: Shape, *kernels: Shape, itemsize: int = 2,
    split: str = "experts", backward: bool = True,
) -> dict[str, Cost]:  # fmt: skip
    """Returns the cost of each backend, from the shapes of one device: a ring of blocks, or one gather of all.

    Forward, rows travel, and sums of the same size behind them. Backward, rows and cotangents travel, and one sum.
    """
    (*batch, rows, features), (e, _, hidden) = x, kernels[0]
    for size in batch:
        rows *= size
    chosen = rows * ids[-1] // (ring if split == "experts" else 1)  # rows of a block that a device multiplies
    weight_bytes, block = len(kernels) * e * features * hidden * itemsize, rows * features * itemsize
    products, passes = len(kernels), 4 * (chosen + rows) * features * itemsize / hbm(chip)  # rows are taken, and added

    def work(count: int, streamed: float, blocks: int) -> float:
        """Returns the seconds of `count` products of the rows of some blocks, in which HBM streams so many bytes."""
        flops = 2 * count * chosen * features * hidden * blocks
        return max(flops / chip.flops, streamed / hbm(chip)) / EFFICIENCY

    def forward(blocks: int) -> float:
        return work(products, weight_bytes, blocks) + blocks * passes

    def gradient(blocks: int) -> float:
        """The gradients of the weights are float32: written once, or read and written in every other turn of a ring."""
        sums = 4 * weight_bytes / itemsize
        return work(2 * products - 1, 2 * weight_bytes, blocks) + work(products, sums, blocks) + 2 * blocks * passes

    def hop(arrays: int) -> float:
        return hop_seconds(chip, arrays * block, 2 if ring > 2 else 1)

    trips = [(forward, 2)] + [(gradient, 3)] * backward  # what a pass computes, and the arrays that travel in a turn
    at_once, in_turns = (sum(turns * one(ring // turns) for one, _ in trips) for turns in (1, ring))
    gathered = sum((ring - 1) * hop(moved) for _, moved in trips)
    exposed = sum((ring - 1) * max(0.0, hop(moved) - one(1)) for one, moved in trips)
    held = 2 * block + 2 * weight_bytes
    return {
        "none": Cost(at_once, gathered, len(trips), held + ring * (2 + backward) * block),
        "xla": Cost(in_turns, exposed, len(trips) * (ring + 1), held + 4 * block),
    }
