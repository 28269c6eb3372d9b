"""The direct all-gather and all-to-all on simulated devices with race detection; then planted
faults, each caught.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from flaxasync.transport import direct, while_travelling
from tests.transport.test_simulated import on_ring

SIZE = 4


def transfer(pair, x):
    """Adds up x while it is on its way, and returns what arrived, changed by nothing that the sum
    did.
    """
    x, future = pair.start(x)
    x, total = while_travelling(x, jnp.sum, x)
    return pair.done(x, future) + (total - total).astype(x.dtype)


def gathered(xs, dim):
    return [np.concatenate(list(xs), dim)] * SIZE


def exchanged(xs, dim):
    return [np.stack([np.split(x, SIZE, dim)[device] for x in xs]) for device in range(SIZE)]


@pytest.mark.parametrize(("kind", "expect", "shape", "dim", "mode", "delayed"), [
    (direct.all_gather, gathered, (8, 256), 1, "on_wait", {1: 0.05}),
    (direct.all_to_all, exchanged, (8, 1024), 1, "eager", {2: 0.05}),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in [
        (direct.all_gather, gathered, (16, 128), 0, "eager", None),
        (direct.all_gather, gathered, (2, 8, 128), 0, "eager", {3: 0.05}),
        (direct.all_to_all, exchanged, (64, 128), 0, "on_wait", {2: 0.05}),
    ]),
])  # fmt: skip
def test_what_arrives(kind, expect, shape, dim, mode, delayed):
    pair = kind("x", SIZE, dim)
    xs, got, report = on_ring(lambda x: transfer(pair, x), shape=shape, mode=mode, delayed=delayed)
    np.testing.assert_array_equal(got, np.stack(expect(xs, dim)))
    assert report.problems() == set()


def test_several_at_once_and_one_after_the_other():
    """Every start uses the same barrier, and one device enters each of them late."""
    gather = direct.all_gather("x", SIZE, 0)

    def run(x):
        started = [gather.start(x + i) for i in range(3)]
        for x_i, future in started:
            x = x + gather.done(x_i, future)[:16]
        return transfer(gather, x)

    xs, got, report = on_ring(run, delayed={0: 0.05})
    want = np.concatenate([x + 3 * xs[0] + 3 for x in xs])
    np.testing.assert_array_equal(got, np.broadcast_to(want, (SIZE, *want.shape)))
    assert report.problems() == set()


def test_a_start_without_a_barrier_is_caught(monkeypatch):
    monkeypatch.setattr(direct.pl, "semaphore_wait", lambda *_: None)
    monkeypatch.setattr(direct.pl, "semaphore_signal", lambda *_, **__: None)
    direct.all_gather.cache_clear()
    gather = direct.all_gather("x", SIZE, 0)
    _, _, report = on_ring(lambda x: transfer(gather, x), delayed={1: 0.2})
    direct.all_gather.cache_clear()
    assert "early_writes" in report.problems()


@pytest.mark.parametrize(
    ("forgotten", "problem"), [("send_sem", "leftover_semaphores"), ("recv_sem", "races")]
)
def test_a_done_that_does_not_wait_is_caught(forgotten, problem):
    def wait(x_ref, y_ref, send_sem, recv_sem):
        if forgotten == "recv_sem":
            for _ in range(SIZE - 1):
                pltpu.make_async_copy(x_ref, x_ref, send_sem).wait()
        else:
            pltpu.make_async_copy(y_ref, y_ref, recv_sem).wait()

    gather = dataclasses.replace(direct.all_gather("x", SIZE, 0), done_body=wait)
    _, _, report = on_ring(lambda x: transfer(gather, x), delayed={1: 0.2})
    assert problem in report.problems()


@pytest.mark.parametrize(
    ("shape", "dtype", "dim", "fits"),
    [
        ((8, 128), np.float32, 0, True),
        ((8, 128), jnp.bfloat16, 0, False),
        ((16, 100), jnp.bfloat16, 0, True),
        ((3, 128), np.float32, 1, True),
        ((8, 64), np.float32, 1, False),
        ((3, 5, 7), np.float32, 0, True),
        ((1024,), np.float32, 0, False),
    ],
)
def test_blocks_that_are_whole_tiles(shape, dtype, dim, fits):
    assert direct.in_whole_tiles(jax.ShapeDtypeStruct(shape, dtype), dim) == fits
