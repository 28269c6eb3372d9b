"""The router of a mixture of experts: which experts each row chooses, their weights, and how even the choice is."""

import dataclasses
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from flaxasync.mesh import cast_to_varying


@dataclasses.dataclass(frozen=True)
class RouterOptions:
    """How experts are chosen, from scores that are computed in float32. The defaults are those of Mixtral and Qwen 3.

    Attributes:
      scores: "softmax" over experts of x @ kernel, or "sigmoid" of each, as in DeepSeek V3.
      choose_first: Whether the experts are chosen by x @ kernel, and scores are computed of the chosen ones alone.
      normalize: Whether the weights of a row are divided by their sum.
      scale: A factor of the weights.
      selection_bias: Whether a bias is added to the scores where experts are chosen, but not in the weights. It has no
        gradient: it is `router.selection_bias`, an `nnx.Variable` [E] that a training loop adds to, so that experts
        with too many rows are chosen less (Wang et al., "Auxiliary-Loss-Free Load Balancing Strategy for
        Mixture-of-Experts", 2024).
    """

    scores: Literal["softmax", "sigmoid"] = "softmax"
    choose_first: bool = False
    normalize: bool = True
    scale: float = 1.0
    selection_bias: bool = False

    def __post_init__(self) -> None:
        if self.scores not in ("softmax", "sigmoid"):
            raise ValueError(f"RouterOptions got scores={self.scores!r}: they must be 'softmax' or 'sigmoid'")


class Routing(NamedTuple):
    """How the rows of a batch were routed, over all devices. Add the losses, with a factor, to the loss of a model.

    Attributes:
      load_balance_loss: E times the sum over experts of their share and their mean score; 1 if both are even (Fedus et
        al., "Switch Transformers", 2021). Where each row's scores do not sum to 1, they are divided by their sum.
      z_loss: The mean of logsumexp(x @ kernel)**2 (Zoph et al., "ST-MoE", 2022).
      share: The share of each expert in all choices, [E].
      dropped: The share of the choices that were dropped, because an expert had no capacity left.
    """

    load_balance_loss: Array
    z_loss: Array
    share: Array
    dropped: Array


def route(logits: Array, k: int, options: RouterOptions, bias: Array | None) -> tuple[Array, Array, Array]:
    """Returns the ids and the weights of the k experts of each row, and the scores of all, for logits [..., n, E]."""
    score = jax.nn.softmax if options.scores == "softmax" else jax.nn.sigmoid
    scores = score(logits)
    chooses_by = logits if options.choose_first else scores
    if bias is not None:
        chooses_by = chooses_by + lax.stop_gradient(bias.astype(scores.dtype))
    _, ids = lax.top_k(lax.stop_gradient(chooses_by), k)
    weights = jnp.take_along_axis(logits if options.choose_first else scores, ids, axis=-1)
    weights = score(weights) if options.choose_first else weights
    if options.normalize:
        weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    return ids, weights * options.scale, scores


def routing(logits: Array, scores: Array, ids: Array, dropped: Array, axes: frozenset[str]) -> Routing:
    """Returns how the rows of this device and of all devices on `axes` were routed. Inside shard_map.

    `dropped` counts the choices of this device's rows that were dropped.
    """
    experts = logits.shape[-1]
    flat, chosen = scores.reshape(-1, experts), ids.reshape(-1)
    counts = jnp.sum(chosen[:, None] == jnp.arange(experts, dtype=ids.dtype), axis=0).astype(scores.dtype)
    sums = (
        jnp.sum(flat / jnp.sum(flat, axis=-1, keepdims=True), axis=0),
        jnp.sum(jnp.square(jax.nn.logsumexp(logits, axis=-1))),
        counts,
        dropped.astype(scores.dtype),
        jnp.asarray(flat.shape[0], scores.dtype),
    )
    names = tuple(sorted(axes))
    score, z, counts, left_out, rows = (lax.psum(cast_to_varying(x, axes), names) if names else x for x in sums)
    rows = jnp.maximum(rows, 1)
    choices = rows * ids.shape[-1]
    share = lax.stop_gradient(counts / choices)
    return Routing(experts * jnp.sum(share * score / rows), z / rows, share, left_out / choices)
