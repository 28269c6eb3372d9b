"""Attention of the heads that a device holds, inside shard_map: its options, norms, rotary
positions, and its op.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypedDict

import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name

from flaxasync.kernels.attention_block import Mask
from flaxasync.mesh import mesh_axis_size, vary_like
from flaxasync.nn.attention.rotary import (
    RopeScaling,
    RotaryTables,
    rotary_tables,
    rotate,
    side_by_side,
)
from flaxasync.nn.options import LinearOptions
from flaxasync.ops.attention.api import attention, ring_attention
from flaxasync.ops.attention.dense import dense_attention, positional_mask
from flaxasync.ops.attention.layouts import AttentionLayout, check_sequence_layout, positions
from flaxasync.ops.matmul.products import accumulator_dtype
from flaxasync.ops.saved import OPERANDS


class Inputs[T](NamedTuple):
    """The arrays of a call beside the input of queries, or how they are sharded. Each may be
    None.
    """

    inputs_k: T | None = None  # the input of keys, where it is not that of queries
    inputs_v: T | None = None  # the input of values, where it is not that of keys
    segment_ids: T | None = None  # [b, s]
    mask: T | None = None  # booleans that broadcast to [b, heads, s, t]
    bias: T | None = None  # numbers that broadcast to [b, heads, s, t]
    dropout_key: T | None = None  # a key of `jax.random`; outside of shard_map as raw data


class Norms(NamedTuple):
    """The scales of the norms of queries and of keys; None for no norm."""

    query: Array | None
    key: Array | None


class AttentionOptions(TypedDict, total=False):
    """Keywords of attention layers beside those of Dense layers.

    Where logit_softcap, dropout_rate or attention_fn is used, or a call has a mask or a bias, a
    device computes all scores of its heads at once. Otherwise it holds only tiles of them.

    Attributes:
      kv_heads: The key-value heads, each shared by heads / kv_heads query heads. By default heads.
      head_dim: The features of a head; by default features / heads.
      window: A row attends only to rows fewer than `window` positions away; None, the default, for
        any distance.
      context_axis: The mesh axis that splits the sequence; None, the default, where it is whole.
      context_layout: The order of the rows on it: "contiguous", the default, or "zigzag", which
        shares causal work out equally. The input is then in the order of
        `flaxasync.sequence_order`.
      context_backend: What moves keys and values; see `flaxasync.ring_attention`. By default
        `backend`, where ring attention has it.
      exchange_heads: What travels where the input is sharded by rows. False: the rows. True: the
        weights, and then the heads. Each device multiplies its own rows with the weights of all
        devices, and an all-to-all then gives it all rows of its own heads. This sends less where a
        device has more rows than the weights have features. None, the default: the form that is
        predicted to be faster on the chips of the mesh; the rows on other devices.
      softmax_scale: The factor of the scores; 1 / sqrt(head_dim) by default.
      logit_softcap: Scores are logit_softcap * tanh(score / logit_softcap); None, the default, for
        as they are.
      normalize_qk: Whether queries and keys are normalized, each head, before they are rotated:
        True for `nnx.LayerNorm` without bias, as in `nnx.MultiHeadAttention`, and "rms" for
        `nnx.RMSNorm`. The parameters are `query_ln` and `key_ln`.
      qk_epsilon: What the norm adds to the variance or to the mean square; 1e-6 by default.
      rope_scaling: How the frequencies of the rotary position embedding are scaled; None, the
        default, for not.
      dropout_rate: The share of the weights that is dropped where a call is not deterministic; 0 by
        default.
      deterministic: Whether nothing is dropped, if a call does not say it; None, the default, for
        False.
      attention_fn: A function (query, key, value, *, bias, mask) of this device's heads, all [b, s,
        h, d], that replaces the attention, such as `nnx.dot_product_attention`. Its mask has
        positions and segments too. A layer with such a function takes no `dropout_rate` and no
        `logit_softcap`.
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
    """Keywords of `ParallelAttention` and `ParallelSelfAttention`: those of Dense layers, and those
    of attention.
    """


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadAttention:
    """What the heads of a layer have in common: its arguments and the values of `AttentionOptions`.
    Hashable.
    """

    heads: int
    kv_heads: int
    head_dim: int
    causal: bool
    rope_theta: float | None
    precision: lax.PrecisionLike
    window: int | None = None
    context_axis: str | None = None
    context_layout: AttentionLayout = "contiguous"
    context_backend: str | None = None
    exchange_heads: bool | None = None
    softmax_scale: float | None = None
    logit_softcap: float | None = None
    normalize_qk: bool | Literal["rms"] = False
    qk_epsilon: float = 1e-6
    rope_scaling: RopeScaling | None = None
    dropout_rate: float = 0.0
    deterministic: bool | None = None
    attention_fn: Callable[..., Array] | None = None

    @classmethod
    def of(
        cls,
        layer: str,
        features: int,
        heads: int,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        **more: Any,
    ) -> "HeadAttention":
        """Returns the attention of a layer's heads, once it is checked. Messages of errors begin
        with `layer`.
        """
        if kv_heads is None:
            kv_heads = heads
        for name, count in (("heads", heads), ("kv_heads", kv_heads), ("head_dim", head_dim)):
            if count is not None and count < 1:
                raise ValueError(f"{layer} needs {name} to be 1 or more: got {name}={count}")
        if heads % kv_heads:
            raise ValueError(
                f"{layer}: heads must be a multiple of kv_heads: got heads={heads}, "
                f"kv_heads={kv_heads}"
            )
        if head_dim is None and features % heads:
            raise ValueError(
                f"{layer}: features must be divisible by heads: got features={features}, "
                f"heads={heads}; or give head_dim"
            )
        if head_dim is None:
            head_dim = features // heads
        made = cls(heads=heads, kv_heads=kv_heads, head_dim=head_dim, **more)
        if made.rope_theta is not None and head_dim % 2:
            raise ValueError(
                f"{layer}: rotary embedding rotates pairs, so head_dim must be even: got "
                f"{head_dim}; use an even head_dim, or rope_theta=None"
            )
        if made.window is not None and made.window < 1:
            raise ValueError(
                f"{layer} needs window to be 1 or more rows, or None: got {made.window}"
            )
        if not 0 <= made.dropout_rate < 1:
            raise ValueError(
                f"{layer} needs dropout_rate to be 0 or more and less than 1: got "
                f"{made.dropout_rate}"
            )
        lacking = made.needs_all_scores
        if made.attention_fn is not None and lacking != ["attention_fn"]:
            raise ValueError(
                f"{layer} with an attention_fn takes no {lacking[0]}: apply it inside attention_fn"
            )
        if made.context_axis is not None:
            mesh_axis_size(layer, made.context_axis)
            check_sequence_layout(layer, made.context_layout)
            if lacking:
                raise NotImplementedError(
                    f"{layer} over a split sequence lacks {lacking[0]}, because no device has all "
                    "scores of a row: use a layer whose sequences are whole (context_axis=None)"
                )
        return made

    def changed(self, layer: str, **changes: Any) -> "HeadAttention":
        """Returns the attention with changes, once it is checked that they go with each other."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return HeadAttention.of(layer, self.heads * self.head_dim, **(values | changes))

    @property
    def needs_all_scores(self) -> list[str]:
        """The names of the options for which a device needs all scores of a row."""
        used = {
            "logit_softcap": self.logit_softcap is not None,
            "dropout_rate": self.dropout_rate > 0,
            "attention_fn": self.attention_fn is not None,
        }
        return [name for name, is_used in used.items() if is_used]

    @property
    def scale(self) -> float:
        """The factor of the scores."""
        if self.softmax_scale is None:
            return 1 / math.sqrt(self.head_dim)
        return self.softmax_scale

    def attend(
        self,
        q: Array,
        k: Array,
        v: Array,
        inputs: Inputs[Array],
        norms: Norms,
        tables: RotaryTables | None = None,
    ) -> Array:
        """Returns the attention [b, s, h * d] of this device's heads of projections [b, s, h * d]
        and [b, t, n * d].
        """
        axis = self.context_axis
        if axis is None:
            at = None
        else:
            at = positions(self.context_layout, q.shape[1], axis)
        q, k, v = (
            # Heads side by side, as they are in memory: XLA would give what it keeps of heads apart
            # another layout.
            checkpoint_name(side_by_side(x), OPERANDS).reshape(x.shape)
            for x in self.split(q, k, v, norms, at, tables)
        )
        given = any(array is not None for array in (inputs.mask, inputs.bias, inputs.dropout_key))
        if given or self.needs_all_scores or q.shape[1] != k.shape[1]:
            y = self._attend_dense(q, k, v, inputs)
            return y.reshape(*y.shape[:2], -1)
        options: dict[str, Any] = {
            "causal": self.causal,
            "window": self.window,
            "segment_ids": inputs.segment_ids,
            "scale": self.softmax_scale,
            "precision": self.precision,
            "joined": True,
        }
        if axis is None:
            return attention(q, k, v, **options)
        return ring_attention(
            q, k, v, axis, layout=self.context_layout, backend=self.context_backend, **options
        )

    def split(
        self,
        q: Array,
        k: Array,
        v: Array,
        norms: Norms,
        positions: Array | None,
        tables: RotaryTables | None = None,
    ) -> tuple[Array, Array, Array]:
        """Returns the heads [b, s, h, d] of projections [b, s, h * d], normalized, and rotated by
        their positions.
        """
        if tables is None:
            tables = self.rotary_tables(q, q.shape[1], positions)
        if k.shape[1] == q.shape[1]:
            k_tables = tables
        else:
            k_tables = self.rotary_tables(k, k.shape[1], positions)
        q, k, v = (
            x.reshape(*x.shape[:-1], x.shape[-1] // self.head_dim, self.head_dim) for x in (q, k, v)
        )
        q = self._normalize(q, norms.query)
        k = self._normalize(k, norms.key)
        if tables is not None and k_tables is not None:
            q = rotate(q, tables)
            k = rotate(k, k_tables)
        return q, k, v

    def rotary_tables(
        self, x: Array, rows: int, positions: Array | None = None
    ) -> RotaryTables | None:
        """Returns the cosines and sines of rows at positions, by default 0 .. rows - 1; None where
        nothing rotates.
        """
        if self.rope_theta is None:
            return None
        tables = rotary_tables(
            rows,
            self.head_dim,
            accumulator_dtype(x),
            theta=self.rope_theta,
            positions=positions,
            scaling=self.rope_scaling,
        )
        return lax.optimization_barrier(tables)

    def _normalize(self, x: Array, scale: Array | None) -> Array:
        """Normalizes each head as `nnx.LayerNorm` without bias, or as `nnx.RMSNorm`."""
        if scale is None:
            return x
        x32 = x.astype(accumulator_dtype(x))
        if self.normalize_qk != "rms":
            x32 -= jnp.mean(x32, axis=-1, keepdims=True)
        variance = jnp.mean(jnp.square(x32), axis=-1, keepdims=True)
        factor = lax.broadcast_to_rank(vary_like(scale, x).astype(x32.dtype), x.ndim)
        return (x32 * (lax.rsqrt(variance + self.qk_epsilon) * factor)).astype(x.dtype)

    def _attend_dense(self, q: Array, k: Array, v: Array, inputs: Inputs[Array]) -> Array:
        mask = positional_mask(
            Mask(self.causal, self.window), q.shape[1], k.shape[1], inputs.segment_ids
        )
        if inputs.mask is not None:
            if mask is None:
                mask = inputs.mask
            else:
                mask = inputs.mask & mask
        if self.attention_fn is not None:
            # the function divides by the root
            q = q * jnp.asarray(self.scale * math.sqrt(self.head_dim), q.dtype)
            k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
            return self.attention_fn(q, k, v, bias=inputs.bias, mask=mask)
        return dense_attention(
            q,
            k,
            v,
            scale=self.scale,
            softcap=self.logit_softcap,
            mask=mask,
            bias=inputs.bias,
            dropout_key=inputs.dropout_key,
            dropout_rate=self.dropout_rate,
            precision=self.precision,
        )
