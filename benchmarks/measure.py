"""Timing of programs on attached devices, for the benchmarks."""

import time
from collections.abc import Callable
from typing import Any

import jax

RUNS = 10  # timed runs of a program


def fastest_ms(fn: Callable, *values: Any) -> float:
    """Returns the time of the fastest of several runs in milliseconds; a first run, which compiles, is not counted."""
    jax.block_until_ready(fn(*values))
    spent = []
    for _ in range(RUNS):
        begin = time.perf_counter()
        jax.block_until_ready(fn(*values))
        spent.append(time.perf_counter() - begin)
    return min(spent) * 1e3
