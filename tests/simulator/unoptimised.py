"""How programs that are made of callbacks are compiled: fast."""

import contextlib

import jax


@contextlib.contextmanager
def unoptimised():
    """The programs here are callbacks: optimising what stands between them takes longer than running it."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    try:
        yield
    finally:
        jax.config.update("jax_disable_most_optimizations", before)
