"""Skipping of bad batches: an update is not applied if its gradient is not finite or far larger than usual.

The decision is made on the devices, within the step, so that the host need not wait for it and every process decides
alike. Both kinds of skipping are off by default.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from train.config import SkipConfig

DECAY = 0.98
"""Decay of the running mean of the gradient norm, which thus remembers about 50 steps."""
STEPS_BEFORE = 20
"""Number of applied updates before a norm can count as a spike, because norms fall fast at the beginning."""


class GuardState(NamedTuple):
    """What the guard remembers; a checkpoint stores it.

    Attributes:
      norm: Running mean of the gradient norms of applied updates, a float32 scalar.
      applied: Number of applied updates, an int32 scalar.
      skipped: Number of skipped updates, an int32 scalar.
    """

    norm: jax.Array
    applied: jax.Array
    skipped: jax.Array


def is_on(config: SkipConfig) -> bool:
    """Returns whether any updates may be skipped."""
    return config.nonfinite or config.spike_factor > 0


def init_guard() -> GuardState:
    return GuardState(jnp.float32(0), jnp.int32(0), jnp.int32(0))


def judge(guard: GuardState, loss: jax.Array, norm: jax.Array, config: SkipConfig) -> tuple[jax.Array, GuardState]:
    """Decides whether to skip an update, by the loss of the batch and the norm of its gradient before clipping.

    Returns whether to skip the update, and the new state of the guard.
    """
    loss, norm = loss.astype(jnp.float32), norm.astype(jnp.float32)
    finite = jnp.isfinite(loss) & jnp.isfinite(norm)
    skip = jnp.bool_(config.nonfinite) & ~finite
    if config.spike_factor:
        skip |= finite & (guard.applied >= STEPS_BEFORE) & (norm > config.spike_factor * guard.norm)
    mean = jnp.where(guard.applied == 0, norm, DECAY * guard.norm + (1 - DECAY) * norm)
    step = jnp.int32(1)
    return skip, GuardState(
        jnp.where(skip, guard.norm, mean),
        guard.applied + jnp.where(skip, 0, step),
        guard.skipped + jnp.where(skip, step, 0),
    )


def keep_if(skip: jax.Array, old: Any, new: Any) -> Any:
    """Returns the old tree if the update is skipped, and the new one otherwise."""
    return jax.tree.map(lambda before, after: jnp.where(skip, before, after), old, new)
