"""The sum over all devices in `matmul_all_reduce`: XLA's all-reduce, and the exchange kernel for few rows.

```
XLA, gathered    R / 2 hops of the whole arrays, both ways around the ring; each device adds all of them
XLA, reduced     2 (R / 2) hops of shares: reduced, then gathered; XLA takes it where there are more bytes
one step         every device sends all of its array to all others
two steps        every device sends a share to each other one, and then its sum to all
```

All of them begin with a barrier, a signal to another device. The constants are those of played programs
(benchmarks/few_rows.py). There a transfer to another chip takes 1 us however many links it crosses. On a v5e:4x4 with a
ring of 16 the exchange took up to one and a half times as long as XLA's sum.
"""

from flaxasync.hardware import Chip
from flaxasync.kernels.exchange import vmem_bytes
from flaxasync.ops.costs.cost import Cost, hop_seconds
from flaxasync.ops.costs.trips import Trip, directions, product

TABLE = 0.45e-6
"""The seconds in which XLA's all-reduce fetches the table of its neighbours."""
LEAST = 16 * 2**10
"""The bytes to which XLA pads a small array."""
CROSSING = {1: 1.63, 2: 1.33}
"""How many times as long an exchange in one or in two steps occupies the links as if its routes shared them evenly,
fitted to a ring of 8 on a 2x4."""
PLAYED_RINGS, PLAYED_ROWS, PLAYED_BYTES = (4, 8), 128, 2**18
"""The rings on which the exchange was played, and the most rows and the largest array there."""
GAINS = 0.2
"""The share of XLA's seconds that the exchange has to gain. Predictions overstated the gain by up to 0.17 of them."""
ONE_STEP_BYTES = 2**19
"""The largest array, in bytes times R squared, that is exchanged in one step."""
TILE_BYTES = 4 * 2**10
"""The bytes of a hardware tile; an array is padded to a multiple of it, in two steps for each of the devices."""
LAYOUT = 0.3e-6
"""The seconds in which XLA puts a result that is no whole rows of tiles into another layout, and back."""


def steps(ring: int, size: int) -> int:
    """Returns the steps in which an array of `size` bytes is exchanged."""
    return 1 if size * ring**2 <= ONE_STEP_BYTES else 2


def all_reduce_seconds(chip: Chip, ring: int, size: int) -> float:
    """Returns the seconds of XLA's all-reduce of arrays of `size` bytes."""
    if ring == 1:
        return 0.0
    rate, hops = directions(ring) * chip.link_bandwidth, ring // 2
    gathered = hops * chip.hop_latency + (ring - 1) * max(size, LEAST) / rate
    reduced = 2 * hops * chip.hop_latency + 2 * (ring - 1) / ring * size / rate
    return TABLE + chip.hop_latency + min(gathered, reduced)


def exchange_seconds(chip: Chip, ring: int, rows: int, row_bytes: int) -> float:
    """Returns the seconds of the exchange kernel for `rows` rows."""
    count = steps(ring, rows * row_bytes)
    unit = TILE_BYTES * (ring if count == 2 else 1)
    sent = -(-rows * row_bytes // unit) * unit
    blocks = CROSSING[count] * ring**2 / 8  # on the busiest link
    each = hop_seconds(chip, blocks * sent / (ring if count == 2 else 1), 1)
    return chip.hop_latency + count * each + (LAYOUT if rows % 16 else 0.0)


def gains(chip: Chip, ring: int, rows: int, row_bytes: int) -> bool:
    """Says whether the exchange of `rows` rows was played, and is clearly faster than XLA's sum, as predicted."""
    if ring not in PLAYED_RINGS or rows > PLAYED_ROWS or rows * row_bytes > PLAYED_BYTES:
        return False
    return exchange_seconds(chip, ring, rows, row_bytes) <= (1 - GAINS) * all_reduce_seconds(
        chip, ring, rows * row_bytes
    )


def exchange(chip: Chip, ring: int, rows: int, k: int, n: int, itemsize: int, local: list[Trip]) -> Cost:
    """Returns the cost of a product of `rows` rows and the exchange of its sums, and of local products."""
    trips = [Trip("local", 0, rows, k, n), *local]
    compute = sum(product(chip, trip, 1, itemsize, "none") for trip in trips)
    size = rows * n * itemsize
    held = vmem_bytes(ring, size, steps(ring, size))
    return Cost(compute, exchange_seconds(chip, ring, rows, n * itemsize), len(trips), held, 0.0)
