"""The predicted gain of attention blocks whose weights and heads travel: against played programs, and its parts."""

import pytest

from flaxasync.hardware import chip
from flaxasync.ops.costs.exchanged import WORTH, Block, times_as_fast


def block(ring: int, batch: int, rows: int, width: int) -> Block:
    """Returns the block of benchmarks/plan_layers.py with all of its rows and features."""
    out = width // ring
    return Block(batch, rows // ring, width, out + 2 * 8 * 128 // ring, out)


@pytest.mark.parametrize(
    ("name", "ring", "sizes", "rows_ms", "heads_ms"),
    [
        ("v5e", 4, (4, 1024, 2048), 1.1241, 1.1943),
        ("v5e", 8, (1, 2048, 3072), 0.8341, 1.9925),
        ("v6e", 4, (4, 2048, 3072), 1.8880, 1.7028),
        ("v6e", 8, (4, 1024, 2048), 0.5341, 0.6705),
    ],
)
def test_the_faster_form_of_played_blocks_is_predicted(name, ring, sizes, rows_ms, heads_ms):
    """Played with backend="fused" and without memory for gathered rows, by benchmarks/plan_layers.py."""
    predicted = times_as_fast(block(ring, *sizes), chip(name), ring, 2)
    assert (predicted >= WORTH) == (rows_ms > heads_ms)


def test_memory_serves_both_forms():
    """Kept rows spare one trip of four, and kept weights a trip and the wait for the last departure."""
    some, sizes = chip("v5e"), block(8, 2, 2048, 4096)
    rows_kept = 8 * sizes.batch * sizes.rows * sizes.features * 2
    weights_kept = 8 * sizes.inputs * sizes.features * 2
    assert rows_kept < weights_kept
    without, rows_only, both = (times_as_fast(sizes, some, 8, 2, n) for n in (0, rows_kept, weights_kept))
    assert rows_only < without
    assert both > rows_only


def test_more_sequences_hide_more_of_the_exchange():
    v6e = chip("v6e")
    found = [times_as_fast(block(4, batch, 4096, 4096), v6e, 4, 2) for batch in (1, 2, 4)]
    assert found == sorted(found)
    assert found[0] < 1 < found[-1]
