"""`measure_dispatch`: how long a call keeps the host, and how long it keeps the device.

A ratio of two times says it: of a call that returns at once and leaves the device working, dispatch / total is small;
of a call that waits, it is near 1. Three things would falsify it, and are excluded: inputs that are not ready yet, a
queue of earlier calls (each repeat ends before the next begins), and functions so short that dispatch is all there is.
"""

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

FLOOR = 1e-3  # s; a pure function of microseconds reads 80 %
WAITS = 0.5  # dispatch / total; measured are below 0.3 and above 0.95, and nothing between
_CONTROL_SIZE, _CONTROL_TRIPS = 512, 16  # some 10 ms on two CPU cores


@dataclasses.dataclass(frozen=True)
class DispatchTiming:
    """Medians over the repeats.

    Attributes:
      dispatch: seconds until the call returned.
      total: seconds until its outputs were there.
      ratio: dispatch / total, the median of each repeat's own.
      repeats: calls that were measured, after one that was not.
      floor: seconds below which `total` is too short to judge.
    """

    dispatch: float
    total: float
    ratio: float
    repeats: int
    floor: float

    @property
    def waits(self) -> bool | None:
        """True when the call waits for the device, False when it does not, None when it is too short to say."""
        return None if self.total < self.floor else self.ratio > WAITS

    def __str__(self) -> str:
        verdict = {True: "the host waits", False: "the host does not wait", None: "too short to judge"}[self.waits]
        times = f"dispatch {self.dispatch * 1e3:.3g} ms of {self.total * 1e3:.3g} ms"
        return f"{verdict}: {times} ({self.ratio:.1%}, {self.repeats} repeats)"


def measure_dispatch(fn: Callable, *args: Any, repeats: int = 5, floor: float = FLOOR) -> DispatchTiming:
    """Measures how much of a call's time the host is held.

    Args:
      fn: a jitted or compiled function of arrays that returns arrays. It is called `repeats` + 1 times.
      *args: its arguments; they are waited for first. They must not be donated, for they are used again.
      repeats: calls to measure.
      floor: seconds; a shorter call is not judged.

    Returns:
      The times and the ratio; `.waits` is the verdict.

    Raises:
      ValueError: fn is not callable, returns something else than arrays, or donates its arguments; repeats is no count.
      NotImplementedError: the device has no asynchronous dispatch: a function that must not wait waits, too.
    """
    if not callable(fn):
        raise ValueError(f"fn must be a function: got {type(fn).__name__}; pass a jitted or a compiled function")
    if repeats < 1:
        raise ValueError(f"repeats must be at least 1: got {repeats}")
    jax.block_until_ready(args)
    outputs = jax.tree.leaves(fn(*args))
    strange = [type(leaf).__name__ for leaf in outputs if not isinstance(leaf, jax.Array)]
    if strange or not outputs:
        raise ValueError(
            f"fn must return jax arrays, whose readiness can be waited for: got {', '.join(strange) or 'nothing'}; "
            "pass a jitted function"
        )
    jax.block_until_ready(outputs)
    if any(isinstance(leaf, jax.Array) and leaf.is_deleted() for leaf in jax.tree.leaves(args)):
        raise ValueError("fn donates its arguments, so it cannot be called again with them; measure it undonated")
    timing = _measure(fn, args, repeats, floor)
    device = min(outputs[0].sharding.device_set, key=lambda device: device.id)
    if timing.waits and _waits_for_everything(device):
        raise NotImplementedError(
            f"{device} has no asynchronous dispatch: there a pure function holds the host as well, so this says "
            "nothing about fn; on a CPU, leave jax_cpu_enable_async_dispatch at True"
        )
    return timing


def _measure(fn: Callable, args: Any, repeats: int, floor: float) -> DispatchTiming:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        outputs = fn(*args)
        returned = time.perf_counter()
        jax.block_until_ready(outputs)
        times.append((returned - start, time.perf_counter() - start))
        jax.effects_barrier()  # prints of this repeat must not run in the next
    # Medians: one repeat in which another process had the cores must not decide.
    dispatch, total = (statistics.median(column) for column in zip(*times, strict=True))
    return DispatchTiming(dispatch, total, statistics.median(d / t for d, t in times), repeats, floor)


@functools.cache
def _waits_for_everything(device: jax.Device) -> bool:
    """Measures a function that has nothing to wait for, once a device."""
    x = jax.device_put(jnp.eye(_CONTROL_SIZE, dtype=jnp.float32), device)
    control = jax.jit(lambda x: lax.fori_loop(0, _CONTROL_TRIPS, lambda _, y: jnp.tanh(y @ x), x))
    jax.block_until_ready(control(x))
    return bool(_measure(control, (x,), 3, FLOOR).waits)
