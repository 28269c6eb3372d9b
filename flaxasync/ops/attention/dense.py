"""Attention with all scores at once: for masks, biases, soft caps, dropout, other rows, and rows
that a cache holds.

It needs memory for all scores of a device, [b, h, s, t] in float32. `flaxasync.attention` needs
only tiles of them.
"""

import jax
import jax.numpy as jnp
from jax import Array, lax

from flaxasync.kernels.attention_block import Mask
from flaxasync.ops.matmul.products import accumulator_dtype


def dense_attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    scale: float,
    softcap: float | None,
    mask: Array | None,
    bias: Array | None,
    dropout_key: Array | None,
    dropout_rate: float,
    precision: lax.PrecisionLike,
) -> Array:
    """Returns softmax(softcap(scale * q @ k.T) + bias, where the mask allows) @ v.

    Queries are [b, s, h, d]. Keys and values are [b, t, n, d]; h/n heads share each of n. Mask and
    bias broadcast to [b, h, s, t]. A row whose mask allows nothing attends to all rows equally, as
    in `nnx.dot_product_attention`. With a key, the `dropout_rate` share of the weights is dropped,
    and the others are divided by what is kept.
    """
    b, s, h, d = q.shape
    _, t, n, _ = k.shape
    dtype = accumulator_dtype(q)
    queries = q.reshape(b, s, n, h // n, d)  # of each head of keys
    scores = (
        jnp.einsum(
            "bsngd,btnd->bngst", queries, k, precision=precision, preferred_element_type=dtype
        )
        * scale
    )
    scores = scores.reshape(b, h, s, t)
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    if bias is not None:
        scores += bias.astype(dtype)
    if mask is not None:
        scores = jnp.where(mask, scores, jnp.finfo(dtype).min)
    weights = jax.nn.softmax(scores, axis=-1)
    if dropout_key is not None and dropout_rate:
        kept = jax.random.bernoulli(dropout_key, 1 - dropout_rate, weights.shape)
        weights = jnp.where(kept, weights / (1 - dropout_rate), 0)
    weights = weights.astype(v.dtype).reshape(b, n, h // n, s, t)
    return jnp.einsum("bngst,btnd->bsngd", weights, v, precision=precision).reshape(b, s, h, d)


def positional_mask(
    mask: Mask, q_rows: int, k_rows: int, segment_ids: Array | None
) -> Array | None:
    """Returns the mask of positions and segments, [1 or b, 1, s, t]; None where all rows attend to
    all.
    """
    allowed = None
    if mask.by_position:
        allowed = mask.allows(jnp.arange(q_rows)[:, None], jnp.arange(k_rows)[None])[None, None]
    if segment_ids is not None:
        same = (segment_ids[:, :, None] == segment_ids[:, None, :])[:, None]
        if allowed is None:
            allowed = same
        else:
            allowed = allowed & same
    return allowed
