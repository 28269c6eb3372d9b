"""The costs of the collective matmuls, whose gradients are further `trips` around the ring.

Sums over other mesh axes, such as those of gradients over the data axis, are not counted: every
  backend has them.

The sum over all devices in `matmul_all_reduce` takes one of these forms. All of them begin with a
signal to another device.

```
XLA, gathered    R / 2 hops of the whole arrays, both ways around the ring; each device adds all of them
XLA, reduced     2 (R / 2) hops of shares: reduced, then gathered; XLA takes it where there are more bytes
one step         "exchange": every device sends all of its array to all others
two steps        "exchange": every device sends a share to each other one, and then its sum to all
```

The constants of these sums are those of played programs (benchmarks/few_rows.py). There a transfer
to another chip takes 1 us however many links it crosses. On a v5e:4x4 with a ring of 16 the
exchange took up to one and a half times as long as XLA's sum.
"""

import dataclasses
import math
import numbers
from typing import Any

from flaxasync.hardware import Chip
from flaxasync.kernels.exchange import vmem_bytes
from flaxasync.ops.costs.cost import Cost, Shape, hop_seconds
from flaxasync.ops.costs.trips import (
    LARGEST_BLOCK,
    Trip,
    directions,
    fused,
    product,
    ring_of_blocks,
    serial,
)
from flaxasync.ops.quantization import Quantization, check_chip, quantization_of

KEEPING_GAINS = 0.05
"""The op keeps what it gathers only if that saves this share of its time: predictions are no better
than that.
"""

TABLE_SECONDS = 0.45e-6  # the seconds in which XLA's all-reduce fetches the table of its neighbours
PADDED_BYTES = 16 * 2**10  # the bytes to which XLA pads a small array
CROSSING = {1: 1.63, 2: 1.33}
"""How many times as long an exchange in one or in two steps occupies the links as if its routes
shared them evenly, fitted to a ring of 8 on a 2x4."""
PLAYED_RINGS = (4, 8)
PLAYED_ROWS = 128
PLAYED_BYTES = 2**18
"""The rings on which the exchange was played, and the most rows and the largest array there."""
EXCHANGE_GAINS = 0.2
"""The share of XLA's seconds that the exchange has to gain. Predictions overstated the gain by up
to 0.17 of them.
"""
ONE_STEP_BYTES = 2**19  # the largest array, in bytes times R squared, that is exchanged in one step
TILE_BYTES = 4 * 2**10
"""The bytes of a hardware tile; an array is padded to a multiple of it, in two steps for each of
the devices.
"""
LAYOUT_SECONDS = 0.3e-6
"""The seconds in which XLA puts a result that is no whole rows of tiles into another layout, and
back.
"""


def all_gather_matmul_costs(
    chip: Chip,
    ring: int,
    x: Shape,
    *ws: Shape,
    itemsize: int = 2,
    backward: bool = True,
    kernels: bool = True,
    gathered_bytes: int = 0,
    quantization: Quantization | str | None = None,
) -> dict[str, Cost]:
    """Returns the cost of each backend for x [..., m, k] and each w [k, n] of one device.

    Where `gathered_bytes` suffice for all_gather(x), a backend keeps it for dw if the chip has as
    much memory and that is predicted to gain. Then x makes one trip less.
    """
    check_gathered_bytes("all_gather_matmul", gathered_bytes)
    widths = tuple(w[1] for w in ws)
    rows = math.prod(x[:-1])
    k = x[-1]
    n = sum(widths)
    forward, dx, dw = _kinds("all_gather_matmul", chip, quantization)
    sent = rows * k * (itemsize if forward is None else 1)
    gather = Trip("gather", sent, rows, k, n, widths=widths, quantized=forward)
    if not backward:
        return _costs(chip, ring, [gather], itemsize, kernels)
    # The order of the kernels is dw, reduce, gather.
    behind = 2 * ring * rows * k * n / chip.flops
    reduce = Trip(
        "reduce", rows * k * itemsize, rows, n, k, behind=behind, widths=widths, quantized=dx
    )
    costs = _costs(
        chip, ring, [gather, reduce, Trip("dw", sent, k, rows, n, quantized=dw)], itemsize, kernels
    )
    if ring == 1 or ring * sent > gathered_bytes:
        return costs
    of_kept = Trip("gathered" if dw is None else "beside", 0, k, ring * rows, n, quantized=dw)
    keeping = _costs(chip, ring, [gather, reduce, of_kept], itemsize, kernels)
    for name, cost in costs.items():
        # XLA dequantises kept 8-bit rows before their product; in estimates that cost more than the
        # trip.
        if name == "fused" and forward is not None and dw is None:
            continue
        kept = dataclasses.replace(
            keeping[name], held=max(keeping[name].held, ring * sent), kept=ring * sent
        )
        if kept.held < chip.hbm_bytes and kept.seconds <= (1 - KEEPING_GAINS) * cost.seconds:
            costs[name] = kept
    return costs


def check_gathered_bytes(caller: str, gathered_bytes: Any) -> None:
    """Raises ValueError, which begins with the caller's name, for a limit of memory that is no
    integer of 0 or more.
    """
    if not isinstance(gathered_bytes, numbers.Integral) or gathered_bytes < 0:
        raise ValueError(
            f"{caller} needs gathered_bytes to be an integer of 0 or more: got {gathered_bytes!r}; "
            "use 2**27 for "
            "128 MiB, or 0 to keep nothing"
        )


