"""The gate on a training step of plain JAX, compiled for a TPU: planted regressions, and changes
that do not matter.
"""

import functools

import pytest

from flaxasync.check import Row, compare, summarize
from tests.check.gate import plain_step

pytestmark = pytest.mark.slow  # each program takes 10 s to compile


@functools.cache
def summary(plant: str = ""):
    return summarize(plain_step.compiled(plant))


def test_the_step_has_overlap_to_lose():
    gathers = Row(
        "all-gather", "forward loop", "data", "bf16", plain_step.WIDTH * plain_step.HIDDEN // 4 * 2
    )
    before, after = (summary(plant).transfers[gathers] for plant in ("", "overlap"))
    assert before.count == after.count == 3
    assert before.exposed < 0.75 * after.exposed


def test_recompiling_renaming_and_reordering_change_nothing():
    assert compare(summary(), summary("renamed")).changes == ()


@pytest.mark.parametrize(
    ("plant", "kind", "words"),
    [
        ("overlap", "lost overlap", "3 all-gathers of 2 MiB over data in the forward loop"),
        ("gather", "extra transfer", "1 more all-gather of 8 MiB over model in the forward loop"),
        ("copy", "extra copy in a loop", "copies of 2 MiB in the forward loop"),
        (
            "dtype",
            "wider dtype",
            "over data in the backward loop is f32 on the wire, bf16 in the baseline",
        ),
        ("callback", "extra host callback", "1 more jax.debug.print in the forward loop"),
    ],
)
def test_a_planted_regression_is_named_with_its_line(plant, kind, words):
    comparison = compare(summary(), summary(plant))
    found = [c for c in comparison.changes if c.kind == kind and words in c.text and c.worse]
    assert len(found) == 1, str(comparison)
    assert plain_step.line_of(plant) in found[0].sources
