"""AdamW with a schedule, gradient clipping and weight decay on the matmul kernels only; and the
skipping of updates.

The devices decide within the step whether an update is skipped, so that the host need not wait for
it and every process decides alike.

Reference: Loshchilov and Hutter, Decoupled Weight Decay Regularization, 2019,
https://arxiv.org/abs/1711.05101
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import PyTree

from train.config import OptimizerConfig, SkipConfig

NORM_DECAY = 0.98  # of the running mean of the gradient norm, which thus remembers about 50 steps
# applied updates before a norm can count as a spike, because norms fall fast at the beginning
STEPS_BEFORE = 20
_DECAYS = {"kernel": True, "scale": False, "bias": False, "embedding": False}
_DECAYS |= dict.fromkeys(("up", "gate", "down"), True)  # of experts


class GuardState(NamedTuple):
    """What is remembered of earlier updates to judge the next one; a checkpoint stores it. All are
    scalars.
    """

    # float32, running mean of the gradient norms of applied updates; 0 before the first of them
    norm: jax.Array
    applied: jax.Array  # int32, number of updates that were applied since there is a guard
    skipped: jax.Array  # int32, number of skipped updates


def make_schedule(config: OptimizerConfig, *, steps: int) -> optax.Schedule:
    """Makes the schedule of the learning rate: a linear warm-up to the peak, then what
    `optimizer.schedule` names.

    The function takes the number of updates that are done and counts from 1, so that the first
    update has a learning rate above 0 and the last one that of the floor. A run that is shorter
    than its warm-up ends during the warm-up.
    """
    peak = config.learning_rate
    warmup = config.warmup_steps
    last = max(steps, warmup + 1)
    floor = peak * config.decay_floor
    decay_steps = max(round(config.decay_fraction * steps), 1)
    begin = max(last - decay_steps, warmup) if config.schedule == "wsd" else warmup
    after = {
        "cosine": optax.cosine_decay_schedule(peak, last - begin, config.decay_floor),
        "linear": optax.linear_schedule(peak, floor, last - begin),
        "wsd": optax.linear_schedule(peak, floor, last - begin),
        "constant": optax.constant_schedule(peak),
    }[config.schedule]
    pieces = [optax.linear_schedule(0.0, peak, warmup), optax.constant_schedule(peak), after]
    rate = optax.join_schedules(pieces, [warmup, begin])
    return lambda count: rate(count + 1)


def make_optimizer(config: OptimizerConfig, *, steps: int) -> optax.GradientTransformation:
    """Makes the optimizer: clipping by the global norm, then AdamW."""
    rate = make_schedule(config, steps=steps)
    adamw = optax.adamw(
        rate,
        b1=config.b1,
        b2=config.b2,
        eps=config.epsilon,
        mu_dtype=config.first_moment_dtype,
        weight_decay=config.weight_decay,
        mask=decay_mask,
    )
    return optax.chain(optax.clip_by_global_norm(config.clip_norm), adamw)


def decay_mask(params: PyTree) -> PyTree:
    """Says for each parameter whether it decays, by its name; stacked layers give even the scale of
    a norm two axes.
    """

    def decays(path: tuple[object, ...], _: object) -> bool:
        name = jax.tree_util.keystr(path[-1:], simple=True)
        if name not in _DECAYS:
            parameter = jax.tree_util.keystr(path, simple=True, separator=".")
            raise ValueError(
                f"parameter {parameter} must end in one of {sorted(_DECAYS)}: rename it, or add "
                "its name"
            )
        return _DECAYS[name]

    return jax.tree_util.tree_map_with_path(decays, params)


def is_on(config: SkipConfig) -> bool:
    return config.nonfinite or config.spike_factor > 0


def init_guard() -> GuardState:
    return GuardState(jnp.float32(0), jnp.int32(0), jnp.int32(0))


def judge(
    guard: GuardState, loss: jax.Array, norm: jax.Array, config: SkipConfig
) -> tuple[jax.Array, GuardState]:
    """Decides whether to skip an update, by its loss and by the norm of its gradient before
    clipping.
    """
    loss = loss.astype(jnp.float32)
    norm = norm.astype(jnp.float32)
    finite = jnp.isfinite(loss) & jnp.isfinite(norm)
    skip = jnp.bool_(config.nonfinite) & ~finite
    is_known = guard.norm > 0  # and not NaN, after a norm that was not finite
    if config.spike_factor:
        is_spike = norm > config.spike_factor * guard.norm
        skip |= finite & is_known & (guard.applied >= STEPS_BEFORE) & is_spike
    mean = jnp.where(is_known, NORM_DECAY * guard.norm + (1 - NORM_DECAY) * norm, norm)
    step = jnp.int32(1)
    return skip, GuardState(
        jnp.where(skip, guard.norm, mean),
        guard.applied + jnp.where(skip, 0, step),
        guard.skipped + jnp.where(skip, step, 0),
    )
