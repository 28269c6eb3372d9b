"""`measure_dispatch`: how long a call holds the host, and how long it keeps the devices busy.

The ratio of these two times shows whether the host waits. For a call that returns at once and
leaves the devices working, dispatch / total is small; for a call that waits, it is near 1. On a
device without asynchronous dispatch every call waits. Three things would falsify the ratio and are
excluded: inputs that are not ready yet, a queue of earlier calls (each repeat ends before the next
begins), and functions so short that the dispatch takes most of their time.
"""

import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax

from flaxasync.check.units import time_text

# seconds; shorter functions are not judged, because a pure one of microseconds has a ratio of 80 %
FLOOR = 1e-3
# the ratio above which a call waits; all ratios that were measured are below 0.3 or above 0.95
WAITS = 0.5


@dataclasses.dataclass(frozen=True)
class DispatchTiming:
    """How long calls held the host. The times and the ratio are medians over the repeats."""

    dispatch: float  # seconds until the call returned
    total: float  # seconds until its outputs were ready
    ratio: float  # dispatch / total: the median of the ratios, and not the ratio of the medians
    repeats: int  # the number of calls that were measured, after a first call that was not
    floor: float  # seconds below which `total` is too short to judge

    @property
    def waits(self) -> bool | None:
        """True if the call waits for the device, False if it does not, None if it is too short to
        tell.
        """
        if self.total < self.floor:
            return None
        return self.ratio > WAITS

    def __str__(self) -> str:
        answer = {
            True: "the host waits",
            False: "the host does not wait",
            None: "too short to judge",
        }[self.waits]
        times = f"dispatch {time_text(self.dispatch)} of {time_text(self.total)}"
        return f"{answer}: {times} ({self.ratio:.1%}, {self.repeats} repeats)"


def measure_dispatch(
    fn: Callable, *args: Any, repeats: int = 5, floor: float = FLOOR
) -> DispatchTiming:
    """Measures for how much of a call's time the host waits.

    Args:
      fn: A jitted or compiled function of arrays that returns arrays. It is called `repeats` + 1
        times.
      *args: Its arguments. The measurement begins when they are ready. They must not be donated,
        because they are used again.
      repeats: The number of calls to measure.
      floor: Seconds; a shorter call is not judged.

    Raises:
      ValueError: `fn` returns anything but arrays, or donates its arguments; or `repeats` is below
        1.
    """
    if repeats < 1:
        raise ValueError(f"repeats must be at least 1: got {repeats}")
    jax.block_until_ready(args)
    outputs = jax.tree.leaves(fn(*args))
    strange = [type(leaf).__name__ for leaf in outputs if not isinstance(leaf, jax.Array)]
    if strange or not outputs:
        raise ValueError(
            "fn must return jax arrays, whose readiness can be waited for: got "
            f"{', '.join(strange) or 'nothing'}; pass a jitted function"
        )
    jax.block_until_ready(outputs)
    if any(isinstance(leaf, jax.Array) and leaf.is_deleted() for leaf in jax.tree.leaves(args)):
        raise ValueError(
            "fn donates its arguments, so it cannot be called again with them; measure it undonated"
        )
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        outputs = fn(*args)
        returned = time.perf_counter()
        jax.block_until_ready(outputs)
        times.append((returned - start, time.perf_counter() - start))
        jax.effects_barrier()  # so that callbacks of this repeat do not run during the next one
    # Medians, so that one repeat during which another process had the cores does not decide.
    dispatch, total = (statistics.median(column) for column in zip(*times, strict=True))
    return DispatchTiming(
        dispatch, total, statistics.median(d / t for d, t in times), repeats, floor
    )
