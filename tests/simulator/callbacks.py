"""Compiling and running programs that are made of callbacks, fast."""

import contextlib
from unittest import mock

import jax
import numpy as np
from jax._src import callback


@contextlib.contextmanager
def quick_callbacks():
    """Compiles unoptimised, and hands callbacks numpy arrays.

    In these programs it takes longer to optimise what stands between the callbacks than to run it. JAX would turn the
    arguments of a callback into arrays on a device, whose values the simulators read at once; this would take most of
    the time of a callback.
    """
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    try:
        with mock.patch.object(callback, "io_callback_impl", _call):
            yield
    finally:
        jax.config.update("jax_disable_most_optimizations", before)


def _call(*args, callback, **_):
    # These are copies: the arguments are memory of the program, which reuses it when the callback returns.
    return jax.tree.map(np.asarray, callback(*map(np.array, args)))
