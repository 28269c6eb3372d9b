"""The costs of the ops that are no collective matmul of one axis, and the table of all costs.

They have the form of `flaxasync.ops.roofline`, from which their predictions take what a hop takes.
"""

import dataclasses
import functools
import math
from collections.abc import Callable

from flaxasync.hardware import Chip
from flaxasync.kernels.attention_block import Mask
from flaxasync.ops.attention import layouts
from flaxasync.ops.roofline import (
    Cost,
    Rates,
    Shape,
    Trip,
    all_gather_matmul_costs,
    directions,
    hbm,
    hop_seconds,
    sum_of_products_costs,
)

# Those of attention are played on v5e (benchmarks/attention.py), and their steps assumed.
ATTENTION = {"none": Rates(0.9, 5e-6), "xla": Rates(0.9, 10e-6)}
# Played on v5e (docs/kernels/mesh_matmul.md); a step is a kernel or a collective, assumed.
MESH = Rates(0.93, 3e-6)
# Of all backends of experts; a step is a turn. A row is sorted, taken and added (docs/moe.md).
EXPERTS = Rates(0.9, 5e-6)
EXPERT_ROW = 35e-9


def ring_attention_costs(
    chip: Chip,
    ring: int,
    q: Shape,
    k: Shape,
    v: Shape | None = None,
    *,
    causal: bool = True,
    layout: layouts.AttentionLayout = "contiguous",
    window: int | None = None,
    itemsize: int = 2,
    backward: bool = True,
) -> dict[str, Cost]:
    """Returns the cost of each backend, from the shapes of one device: a ring of k and v, or one
    gather of both.

    A block has s x s scores: two matmuls forward, five backward. k and v cross the ring in their
    dtype, dk and dv in float32. In the zigzag layout a device multiplies half a block with the rows
    that each hop brings. In the contiguous layout the last device multiplies every block, and the
    others wait for it.
    """
    b, s, h, d = q
    layouts.check_sequence_layout("plan", layout)
    layouts.check_sequence_rows("plan", layout, ring * s, ring)
    if window is not None and window < 1:
        raise ValueError(f"plan needs window to be 1 or more rows, or None: got {window}")
    sequence = layouts.Sequence(layout, Mask(causal, window), s, ring)
    hops = sequence.hops
    ways = directions(chip, ring)
    if sequence.one_way:
        ways = 1
    kv_elements = 2 * b * s * k[2] * d
    # the blocks that are computed: half of the own one is masked, and of others in this layout
    own = 0.5 if causal else 1.0
    arrived = 0.5 if causal and layout == "zigzag" else 1.0
    # the accumulator of a block is read and written once
    accumulated = 2 * 4 * b * h * s * d / hbm(chip)
    matmul = 2 * b * h * s * s * d / (chip.flops * ATTENTION["xla"].share)
    compute = exposed = gathered = 0.0
    sent = kv_elements * itemsize
    passes = [(2, sent)]
    if backward:
        sent += 4 * kv_elements
        passes.append((5, sent))
    for matmuls, moved in passes:
        block = max(arrived * matmuls * matmul, accumulated)
        compute += max(own * matmuls * matmul, accumulated)
        compute += hops * block
        exposed += hops * max(0.0, hop_seconds(chip, moved, ways) - block)
        if ring > 1:
            gathered += hop_seconds(chip, (ring - 1) * moved, directions(chip, ring))
    steps = len(passes) * (hops + 1)
    return {
        "xla": Cost(compute, exposed, steps, ATTENTION["xla"].step, 2 * sent),
        "none": Cost(compute, gathered, steps, ATTENTION["none"].step, ring * sent),
    }


