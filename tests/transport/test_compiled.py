"""Every form in compiled TPU programs; and broken forms, which the same checks notice."""

import functools
import itertools
import re

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import flaxasync as fa
from flaxasync import check, transport
from flaxasync.mesh import cast_to_varying
from flaxasync.transport.pallas import FutureChannel, enter, send, wait_sent_and_received
from tests.grids import sparse
from tests.transport.compiled import DEVICES, compile_form, faults
from tests.transport.forms import FORMS, done, start

HOPS = 7
CASES = sparse(FORMS, DEVICES, keep=lambda i, k: (k - i) % 5 < 2)


def rows_of(name, topology):
    """Returns the rows of a block of 2 MiB or of 32 MiB; each form has both of them in `make test`."""
    return (1024, 16384)[(list(DEVICES).index(topology) - list(FORMS).index(name)) % 5 % 2]


@pytest.mark.parametrize(("name", "topology"), CASES)
def test_every_form(name, topology):
    form, rows = FORMS[name], rows_of(name, topology)
    program = compile_form(lambda x: tuple(form.run(x, HOPS)), topology, rows=rows)
    assert faults(program, pairs=form.pairs(HOPS, DEVICES[topology])) == set()


def test_every_form_and_every_topology_has_both_sizes_of_blocks():
    """This holds for what `make test` runs alone, and so for all cases too."""
    kept = [case.values for case in CASES if not case.marks]
    for n, names in enumerate((FORMS, DEVICES)):
        covered = {(case[n], rows_of(*case)) for case in kept}
        assert covered == set(itertools.product(names, (1024, 16384)))


@pytest.mark.slow
@pytest.mark.parametrize("topology", DEVICES)
def test_hlo_only_is_the_same_hlo(topology):
    """The tests of this folder compile what a TPU would run, except for the code of the fusions."""

    def compile_both(x):
        return FORMS["reduce_pallas_2"].run(x, HOPS), FORMS["staggered_both"].run(x, HOPS)

    quick, whole = (compile_form(compile_both, topology, compiler_options=o) for o in (check.HLO_ONLY, {}))
    texts = [re.sub(r'"used_scoped_memory_configs":\[.*?\]', "", program.text) for program in (quick, whole)]
    assert texts[0] == texts[1]
    assert quick.cost == whole.cost
    different = {kind for kind in whole.memory if quick.memory[kind] != whole.memory[kind]}
    assert different == {"generated_code_size_in_bytes"}  # an empty set would mean that libtpu has changed the option


@pytest.mark.parametrize(("name", "hops", "axis_type"), [
    ("one_after_another", 6, AxisType.Explicit),
    ("staggered", 6, AxisType.Explicit),
    ("staggered", HOPS, AxisType.Auto),
])  # fmt: skip
def test_an_even_number_of_hops_and_auto_axes(name, hops, axis_type):
    program = compile_form(lambda x: tuple(FORMS[name].run(x, hops)), axis_type=axis_type)
    assert faults(program, pairs=FORMS[name].pairs(hops, 4)) == set()


@pytest.mark.parametrize(
    ("backend", "axis_type"),
    sparse(["pallas", "stateful"], [AxisType.Explicit, AxisType.Auto], keep=lambda backend, axes: backend == axes),
)
def test_on_one_axis_of_two(backend, axis_type):
    """A ring finds its neighbours on a mesh of two axes too."""
    mesh = check.topology_mesh("v5e:2x4", (2, 4), ("data", "model"), axis_types=(axis_type,) * 2)
    rows, columns = P("data", "model", None), P(None, "model")
    with jax.set_mesh(mesh):
        x = jax.ShapeDtypeStruct((4, 4096, 1024), jnp.bfloat16, sharding=NamedSharding(mesh, rows))
        w = jax.ShapeDtypeStruct((1024, 4096), jnp.bfloat16, sharding=NamedSharding(mesh, columns))
        multiply = functools.partial(fa.all_gather_matmul, axis_name="model", backend=backend)
        mapped = jax.shard_map(multiply, in_specs=(rows, columns), out_specs=P("data", None, "model"))
        program = check.compile_for("v5e:2x4", jax.jit(mapped), x, w, compiler_options=check.HLO_ONLY)
    assert faults(program, pairs=2 * 3) == set()  # two directions, three hops


def test_a_dot_in_the_window_writes_straight_into_its_rows():
    """An all-gather-matmul of large blocks has only products between its kernels, and no copy of the output."""

    def f(x):
        w = cast_to_varying(jnp.ones((1024, 1024), x.dtype), {"x"})
        return fa.all_gather_matmul(x, w, "x", backend="pallas", directions=2)

    program = compile_form(f, "v5e:2x4", rows=16384)
    assert faults(program, pairs=10) == set()
    instructions = [i for c in check.parse(program.as_text()).computations.values() for i in c.instructions]
    assert not [i for i in instructions if i.opcode.startswith("copy") and i.shape.bytes >= 8 * 16384 * 1024 * 2]
    assert program.bytes_by_kind["temporaries"] < 3 * 16384 * 1024 * 2  # two buffers of the block, not a gathered x


# ---- negative tests -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("turns", "pairs", "found"), [
    (8, 2, {"copied", "unsafe"}),
    # `staggered_loop` writes out a single turn, because `unroll=2` does not alter the one of a ring of four.
    (1, 3, {"copied"}),
])  # fmt: skip
def test_a_future_in_a_body_of_one_turn_is_copied_in_flight(turns, pairs, found):
    def f(x):
        return done(*lax.fori_loop(0, turns, lambda _, carry: start(done(*carry)), start(x), unroll=1))

    assert found <= faults(compile_form(f), pairs=pairs)


