"""Every form in compiled TPU programs; and broken forms, which the same checks notice."""

import functools
import itertools
import re

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import flaxasync as fa
from flaxasync import check, transport
from flaxasync.mesh import cast_to_varying
from flaxasync.transport.pallas import FutureChannel
from tests.check.programs import async_form
from tests.transport.forms import DEVICES, FORMS, compile_form, done, faults, start

HOPS, SLOW = 7, pytest.mark.slow


CASES = []
for (i, name), (k, topology) in itertools.product(enumerate(FORMS), enumerate(DEVICES)):
    # Each form has blocks of 2 MiB at distance 0 and of 32 MiB at distance 1. `make test` has each
    # form and each topology once or more, and every other form has the larger blocks.
    distance = (k - i) % len(DEVICES)
    if distance < 2:
        marks = [] if distance == i % 2 else SLOW
        CASES.append(pytest.param(name, topology, (1024, 16384)[distance], marks=marks))


@pytest.mark.parametrize(("name", "topology", "rows"), CASES)
def test_every_form(name, topology, rows):
    program = compile_form(lambda x: tuple(FORMS[name].run(x, HOPS)), topology, rows=rows)
    assert faults(program, pairs=FORMS[name].pairs(HOPS, DEVICES[topology])) == set()


@pytest.mark.slow
@pytest.mark.parametrize("topology", ["v5e:2x2", "tpu7x:2x2x1"])
def test_hlo_only_is_the_same_hlo(topology):
    """The tests of this folder compile what a TPU would run, except for the code of the fusions."""

    def compile_both(x):
        return FORMS["reduce_pallas_2"].run(x, HOPS), FORMS["staggered_both"].run(x, HOPS)

    quick, whole = (
        compile_form(compile_both, topology, compiler_options=o) for o in (check.HLO_ONLY, {})
    )
    texts = [
        re.sub(r'"used_scoped_memory_configs":\[.*?\]', "", program.text)
        for program in (quick, whole)
    ]
    assert texts[0] == texts[1]
    assert quick.cost == whole.cost
    different = {kind for kind in whole.memory if quick.memory[kind] != whole.memory[kind]}
    # an empty set would mean that libtpu has changed the option
    assert different == {"generated_code_size_in_bytes"}


@pytest.mark.parametrize("name", ["staggered", pytest.param("one_after_another", marks=SLOW)])
def test_an_even_number_of_hops_and_auto_axes(name):
    hops = HOPS - 1
    program = compile_form(lambda x: tuple(FORMS[name].run(x, hops)), axis_type=AxisType.Auto)
    assert faults(program, pairs=FORMS[name].pairs(hops, 4)) == set()


@pytest.mark.parametrize(
    ("backend", "axis_type"),
    [("pallas", AxisType.Explicit), pytest.param("stateful", AxisType.Auto, marks=SLOW)],
)
def test_on_one_axis_of_two(backend, axis_type):
    """A ring finds its neighbours on a mesh of two axes too."""
    mesh = check.topology_mesh("v5e:2x4", (2, 4), ("data", "model"), axis_types=(axis_type,) * 2)
    rows, columns = P("data", "model", None), P(None, "model")
    with jax.set_mesh(mesh):
        x = jax.ShapeDtypeStruct((2, 4096, 1024), jnp.bfloat16, sharding=NamedSharding(mesh, rows))
        w = jax.ShapeDtypeStruct((1024, 4096), jnp.bfloat16, sharding=NamedSharding(mesh, columns))
        multiply = functools.partial(fa.all_gather_matmul, axis_name="model", backend=backend)
        mapped = jax.shard_map(
            multiply, in_specs=(rows, columns), out_specs=P("data", None, "model")
        )
        program = check.compile_for(
            "v5e:2x4", jax.jit(mapped), x, w, compiler_options=check.HLO_ONLY
        )
    assert faults(program, pairs=2 * 3) == set()  # two directions, three hops


