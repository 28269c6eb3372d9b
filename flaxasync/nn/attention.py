"""Tensor-parallel self-attention: its heads are split over a mesh axis, and its sequence may be split over another."""

import functools
import math
from typing import Unpack

import jax
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from flaxasync.mesh import mesh_axis_size
from flaxasync.nn import shards
from flaxasync.nn.heads import Context, HeadAttention, make_context
from flaxasync.nn.linear import ColumnParallelLinear, RowParallelLinear
from flaxasync.nn.options import LinearOptions, LinearSettings, settings_of
from flaxasync.nn.placement import Layout, Placement, check_divides
from flaxasync.nn.self_attention import SelfAttention
from flaxasync.ops import backends
from flaxasync.ops.attention.layouts import AttentionLayout, check_sequence_rows


class ParallelSelfAttention(SelfAttention):
    """Multi-head self-attention with heads split over a mesh axis and grouped key-value heads.

    ```
    x        [b, s, features]              sharded by rows over axis_name, or the same on all of its devices
    q        [b, s, heads, head_dim]       a share of the heads on each device, all rows
    k, v     [b, s, kv_heads, head_dim]    likewise
    y        [b, s, features]              sharded as x is
    ```

    Query, key and value share one trip of x; the output projection is row-parallel. The parameters are those of four
    `nnx.Linear`: `query`, `key`, `value` and `out`, of which the first three have heads * head_dim output features.

    With `context_axis` the sequence is split over a second axis, and each device has its heads of its rows: x is
    sharded by rows over (context_axis, axis_name), and keys and values travel along context_axis as in
    `flaxasync.ring_attention`. Without it, rows are positions 0 .. s - 1.

    Args:
      features: The features of input and output.
      heads: The query heads; a multiple of the axis and of `kv_heads`.
      kv_heads: The key-value heads, each shared by heads / kv_heads query heads; a multiple of the axis. By default
        heads.
      head_dim: The features of a head; by default features / heads.
      causal: Whether a row attends only to itself and to earlier rows.
      window: A row attends only to rows fewer than `window` positions away; None for any distance.
      rope_theta: The base of the rotary position embedding; None for none.
      context_axis: The mesh axis that splits the sequence; None where it is whole.
      context_layout: The order of the rows on it: "contiguous", or "zigzag", which shares causal work out equally. The
        input is then in the order of `flaxasync.sequence_order`.
      context_backend: What moves keys and values; see `flaxasync.ring_attention`. By default `backend`, where ring
        attention has it.
      rngs: The random streams; the layer draws from `params`.
      **options: See `flaxasync.nn.LinearOptions`. `use_bias` is False by default; `in_spec` has the rows over
        `axis_name`.

    Raises:
      TypeError: A keyword is unknown.
      ValueError: No mesh is set, it lacks an axis, or the heads do not divide by the axis or by each other.
    """

    def __init__(
        self,
        features: int,
        heads: int,
        *,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        causal: bool = True,
        window: int | None = None,
        rope_theta: float | None = 10_000.0,
        context_axis: str | None = None,
        context_layout: AttentionLayout = "contiguous",
        context_backend: str | None = None,
        rngs: nnx.Rngs,
        **options: Unpack[LinearOptions],
    ):
        layer, kv_heads = "ParallelSelfAttention", kv_heads or heads
        options.setdefault("use_bias", False)
        self.settings = settings_of(LinearSettings, layer, options)
        check_divides(layer, self.settings.axis_name, heads=heads, kv_heads=kv_heads)
        context = None
        if context_axis is not None:
            backend = context_backend or backends.if_available("ring_attention", self.settings.backend)
            context = make_context(layer, context_axis, context_layout, backend)
        attention = HeadAttention.of(
            layer, features, heads, kv_heads, head_dim,
            causal=causal, window=window, rope_theta=rope_theta, context=context,
        )  # fmt: skip
        column = functools.partial(ColumnParallelLinear, rngs=rngs, **options)
        row = functools.partial(RowParallelLinear, rngs=rngs, **options)
        self._build(features, heads, kv_heads, attention, column, row)

    def __call__(self, x: Float[Array, "b s d"], segment_ids: Int[Array, "b s"] | None = None) -> Float[Array, "b s d"]:
        """Applies the layer.

        Args:
          x: The input.
          segment_ids: The segment of each row; a row attends only to rows of the same segment.

        Raises:
          ValueError: No mesh is set, it lacks an axis, x has other features or dimensions, has rows that are not on the
            axes where they belong, or rows that cannot be shared out equally.
        """
        context = self.attention.context
        in_spec = self.settings.in_spec if context is None else self._in_spec(x, context.axis_name)
        placement = self._place(x, segment_ids, in_spec)
        if context is not None:
            self._check_context(x, placement, context)
        elif placement.rows:
            raise ValueError(
                f"ParallelSelfAttention needs all rows of a sequence on {placement.axis_name!r}: its input's rows are "
                f"sharded over {', '.join(map(repr, placement.rows))}, too; reshard it with jax.reshard, or name that "
                "axis with context_axis"
            )
        layout: Layout = "sequence" if placement.rows_sharded else "replicated"
        return self._attend(
            x,
            segment_ids,
            placement,
            placement.token_spec(),
            rows_sharded=placement.rows_sharded,
            project=functools.partial(shards.row, layout=layout),
        )

    def _in_spec(self, x: Array, context_axis: str) -> P | None:
        """Returns how the input is sharded under Auto axes: the rows over both axes, the batch over the others.

        Other axes that do not divide the batch leave it whole. Under Explicit axes the type says how the input is
        sharded, and inside shard_map nothing has to be said.
        """
        mesh, axis_name = jax.sharding.get_abstract_mesh(), self.settings.axis_name
        auto = [name for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind == AxisType.Auto]
        if self.settings.in_spec is not None or not {context_axis, axis_name} <= set(auto):
            return self.settings.in_spec
        others = tuple(name for name in auto if name not in (context_axis, axis_name))
        fits = x.shape[0] % math.prod(mesh.shape[name] for name in others) == 0
        return P(others if others and fits else None, (context_axis, axis_name), None)

    def _check_context(self, x: Array, placement: Placement, context: Context) -> None:
        size = mesh_axis_size("ParallelSelfAttention", context.axis_name)
        if placement.manual:
            varies = context.axis_name in jax.typeof(x).mat.varying
            rows: tuple[str, ...] = (context.axis_name,) if varies else ()
        else:
            rows = placement.rows
            check_sequence_rows("ParallelSelfAttention", context.layout, x.shape[1], size)
        if size > 1 and rows != (context.axis_name,):
            raise ValueError(
                f"ParallelSelfAttention with context_axis={context.axis_name!r} needs its input's rows sharded over "
                f"{(context.axis_name, placement.axis_name)}, or over {context.axis_name!r} alone: got "
                f"{placement.in_spec}; reshard it with jax.reshard"
            )
