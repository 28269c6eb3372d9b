"""The costs of the collective matmuls: one collective and one product, rings of blocks, and one kernel for each trip.

An op and its gradients are a list of `trips.Trip`; `serial`, `rings` and `fused` say what each backend takes for them.
Sums over other mesh axes, such as those of gradients over the data axis, are not counted, because every backend has
them.
"""

import dataclasses
import math

from flaxasync.hardware import Chip
from flaxasync.ops.costs import fused
from flaxasync.ops.costs.cost import Cost, Shape, hop_seconds
from flaxasync.ops.costs.rings import ring_of_blocks
from flaxasync.ops.costs.serial import serial
from flaxasync.ops.costs.trips import Trip, directions


def all_gather_matmul(
    chip: Chip, ring: int, x: Shape, *ws: Shape, itemsize: int = 2, backward: bool = True, kernels: bool = True
) -> dict[str, Cost]:
    """Returns the cost of each backend for x [..., m, k] and each w [k, n] of one device."""
    rows, k, n = math.prod(x[:-1]), x[-1], sum(w[1] for w in ws)
    sent = rows * k * itemsize
    trips = [Trip("gather", sent, rows, k, n)]
    if backward:  # the order of the kernels is dw, reduce, gather
        trips.append(Trip("reduce", sent, rows, n, k, behind=2 * ring * rows * k * n / chip.flops))
        trips.append(Trip("dw", sent, k, rows, n))
    return _costs(chip, ring, trips, itemsize, kernels)


def matmul_reduce_scatter(
    chip: Chip, ring: int, x: Shape, w: Shape, *, itemsize: int = 2, backward: bool = True, kernels: bool = True
) -> dict[str, Cost]:
    """Returns the cost of each backend for x [..., R*m, k] and w [k, n] of one device.

    Where several products are summed, k is the sum of theirs.
    """
    rows, (k, n) = math.prod(x[:-1]) // ring, w
    sent = rows * n * itemsize
    trips = [Trip("reduce", sent, rows, k, n, behind=math.inf if backward else 0.0)]
    if backward:  # before the reduction stands XLA's product of what was gathered, never shorter than fetching w
        trips.append(Trip("gather", sent, rows, n, k))
        trips.append(Trip("gathered", 0, k, ring * rows, n))
    return _costs(chip, ring, trips, itemsize, kernels)


def matmul_all_reduce(
    chip: Chip, ring: int, x: Shape, w: Shape, *, itemsize: int = 2, backward: bool = True, kernels: bool = True
) -> dict[str, Cost]:
    """Returns the cost of each backend for x [..., m, k] and w [k, n] of one device.

    The sums are scattered, then gathered; the gradients are local products.
    """
    rows, (k, n) = math.prod(x[:-1]), w
    share = -(-rows // ring)
    trips = [Trip("reduce", share * n * itemsize, share, k, n)]
    if backward:
        trips += [Trip("local", 0, rows, n, k), Trip("local", 0, k, rows, n)]
    gather = (ring - 1) * hop_seconds(chip, share * n * itemsize, directions(ring))
    costs = _costs(chip, ring, trips, itemsize, kernels)
    return {name: dataclasses.replace(cost, exposed=cost.exposed + gather) for name, cost in costs.items()}


def _costs(chip: Chip, ring: int, trips: list[Trip], itemsize: int, kernels: bool) -> dict[str, Cost]:
    costs = {"none": serial(chip, ring, trips, itemsize)}
    if ring > 1:
        costs |= {backend: ring_of_blocks(chip, ring, trips, itemsize, backend) for backend in ("xla", "pallas")}
        if kernels and fused.serves(trips):
            costs["fused"] = fused.kernels(chip, ring, trips, itemsize)
    return costs
