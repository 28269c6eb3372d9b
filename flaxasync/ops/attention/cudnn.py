"""Attention over whole sequences by cuDNN, NVIDIA's library, on a mesh of its GPUs.

`jax.nn.dot_product_attention` calls it. It holds tiles of scores, as the kernel of TPUs does.
"""

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name

from flaxasync import mesh
from flaxasync.kernels.attention_block import Mask
from flaxasync.ops.choose import is_default
from flaxasync.ops.saved import ATTENTION

_DTYPES = (jnp.bfloat16, jnp.float16)
_LARGEST_HEAD = 128
_HEAD_UNIT = 8  # elements


def unsupported(
    q: Array, mask: Mask, segment_ids: Array | None, precision: lax.PrecisionLike
) -> str | None:
    """Says what cuDNN takes where it cannot serve a call; None where it can."""
    head = q.shape[-1]
    if q.dtype not in _DTYPES:
        return f"bfloat16 and float16: got {q.dtype}"
    if head % _HEAD_UNIT or head > _LARGEST_HEAD:
        return f"heads of a multiple of {_HEAD_UNIT} features, up to {_LARGEST_HEAD}: got {head}"
    if segment_ids is not None:
        return "sequences of one segment: got segment_ids"
    if mask.window is not None and not mask.causal:
        return "a window of causal attention alone: got causal=False"
    if not is_default(precision):
        return f"the default precision: got precision={precision}"
    return None


def is_here() -> bool:
    """Says whether the mesh is one of NVIDIA's GPUs."""
    return mesh.platform() == "gpu" and mesh.chip_name().startswith("NVIDIA")


def is_known_here() -> bool:
    """Says whether the mesh is one of GPUs for which calls of cuDNN were compiled: those of
    `flaxasync.hardware`. Older ones cannot run them.
    """
    return mesh.gpu() is not None


def attend(q: Array, k: Array, v: Array, mask: Mask, scale: float) -> Array:
    """Returns o [b, s, h, d] of q [b, s, h, d], and of k and v [b, s, n, d]."""
    window = None
    if mask.window is not None:
        window = (mask.window - 1, 0)
    o = jax.nn.dot_product_attention(
        q,
        k,
        v,
        scale=scale,
        is_causal=mask.causal,
        local_window_size=window,
        implementation="cudnn",
    )
    return checkpoint_name(o, ATTENTION)
