"""Every transport of the package in one compiled program: it is read as jaxlib reads it, and found safe."""

import functools

import jax
import pytest

from flaxasync.check import audit, format_module, parse
from tests.check.jaxlib_counts import counts, counts_of_jaxlib
from tests.transport.compiled import compile_form
from tests.transport.forms import FORMS
from tests.transport.test_jax_scenarios import SCENARIOS

HOPS = 7
FUTURES = ("gather_pallas_2",)
REFS = ("swap", "reduce_stateful_2")
LOCAL = ("multiple_copies", "two_dynamic_slices", "stateful_copies")
SHARED = ("remote_copies",)  # it sends one source in two transfers
STARTS = ("ppermute_start", "ppermute_stateful_start", "copy_start", "slice_start")


@functools.cache
def program():
    """Compiles all forms on one block of 2 MiB per device, for v5e:2x2."""

    def fn(x):
        rings = [FORMS[name].run(x, HOPS) for name in (*FUTURES, *REFS)]
        return jax.tree.leaves((rings, [SCENARIOS[name].run(x) for name in (*LOCAL, *SHARED)]))

    return compile_form(fn)


def test_it_is_read_as_jaxlib_reads_it():
    module = parse(program().text)
    assert counts_of_jaxlib([program().text]) == [counts(module)]
    assert parse(format_module(module)) == module


@pytest.mark.parametrize("start", STARTS)
def test_its_pairs_are_found(start):
    pairs = [p for p in audit(program()).pairs if p.spelling == "kernel" and p.name.startswith(start)]
    assert pairs
    assert all(p.dones for p in pairs)


def test_it_is_safe():
    report = audit(program())
    assert report.ok, str(report)
