"""Attention of the heads that a device holds: rotary positions, and the rows of other devices where they are split.

It runs inside shard_map, on local shards; the modules are in `attention`.
"""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from flaxasync.mesh import mesh_axis_size
from flaxasync.ops.attention.api import attention, ring_attention
from flaxasync.ops.attention.layouts import AttentionLayout, check_sequence_layout, positions


def rotary_embedding(
    x: Float[Array, "*batch s h d"], *, theta: float = 10_000.0, positions: Int[Array, "*s"] | None = None
) -> Float[Array, "*batch s h d"]:
    """Rotates each pair (x[i], x[i + d/2]) by position * theta ** (-2 i / d), computed in float32.

    Args:
      x: Rows of heads.
      theta: The base of the frequencies.
      positions: The positions of the rows; 0 .. s - 1 by default.

    Returns:
      The rotated rows, in the dtype of x.

    Source: Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding" (2021), in the half-split layout
    of the public Llama checkpoints.
    """
    rows, dim = x.shape[-3], x.shape[-1]
    frequency = theta ** (-jnp.arange(dim // 2, dtype=jnp.float32) / (dim // 2))
    position = jnp.arange(rows) if positions is None else positions
    angle = position.astype(jnp.float32)[:, None] * frequency
    cos, sin = jnp.cos(angle)[:, None, :], jnp.sin(angle)[:, None, :]
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


@dataclasses.dataclass(frozen=True)
class Context:
    """How a sequence is split over a mesh axis.

    Attributes:
      axis_name: The mesh axis.
      layout: Which rows a device holds; see `flaxasync.ring_attention`.
      backend: What moves keys and values; see `flaxasync.ring_attention`.
    """

    axis_name: str
    layout: AttentionLayout
    backend: str | None


@dataclasses.dataclass(frozen=True)
class HeadAttention:
    """What the heads of a layer have in common.

    Attributes:
      head_dim: The features of a head.
      causal: Whether a row attends only to itself and to earlier rows.
      window: A row attends only to rows fewer than `window` positions away; None for any distance.
      rope_theta: The base of the rotary position embedding; None for none.
      context: How the sequence is split; None where a device has all rows.
    """

    head_dim: int
    causal: bool
    window: int | None
    rope_theta: float | None
    context: Context | None

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
    ) -> "HeadAttention":
        """Returns the attention of a layer's heads.

        Raises:
          ValueError: Heads do not divide, or cannot be rotated, or the window contains no row. The message begins with
            `layer`.
        """
        if heads % kv_heads:
            raise ValueError(f"{layer}: heads must be a multiple of kv_heads: got heads={heads}, kv_heads={kv_heads}")
        if head_dim is None and features % heads:
            raise ValueError(
                f"{layer}: features must be divisible by heads: got features={features}, heads={heads}; or give "
                "head_dim"
            )
        head_dim = head_dim or features // heads
        if rope_theta is not None and head_dim % 2:
            raise ValueError(
                f"{layer}: rotary embedding rotates pairs, so head_dim must be even: got {head_dim}; "
                "use an even head_dim, or rope_theta=None"
            )
        if window is not None and window < 1:
            raise ValueError(f"{layer} needs window to be 1 or more rows, or None: got {window}")
        return cls(head_dim, causal, window, rope_theta, context)

    def attend(self, query: Array, key: Array, value: Array, segment_ids: Array | None) -> Array:
        """Returns the attention [b, s, h, d] of this device's heads, from projections [b, s, h * d]."""
        q, k, v = (x.reshape(*x.shape[:-1], -1, self.head_dim) for x in (query, key, value))
        if self.rope_theta is not None:
            q, k = (rotary_embedding(x, theta=self.rope_theta, positions=self._positions(x)) for x in (q, k))
        causal, window, context = self.causal, self.window, self.context
        if context is None:
            return attention(q, k, v, causal=causal, window=window, segment_ids=segment_ids)
        return ring_attention(
            q, k, v, context.axis_name, layout=context.layout, backend=context.backend, causal=causal, window=window,
            segment_ids=segment_ids,
        )  # fmt: skip

    def _positions(self, x: Array) -> Array | None:
        return None if self.context is None else positions(self.context.layout, x.shape[-3], self.context.axis_name)


def make_context(layer: str, axis_name: str, layout: AttentionLayout, backend: str | None) -> Context:
    """Returns the context, after checking that the mesh has the axis and that the layout exists.

    Raises:
      ValueError: There is no mesh, no such axis, or no such layout. The message begins with `layer`.
    """
    mesh_axis_size(layer, axis_name)
    check_sequence_layout(layer, layout)
    return Context(axis_name, layout, backend)


def check_segments(layer: str, x: Array, segment_ids: Array | None) -> None:
    """Raises ValueError for segment ids that are not one integer a row."""
    if segment_ids is not None and not jnp.issubdtype(segment_ids.dtype, jnp.integer):
        raise ValueError(f"{layer} needs segment ids of an integer dtype: got {segment_ids.dtype}; cast them")
    if segment_ids is not None and segment_ids.shape != x.shape[:2]:
        raise ValueError(f"{layer} needs one segment id a row, {list(x.shape[:2])}: got {list(segment_ids.shape)}")
