"""The gate on a training step of plain JAX, compiled for a TPU: planted regressions, and changes
that do not matter.
"""

import functools

import pytest

from flaxasync.check import compare, summarize
from tests.check.gate import plain_step

pytestmark = pytest.mark.slow  # each program takes 10 s to compile


@functools.cache
def summary(plant: str = ""):
    return summarize(plain_step.compiled(plant))


def test_the_step_has_overlap_to_lose():
    gather = "all-gather over data (forward loop)"
    before, after = (summary(plant).rows for plant in ("", "overlap"))
    assert before[f"transfers: {gather}"].amount == after[f"transfers: {gather}"].amount > 0
    waits = f"seconds of waiting: {gather}"
    assert before[waits].amount < 0.75 * after[waits].amount


def test_recompiling_renaming_and_reordering_change_nothing():
    assert compare(summary(), summary("renamed")).changes == ()


@pytest.mark.parametrize(
    ("plant", "kind", "words"),
    [
        ("overlap", "more seconds of waiting", "all-gather over data (forward loop)"),
        ("gather", "more transfers", "all-gather over model (forward loop)"),
        ("copy", "more loop-copies", "on every iteration (forward loop)"),
        ("dtype", "more transfers", "over data (backward loop)"),
        ("callback", "more host callbacks", "jax.debug.print (forward loop)"),
    ],
)
def test_a_planted_regression_is_named_with_its_line(plant, kind, words):
    comparison = compare(summary(), summary(plant))
    found = [c for c in comparison.changes if c.kind == kind and words in c.text and c.worse]
    assert len(found) == 1, str(comparison)
    assert plain_step.line_of(plant) in found[0].sources
