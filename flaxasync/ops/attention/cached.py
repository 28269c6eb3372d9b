"""Attention of a few new rows to the keys and values of all rows before them, which a cache holds."""

import jax
import jax.numpy as jnp
from jax import Array, lax

from flaxasync.ops.dtypes import accumulator_dtype


def cached_attention(
    q: Array,
    k: Array,
    v: Array,
    allowed: Array,
    *,
    scale: float,
    softcap: float | None = None,
    precision: lax.PrecisionLike = None,
) -> Array:
    """Returns softmax(softcap(scale * q @ k.T), where allowed) @ v, and reads the keys and values once.

    Args:
      q: Queries of the new rows, [b, s, h, d].
      k: Keys of all rows, [b, t, n, d]; h/n heads share each of n.
      v: Values of all rows, [b, t, n, d].
      allowed: Which rows a new row attends to, [b or 1, 1, s, t].
      scale: The factor of the scores.
      softcap: Scores are softcap * tanh(score / softcap); None for as they are.
      precision: The precision of the matmuls.

    Returns:
      [b, s, h, d], in the dtype of q.
    """
    b, s, h, d = q.shape
    dtype = accumulator_dtype(q)
    groups = q.reshape(b, s, k.shape[2], h // k.shape[2], d)
    k, v = k.astype(q.dtype), v.astype(q.dtype)
    scores = jnp.einsum("bsngd,btnd->bngst", groups, k, precision=precision, preferred_element_type=dtype) * scale
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    weights = jax.nn.softmax(jnp.where(allowed[:, :, None], scores, jnp.finfo(dtype).min), axis=-1)
    y = jnp.einsum("bngst,btnd->bsngd", weights.astype(q.dtype), v, precision=precision, preferred_element_type=dtype)
    return y.reshape(b, s, h, d).astype(q.dtype)