def permute_anywhere(x):
    """A permute with `pl.ANY` outputs, as it is usually written."""
    anywhere, sem = pl.BlockSpec(memory_space=pl.ANY), pl.BlockSpec(memory_space=pltpu.SEMAPHORE)
    like, dma = jax.ShapeDtypeStruct.like(x), pltpu.SemaphoreType.DMA(())

    def start(x_ref, send_sem, recv_sem, _, y_ref):
        enter("x", 1)
        send(x_ref, y_ref, send_sem, recv_sem, "x", 1)

    def done(x_ref, y_ref, send_sem, recv_sem, _):
        wait_sent_and_received(x_ref, y_ref, send_sem, recv_sem)

    params = pltpu.CompilerParams(has_side_effects=True)
    *sems, x, y = pl.pallas_call(
        start, in_specs=[anywhere], out_specs=(sem, sem, anywhere, anywhere), out_shape=(dma, dma, like, like),
        input_output_aliases={0: 2}, compiler_params=params, name="ppermute_start",
    )(x)  # fmt: skip
    return pl.pallas_call(
        done, in_specs=[anywhere, anywhere, sem, sem], out_specs=anywhere, out_shape=like,
        input_output_aliases={1: 0}, compiler_params=params, name="ppermute_done",
    )(x, y, *sems)  # fmt: skip


@pytest.mark.parametrize("rows", [1024, 16384])
def test_outputs_given_as_any_land_in_vmem(rows):
    assert {"vmem", "unsafe"} <= faults(compile_form(lambda x: permute_anywhere(x + 1) + 1, rows=rows), pairs=1)


def unthreaded(x_ref, y_ref):
    """A stateful pair on closed-over Refs that declares side effects, and is still removed."""
    sem = pl.BlockSpec(memory_space=pltpu.SEMAPHORE)
    neighbours = jnp.stack([(lax.axis_index("x") + step) % lax.axis_size("x") for step in (-1, 1)])
    params = pltpu.CompilerParams(has_side_effects=True)

    def start(neighbour_ref, send_sem, recv_sem):
        barrier = pltpu.get_barrier_semaphore("test")
        pl.semaphore_signal(barrier, device_id={"x": neighbour_ref[0]})
        pl.semaphore_wait(barrier, 1)
        pallas_send = pltpu.make_async_remote_copy(x_ref, y_ref, send_sem, recv_sem, device_id={"x": neighbour_ref[1]})
        pallas_send.start()

    sems = pl.pallas_call(
        start,
        grid_spec=pltpu.PrefetchScalarGridSpec(num_scalar_prefetch=1, in_specs=[], out_specs=(sem, sem)),
        out_shape=(pltpu.SemaphoreType.DMA(()),) * 2, compiler_params=params, name="ppermute_start",
    )(neighbours)  # fmt: skip
    pl.pallas_call(
        lambda *sems: wait_sent_and_received(x_ref, y_ref, *sems), in_specs=[sem, sem], out_shape=(),
        compiler_params=params, name="ppermute_done",
    )(*sems)  # fmt: skip


def ours(x_ref, y_ref):
    transport.ppermute_done_stateful(*transport.ppermute_start_stateful(x_ref, y_ref, "x"), x_ref, y_ref)


def unused_loop(hop):
    def f(x):
        x_ref, y_ref = jax.new_ref(x), jax.new_ref(jnp.zeros_like(x))

        def there_and_back(_, carry):
            hop(x_ref, y_ref)
            hop(y_ref, x_ref)
            return carry

        lax.fori_loop(0, 4, there_and_back, 0)
        return x + 1

    return f


def test_an_unthreaded_stateful_pair_is_deleted():
    program = compile_form(unused_loop(unthreaded))
    assert "deleted" in faults(program, pairs=2)
    assert "tpu_custom_call" not in program.as_text()


def test_our_stateful_pair_is_kept_where_nobody_needs_it():
    def once(x):
        ours(jax.new_ref(x), jax.new_ref(jnp.zeros_like(x)))
        return x + 1

    for form, pairs in ((unused_loop(ours), 2), (once, 1)):
        assert not {"deleted", "copied", "vmem", "unsafe"} & faults(compile_form(form), pairs=pairs)


def test_windows_that_are_not_tied_are_moved_out():
    """Three hops in a row each have compute of their own to hide behind; without ties, some windows end up empty."""

    def products(tie):
        def f(x):
            seen, hold = jnp.zeros_like(x), transport.while_travelling if tie else lambda x, add, *a: (x, add(*a))
            for _ in range(3):
                x, future = start(x)
                x, seen = hold(x, lambda x, seen: seen + jnp.tanh(x), x, seen)
                x = done(x, future)
            return x, seen

        return f

    assert "order" in faults(compile_form(products(tie=False)), pairs=3)
    assert faults(compile_form(products(tie=True)), pairs=3) == set()


@pytest.mark.parametrize("op", ["all_gather_matmul", pytest.param("matmul_reduce_scatter", marks=pytest.mark.slow)])
def test_without_its_ties_the_loop_hides_less(op, monkeypatch):
    def f(x):
        x = jnp.concatenate([x] * 8) if op == "matmul_reduce_scatter" else x
        w = cast_to_varying(jnp.ones((1024, 1024), x.dtype), {"x"})
        return getattr(fa, op)(x, w, "x", backend="pallas", directions=1)

    assert faults(compile_form(f, "v5e:2x4"), pairs=5) == set()
    monkeypatch.setattr(FutureChannel, "tie", lambda self, state, values: (state, values))
    assert faults(compile_form(f, "v5e:2x4"), pairs=5) == {"order"}
