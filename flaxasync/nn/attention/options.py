"""The keywords of attention layers; those of their Dense layers are in `flaxasync.nn.options`."""

from collections.abc import Callable
from typing import Literal, TypedDict

from jax import Array

from flaxasync.nn.attention.rotary import RopeScaling
from flaxasync.nn.options import LinearOptions
from flaxasync.ops.attention.layouts import AttentionLayout


class AttentionOptions(TypedDict, total=False):
    """Keywords of attention layers beside those of Dense layers. `HeadAttention` has their defaults.

    Where logit_softcap, dropout_rate or attention_fn is used, or a call has a mask or a bias, a device computes all
    scores of its heads at once. Otherwise it holds only tiles of them.

    Attributes:
      kv_heads: The key-value heads, each shared by heads / kv_heads query heads. By default heads.
      head_dim: The features of a head; by default features / heads.
      window: A row attends only to rows fewer than `window` positions away; None, the default, for any distance.
      context_axis: The mesh axis that splits the sequence; None, the default, where it is whole.
      context_layout: The order of the rows on it: "contiguous", the default, or "zigzag", which shares causal work out
        equally. The input is then in the order of `flaxasync.sequence_order`.
      context_backend: What moves keys and values; see `flaxasync.ring_attention`. By default `backend`, where ring
        attention has it.
      exchange_heads: What travels where the input is sharded by rows. False: the rows. True: the weights, and then the
        heads. Each device multiplies its own rows with the weights of all devices, and an all-to-all then gives it all
        rows of its own heads. This sends less where a device has more rows than the weights have features. None, the
        default: the form that is predicted to be faster on the chips of the mesh; the rows on other devices.
      softmax_scale: The factor of the scores; 1 / sqrt(head_dim) by default.
      logit_softcap: Scores are logit_softcap * tanh(score / logit_softcap); None, the default, for as they are.
      normalize_qk: Whether queries and keys are normalized, each head, before they are rotated: True for
        `nnx.LayerNorm` without bias, as in `nnx.MultiHeadAttention`, and "rms" for `nnx.RMSNorm`. The parameters are
        `query_ln` and `key_ln`.
      qk_epsilon: What the norm adds to the variance or to the mean square; 1e-6 by default.
      rope_scaling: How the frequencies of the rotary position embedding are scaled; None, the default, for as they are.
      dropout_rate: The share of the weights that is dropped where a call is not deterministic; 0 by default.
      deterministic: Whether nothing is dropped, if a call does not say it; None, the default, for False.
      attention_fn: A function (query, key, value, *, bias, mask) of this device's heads, all [b, s, h, d], that
        replaces the attention, such as `nnx.dot_product_attention`. Its mask has positions and segments too. A layer
        with such a function takes no `dropout_rate` and no `logit_softcap`.
    """

    kv_heads: int | None
    head_dim: int | None
    window: int | None
    context_axis: str | None
    context_layout: AttentionLayout
    context_backend: str | None
    exchange_heads: bool | None
    softmax_scale: float | None
    logit_softcap: float | None
    normalize_qk: bool | Literal["rms"]
    qk_epsilon: float
    rope_scaling: RopeScaling | None
    dropout_rate: float
    deterministic: bool | None
    attention_fn: Callable[..., Array] | None


class ParallelAttentionOptions(LinearOptions, AttentionOptions, total=False):
    """Keywords of `ParallelAttention` and `ParallelSelfAttention`: those of Dense layers, and those of attention."""
