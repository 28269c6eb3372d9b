"""Is an attention block faster if weights and heads travel instead of rows? See `flaxasync.ops.attention.exchanged`.

Both forms compute the same attention, which is left out as far as it hides nothing. `plan` predicts the rest as
collective matmuls:

```
rows travel      all_gather_matmul of the rows, matmul_reduce_scatter of the heads
heads travel     all_gather_matmul of the weights of the inputs, and of those of the output
                 + the exchanges of heads that nothing hides, and the transposes
```

The sequences of a batch are exchanged one after the other, so attention to one hides the exchange of the next. Only the
first arrival and the last departure lack that. Forward, the projection of the last sequence hides the first arrival.
Backward, the product of dout does so; and the products of dx hide the last departure if the gathered weights were kept.
Products have features as rows and attention has positions as rows, so XLA transposes the inputs and results of
attention, w, y and their gradients.
"""

import dataclasses
from typing import Any

from flaxasync.hardware import Chip
from flaxasync.ops.costs.cost import hop_seconds
from flaxasync.ops.plan import plan

WORTH = 1.05
"""How many times as fast the exchange must be predicted to be; predictions are no better than that."""
ATTENTION = 0.4
"""The share of the peak that causal attention reaches forward, played on v6e. On v5e it is more, and hides less."""


@dataclasses.dataclass(frozen=True)
class Block:
    """The sizes of an attention block on one device.

    Attributes:
      batch: The sequences.
      rows: This device's rows of each.
      features: The features of input and output.
      inputs: The features of the queries, keys and values of this device's heads.
      out: The features of the queries of this device's heads.
    """

    batch: int
    rows: int
    features: int
    inputs: int
    out: int


def times_as_fast(block: Block, chip: Chip, ring: int, itemsize: int, gathered_bytes: int = 0) -> float:
    """Predicts the time with travelling rows divided by that with travelling heads, gradients included.

    Either form may keep `gathered_bytes` of what it gathers: rows, or the weights of the inputs.
    """
    b, r, k = block.batch, block.rows, block.features
    options: Any = {"chip": chip, "ring": ring, "itemsize": itemsize}
    rows = [
        plan("all_gather_matmul", (b, r, k), (k, block.inputs), gathered_bytes=gathered_bytes, **options),
        plan("matmul_reduce_scatter", (b, ring * r, block.out), (block.out, k), **options),
    ]
    weights = [
        plan("all_gather_matmul", (block.inputs, k), (k, b * r), gathered_bytes=gathered_bytes, **options),
        plan("all_gather_matmul", (block.out, k), (k, b * r), **options),
    ]
    travelling_rows, travelling_weights = (sum(p.seconds[p.backend] for p in plans) for plans in (rows, weights))
    keep = ring * block.inputs * k * itemsize <= gathered_bytes
    exposed = _exposed_seconds(block, chip, ring, itemsize, keep)
    attended = ring * b * r * (block.inputs + block.out)
    transposed = 2 * 2 * (attended + block.inputs * k + b * r * k) * itemsize  # bytes, with those of the gradients
    hbm = chip.hbm_bandwidth * chip.hbm_efficiency
    return travelling_rows / (travelling_weights + exposed + transposed / hbm)


def _exposed_seconds(block: Block, chip: Chip, ring: int, itemsize: int, keep: bool) -> float:
    """Returns the seconds in which the exchanges have nothing beside them, forward and backward."""

    def one_sequence(features: int) -> float:  # over the middle of a ring go ring**2 / 4 blocks each way, on two links
        return hop_seconds(chip, ring**2 / 4 * features * block.rows * itemsize, 2)

    first, last = one_sequence(block.inputs), one_sequence(block.out)
    middle = block.batch * (first + last) - first - last
    attention = 2 * 2 * block.batch * block.out * (ring * block.rows) ** 2 / 2 / (ATTENTION * chip.flops)
    products = 2 * block.batch * ring * block.rows * block.features / chip.flops
    ends = [max(0.0, first - products * block.inputs / block.batch) if block.batch > 1 else first, last]
    ends.append(max(0.0, last - products * block.out))
    ends.append(max(0.0, first - products * block.inputs * (block.batch - 1) / block.batch) if keep else first)
    return sum(ends) + sum(max(0.0, middle - part) for part in (attention, 2 * attention))
