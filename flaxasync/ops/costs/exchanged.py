"""Is an attention block faster if weights and heads travel instead of rows? See `flaxasync.ops.attention.exchanged`.

Both forms have the same attention. The products and trips of either are those of collective matmuls, as `plan`
predicts them: with rows that travel, one all-gather-matmul and one matmul-reduce-scatter; with weights that travel, two
all-gather-matmuls of the weights. What may be kept is kept in both.

Beside those, the second form takes what its exchanges do not hide and what its transposes move. Attention hides the
exchanges of all sequences but the first arrival and the last departure, if it takes as long. The projection of the last
sequence hides the first arrival, and backward the product of dout does; the products of dx hide the last departure of
the backward pass where the gathered weights were kept. Between
products, whose rows are features, and attention, whose rows are positions, XLA transposes the inputs and results of
attention, w and y, and their gradients.
"""

import dataclasses
from typing import Any

from flaxasync.hardware import Chip
from flaxasync.ops.costs.cost import hop_seconds
from flaxasync.ops.plan import plan

WORTH = 1.05
"""How many times as fast the exchange must be predicted to be; predictions are no better than that."""
ATTENTION = 0.4
"""The share of the peak that the attention kernel reaches with the causal half of the scores, forward; played on v6e.
On v5e it reaches more, and hides less."""


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
    """Predicts the time of a block whose rows travel divided by that of one whose heads travel, with the gradients.

    Attention is left out of both, as far as it does not hide the exchange.

    Args:
      block: The sizes.
      chip: The chip.
      ring: The number of devices.
      itemsize: The bytes of an element.
      gathered_bytes: The bytes that either form may take for what it gathers: rows, or the weights of the inputs.
    """
    b, r, k = block.batch, block.rows, block.features
    options: Any = {"chip": chip, "ring": ring, "itemsize": itemsize}
    rows = [
        plan("all_gather_matmul", (b, r, k), (k, block.inputs), gathered_bytes=gathered_bytes, **options),
        plan("matmul_reduce_scatter", (b, ring * r, block.out), (block.out, k), **options),
    ]
    keep = ring * block.inputs * k * itemsize <= gathered_bytes
    weights = [
        plan("all_gather_matmul", (n, k), (k, b * r), gathered_bytes=most, **options)
        for n, most in ((block.inputs, gathered_bytes), (block.out, 0))
    ]
    travelling_rows, travelling_weights = (sum(p.seconds[p.backend] for p in plans) for plans in (rows, weights))
    exposed, transposed = _exposed(block, chip, ring, itemsize, keep), _transposed(block, chip, ring, itemsize)
    return travelling_rows / (travelling_weights + exposed + transposed)


def _exposed(block: Block, chip: Chip, ring: int, itemsize: int, keep: bool) -> float:
    """Returns the seconds in which the exchanges have nothing beside them, forward and backward."""
    first, last = (_sequence(n, block.rows, chip, ring, itemsize) for n in (block.inputs, block.out))
    middle, attention = _exchange(block, chip, ring, itemsize) - first - last, _attention(block, chip, ring)
    products = 2 * block.batch * ring * block.rows * block.features / chip.flops
    ends = [max(0.0, first - products * block.inputs / block.batch) if block.batch > 1 else first, last]
    ends.append(max(0.0, last - products * block.out))
    ends.append(max(0.0, first - products * block.inputs * (block.batch - 1) / block.batch) if keep else first)
    return sum(ends) + sum(max(0.0, middle - part) for part in (attention, 2 * attention))


def _transposed(block: Block, chip: Chip, ring: int, itemsize: int) -> float:
    """Returns the seconds in which all transposes of a block and its gradients read and write HBM."""
    rows = block.batch * block.rows
    attended = ring * rows * (block.inputs + block.out)
    elements = attended + block.inputs * block.features + rows * block.features
    return 2 * 2 * elements * itemsize / (chip.hbm_bandwidth * chip.hbm_efficiency)


def _exchange(block: Block, chip: Chip, ring: int, itemsize: int) -> float:
    """Returns the seconds in which all sequences of a batch go there and back."""
    both = (_sequence(n, block.rows, chip, ring, itemsize) for n in (block.inputs, block.out))
    return block.batch * sum(both)


def _sequence(features: int, rows: int, chip: Chip, ring: int, itemsize: int) -> float:
    """Returns the seconds of the exchange of one sequence.

    Over the middle of a ring of R devices, each of which sends a block to each other one, R**2 / 4 blocks go in either
    direction. They have two links.
    """
    return hop_seconds(chip, ring**2 / 4 * features * rows * itemsize, 2)


def _attention(block: Block, chip: Chip, ring: int) -> float:
    """Returns the seconds of causal attention forward."""
    length = ring * block.rows
    return 2 * 2 * block.batch * block.out * length**2 / 2 / (ATTENTION * chip.flops)
