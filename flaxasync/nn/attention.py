"""Tensor-parallel self-attention: heads split over a mesh axis, queries, keys and values from one trip of the input."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.typing import Initializer
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from flaxasync.mesh import mesh_axis_size
from flaxasync.nn import shards
from flaxasync.nn.heads import Context, HeadAttention, check_heads, check_segments, check_window, make_context
from flaxasync.nn.linear import ColumnParallelLinear, RowParallelLinear, default_bias_init, default_kernel_init
from flaxasync.nn.placement import Layout, Placement, check_divides, check_input, place
from flaxasync.ops.attention.layouts import AttentionLayout, check_rows


class ParallelSelfAttention(nnx.Module):
    """Multi-head self-attention with heads split over a mesh axis and grouped key-value heads.

    ```
    x        [b, s, features]              sharded by rows over axis_name, or the same on all of its devices
    q        [b, s, heads, head_dim]       a share of the heads on each device, all rows
    k, v     [b, s, kv_heads, head_dim]    likewise
    y        [b, s, features]              sharded as x is
    ```

    Query, key and value share one trip of x; the output projection is row-parallel. The parameters are those of four
    `nnx.Linear`: `query`, `key`, `value` and `out`, the first three with heads * head_dim output features.

    With `context_axis` the sequence is split over a second axis, and each device has its heads of its rows: x is
    sharded by rows over (context_axis, axis_name), and keys and values travel along context_axis as in
    `flaxasync.ring_attention`. Otherwise rows are positions 0 .. s - 1.

    Args:
      features: of input and output.
      heads: query heads; a multiple of the axis and of `kv_heads`.
      kv_heads: key-value heads, each shared by heads / kv_heads query heads; a multiple of the axis. By default heads.
      head_dim: features of a head; by default features / heads.
      causal: whether a position attends only to itself and earlier ones.
      window: a position attends only to those fewer than so many away; None for any distance.
      rope_theta: base of the rotary position embedding; None for none.
      axis_name: the mesh axis that splits the heads.
      context_axis: the mesh axis that splits the sequence; None where it is whole.
      context_layout: the order of the rows on it: "contiguous", or "zigzag", which shares causal work out equally. The
        input is then in the order of `flaxasync.sequence_order`.
      context_backend: see `flaxasync.ring_attention`.
      use_bias: whether the projections have biases.
      dtype: of the computation; by default the input's and the parameters' common type.
      param_dtype: of the parameters.
      precision: of the projections.
      kernel_init: of the kernels.
      bias_init: of the biases.
      backend: of the rings; see `flaxasync.all_gather_matmul`.
      in_spec: how the input is sharded, under Auto axes; see `ColumnParallelLinear`.
      rngs: the random streams; draws from `params`.

    Raises:
      ValueError: no mesh is set, it lacks an axis, or the heads do not divide by it or by each other.
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
        axis_name: str = "model",
        context_axis: str | None = None,
        context_layout: AttentionLayout = "contiguous",
        context_backend: str | None = None,
        use_bias: bool = False,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        precision: jax.lax.PrecisionLike = None,
        kernel_init: Initializer = default_kernel_init,
        bias_init: Initializer = default_bias_init,
        backend: str | None = None,
        in_spec: P | None = None,
        rngs: nnx.Rngs,
    ):
        kv_heads = kv_heads or heads
        check_divides("ParallelSelfAttention", axis_name, heads=heads, kv_heads=kv_heads)
        head_dim = check_heads("ParallelSelfAttention", features, heads, kv_heads, head_dim, rope_theta)
        check_window("ParallelSelfAttention", window)
        context = None
        if context_axis is not None:
            context = make_context("ParallelSelfAttention", context_axis, context_layout, context_backend)
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.attention = HeadAttention(head_dim, causal, window, rope_theta, context)
        options: dict[str, Any] = {
            "axis_name": axis_name,
            "use_bias": use_bias,
            "dtype": dtype,
            "param_dtype": param_dtype,
            "precision": precision,
            "kernel_init": kernel_init,
            "bias_init": bias_init,
            "backend": backend,
            "in_spec": in_spec,
            "rngs": rngs,
        }
        self.query = ColumnParallelLinear(features, heads * head_dim, **options)
        self.key = ColumnParallelLinear(features, kv_heads * head_dim, **options)
        self.value = ColumnParallelLinear(features, kv_heads * head_dim, **options)
        self.out = RowParallelLinear(heads * head_dim, features, **options)

    def __call__(self, x: Float[Array, "b s d"], segment_ids: Int[Array, "b s"] | None = None) -> Float[Array, "b s d"]:
        """Applies the layer.

        Args:
          x: the input.
          segment_ids: a position attends only to positions of the same id.

        Raises:
          ValueError: no mesh is set, it lacks an axis, x has other features or dimensions, or has rows that are not on
            the axes where they belong, or cannot be shared out.
        """
        query, context = self.query, self.attention.context
        in_spec = query.in_spec if context is None else self._in_spec(x, context.axis_name)
        placement = place("ParallelSelfAttention", x, query.axis_name, in_spec, sharded="rows")
        check_input("ParallelSelfAttention", x, query.in_features, placement)
        check_segments("ParallelSelfAttention", x, segment_ids)
        if x.ndim != 3:
            raise ValueError(f"ParallelSelfAttention needs an input [batch, rows, features]: got {list(x.shape)}")
        if context is not None:
            self._check_context(x, placement, context)
        elif placement.rows:
            raise ValueError(
                f"ParallelSelfAttention needs all rows of a sequence on {placement.axis_name!r}: its input's rows are "
                f"sharded over {', '.join(map(repr, placement.rows))}, too; reshard it with jax.reshard, or name that "
                "axis with context_axis"
            )
        layout: Layout = "sequence" if placement.rows_sharded else "replicated"
        options = query.options(x)
        projections = (query, self.key, self.value)

        @jax.checkpoint  # or the output of the heads would be saved twice: as it is, and flattened
        def project(heads: Array, out: shards.Linear) -> Array:
            return shards.row(heads.reshape(*heads.shape[:-2], -1), out, options, layout=layout)

        def apply(x: Array, linears: tuple[shards.Linear, ...], out: shards.Linear, ids: Array | None) -> Array:
            q, k, v = shards.column(x, linears, options, rows_sharded=placement.rows_sharded)
            return project(self.attention.attend(q, k, v, ids), out)

        ids_spec = None if segment_ids is None else placement.token_spec()
        return placement.run(
            apply,
            (x, tuple(linear.parameters() for linear in projections), self.out.parameters(), segment_ids),
            (placement.in_spec, tuple(linear.specs() for linear in projections), self.out.specs(), ids_spec),
            placement.in_spec,
        )

    def _in_spec(self, x: Array, context_axis: str) -> P | None:
        """How the input is sharded under Auto axes: the batch over the other axes, where they divide it, and the rows.

        Under Explicit axes the type says it, and inside shard_map there is nothing to say.
        """
        mesh, axis_name = jax.sharding.get_abstract_mesh(), self.query.axis_name
        auto = [name for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind == AxisType.Auto]
        if self.query.in_spec is not None or not {context_axis, axis_name} <= set(auto):
            return self.query.in_spec
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
            check_rows("ParallelSelfAttention", context.layout, x.shape[1], size)
        if size > 1 and rows != (context.axis_name,):
            raise ValueError(
                f"ParallelSelfAttention with context_axis={context.axis_name!r} needs its input's rows sharded over "
                f"{(context.axis_name, placement.axis_name)}, or over {context.axis_name!r} alone: got "
                f"{placement.in_spec}; reshard it with jax.reshard"
            )
