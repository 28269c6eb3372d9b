"""Is an attention block faster if weights and heads travel instead of rows? See `flaxasync.ops.attention.exchanged`.

`plan` predicts the rows that travel as an all_gather_matmul and a matmul_reduce_scatter, and the weights as two
all_gather_matmuls. Both forms compute the same attention. The exchanges of heads come on top, as far as nothing hides
them: attention to one sequence of the batch hides the exchange of the next, but the first arrival and the last
departure lack that. The transposes also come on top: products have features as rows, and attention has positions as
rows.
"""

import dataclasses
from typing import Any

from flaxasync.hardware import Chip
from flaxasync.ops.costs.cost import hbm, hop_seconds
from flaxasync.ops.plan import plan

WORTH = 1.05
"""How many times as fast the exchange must be predicted to be; predictions are no better than that."""
ATTENTION = 0.4
"""The share of the peak that causal attention reaches forward, played on v6e. On v5e it is more, and hides less."""


@dataclasses.dataclass(frozen=True)
class Block:
    """The sizes of an attention block on one device."""

    batch: int  # sequences
    rows: int  # this device's rows of each
    features: int  # of input and output
    inputs: int  # the features of the queries, keys and values of this device's heads
    out: int  # the features of the queries of this device's heads


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
    attended = ring * b * r * (block.inputs + block.out)
    transposed = 2 * 2 * (attended + block.inputs * k + b * r * k) * itemsize  # bytes, with those of the gradients
    keep = ring * block.inputs * k * itemsize <= gathered_bytes
    exposed = _exposed_seconds(block, chip, ring, itemsize, keep)
    return travelling_rows / (travelling_weights + exposed + transposed / hbm(chip))


def _exposed_seconds(block: Block, chip: Chip, ring: int, itemsize: int, keep: bool) -> float:
    """Returns the seconds in which the exchanges have nothing beside them, forward and backward."""

    def one_sequence(features: int) -> float:  # over the middle of a ring go ring**2 / 4 blocks each way, on two links
        return hop_seconds(chip, ring**2 / 4 * features * block.rows * itemsize, 2)

    batch, inputs, out = block.batch, block.inputs, block.out
    first, last = one_sequence(inputs), one_sequence(out)
    middle = (batch - 1) * (first + last)
    attention = 2 * 2 * batch * out * (ring * block.rows) ** 2 / 2 / (ATTENTION * chip.flops)
    products = 2 * batch * ring * block.rows * block.features / chip.flops  # for each of the features of a weight
    hidden = {
        "projection": (first, products * inputs / batch if batch > 1 else 0.0),
        "heads of the output": (last, 0.0),
        "dout": (last, products * out),
        "dx": (first, products * inputs * (batch - 1) / batch if keep else 0.0),
        "attention": (middle, attention),
        "gradient of attention": (middle, 2 * attention),
    }
    return sum(max(0.0, exchange - beside) for exchange, beside in hidden.values())
