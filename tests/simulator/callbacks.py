"""How programs that are made of callbacks are compiled and run: fast."""

import contextlib
from unittest import mock

import jax
import numpy as np
from jax._src import callback


@contextlib.contextmanager
def quick_callbacks():
    """Compiles unoptimised, and hands callbacks numpy arrays.

    The programs here are callbacks: optimising what stands between them takes longer than running it. Of a callback's
    arguments JAX makes arrays on a device, whose values the simulators read at once: most of what a callback took.
    """
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    try:
        with mock.patch.object(callback, "io_callback_impl", _call):
            yield
    finally:
        jax.config.update("jax_disable_most_optimizations", before)


def _call(*args, callback, **_):
    # Copies, as what is given lies in memory of the program, which takes it back when the callback returns.
    return jax.tree.map(np.asarray, callback(*map(np.array, args)))
