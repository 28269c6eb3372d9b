"""Scenarios of JAX's own tests of asynchronous Pallas operations, simulated and compiled without a
TPU.

After `tests/pallas/tpu_pallas_async_test.py` of the JAX repository, whose tests skip themselves
where there is no TPU.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from flaxasync import check
from flaxasync.transport import (
    Pair,
    copy_done,
    copy_start,
    done_kernel,
    ppermute_done_stateful,
    ppermute_start_stateful,
    slice_done,
    slice_start,
    start_kernel,
    while_travelling,
)
from tests.transport.forms import compile_form, done, kernels, start
from tests.transport.test_simulated import on_ring


@dataclasses.dataclass(frozen=True)
class Scenario:
    run: Callable  # block [rows, columns] -> results
    expect: Callable  # blocks of all devices [R, rows, columns] -> their results
    pairs: int  # how many pairs of kernels the compiled program has


def planes(x):
    return x.reshape(4, -1, x.shape[-1])


def multiple_copies(x):
    x, first = copy_start(x)
    x, second = copy_start(x)
    return copy_done(x, first), copy_done(x, second)


def static_slice(x):
    return slice_done(*slice_start(planes(x), 2))


def two_dynamic_slices(x):
    x, first = slice_start(planes(x), lax.axis_index("x"))
    x, second = slice_start(x, 3 - lax.axis_index("x"))
    return slice_done(x, first), slice_done(x, second)


def copy_into_vmem(x):
    return copy_done(*copy_start(x[:16], memory_space=pltpu.VMEM))


def staggered_copy_in_a_loop(x):
    return copy_done(
        *lax.fori_loop(0, 7, lambda _, c: copy_start(copy_done(*c)), copy_start(x), unroll=2)
    )


def staggered_full_copy_in_a_loop(x):
    x = planes(x)

    def turn(i, carry):
        x, future, y = carry
        y = y.at[i].set(slice_done(x, future))
        return *slice_start(x, i + 1), y

    x, future, y = lax.fori_loop(0, 3, turn, (*slice_start(x, 0), jnp.zeros_like(x)), unroll=2)
    return y.at[3].set(slice_done(x, future)).reshape(-1, x.shape[-1])


def remote_copies(x):
    x, right = start(x)
    x, left = start(x, shift=-1)
    return done(x, right), done(x, left)


def _begin(x_ref, y_ref, sem):
    pltpu.make_async_copy(x_ref, y_ref, sem).start()


def _wait(x_ref, y_ref, sem):
    pltpu.make_async_copy(x_ref, y_ref, sem).wait()


def stateful_copies(x):
    """A user-defined pair on Refs: two copies of one Ref are under way at once."""
    refs = [jax.new_ref(x), jax.new_ref(jnp.zeros_like(x)), jax.new_ref(jnp.zeros_like(x))]

    def begin(to):
        sems, (refs[0][...], refs[to][...]), _ = start_kernel(
            "copy_start", _begin, (refs[0][...], refs[to][...])
        )
        return sems

    sems = begin(1), begin(2)
    for to in (1, 2):
        contents = (refs[0][...], refs[to][...])
        refs[0][...], refs[to][...] = done_kernel(
            "copy_done", _wait, contents, sems[to - 1], returned=(0, 1)
        )
    return refs[1][...], refs[2][...]


LAST = Pair(
    "last",
    lambda x_ref, y_ref, sem: pltpu.make_async_copy(x_ref.at[3], y_ref, sem).start(),
    lambda x_ref, y_ref, sem: pltpu.make_async_copy(x_ref.at[3], y_ref, sem).wait(),
    out=lambda x: x[3],
)


def pair_of_ones_own(x):
    return LAST.done(*LAST.start(planes(x)))


def _begin_two(x_ref, w_ref, y_ref, row_ref, x_sem, w_sem):
    pltpu.make_async_copy(x_ref, y_ref, x_sem).start()
    pltpu.make_async_copy(w_ref.at[1], row_ref, w_sem).start()


def _wait_for_two(x_ref, w_ref, y_ref, row_ref, x_sem, w_sem):
    pltpu.make_async_copy(x_ref, y_ref, x_sem).wait()
    pltpu.make_async_copy(w_ref.at[1], row_ref, w_sem).wait()


TWO = Pair(
    "two", _begin_two, _wait_for_two, out=lambda arrays: (arrays[0], arrays[1][1]), semaphores=2
)


def several_arrays_in_and_out(x):
    """One pair copies x and a row of w. Its future passes through a loop."""

    def turn(_, carry):
        y, _ = TWO.done(*carry)
        return TWO.start((y, planes(y)))

    arrays, future = lax.fori_loop(0, 4, turn, TWO.start((x, planes(x))), unroll=2)
    arrays, doubled = while_travelling(arrays, lambda arrays: arrays[0] * 2, arrays)
    return *TWO.done(arrays, future), doubled


def scoped_by_run_state(x):
    """The two Refs live as long as the function that `run_state` calls."""

    @pl.run_state
    def there_and_back(refs):
        x_ref, y_ref = refs
        ppermute_done_stateful(*ppermute_start_stateful(x_ref, y_ref, "x"), x_ref, y_ref)
        sems = ppermute_start_stateful(y_ref, x_ref, "x")
        ppermute_done_stateful(*sems, y_ref, x_ref)

    return there_and_back((x, jnp.zeros_like(x)))


def each(i):
    return lambda blocks: np.stack(
        [planes(block)[i(device)] for device, block in enumerate(blocks)]
    )


def rolled(shift):
    return lambda blocks: np.roll(blocks, shift, axis=0)


def same(blocks):
    return blocks


SCENARIOS = {
    "multiple_copies": Scenario(multiple_copies, lambda b: (b, b), 2),
    "static_slice": Scenario(static_slice, each(lambda device: 2), 1),
    "two_dynamic_slices": Scenario(
        two_dynamic_slices,
        lambda b: (each(lambda device: device)(b), each(lambda device: 3 - device)(b)),
        2,
    ),
    "copy_into_vmem": Scenario(copy_into_vmem, lambda b: b[:, :16], 1),
    "staggered_copy_in_a_loop": Scenario(staggered_copy_in_a_loop, same, 4),
    "staggered_full_copy_in_a_loop": Scenario(staggered_full_copy_in_a_loop, same, 4),
    "remote_copies": Scenario(remote_copies, lambda b: (rolled(1)(b), rolled(-1)(b)), 2),
    "stateful_copies": Scenario(stateful_copies, lambda b: (b, b), 2),
    "pair_of_ones_own": Scenario(pair_of_ones_own, each(lambda device: 3), 1),
    "several_arrays_in_and_out": Scenario(
        several_arrays_in_and_out, lambda b: (b, each(lambda device: 1)(b), 2 * b), 3
    ),
    "scoped_by_run_state": Scenario(scoped_by_run_state, lambda b: (rolled(2)(b), rolled(1)(b)), 2),
}


@pytest.mark.parametrize("name", SCENARIOS)
def test_simulated(name):
    scenario = SCENARIOS[name]
    blocks, got, report = on_ring(scenario.run, mode="on_wait")
    jax.tree.map(np.testing.assert_array_equal, got, scenario.expect(blocks))
    assert report.problems() == set()


# Each scenario is simulated at every change. Compiled are those in which XLA may copy what a loop
# carries, or has to take vector memory.
COMPILED = "staggered_full_copy_in_a_loop", "copy_into_vmem", "scoped_by_run_state"


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in COMPILED else pytest.mark.slow) for name in SCENARIOS],
)
def test_compiled(name):
    scenario = SCENARIOS[name]
    module = check.parse(compile_form(scenario.run, rows=256, dtype=jnp.float32).as_text())
    calls = [i.name for found in kernels(module).values() for i in found]
    assert (
        sum("_start" in call for call in calls)
        == sum("_done" in call for call in calls)
        == scenario.pairs
    )
    errors = {
        f.code
        for f in check.audit(module, chip="v5e").findings
        if f.severity == check.Severity.ERROR
    }
    assert errors == ({"in-flight-vmem"} if "vmem" in name else set())
