"""The router of a mixture of experts: which experts each row chooses, their weights, and how even
the choice is.
"""

import dataclasses
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from flaxasync.mesh import cast_to_varying


@dataclasses.dataclass(frozen=True)
class RouterOptions:
    """How experts are chosen, from scores that are computed in float32. The defaults are those of
    Mixtral and Qwen 3.

    Attributes:
      scores: "softmax" over experts of x @ kernel, or "sigmoid" of each, as in DeepSeek V3.
      choose_first: Whether the experts are chosen by x @ kernel, and scores are computed of the
        chosen ones alone.
      normalize: Whether the weights of a row are divided by their sum.
      scale: A factor of the weights.
      selection_bias: Whether a bias is added to the scores where experts are chosen, but not in the
        weights. It has no gradient: it is `router.selection_bias`, an `nnx.Variable` [E] that a
        training loop adds to, so that experts with too many rows are chosen less (Wang et al.,
        "Auxiliary-Loss-Free Load Balancing Strategy for Mixture-of-Experts", 2024).
    """

    scores: Literal["softmax", "sigmoid"] = "softmax"
    choose_first: bool = False
    normalize: bool = True
    scale: float = 1.0
    selection_bias: bool = False

    def __post_init__(self) -> None:
        if self.scores not in ("softmax", "sigmoid"):
            raise ValueError(
                f"RouterOptions got scores={self.scores!r}: they must be 'softmax' or 'sigmoid'"
            )


class Routing(NamedTuple):
    """How the rows of a batch were routed, over all devices. Add the losses, with a factor, to the
    loss of a model.

    Attributes:
      load_balance_loss: E times the sum over experts of their share and their mean score; 1 if both
        are even (Fedus et al., "Switch Transformers", 2021). Where each row's scores do not sum to
        1, they are divided by their sum.
      z_loss: The mean of logsumexp(x @ kernel)**2 (Zoph et al., "ST-MoE", 2022).
      share: The share of each expert in all choices, [E].
      dropped: The share of the choices that were dropped, because an expert had no capacity left.
    """

    load_balance_loss: Array
    z_loss: Array
    share: Array
    dropped: Array


class Choice(NamedTuple):
    """Which experts each row chose.

    Attributes:
      ids: The numbers of the k experts, [..., n, k].
      weights: The weight of each of them, [..., n, k].
      log_scores: The logarithms of the scores of all experts, [..., n, E].
    """

    ids: Array
    weights: Array
    log_scores: Array


def route(logits: Array, k: int, options: RouterOptions, bias: Array | None) -> Choice:
    """Chooses k experts for each row, from logits [..., n, E].

    Weights and shares are computed from the logarithms of scores. The sigmoid of a logit below -88
    is zero in float32, and so would be the sum that divides the weights of a row whose logits are
    all that low.
    """
    log_score = jax.nn.log_softmax if options.scores == "softmax" else jax.nn.log_sigmoid
    log_scores = log_score(logits)
    # Scores grow with their logits, so both choose the same experts, but distinct logits can have
    # equal scores.
    chooses_by = logits
    if bias is not None:
        if options.choose_first:
            unbiased = logits
        else:
            unbiased = jnp.exp(log_scores)
        of_experts = lax.broadcast_to_rank(bias.astype(logits.dtype), logits.ndim)
        chooses_by = unbiased + lax.stop_gradient(of_experts)
    _, ids = lax.top_k(lax.stop_gradient(chooses_by), k)
    if options.choose_first:
        log_weights = log_score(jnp.take_along_axis(logits, ids, axis=-1))
    else:
        log_weights = jnp.take_along_axis(log_scores, ids, axis=-1)
    if options.normalize:
        weights = jax.nn.softmax(log_weights, axis=-1)
    else:
        weights = jnp.exp(log_weights)
    return Choice(ids, weights * options.scale, log_scores)


def routing_facts(logits: Array, choice: Choice, dropped: Array, axes: frozenset[str]) -> Routing:
    """Returns how the rows of this device and of all devices on `axes` were routed. Inside
    shard_map.

    `dropped` counts the choices of this device's rows that were dropped.
    """
    experts = logits.shape[-1]
    chosen = choice.ids.reshape(-1, 1)
    dtype = logits.dtype
    shares = jax.nn.softmax(choice.log_scores.reshape(-1, experts), axis=-1)
    counts = jnp.sum(chosen == jnp.arange(experts, dtype=chosen.dtype)[None], axis=0).astype(dtype)
    sums = (
        jnp.sum(shares, axis=0),
        jnp.sum(jnp.square(jax.nn.logsumexp(logits, axis=-1))),
        counts,
        dropped.astype(dtype),
        jnp.asarray(shares.shape[0], dtype),
    )
    names = tuple(sorted(axes))
    score, z, counts, left_out, rows = (
        lax.psum(cast_to_varying(x, axes), names) if names else x for x in sums
    )
    rows = jnp.maximum(rows, 1)
    choices = rows * choice.ids.shape[-1]
    share = lax.stop_gradient(counts / choices)
    return Routing(experts * jnp.sum(share * score / rows), z / rows, share, left_out / choices)
