"""What the self-attention layers share: three projections, the attention of heads, and a projection of their output."""

import dataclasses
from collections.abc import Callable

import jax
from flax import nnx
from flax.nnx.nn.dtypes import canonicalize_dtype
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from flaxasync.nn import shards
from flaxasync.nn.heads import HeadAttention, check_segments
from flaxasync.nn.linear import ColumnParallelLinear, RowParallelLinear, parameter_specs, parameters
from flaxasync.nn.options import LinearSettings
from flaxasync.nn.placement import Placement, check_input, place


class SelfAttention(nnx.Module):
    """Three projections, the attention of heads, and a projection of their output.

    A subclass makes the projections, says how they are sharded, and how the output is projected.
    """

    settings: LinearSettings

    def _build(
        self,
        features: int,
        heads: int,
        kv_heads: int,
        attention: HeadAttention,
        make_input: Callable[[int, int], ColumnParallelLinear | nnx.Linear],
        make_output: Callable[[int, int], RowParallelLinear | nnx.Linear],
    ) -> None:
        """Creates the projections, each from its numbers of input and output features."""
        self.heads, self.kv_heads, self.head_dim, self.attention = heads, kv_heads, attention.head_dim, attention
        self.query = make_input(features, heads * attention.head_dim)
        self.key = make_input(features, kv_heads * attention.head_dim)
        self.value = make_input(features, kv_heads * attention.head_dim)
        self.out = make_output(heads * attention.head_dim, features)

    def _place(self, x: Array, segment_ids: Array | None, in_spec: P | None) -> Placement:
        """Reads how `x` is sharded, and checks both inputs."""
        layer = type(self).__name__
        placement = place(layer, x, self.settings.axis_name, in_spec, sharded="rows")
        check_input(layer, x, self.query.in_features, placement)
        check_segments(layer, x, segment_ids)
        if x.ndim != 3:
            raise ValueError(f"{layer} needs an input [batch, rows, features]: got {list(x.shape)}")
        return placement

    def _attend(
        self,
        x: Array,
        segment_ids: Array | None,
        placement: Placement,
        ids_spec: P,
        *,
        rows_sharded: bool,
        project: Callable[[Array, shards.Linear, LinearSettings], Array],
    ) -> Array:
        """Runs the layer on its shards.

        Args:
          x: The input.
          segment_ids: The segment of each row; None for one segment.
          placement: How the input is sharded, as the output is.
          ids_spec: How the segment ids are sharded.
          rows_sharded: Whether the layer's axis shards the rows that query, key and value need.
          project: Projects the output of the heads.
        """
        projections = self.query, self.key, self.value, self.out
        linears = tuple(map(parameters, projections))
        dtype = canonicalize_dtype(x, *(p for linear in linears for p in linear), dtype=self.settings.dtype)
        settings = dataclasses.replace(self.settings, dtype=dtype)

        @jax.checkpoint  # otherwise the output of the heads would be saved twice: as it is, and flattened
        def project_heads(heads: Array, out: shards.Linear) -> Array:
            return project(heads.reshape(*heads.shape[:-2], -1), out, settings)

        def apply(x: Array, linears: tuple[shards.Linear, ...], ids: Array | None) -> Array:
            *inputs, out = linears
            q, k, v = shards.column(x, tuple(inputs), settings, rows_sharded=rows_sharded)
            return project_heads(self.attention.attend(q, k, v, ids), out)

        specs = tuple(map(parameter_specs, projections))
        in_specs = (placement.in_spec, specs, None if segment_ids is None else ids_spec)
        return placement.run(apply, (x, linears, segment_ids), in_specs, placement.in_spec)