def matmul_reduce_scatter_costs(
    chip: Chip,
    ring: int,
    x: Shape,
    w: Shape,
    *,
    itemsize: int = 2,
    backward: bool = True,
    kernels: bool = True,
    quantization: Quantization | str | None = None,
) -> dict[str, Cost]:
    """Returns the cost of each backend for x [..., R*m, k] and w [k, n] of one device.

    Where several products are summed, k is the sum of theirs.
    """
    rows = math.prod(x[:-1]) // ring
    k, n = w
    forward, dx, dw = _kinds("matmul_reduce_scatter", chip, quantization)
    behind = math.inf if backward else 0.0
    trips = [Trip("reduce", rows * n * itemsize, rows, k, n, behind=behind, quantized=forward)]
    # before the reduction stands XLA's product of what was gathered, never shorter than fetching w
    if backward:
        sent = rows * n * (itemsize if dx is None else 1)
        trips += [
            Trip("gather", sent, rows, n, k, quantized=dx),
            Trip("gathered", 0, k, ring * rows, n, quantized=dw),
        ]
    return _costs(chip, ring, trips, itemsize, kernels)


def matmul_all_reduce_costs(
    chip: Chip,
    ring: int,
    x: Shape,
    w: Shape,
    *,
    itemsize: int = 2,
    backward: bool = True,
    kernels: bool = True,
    exchange: bool = True,
    quantization: Quantization | str | None = None,
) -> dict[str, Cost]:
    """Returns the cost of each backend for x [..., m, k] and w [k, n] of one device.

    A ring scatters the sums, and one collective operation gathers them. The gradients are local
    products. "exchange" is there only where it was played and is predicted to gain; see
    `exchange_gains`.
    """
    rows = math.prod(x[:-1])
    k, n = w
    share = -(-rows // ring)
    size = rows * n * itemsize
    forward, dx, dw = _kinds("matmul_all_reduce", chip, quantization)
    local = (
        [Trip("local", 0, rows, n, k, quantized=dx), Trip("local", 0, k, rows, n, quantized=dw)]
        if backward
        else []
    )
    gather = (ring - 1) * hop_seconds(chip, share * n * itemsize, directions(ring))
    reduce = Trip("reduce", share * n * itemsize, share, k, n, quantized=forward)
    rings = _costs(chip, ring, [reduce, *local], itemsize, kernels)
    costs = {
        name: dataclasses.replace(cost, exposed=cost.exposed + gather)
        for name, cost in rings.items()
    }
    products = [Trip("local", 0, rows, k, n, quantized=forward), *local]
    compute = sum(product(chip, trip, 1, itemsize, "none") for trip in products)
    costs["none"] = Cost(compute, all_reduce_seconds(chip, ring, size), len(products), size, 0.0)
    held = vmem_bytes(ring, size, exchange_steps(ring, size))
    if exchange and exchange_gains(chip, ring, rows, n * itemsize) and held < chip.vmem_bytes:
        costs["exchange"] = Cost(
            compute, exchange_seconds(chip, ring, rows, n * itemsize), len(products), held, 0.0
        )
    return costs


def all_reduce_seconds(chip: Chip, ring: int, size: int) -> float:
    """Returns the seconds of XLA's all-reduce of arrays of `size` bytes."""
    if ring == 1:
        return 0.0
    rate = directions(ring) * chip.link_bandwidth
    hops = ring // 2
    gathered = hops * chip.hop_latency + (ring - 1) * max(size, PADDED_BYTES) / rate
    reduced = 2 * hops * chip.hop_latency + 2 * (ring - 1) / ring * size / rate
    return TABLE_SECONDS + chip.hop_latency + min(gathered, reduced)


def exchange_steps(ring: int, size: int) -> int:
    """Returns the steps in which an array of `size` bytes is exchanged."""
    return 1 if size * ring**2 <= ONE_STEP_BYTES else 2


def exchange_seconds(chip: Chip, ring: int, rows: int, row_bytes: int) -> float:
    """Returns the seconds of the exchange kernel for `rows` rows."""
    steps = exchange_steps(ring, rows * row_bytes)
    unit = TILE_BYTES * (ring if steps == 2 else 1)
    sent = -(-rows * row_bytes // unit) * unit
    blocks = CROSSING[steps] * ring**2 / 8  # on the busiest link
    each = hop_seconds(chip, blocks * sent / (ring if steps == 2 else 1), 1)
    return chip.hop_latency + steps * each + (LAYOUT_SECONDS if rows % 16 else 0.0)


def exchange_gains(chip: Chip, ring: int, rows: int, row_bytes: int) -> bool:
    """Says whether the exchange of `rows` rows was played, and is clearly faster than XLA's sum, as
    predicted.
    """
    if ring not in PLAYED_RINGS or rows > PLAYED_ROWS or rows * row_bytes > PLAYED_BYTES:
        return False
    most = (1 - EXCHANGE_GAINS) * all_reduce_seconds(chip, ring, rows * row_bytes)
    return exchange_seconds(chip, ring, rows, row_bytes) <= most


def _kinds(
    op: str, chip: Chip, quantization: Quantization | str | None
) -> tuple[str | None, str | None, str | None]:
    """Returns the 8-bit types of the products of y, of dx and of dw; None for those that are not
    quantised.
    """
    quantization = quantization_of(op, quantization)
    check_chip(op, quantization, chip)
    if quantization is None:
        return None, None, None
    return quantization.forward, quantization.backward, quantization.weights


def _costs(
    chip: Chip, ring: int, trips: list[Trip], itemsize: int, kernels: bool
) -> dict[str, Cost]:
    costs = {"none": serial(chip, ring, trips, itemsize)}
    if ring > 1:
        costs |= {
            backend: ring_of_blocks(chip, ring, trips, itemsize, backend)
            for backend in ("xla", "pallas")
        }
        if kernels and not any(
            trip.kind == "reduce" and trip.m * trip.n > LARGEST_BLOCK for trip in trips
        ):
            costs["fused"] = fused(chip, ring, trips, itemsize)
    return costs
