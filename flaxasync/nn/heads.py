"""Attention of the heads that a device holds: rotary positions, and the rows of other devices where they are split.

It runs inside shard_map, on local shards; the modules are in `attention`.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Literal, TypedDict

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from flaxasync.mesh import cast_to_varying
from flaxasync.nn.context import Context
from flaxasync.nn.rotary import RopeScaling, rotary_tables, rotate
from flaxasync.ops.attention.api import attention, ring_attention
from flaxasync.ops.attention.dense import Additions, dense_attention, positional_mask
from flaxasync.ops.attention.layouts import Mask, positions
from flaxasync.ops.dtypes import accumulator_dtype


class AttentionOptions(TypedDict, total=False):
    """Keywords of attention layers that change scores or weights.

    Where logit_softcap, dropout_rate or attention_fn is used, or a call has a mask or a bias, a device computes all
    scores of its heads at once. Otherwise it holds only tiles of them.

    Attributes:
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

    softmax_scale: float | None
    logit_softcap: float | None
    normalize_qk: bool | Literal["rms"]
    qk_epsilon: float
    rope_scaling: RopeScaling | None
    dropout_rate: float
    deterministic: bool | None
    attention_fn: Callable[..., Array] | None


@dataclasses.dataclass(frozen=True)
class ScoreOptions:
    """The values of `AttentionOptions` in a layer."""

    softmax_scale: float | None = None
    logit_softcap: float | None = None
    normalize_qk: bool | Literal["rms"] = False
    qk_epsilon: float = 1e-6
    rope_scaling: RopeScaling | None = None
    dropout_rate: float = 0.0
    deterministic: bool | None = None
    attention_fn: Callable[..., Array] | None = None

    @property
    def needs_all_scores(self) -> str:
        """The name of the first option for which a device needs all scores of a row; "" for none."""
        given = {
            "logit_softcap": self.logit_softcap is not None,
            "dropout_rate": self.dropout_rate > 0,
            "attention_fn": self.attention_fn is not None,
        }
        return next((name for name, used in given.items() if used), "")


