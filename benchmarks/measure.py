"""How the benchmarks time a program on attached devices."""

import time
from collections.abc import Callable
from typing import Any

import jax

RUNS = 10


def fastest_ms(fn: Callable, *values: Any) -> float:
    """Milliseconds of the fastest of some runs, after one that compiles."""
    jax.block_until_ready(fn(*values))
    spent = []
    for _ in range(RUNS):
        begin = time.perf_counter()
        jax.block_until_ready(fn(*values))
        spent.append(time.perf_counter() - begin)
    return min(spent) * 1e3