@pytest.mark.slow
def test_a_dot_in_the_window_writes_straight_into_its_rows():
    """An all-gather-matmul of large blocks has only products between its kernels, and no copy of
    the output.
    """

    def f(x):
        w = cast_to_varying(jnp.ones((1024, 1024), x.dtype), {"x"})
        return fa.all_gather_matmul(x, w, "x", backend="pallas", directions=2)

    program = compile_form(f, "v5e:2x4", rows=16384)
    assert faults(program, pairs=10) == set()
    instructions = [
        i for c in check.parse(program.as_text()).computations.values() for i in c.instructions
    ]
    assert not [
        i
        for i in instructions
        if i.opcode.startswith("copy") and i.shape.bytes >= 8 * 16384 * 1024 * 2
    ]
    # two buffers of the block, not a gathered x
    assert program.bytes_by_kind["temporaries"] < 3 * 16384 * 1024 * 2


# ---- negative tests -------------------------------------------------------------------------------------------------


def one_turn(x):
    """A loop of a single turn. With `unroll=2` JAX writes it without a loop
    (test_touched_in_flight.py).
    """
    return done(*lax.fori_loop(0, 1, lambda _, carry: start(done(*carry)), start(x), unroll=1))


@pytest.mark.parametrize(("form", "pairs", "found"), [
    ("staggered_unroll_1", 2, {"copied", "unsafe"}),
    (one_turn, 3, {"copied"}),
    ("any_outputs", 3, {"vmem", "unsafe"}),
    ("unthreaded", 1, {"deleted"}),
])  # fmt: skip
def test_a_wrong_form_has_its_fault(form, pairs, found):
    # of `tests/check/async_forms.py`
    program = compile_form(form) if callable(form) else async_form(form)
    assert found <= faults(program, pairs=pairs)


def ours(x_ref, y_ref):
    transport.ppermute_done_stateful(
        *transport.ppermute_start_stateful(x_ref, y_ref, "x"), x_ref, y_ref
    )


def test_our_stateful_pair_is_kept_where_nobody_needs_it():
    def once_and_in_a_loop(x):
        def there_and_back(_, carry):
            ours(x_ref, y_ref)
            ours(y_ref, x_ref)
            return carry

        ours(jax.new_ref(x), jax.new_ref(jnp.zeros_like(x)))
        x_ref, y_ref = jax.new_ref(x), jax.new_ref(jnp.zeros_like(x))
        lax.fori_loop(0, 4, there_and_back, 0)
        return x + 1

    assert not {"deleted", "copied", "vmem", "unsafe"} & faults(
        compile_form(once_and_in_a_loop), pairs=1 + 2
    )


def test_windows_that_are_not_tied_are_moved_out():
    """Three hops in a row each have compute of their own to hide behind; without ties, some windows
    end up empty.
    """

    def products(tie):
        def f(x):
            seen, hold = (
                jnp.zeros_like(x),
                transport.while_travelling if tie else lambda x, add, *a: (x, add(*a)),
            )
            for _ in range(3):
                x, future = start(x)
                x, seen = hold(x, lambda x, seen: seen + jnp.tanh(x), x, seen)
                x = done(x, future)
            return x, seen

        return f

    assert "order" in faults(compile_form(products(tie=False)), pairs=3)
    assert faults(compile_form(products(tie=True)), pairs=3) == set()


@pytest.mark.slow
@pytest.mark.parametrize("op", ["all_gather_matmul", "matmul_reduce_scatter"])
def test_without_its_ties_the_loop_hides_less(op, monkeypatch):
    def f(x):
        x = jnp.concatenate([x] * 8) if op == "matmul_reduce_scatter" else x
        w = cast_to_varying(jnp.ones((1024, 1024), x.dtype), {"x"})
        return getattr(fa, op)(x, w, "x", backend="pallas", directions=1)

    assert faults(compile_form(f, "v5e:2x4"), pairs=5) == set()
    monkeypatch.setattr(FutureChannel, "tie", lambda self, state, values: (state, values))
    assert faults(compile_form(f, "v5e:2x4"), pairs=5) == {"order"}
