"""AdamW with warm-up and cosine decay, gradient clipping, and weight decay on the matmul kernels only.

Reference: Loshchilov and Hutter, Decoupled Weight Decay Regularization, 2019, https://arxiv.org/abs/1711.05101
"""

from typing import Any

import jax
import optax

from train.config import OptimizerConfig

_DECAYED = frozenset({"kernel"})
_NOT_DECAYED = frozenset({"scale", "bias", "embedding"})


def make_schedule(config: OptimizerConfig, *, steps: int) -> optax.Schedule:
    """Makes the schedule of the learning rate: a linear warm-up to the peak, then a cosine decay to the floor.

    The schedule counts from 1, so that the first update has a learning rate above 0 and the last update of the run has
    that of the floor. A run that is shorter than its warm-up ends during the warm-up.

    Args:
      config: The peak, the floor and the length of the warm-up.
      steps: The number of updates in the run.

    Returns:
      A function from the number of updates that are done to the learning rate of the next one.
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
    """Makes the optimizer: clipping by the global norm, then AdamW."""
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
    """Returns a tree of booleans that says which parameters decay: kernels do, scales, biases and embeddings do not.

    The decision follows the name of the parameter and not its rank, because layers are stacked for `scan`, which gives
    the scale of a norm two dimensions.

    Raises:
      ValueError: The name of a parameter is none of these.
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