def mesh_matmul_costs(
    chip: Chip,
    ring: tuple[int, int],
    lhs: Shape,
    rhs: Shape,
    *,
    itemsize: int = 2,
    kernels: bool = True,
) -> dict[str, Cost]:
    """Returns the cost of each backend for lhs [m, k] and rhs [k', n] of one device; ring is
    (devices on x, on y).

    w moves along x, sums move along y, and each backend hides a part of it. Only the forward pass
    is counted: the gradients are the same, whatever the backend.
    """
    x, y = ring
    m, k = lhs
    rhs_rows, n = rhs
    w_bytes = k * n * itemsize
    o_bytes = m * n * itemsize
    whole_rhs = x * rhs_rows * n * itemsize
    product = Trip("local", 0, m, k, n, itemsize).seconds(chip, MESH, 1, w_bytes)
    # seconds: of a gather of all blocks of rhs, of hops that bring w alone, and of sums that are
    # reduced and added
    gathered = (x - 1) * hop_seconds(chip, rhs_rows * n * itemsize)
    permuted = (x - 1) * hop_seconds(chip, w_bytes / x)
    if x == y > 1:
        permuted = hop_seconds(chip, w_bytes)
    reduced = 2 * (y - 1) * hop_seconds(chip, o_bytes / y)
    after = reduced
    if y > 1:
        after += 3 * o_bytes / hbm(chip)

    def cost(waits: float, steps: int, held: int, cores: int = 1) -> Cost:
        return Cost(cores * product, waits, steps, MESH.step, held)

    # "none" brings w by one permute on a square mesh, and gathers all blocks on another.
    costs = {"none": cost(gathered + after, 3, whole_rhs)}
    if x == y:
        costs["none"] = cost(permuted + after, 3, w_bytes)
    if kernels and x * y > 1:
        for backend in ("xla_gemm", "serial"):
            costs[backend] = cost(gathered + after, 3, whole_rhs + o_bytes)
        # The product of "fused", on one core, hides the transfers of w; that of "overlapped" those
        # of sums, too.
        beside = chip.cores * product
        own = w_bytes + o_bytes
        waits = after + max(0.0, permuted - beside)
        costs["fused"] = cost(waits, min(y, 2), own, chip.cores)
        waits = max(0.0, permuted - beside, reduced - beside)
        costs["overlapped"] = cost(waits, 1, own, chip.cores)
    return costs