@dataclasses.dataclass(frozen=True)
class HeadAttention:
    """What the heads of a layer have in common.

    Attributes:
      head_dim: The features of a head.
      causal: Whether a row attends only to itself and to earlier rows.
      window: A row attends only to rows fewer than `window` positions away; None for any distance.
      rope_theta: The base of the rotary position embedding; None for none.
      context: How the sequence is split; None where a device has all rows.
      options: How scores and weights differ from those of plain attention.
      precision: The precision of the matmuls, as in `lax.dot_general`.
    """

    head_dim: int
    causal: bool
    window: int | None
    rope_theta: float | None
    context: Context | None
    options: "ScoreOptions"
    precision: lax.PrecisionLike = None

    @classmethod
    def of(
        cls,
        layer: str,
        features: int,
        heads: int,
        kv_heads: int,
        head_dim: int | None,
        *,
        causal: bool,
        window: int | None,
        rope_theta: float | None,
        context: Context | None,
        options: "ScoreOptions",
        precision: lax.PrecisionLike,
    ) -> "HeadAttention":
        """Returns the attention of a layer's heads.

        Raises:
          ValueError: Heads do not divide, or cannot be rotated, the window contains no row, or an option does not go
            with attention_fn. The message begins with `layer`.
        """
        for name, count in (("heads", heads), ("kv_heads", kv_heads), ("head_dim", head_dim)):
            if count is not None and count < 1:
                raise ValueError(f"{layer} needs {name} to be 1 or more: got {name}={count}")
        if heads % kv_heads:
            raise ValueError(f"{layer}: heads must be a multiple of kv_heads: got heads={heads}, kv_heads={kv_heads}")
        if head_dim is None and features % heads:
            raise ValueError(
                f"{layer}: features must be divisible by heads: got features={features}, heads={heads}; or give "
                "head_dim"
            )
        head_dim = features // heads if head_dim is None else head_dim
        if rope_theta is not None and head_dim % 2:
            raise ValueError(
                f"{layer}: rotary embedding rotates pairs, so head_dim must be even: got {head_dim}; "
                "use an even head_dim, or rope_theta=None"
            )
        if window is not None and window < 1:
            raise ValueError(f"{layer} needs window to be 1 or more rows, or None: got {window}")
        if context is not None and (lacking := options.needs_all_scores):
            raise NotImplementedError(
                f"{layer} over a split sequence lacks {lacking}: keys and values travel, and no device has all scores "
                "of a row; use a layer whose sequences are whole (context_axis=None)"
            )
        if not 0 <= options.dropout_rate < 1:
            raise ValueError(f"{layer} needs dropout_rate to be 0 or more and less than 1: got {options.dropout_rate}")
        for name, used in (
            ("dropout_rate", options.dropout_rate),
            ("logit_softcap", options.logit_softcap is not None),
        ):
            if used and options.attention_fn is not None:
                raise ValueError(f"{layer} with an attention_fn takes no {name}: apply it inside attention_fn")
        return cls(head_dim, causal, window, rope_theta, context, options, precision)

    def attend(
        self,
        query: Array,
        key: Array,
        value: Array,
        segment_ids: Array | None,
        additions: Additions = Additions(),  # noqa: B008 (it is frozen)
        norms: tuple[Array | None, Array | None] = (None, None),
        tables: tuple[Array, Array] | None = None,
    ) -> Array:
        """Returns the attention [b, s, h, d] of this device's heads, from projections [b, s, h * d].

        Args:
          query: The projected queries.
          key: The projected keys, of these or of other rows.
          value: The projected values.
          segment_ids: The segment of each row; None for one segment.
          additions: The mask, the bias and the key of the dropout.
          norms: The scales of the norms of queries and of keys; None for no norm.
          tables: What `rotary_tables` returns for these rows, where it was computed before.
        """
        q, k, v = self.split(query, key, value, norms, None if self.context is None else self._positions(query), tables)
        causal, window, context = self.causal, self.window, self.context
        options = self.options
        if additions.some or options.needs_all_scores or q.shape[1] != k.shape[1]:
            return self._attend_dense(q, k, v, segment_ids, additions)
        if context is None:
            return attention(
                q, k, v, causal=causal, window=window, segment_ids=segment_ids, scale=options.softmax_scale,
                precision=self.precision,
            )  # fmt: skip
        return ring_attention(
            q, k, v, context.axis_name, layout=context.layout, backend=context.backend, causal=causal, window=window,
            segment_ids=segment_ids, scale=options.softmax_scale, precision=self.precision,
        )  # fmt: skip

    def split(
        self,
        query: Array,
        key: Array,
        value: Array,
        norms: tuple[Array | None, Array | None],
        positions: Array | None,
        tables: tuple[Array, Array] | None = None,
    ) -> tuple[Array, Array, Array]:
        """Returns the heads [b, s, h, d] of projections [b, s, h * d], normalized, and rotated by their positions.

        The positions are 0 .. s - 1 by default.
        """
        q, k, v = (x.reshape(*x.shape[:-1], x.shape[-1] // self.head_dim, self.head_dim) for x in (query, key, value))
        q, k = (
            x if scale is None else _normalize(x, scale, self.options) for x, scale in zip((q, k), norms, strict=True)
        )
        tables = self.rotary_tables(query, query.shape[1], positions) if tables is None else tables
        k_tables = tables if key.shape[1] == query.shape[1] else self.rotary_tables(key, key.shape[1], positions)
        if tables is not None and k_tables is not None:
            q, k = rotate(q, tables), rotate(k, k_tables)
        return q, k, v

    def rotary_tables(self, x: Array, rows: int, positions: Array | None = None) -> tuple[Array, Array] | None:
        """Returns the cosines and sines of the rotary position embedding of a number of rows; None for no embedding."""
        if self.rope_theta is None:
            return None
        tables = rotary_tables(
            rows, self.head_dim, accumulator_dtype(x), theta=self.rope_theta, positions=positions,
            scaling=self.options.rope_scaling,
        )  # fmt: skip
        return lax.optimization_barrier(tables)

    def _attend_dense(self, q: Array, k: Array, v: Array, segment_ids: Array | None, additions: Additions) -> Array:
        options = self.options
        allowed = positional_mask(Mask(self.causal, self.window), q.shape[1], k.shape[1], segment_ids)
        if additions.mask is not None:
            allowed = additions.mask if allowed is None else additions.mask & allowed
        scale = 1 / math.sqrt(self.head_dim) if options.softmax_scale is None else options.softmax_scale
        if options.attention_fn is None:
            return dense_attention(
                q, k, v, dataclasses.replace(additions, mask=allowed), scale=scale, softcap=options.logit_softcap,
                dropout_rate=options.dropout_rate, precision=self.precision,
            )  # fmt: skip
        q = q * jnp.asarray(scale * math.sqrt(self.head_dim), q.dtype)  # the function divides by the root of head_dim
        k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
        return options.attention_fn(q, k, v, bias=additions.bias, mask=allowed)

    def _positions(self, x: Array) -> Array:
        assert self.context is not None
        return positions(self.context.layout, x.shape[1], self.context.axis_name)


def _normalize(x: Array, scale: Array, options: ScoreOptions) -> Array:
    """Normalizes each head as `nnx.LayerNorm` without bias, or as `nnx.RMSNorm`."""
    x32 = x.astype(accumulator_dtype(x))
    if options.normalize_qk != "rms":
        x32 -= jnp.mean(x32, axis=-1, keepdims=True)
    variance = jnp.mean(jnp.square(x32), axis=-1, keepdims=True)
    scale = cast_to_varying(scale, jax.typeof(x).mat.varying).astype(x32.dtype)
    return (x32 * (lax.rsqrt(variance + options.qk_epsilon) * scale)).astype(x.dtype)


def check_segments(layer: str, x: Array, segment_ids: Array | None) -> None:
    """Raises ValueError for segment ids that are not one integer a row."""
    if segment_ids is not None and not jnp.issubdtype(segment_ids.dtype, jnp.integer):
        raise ValueError(f"{layer} needs segment ids of an integer dtype: got {segment_ids.dtype}; cast them")
    if segment_ids is not None and segment_ids.shape != x.shape[:2]:
        raise ValueError(f"{layer} needs one segment id a row, {list(x.shape[:2])}: got {list(segment_ids.shape)}")
