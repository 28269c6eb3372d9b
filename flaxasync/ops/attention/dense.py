"""Attention with all scores at once: for masks, biases, soft caps, dropout, other rows, and rows that a cache holds.

It needs memory for all scores of a device, [b, h, s, t] in float32. `flaxasync.attention` needs only tiles of them.
"""

import jax
import jax.numpy as jnp
from jax import Array, lax

from flaxasync.kernels.attention_block import Mask
from flaxasync.ops.matmul.products import accumulator_dtype


def dense_attention(
    q: Array, k: Array, v: Array, *,
    scale: float, softcap: float | None, mask: Array | None, bias: Array | None,
    dropout_key: Array | None, dropout_rate: float, precision: lax.PrecisionLike,
) -> Array:  # fmt: skip
    """Returns softmax(softcap(scale * q @ k.T) + bias, where the mask allows) @ v.

    Queries are [b, s, h, d]. Keys and values are [b, t, n, d]; h/n heads share each of n. Mask and bias broadcast to
    [b, h, s, t]. A row whose mask allows nothing attends to all rows equally, as in `nnx.dot_product_attention`. With a
    key, the `dropout_rate` share of the weights is dropped, and the others are divided by what is kept.
    """
    dtype, groups = accumulator_dtype(q), q.shape[2] // k.shape[2]
    k, v = (jnp.repeat(x, groups, axis=2) if groups > 1 else x for x in (k, v))
    scores = jnp.einsum("bshd,bthd->bhst", q, k, precision=precision, preferred_element_type=dtype) * scale
    scores = _capped(scores, softcap)
    if bias is not None:
        scores += bias.astype(dtype)
    if mask is not None:
        scores = jnp.where(mask, scores, jnp.finfo(dtype).min)
    weights = jax.nn.softmax(scores, axis=-1)
    if dropout_key is not None and dropout_rate:
        kept = jax.random.bernoulli(dropout_key, 1 - dropout_rate, weights.shape)
        weights = jnp.where(kept, weights / (1 - dropout_rate), 0)
    return jnp.einsum("bhst,bthd->bshd", weights.astype(v.dtype), v, precision=precision)


def cached_attention(
    q: Array, k: Array, v: Array, mask: Array, *, scale: float, softcap: float | None, precision: lax.PrecisionLike
) -> Array:
    """Returns the attention [b, s, h, d] of a few new rows to all rows that a cache holds, which are read once.

    The arguments are those of `dense_attention`. The mask is [b or 1, 1, s, t]; k and v may have another dtype than q.
    """
    b, s, h, d = q.shape
    dtype = accumulator_dtype(q)
    groups = q.reshape(b, s, k.shape[2], h // k.shape[2], d)
    k, v = k.astype(q.dtype), v.astype(q.dtype)
    scores = jnp.einsum("bsngd,btnd->bngst", groups, k, precision=precision, preferred_element_type=dtype) * scale
    scores = jnp.where(mask[:, :, None], _capped(scores, softcap), jnp.finfo(dtype).min)
    weights = jax.nn.softmax(scores, axis=-1).astype(q.dtype)
    y = jnp.einsum("bngst,btnd->bsngd", weights, v, precision=precision, preferred_element_type=dtype)
    return y.reshape(b, s, h, d).astype(q.dtype)


def positional_mask(mask: Mask, q_rows: int, k_rows: int, segment_ids: Array | None) -> Array | None:
    """Returns the mask of positions and segments, [1 or b, 1, s, t]; None where all rows attend to all."""
    allowed = None
    if mask.by_position:
        allowed = mask.allows(jnp.arange(q_rows)[:, None], jnp.arange(k_rows))[None, None]
    if segment_ids is not None:
        same = (segment_ids[:, :, None] == segment_ids[:, None, :])[:, None]
        allowed = same if allowed is None else allowed & same
    return allowed


def _capped(scores: Array, softcap: float | None) -> Array:
    return scores if softcap is None else softcap * jnp.tanh(scores / softcap)
