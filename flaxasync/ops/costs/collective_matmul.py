"""The collective matmuls: one collective and one product, against rings of blocks, against one kernel a pass.

An op and its gradients are passes (`passes`); `serial`, `rings` and `fused` say what each backend takes for them. Sums
over other mesh axes, of gradients say, are not counted: every backend has them.
"""

import dataclasses
import math

from flaxasync.hardware import Chip
from flaxasync.ops.costs import fused
from flaxasync.ops.costs.cost import Cost, Shape, hop_seconds
from flaxasync.ops.costs.passes import Pass, directions
from flaxasync.ops.costs.rings import ring_of_blocks
from flaxasync.ops.costs.serial import serial


def all_gather_matmul(
    chip: Chip, ring: int, x: Shape, *ws: Shape, itemsize: int = 2, backward: bool = True, kernels: bool = True
) -> dict[str, Cost]:
    """x [..., m, k] and each w [k, n], of one device."""
    rows, k, n = math.prod(x[:-1]), x[-1], sum(w[1] for w in ws)
    sent = rows * k * itemsize
    passes = [Pass("gather", sent, rows, k, n)]
    if backward:  # the kernels' order: outer, reduce, gather
        passes.append(Pass("reduce", sent, rows, n, k, behind=2 * ring * rows * k * n / chip.flops))
        passes.append(Pass("outer", sent, k, rows, n))
    return _costs(chip, ring, passes, itemsize, kernels)


def matmul_reduce_scatter(
    chip: Chip, ring: int, x: Shape, w: Shape, *, itemsize: int = 2, backward: bool = True, kernels: bool = True
) -> dict[str, Cost]:
    """x [..., R*m, k] and w [k, n], of one device; where several are summed, k is the sum of theirs."""
    rows, (k, n) = math.prod(x[:-1]) // ring, w
    sent = rows * n * itemsize
    passes = [Pass("reduce", sent, rows, k, n, behind=math.inf if backward else 0.0)]
    if backward:  # XLA's product of what was gathered stands before the reduction, and is never shorter than a fetch
        passes.append(Pass("gather", sent, rows, n, k))
        passes.append(Pass("gathered", 0, k, ring * rows, n))
    return _costs(chip, ring, passes, itemsize, kernels)


def matmul_all_reduce(
    chip: Chip, ring: int, x: Shape, w: Shape, *, itemsize: int = 2, backward: bool = True, kernels: bool = True
) -> dict[str, Cost]:
    """x [..., m, k] and w [k, n], of one device: the sums are scattered, then gathered; the gradients are local."""
    rows, (k, n) = math.prod(x[:-1]), w
    share = -(-rows // ring)
    passes = [Pass("reduce", share * n * itemsize, share, k, n)]
    if backward:
        passes += [Pass("local", 0, rows, n, k), Pass("local", 0, k, rows, n)]
    again = (ring - 1) * hop_seconds(chip, share * n * itemsize, directions(ring))
    costs = _costs(chip, ring, passes, itemsize, kernels)
    return {name: dataclasses.replace(cost, exposed=cost.exposed + again) for name, cost in costs.items()}


def _costs(chip: Chip, ring: int, passes: list[Pass], itemsize: int, kernels: bool) -> dict[str, Cost]:
    costs = {"none": serial(chip, ring, passes, itemsize)}
    if ring > 1:
        costs |= {backend: ring_of_blocks(chip, ring, passes, itemsize, backend) for backend in ("xla", "pallas")}
        if kernels and fused.serves(passes):
            costs["fused"] = fused.kernels(chip, ring, passes, itemsize)
    return costs