def expert_mlp_costs(
    chip: Chip,
    ring: int,
    x: Shape,
    ids: Shape,
    weights: Shape,
    up: Shape,
    *kernels: Shape,
    itemsize: int = 2,
    split: str = "experts",
    capacity: int | None = None,
    backward: bool = True,
) -> dict[str, Cost]:
    """Returns the cost of each backend for rows that are spread evenly over the experts, from the
    shapes of one device.

    A block is the rows of one device. Each device multiplies, for every block, the rows that chose
    its experts. Forward, these are three products; rows travel, and sums of the same size behind
    them. Backward, they are eight, because two are computed again; rows and cotangents travel, and
    one sum. An exchange is among the backends where a capacity bounds what a device sends to
    another one to less than all of its rows.
    """
    if split not in ("experts", "hidden") or (capacity is not None and capacity < 1):
        raise ValueError(
            "plan needs split to be 'experts' or 'hidden', and capacity to be 1 or more, or None: "
            f"got {split!r} and {capacity}"
        )
    *batch, features = x
    rows = math.prod(batch)
    experts, _, hidden = up
    chosen = rows * ids[-1]
    if split == "experts":
        chosen //= ring
    kernels_of_one = 1 + len(kernels)
    work = _ExpertWork(chip, rows, chosen, kernels_of_one, experts, features, hidden, itemsize)
    block = rows * work.row_bytes
    passes = (2, 3) if backward else (2,)
    at_once = in_turns = gathered = exposed = 0.0
    for arrays in passes:
        hop = hop_seconds(chip, arrays * block, directions(chip, ring))
        turn = work.seconds(arrays, 1, rows)
        at_once += work.seconds(arrays, ring, rows)
        in_turns += ring * turn
        gathered += (ring - 1) * hop
        exposed += (ring - 1) * max(0.0, hop - turn)
    brought = ring * passes[-1] * block
    costs = {"none": work.cost(at_once, gathered, len(passes), brought)}
    costs["xla"] = work.cost(in_turns, exposed, len(passes) * (ring + 1), 4 * block)
    if capacity is None or split == "hidden" or ring == 1:
        return costs
    sent = experts * 2 * -(-capacity // 2)
    if sent < rows:
        costs["exchange"] = _exchange_cost(work, ring, sent, passes)
    return costs


@dataclasses.dataclass(frozen=True)
class _ExpertWork:
    """The work of one device on blocks of rows, of which it multiplies those that chose its
    experts.
    """

    chip: Chip
    rows: int  # of a block
    chosen: int  # rows of a block that chose this device's experts
    kernels: int  # weights of one expert
    experts: int
    features: int
    hidden: int
    itemsize: int

    @property
    def row_bytes(self) -> int:
        return self.features * self.itemsize

    @property
    def elements(self) -> int:
        """The elements of all weights."""
        return self.kernels * self.experts * self.features * self.hidden

    def seconds(self, arrays: int, blocks: float, sent: int) -> float:
        """Returns the seconds of work on some blocks, of which `sent` rows arrive, in the pass in
        which so many arrays travel: two forward, three backward.
        """
        products = self.kernels
        streamed = self.elements * self.itemsize
        if arrays == 3:
            products = 3 * products - 1
            streamed = 2 * streamed + 4 * self.elements  # the gradients of weights are float32
        flops = 2 * products * blocks * self.chosen * self.features * self.hidden
        memory = hbm(self.chip)
        computed = max(flops / self.chip.flops, streamed / memory) / EXPERTS.share
        # Rows are taken, and added to those that were sent.
        moved = 4 * (self.chosen + sent) * self.row_bytes / memory + EXPERT_ROW * self.chosen
        return computed + (arrays - 1) * blocks * moved

    def cost(self, compute: float, exposed: float, steps: int, beside: int) -> Cost:
        held = 2 * self.rows * self.row_bytes + 2 * self.elements * self.itemsize + beside
        return Cost(compute, exposed, steps, EXPERTS.step, held)


def _exchange_cost(work: _ExpertWork, ring: int, sent: int, passes: tuple[int, ...]) -> Cost:
    """Predicts an exchange, in which `sent` rows travel to each other device, and home."""
    chip = work.chip
    # A block goes by the shorter way, so min(s, R - s) blocks of each shift s cross a link.
    crossings = sum(min(shift, ring - shift) for shift in range(1, ring)) / directions(chip, ring)
    home = sent * work.row_bytes / chip.link_bandwidth
    turns = ring // 2 + 1  # of two blocks each, but for the first and perhaps the last
    compute = exposed = 0.0
    for arrays in passes:
        busy = turns * work.seconds(arrays, ring / turns, sent)
        # Each device sorts rows once more before they leave, and when they come home.
        busy += 8 * (ring - 1) * (work.chosen + sent) * work.row_bytes / hbm(chip)
        compute += busy
        exposed += home + max(0.0, arrays * crossings * home - busy)
    steps = len(passes) * turns
    return work.cost(compute, exposed, steps, 2 * ring * sent * work.row_bytes)


MODELS: dict[str, Callable[..., dict[str, Cost]]] = {
    "all_gather_matmul": all_gather_matmul_costs,
    "expert_mlp": expert_mlp_costs,
    "matmul_all_reduce": functools.partial(sum_of_products_costs, "matmul_all_reduce"),
    "matmul_reduce_scatter": functools.partial(sum_of_products_costs, "matmul_reduce_scatter"),
    "mesh_matmul": mesh_matmul_costs,
    "ring_attention": ring_attention_costs,
}
"""For each op, what returns the cost of each backend that can serve a call."""
# the ops of which costs on GPUs are known, and the largest ring: that of one host
LARGEST_ON_GPUS = 8
ON_GPUS = ("all_gather_matmul", "matmul_all_reduce", "matmul_reduce_scatter")
