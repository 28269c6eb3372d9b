"""Every loop on simulated devices with race detection; then planted faults, each caught by the
check that is named.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import PartitionSpec as P

import flaxasync as fa
from flaxasync.transport import Pair, pair, pallas
from tests.simulator.split_pairs import session
from tests.transport.forms import FORMS

MODES = ["eager", "on_wait"]
COLUMNS = 128


def on_ring(fn, size=4, *, shape=(16, COLUMNS), mode="eager", delayed=None):
    """Runs `fn` on each device's block of small integers; returns the blocks, all results, and a
    report.
    """
    blocks = np.random.default_rng(0).integers(-8, 8, (size, *shape)).astype(np.float32)

    mesh = jax.make_mesh((size,), ("x",), devices=jax.devices()[:size])

    def every(x):
        return jax.tree.map(lambda y: y[None], fn(x[0]))

    with jax.set_mesh(mesh), session(mode=mode, delayed=delayed) as report:
        run = jax.jit(jax.shard_map(every, in_specs=P("x"), out_specs=P("x")))
        results = jax.tree.map(np.asarray, run(jax.device_put(blocks, P("x"))))
    return blocks, results, report


LOOPS = [name for name, form in FORMS.items() if form.expect]


@pytest.mark.parametrize(
    ("name", "hops", "size", "mode", "delayed"),
    [
        *((name, 5, 4, mode, None) for name, mode in zip(LOOPS, itertools.cycle(MODES))),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [
                # the swap needs an odd number
                *(
                    (name, 5 if name == "swap" else 4, 4, mode, None)
                    for name, mode in zip(LOOPS, itertools.cycle(MODES[::-1]))
                ),
                ("staggered", 7, 8, "on_wait", None),
                ("staggered_both", 3, 4, "eager", {1: 0.05}),  # a late device is waited for
            ]
        ),
        ("swap", 3, 4, "eager", {1: 0.05}),
    ],
)
def test_every_loop(name, hops, size, mode, delayed):
    form = FORMS[name]
    blocks, got, report = on_ring(
        lambda x: tuple(form.run(x, hops)), size, mode=mode, delayed=delayed
    )
    for g, want in zip(got, form.expect(blocks, hops), strict=True):
        np.testing.assert_array_equal(g, want)
    assert report.problems() == set()


def permute(x, shift=1, **options):
    return fa.ppermute(x, "x", shift, "pallas", **options)


def cotangent(x):
    return jax.grad(lambda z: jnp.sum(permute(z) * x))(jnp.ones_like(x))


def batch(x):
    return jax.vmap(permute)(x.reshape(4, -1, COLUMNS)).reshape(x.shape)


def through_scan_and_cond(x):
    x, future = fa.ppermute_start(x, "x", backend="pallas")
    (x, future), _ = lax.scan(lambda carry, _: (carry, None), (x, future), length=3)
    right = lax.axis_index("x") >= 0
    return lax.cond(
        right, lambda: fa.ppermute_done(x, future), lambda: fa.ppermute_done(x, future) + 1
    )


@pytest.mark.parametrize(("fn", "shift"), [
    *((functools.partial(permute, shift=shift), shift) for shift in (1, -1, 2, 4, 7)),
    (functools.partial(permute, collective_id=5), 1),
    (cotangent, -1),
    (batch, 1),
    (through_scan_and_cond, 1),
])  # fmt: skip
def test_a_block_goes_shift_devices_onward(fn, shift):
    blocks, got, report = on_ring(fn, delayed={2: 0.05})
    np.testing.assert_array_equal(got, np.roll(blocks, shift, axis=0))
    assert report.problems() == set()


def test_what_is_in_flight_cannot_be_read():
    """The simulator returns NaN for it, so that a program which reads it early shows."""

    def early(x):
        x, future = fa.ppermute_start(x, "x", backend="pallas")
        peek = future.buffer + 0
        return fa.ppermute_done(x, future), peek

    _, (_, peek), _ = on_ring(early)
    assert np.isnan(peek).all()


# ---- negative tests: planted faults ---------------------------------------------------------------------------------


def faulty(*, enter=True, wait_send=True, wait_recv=True):
    """Returns the permute with some of its steps left out."""

    def start_body(x_ref, y_ref, send_sem, recv_sem):
        if enter:
            pallas.enter("x", 1)
        pallas.send(x_ref, y_ref, send_sem, recv_sem, "x", 1)

    def done_body(x_ref, y_ref, send_sem, recv_sem):
        if wait_send:
            pltpu.make_async_copy(x_ref, x_ref, send_sem).wait()
        if wait_recv:
            pltpu.make_async_copy(y_ref, y_ref, recv_sem).wait()

    return Pair("ppermute", start_body, done_body, semaphores=2, remote=True)


def permute_with(pair_):
    return lambda x: pair_.done(*pair_.start(x))


@pytest.mark.parametrize("mode", MODES)
def test_the_faulty_permute_without_a_fault_is_right(mode):
    blocks, got, report = on_ring(permute_with(faulty()), mode=mode, delayed={1: 0.05})
    np.testing.assert_array_equal(got, np.roll(blocks, 1, axis=0))
    assert report.problems() == set()


def never_done(x):
    return fa.ppermute_start(x, "x", backend="pallas")[0] + 1


@pytest.mark.parametrize(("fn", "mode", "problems"), [
    *((permute_with(faulty(wait_send=False)), mode, {"leftover_semaphores"}) for mode in MODES),
    (permute_with(faulty(wait_recv=False)), "eager", {"races", "leftover_semaphores"}),
    (permute_with(faulty(wait_recv=False)), "on_wait", {"pending_dmas"}),
    (never_done, "eager", {"leftover_semaphores"}),
    (never_done, "on_wait", {"pending_dmas"}),
    *((permute_with(faulty(enter=False)), mode, {"early_writes"}) for mode in MODES),
])  # fmt: skip
def test_a_step_that_is_left_out_is_reported(fn, mode, problems):
    _, _, report = on_ring(fn, mode=mode, delayed={1: 0.2})
    assert problems <= report.problems()


@pytest.mark.parametrize("mode", ["eager", pytest.param("on_wait", marks=pytest.mark.slow)])
def test_a_missing_capacity_ack_writes_early(mode):
    """Two Refs with a barrier at the first hop only: a Ref is written before its owner is done with
    it.
    """

    def start(here, there, *, acknowledge):
        def body(x_ref, y_ref, send_sem, recv_sem):
            if acknowledge:
                pallas.enter("x", 1)
            pallas.send(x_ref, y_ref, send_sem, recv_sem, "x", 1)

        contents = (here[...], there[...])
        sems, (here[...], there[...]), _ = pair.start_kernel(
            "ppermute_stateful_start", body, contents, semaphores=2
        )
        return sems

    def f(x, acknowledge):
        here, there = jax.new_ref(x), jax.new_ref(jnp.zeros_like(x))
        for hop in range(3):
            sems = start(here, there, acknowledge=hop == 0 or acknowledge)
            fa.ppermute_done_stateful(*sems, here, there)
            here, there = there, here
        return here[...]

    blocks, got, report = on_ring(
        functools.partial(f, acknowledge=True), mode=mode, delayed={1: 0.1}
    )
    np.testing.assert_array_equal(got, np.roll(blocks, 3, axis=0))
    assert report.problems() == set()
    _, _, report = on_ring(functools.partial(f, acknowledge=False), mode=mode, delayed={1: 0.1})
    assert "early_writes" in report.problems()
