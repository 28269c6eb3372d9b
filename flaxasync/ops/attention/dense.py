"""Attention with all scores at once, for what the block kernels lack: masks, biases, soft caps, dropout, other rows.

It needs memory for all scores of a device, [b, h, s, t] in float32. `flaxasync.attention` needs only tiles of them.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from flaxasync.ops.attention.layouts import Mask
from flaxasync.ops.dtypes import accumulator_dtype


@dataclasses.dataclass(frozen=True)
class Additions:
    """The arrays that change scores or weights; each may be None.

    Attributes:
      mask: Booleans, broadcast to [b, h, s, t]: True where a row attends to another.
      bias: Added to the scores before the mask, broadcast to [b, h, s, t].
      dropout_key: A key of `jax.random`; without it nothing is dropped.
    """

    mask: Array | None = None
    bias: Array | None = None
    dropout_key: Array | None = None

    @property
    def some(self) -> bool:
        return any(x is not None for x in (self.mask, self.bias, self.dropout_key))


def dense_attention(
    q: Array,
    k: Array,
    v: Array,
    additions: Additions,
    *,
    scale: float,
    softcap: float | None = None,
    dropout_rate: float = 0.0,
    precision: lax.PrecisionLike = None,
) -> Array:
    """Returns softmax(softcap(scale * q @ k.T) + bias, where the mask allows) @ v.

    A row whose mask allows nothing attends to all rows equally, as in `nnx.dot_product_attention`.

    Args:
      q: Queries, [b, s, h, d].
      k: Keys, [b, t, n, d]; h/n heads share each of n.
      v: Values, [b, t, n, d].
      additions: The mask, the bias and the key of the dropout.
      scale: The factor of the scores.
      softcap: Scores are softcap * tanh(score / softcap); None for as they are.
      dropout_rate: The share of the weights that is dropped; the others are divided by what is kept.
      precision: The precision of the matmuls.
    """
    dtype, groups = accumulator_dtype(q), q.shape[2] // k.shape[2]
    k, v = (jnp.repeat(x, groups, axis=2) if groups > 1 else x for x in (k, v))
    scores = jnp.einsum("bshd,bthd->bhst", q, k, precision=precision, preferred_element_type=dtype) * scale
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    if additions.bias is not None:
        scores += additions.bias.astype(dtype)
    if additions.mask is not None:
        scores = jnp.where(additions.mask, scores, jnp.finfo(dtype).min)
    weights = jax.nn.softmax(scores, axis=-1)
    if additions.dropout_key is not None and dropout_rate:
        kept = jax.random.bernoulli(additions.dropout_key, 1 - dropout_rate, weights.shape)
        weights = jnp.where(kept, weights / (1 - dropout_rate), 0)
    return jnp.einsum("bhst,bthd->bshd", weights.astype(v.dtype), v, precision=precision)


def positional_mask(mask: Mask, q_rows: int, k_rows: int, segment_ids: Array | None) -> Any:
    """Returns the mask of positions and segments, [1 or b, 1, s, t]; None where all rows attend to all."""
    allowed = None
    if mask.by_position:
        allowed = mask.allows(jnp.arange(q_rows)[:, None], jnp.arange(k_rows))[None, None]
    if segment_ids is not None:
        same = (segment_ids[:, :, None] == segment_ids[:, None, :])[:, None]
        allowed = same if allowed is None else allowed & same
    return allowed
