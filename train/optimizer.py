"""AdamW with warm-up and cosine decay, gradient clipping, and weight decay on the matrices alone.

Reference: Loshchilov and Hutter, Decoupled Weight Decay Regularization, 2019, https://arxiv.org/abs/1711.05101
"""

from typing import Any

import jax
import optax

from train.config import OptimizerConfig

_DECAYED = frozenset({"kernel"})
_NOT_DECAYED = frozenset({"scale", "bias", "embedding"})


def make_schedule(config: OptimizerConfig, *, steps: int) -> optax.Schedule:
    """Returns the learning rate after `count` updates: linear up to the peak, then a cosine down to the floor.

    The first update already moves, and the last one of the run has the floor's learning rate. A run that is shorter
    than its warm-up ends while still warming up.
    """
    rate = optax.warmup_cosine_decay_schedule(
        init_value=0.0,
        peak_value=config.learning_rate,
        warmup_steps=config.warmup_steps,
        decay_steps=max(steps, config.warmup_steps + 1),
        end_value=config.learning_rate * config.decay_floor,
    )
    return lambda count: rate(count + 1)


def make_optimizer(config: OptimizerConfig, *, steps: int) -> optax.GradientTransformation:
    """Returns clipping by the global norm, then AdamW."""
    return optax.chain(
        optax.clip_by_global_norm(config.clip_norm),
        optax.adamw(
            make_schedule(config, steps=steps),
            b1=config.b1,
            b2=config.b2,
            eps=config.epsilon,
            weight_decay=config.weight_decay,
            mask=decay_mask,
        ),
    )


def decay_mask(params: Any) -> Any:
    """Says of each parameter whether it decays: kernels do; norm scales, biases and embeddings do not.

    The name decides, not the rank: layers are stacked for `scan`, which gives a norm scale two dimensions.

    Raises:
      ValueError: a parameter has a name that is neither.
    """
    return jax.tree_util.tree_map_with_path(lambda path, _: _decays(path), params)


def _decays(path: tuple[Any, ...]) -> bool:
    name = jax.tree_util.keystr(path[-1:], simple=True)
    if name not in _DECAYED | _NOT_DECAYED:
        raise ValueError(
            f"parameter {jax.tree_util.keystr(path, simple=True, separator='.')} must end in one of "
            f"{sorted(_DECAYED | _NOT_DECAYED)}, so that it is known whether its weights decay; "
            "rename it, or add its name to train/optimizer.py"
        )
    return name in _DECAYED
