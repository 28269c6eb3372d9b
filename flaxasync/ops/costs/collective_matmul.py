"""The costs of the collective matmuls, whose gradients are further `trips` around the ring.

Sums over other mesh axes, such as those of gradients over the data axis, are not counted: every backend has them.
"""

import dataclasses
import math
import numbers
from typing import Any

from flaxasync.hardware import Chip
from flaxasync.ops.costs import all_reduce
from flaxasync.ops.costs.cost import Cost, Shape, hop_seconds
from flaxasync.ops.costs.trips import Trip, directions, kernels_serve, ring_of_blocks, serial
from flaxasync.ops.costs.trips import kernels as fused

KEEPING_GAINS = 0.05
"""The op keeps what it gathers only if that saves this share of its time: predictions are no better than that."""


def all_gather_matmul_costs(
    chip: Chip, ring: int, x: Shape, *ws: Shape,
    itemsize: int = 2, backward: bool = True, kernels: bool = True, gathered_bytes: int = 0,
) -> dict[str, Cost]:  # fmt: skip
    """Returns the cost of each backend for x [..., m, k] and each w [k, n] of one device.

    Where `gathered_bytes` suffice for all_gather(x), a backend keeps it for dw if the chip has as much memory and that
    is predicted to gain. Then x makes one trip less.
    """
    check_gathered_bytes("all_gather_matmul", gathered_bytes)
    widths = tuple(w[1] for w in ws)
    rows, k, n = math.prod(x[:-1]), x[-1], sum(widths)
    sent = rows * k * itemsize
    gather = Trip("gather", sent, rows, k, n, widths=widths)
    if not backward:
        return _costs(chip, ring, [gather], itemsize, kernels)
    # The order of the kernels is dw, reduce, gather.
    reduce = Trip("reduce", sent, rows, n, k, behind=2 * ring * rows * k * n / chip.flops, widths=widths)
    costs = _costs(chip, ring, [gather, reduce, Trip("dw", sent, k, rows, n)], itemsize, kernels)
    if ring == 1 or ring * sent > gathered_bytes:
        return costs
    keeping = _costs(chip, ring, [gather, reduce, Trip("gathered", 0, k, ring * rows, n)], itemsize, kernels)
    for name, cost in costs.items():
        kept = dataclasses.replace(keeping[name], held=max(keeping[name].held, ring * sent), kept=ring * sent)
        if kept.held < chip.hbm_bytes and kept.seconds <= (1 - KEEPING_GAINS) * cost.seconds:
            costs[name] = kept
    return costs


def check_gathered_bytes(caller: str, gathered_bytes: Any) -> None:
    """Raises ValueError, which begins with the caller's name, for a limit of memory that is no integer of 0 or more."""
    if not isinstance(gathered_bytes, numbers.Integral) or gathered_bytes < 0:
        raise ValueError(
            f"{caller} needs gathered_bytes to be an integer of 0 or more: got {gathered_bytes!r}; use 2**27 for "
            "128 MiB, or 0 to keep nothing"
        )


def matmul_reduce_scatter_costs(
    chip: Chip, ring: int, x: Shape, w: Shape, *, itemsize: int = 2, backward: bool = True, kernels: bool = True
) -> dict[str, Cost]:
    """Returns the cost of each backend for x [..., R*m, k] and w [k, n] of one device.

    Where several products are summed, k is the sum of theirs.
    """
    rows, (k, n) = math.prod(x[:-1]) // ring, w
    sent = rows * n * itemsize
    trips = [Trip("reduce", sent, rows, k, n, behind=math.inf if backward else 0.0)]
    if backward:  # before the reduction stands XLA's product of what was gathered, never shorter than fetching w
        trips += [Trip("gather", sent, rows, n, k), Trip("gathered", 0, k, ring * rows, n)]
    return _costs(chip, ring, trips, itemsize, kernels)


def matmul_all_reduce_costs(
    chip: Chip, ring: int, x: Shape, w: Shape, *,
    itemsize: int = 2, backward: bool = True, kernels: bool = True, exchange: bool = True,
) -> dict[str, Cost]:  # fmt: skip
    """Returns the cost of each backend for x [..., m, k] and w [k, n] of one device.

    A ring scatters the sums, and one collective operation gathers them. The gradients are local products. "exchange" is
    there only where it was played and is predicted to gain; see `all_reduce.gains`.
    """
    rows, (k, n) = math.prod(x[:-1]), w
    share = -(-rows // ring)
    local = [Trip("local", 0, rows, n, k), Trip("local", 0, k, rows, n)] if backward else []
    gather = (ring - 1) * hop_seconds(chip, share * n * itemsize, directions(ring))
    rings = _costs(chip, ring, [Trip("reduce", share * n * itemsize, share, k, n), *local], itemsize, kernels)
    costs = {name: dataclasses.replace(cost, exposed=cost.exposed + gather) for name, cost in rings.items()}
    one_product = all_reduce.exchange(chip, ring, rows, k, n, itemsize, local)
    exposed = all_reduce.all_reduce_seconds(chip, ring, rows * n * itemsize)
    costs["none"] = dataclasses.replace(one_product, exposed=exposed, held=rows * n * itemsize)
    if exchange and all_reduce.gains(chip, ring, rows, n * itemsize) and one_product.held < chip.vmem_bytes:
        costs["exchange"] = one_product
    return costs


def _costs(chip: Chip, ring: int, trips: list[Trip], itemsize: int, kernels: bool) -> dict[str, Cost]:
    costs = {"none": serial(chip, ring, trips, itemsize)}
    if ring > 1:
        costs |= {backend: ring_of_blocks(chip, ring, trips, itemsize, backend) for backend in ("xla", "pallas")}
        if kernels and kernels_serve(trips):
            costs["fused"] = fused(chip, ring, trips, itemsize)
    return costs
