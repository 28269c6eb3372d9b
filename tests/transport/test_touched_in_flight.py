"""What XLA does to buffers that a program touches between start and done, and what the audit finds
(docs/async.md).
"""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import flaxasync as fa
from flaxasync import check, transport
from tests.transport.forms import AXIS, FORMS, add, compile_form, done, faults, start

HOPS = 7


def untied(x):
    """The staggered loop of value futures with the returned x and two turns, that reads x without a
    tie.
    """

    def turn(_, carry):
        x, future, seen = carry
        seen = seen + x
        return *start(done(x, future)), seen

    x, future, seen = lax.fori_loop(0, HOPS - 1, turn, (*start(x), jnp.zeros_like(x)), unroll=2)
    seen = seen + x
    return done(x, future), seen


def untied_refs(x):
    """Two Refs that swap roles, one of which is read without a tie."""
    x_ref, y_ref = jax.new_ref(x), jax.new_ref(jnp.zeros_like(x))

    def hop(sems, seen, here, there):
        seen = add(here[...], seen)
        fa.ppermute_done_stateful(*sems, here, there)
        return fa.ppermute_start_stateful(there, here, AXIS), seen

    def two_hops(_, carry):
        return hop(*hop(*carry, x_ref, y_ref), y_ref, x_ref)

    carry = fa.ppermute_start_stateful(x_ref, y_ref, AXIS), jnp.zeros_like(x)
    sems, seen = lax.fori_loop(0, HOPS // 2, two_hops, carry)
    seen = add(x_ref[...], seen)
    fa.ppermute_done_stateful(*sems, x_ref, y_ref)
    return y_ref[...], seen


def untied_copies(x):
    """A loop of copies within the device."""

    def turn(_, carry):
        x, future, seen = carry
        seen = seen + x
        return *transport.copy_start(transport.copy_done(x, future)), seen

    x, future, seen = lax.fori_loop(
        0, HOPS - 1, turn, (*transport.copy_start(x), jnp.zeros_like(x)), unroll=2
    )
    return transport.copy_done(x, future), seen


@pytest.mark.parametrize(
    "topology",
    [
        "v5e:2x2",
        *(pytest.param(t, marks=pytest.mark.slow) for t in ("v6e:2x4", "v5p:2x2x2", "tpu7x:2x2x1")),
    ],
)
def test_a_loop_that_reads_its_block_without_a_tie_is_copied_in_flight(topology):
    program = compile_form(untied, topology)
    assert "copied" in faults(program, pairs=3)
    (found,) = (f for f in check.audit(program).findings if f.code == "in-flight-copied")
    assert "the source buffer" in found.message
    assert "is copied before" in found.message
    tied = compile_form(lambda x: FORMS["staggered"].run(x, HOPS), topology)
    assert faults(tied, pairs=3) == set()


@pytest.mark.parametrize("form", [untied_refs, untied_copies])
def test_other_loops_that_read_their_block_without_a_tie(form):
    assert "in-flight-copied" in check.audit(compile_form(form)).codes()


def test_a_loop_of_one_turn_is_no_loop():
    """`fori_loop` writes it out, so that no carry forces a copy, and ties decide as they do
    anywhere.
    """

    def one_turn(x):
        return done(*lax.fori_loop(0, 1, lambda _, carry: start(done(*carry)), start(x), unroll=2))

    program = compile_form(one_turn)
    assert " while(" not in program.text
    assert not faults(program, pairs=2) & {"copied", "deleted", "unsafe", "vmem"}


@pytest.mark.slow
@pytest.mark.parametrize("hops", [1, 2, 3, 4])
def test_few_turns(hops):
    assert (
        faults(compile_form(lambda x: FORMS["staggered"].run(x, hops)), pairs=min(hops, 3))
        - {"deleted"}
        == set()
    )


def refs(act):
    """Returns a program that does something with two Refs between start and done."""

    def f(x):
        x_ref, y_ref = jax.new_ref(x * 2), jax.new_ref(jnp.zeros_like(x))
        sems = fa.ppermute_start_stateful(x_ref, y_ref, AXIS)
        read = act(x_ref, y_ref)
        fa.ppermute_done_stateful(*sems, x_ref, y_ref)
        return x_ref[...], y_ref[...], x if read is None else read

    return f


def slots(act):
    def f(x):
        ref = jax.new_ref(jnp.stack([x, jnp.zeros_like(x)]))
        sems = fa.ppermute_start_slots(ref, 0, AXIS)
        read = act(ref)
        fa.ppermute_done_slots(*sems, ref)
        return ref[0], ref[1], x if read is None else read

    return f


def value(act):
    """Returns a program that gives something else than the returned x to the done, or reads
    something else.
    """

    def f(x):
        old = x * 2
        x, future = start(old)
        x, read = act(old, x, future)
        return done(x, future), read

    return f


def write(ref, index=...):
    ref[index] += 1


ERROR, WARNING, INFO = check.Severity.ERROR, check.Severity.WARNING, check.Severity.INFO


@pytest.mark.parametrize(
    ("form", "found"),
    [
        (refs(lambda x_ref, y_ref: write(x_ref)), {("in-flight-freed", ERROR)}),
        (refs(lambda x_ref, y_ref: write(x_ref, slice(8))), {("in-flight-freed", ERROR)}),
        (
            refs(lambda x_ref, y_ref: write(y_ref)),
            {("in-flight-freed", ERROR), ("in-flight-read", WARNING)},
        ),
        (refs(lambda x_ref, y_ref: x_ref[...] * 2), set()),
        (refs(lambda x_ref, y_ref: y_ref[...] * 2), {("in-flight-read", WARNING)}),
        (slots(lambda ref: write(ref, 0)), {("in-flight-freed", ERROR), ("in-flight-read", INFO)}),
        (slots(lambda ref: ref[1] * 2), {("in-flight-read", INFO)}),
        (value(lambda old, x, future: (x, future.buffer * 2)), {("in-flight-read", ERROR)}),
        (value(lambda old, x, future: (x, old + 1)), set()),
        (value(lambda old, x, future: (old, x)), {("in-flight-freed", ERROR)}),
        (value(lambda old, x, future: (x + 1, x)), {("in-flight-freed", ERROR)}),
        (value(lambda old, x, future: (x.at[:8].set(1), old)), {("in-flight-freed", ERROR)}),
    ],
)
def test_what_the_audit_finds_of_a_touched_buffer(form, found):
    report = check.audit(compile_form(form))
    assert {
        (f.code, f.severity) for f in report.findings if f.code.startswith("in-flight")
    } == found
    assert report.ok == (ERROR not in {severity for _, severity in found})
