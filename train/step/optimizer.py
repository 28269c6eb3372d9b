"""AdamW with a schedule of its learning rate, gradient clipping, and weight decay on the matmul kernels only.

Reference: Loshchilov and Hutter, Decoupled Weight Decay Regularization, 2019, https://arxiv.org/abs/1711.05101
"""

from typing import Any

import jax
import optax

from train.config import OptimizerConfig

_DECAYS = {"kernel": True, "scale": False, "bias": False, "embedding": False}


def make_schedule(config: OptimizerConfig, *, steps: int) -> optax.Schedule:
    """Makes the schedule of the learning rate: a linear warm-up to the peak, then what `optimizer.schedule` names.

    ```
    cosine     decays from the peak to the floor over all steps after the warm-up, along half a cosine
    linear     decays from the peak to the floor over all steps after the warm-up, along a line
    wsd        stays at the peak, and decays along a line to the floor over the last decay_fraction of the run
    constant   stays at the peak
    ```

    The function takes the number of updates that are done and counts from 1, so that the first update has a learning
    rate above 0 and the last one that of the floor. A run that is shorter than its warm-up ends during the warm-up.
    """
    peak, warmup = config.learning_rate, config.warmup_steps
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

    The decision follows the name of the parameter, which must be one of these, and not its rank, because layers are
    stacked for `scan`, which gives the scale of a norm two dimensions.
    """

    def decays(path: tuple[Any, ...], _: Any) -> bool:
        name = jax.tree_util.keystr(path[-1:], simple=True)
        if name not in _DECAYS:
            raise ValueError(
                f"parameter {jax.tree_util.keystr(path, simple=True, separator='.')} must end in one of "
                f"{sorted(_DECAYS)}, so that it is known whether its weights decay; rename it, or add its name to "
                "train/step/optimizer.py"
            )
        return _DECAYS[name]

    return jax.tree_util.tree_map_with_path(decays, params)
