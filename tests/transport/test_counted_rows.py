"""Rows that are counted when a program runs, sent on simulated devices with race detection; then
planted faults.
"""

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from flaxasync.transport import counted_rows, while_travelling
from tests.transport.test_simulated import on_ring

SIZE, ROWS = 4, 256
# from, to
COUNTS = np.asarray([[0, 1, 128, 129], [256, 0, 3, 0], [0, 200, 0, 256], [5, 0, 140, 0]], np.int32)


def sent(x, shift):
    """Sends two arrays, adds up x meanwhile, and returns the sum of what arrived, zeros behind the
    rows that count.
    """
    me, counts = lax.axis_index("x"), jnp.asarray(COUNTS)
    received = counts[(me - shift) % SIZE, me]
    leaving = counts[me, (me + shift) % SIZE]
    xs, future = counted_rows.start("x", shift, (x, x + 1), [leaving] * 2, [received] * 2)
    xs, total = while_travelling(xs, jnp.sum, x)
    first, second = future.pair.done(xs, future)
    return jnp.where((jnp.arange(ROWS) < received)[:, None], first + second, total - total)


@pytest.mark.parametrize(("shift", "mode", "delayed"), [
    (2, "eager", {1: 0.05}), (-1, "on_wait", {3: 0.05}),
])  # fmt: skip
def test_what_arrives(shift, mode, delayed):
    blocks, got, report = on_ring(
        lambda x: sent(x, shift), shape=(ROWS, 128), mode=mode, delayed=delayed
    )
    for device in range(SIZE):
        sender = (device - shift) % SIZE
        number = COUNTS[sender, device]
        np.testing.assert_array_equal(got[device, :number], 2 * blocks[sender, :number] + 1)
        assert not got[device, number:].any()
    assert report.problems() == set()


def test_a_start_without_a_barrier_is_caught(monkeypatch):
    monkeypatch.setattr(counted_rows, "enter", lambda *_: None)
    counted_rows.pair.cache_clear()
    _, _, report = on_ring(lambda x: sent(x, 1), shape=(ROWS, 128), delayed={1: 0.2})
    counted_rows.pair.cache_clear()
    assert "early_writes" in report.problems()


@pytest.mark.parametrize(("waits", "problem"), [(1, "races"), (0, "leftover_semaphores")])
def test_a_done_that_waits_for_one_end_alone_is_caught(monkeypatch, waits, problem):
    """The first wait of a done is for what was sent, the second one for what arrives."""
    wait, calls = counted_rows._wait_for_chunks, []

    def forgetful(refs, counts, semaphore):
        calls.append(semaphore)
        if len(calls) % 2 == waits:
            wait(refs, counts, semaphore)

    monkeypatch.setattr(counted_rows, "_wait_for_chunks", forgetful)
    _, _, report = on_ring(lambda x: sent(x, 1), shape=(ROWS, 128), delayed={0: 0.2})
    assert problem in report.problems()
