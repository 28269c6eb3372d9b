"""Self-attention: with its heads split over a mesh axis, with its sequence split over one, or with both."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Unpack

import jax
from flax import nnx
from flax.nnx.nn.dtypes import canonicalize_dtype
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from flaxasync.mesh import mesh_axis_size
from flaxasync.nn import shards
from flaxasync.nn.heads import Context, HeadAttention, check_heads, check_segments, check_window, make_context
from flaxasync.nn.linear import ColumnParallelLinear, RowParallelLinear, parameter_specs, parameters
from flaxasync.nn.options import LinearOptions, LinearSettings, settings_of
from flaxasync.nn.placement import Layout, Placement, check_divides, check_input, place
from flaxasync.ops import backends
from flaxasync.ops.attention.layouts import AttentionLayout, check_sequence_rows


class _SelfAttention(nnx.Module):
    """Three projections, the attention of heads, and a projection of their output.

    A subclass makes the projections, says how they are sharded, and how the output is projected.
    """

    settings: LinearSettings

    def __init__(
        self,
        make_input: Callable[[int, int], ColumnParallelLinear | nnx.Linear],
        make_output: Callable[[int, int], RowParallelLinear | nnx.Linear],
        features: int,
        heads: int,
        *,
        kv_heads: int,
        head_dim: int | None,
        causal: bool,
        window: int | None,
        rope_theta: float | None,
        context: Context | None,
    ):
        layer = type(self).__name__
        head_dim = check_heads(layer, features, heads, kv_heads, head_dim, rope_theta)
        check_window(layer, window)
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.attention = HeadAttention(head_dim, causal, window, rope_theta, context)
        self.query = make_input(features, heads * head_dim)
        self.key = make_input(features, kv_heads * head_dim)
        self.value = make_input(features, kv_heads * head_dim)
        self.out = make_output(heads * head_dim, features)

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


class ParallelSelfAttention(_SelfAttention):
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
        super().__init__(
            functools.partial(ColumnParallelLinear, rngs=rngs, **options),
            functools.partial(RowParallelLinear, rngs=rngs, **options),
            features,
            heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            causal=causal,
            window=window,
            rope_theta=rope_theta,
            context=context,
        )

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


class RingSelfAttention(_SelfAttention):
    """Multi-head self-attention whose keys and values travel between devices that each hold rows of the sequence.

    ```
    x        [b, s, features]              sharded by rows over axis_name, as is everything below
    q        [b, s, heads, head_dim]
    k, v     [b, s, kv_heads, head_dim]
    y        [b, s, features]
    ```

    This is `flaxasync.ring_attention` between four `nnx.Linear`: `query`, `key`, `value` and `out`, whose parameters
    are the same on all devices. Only keys and values cross the axis. To split the heads too, over another axis, use
    `ParallelSelfAttention` with `context_axis`.

    Args:
      features: The features of input and output.
      heads: The query heads; a multiple of `kv_heads`.
      kv_heads: The key-value heads, each shared by heads / kv_heads query heads. By default heads.
      head_dim: The features of a head; by default features / heads.
      causal: Whether a row attends only to itself and to earlier rows.
      layout: The order of the rows: "contiguous", or "zigzag", which shares causal work out equally. The input is then
        in the order of `flaxasync.sequence_order`.
      window: A row attends only to rows fewer than `window` positions away; None for any distance.
      rope_theta: The base of the rotary position embedding; None for none.
      rngs: The random streams; the layer draws from `params`.
      **options: See `flaxasync.nn.LinearOptions`. `axis_name`, which splits the sequence, is "context" by default;
        `use_bias` is False by default; `backend` is that of `flaxasync.ring_attention`; `in_spec` has the rows over
        `axis_name`.

    Raises:
      TypeError: A keyword is unknown.
      ValueError: No mesh is set, it lacks the axis, or the heads do not divide by each other.
    """

    def __init__(
        self,
        features: int,
        heads: int,
        *,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        causal: bool = True,
        layout: AttentionLayout = "contiguous",
        window: int | None = None,
        rope_theta: float | None = 10_000.0,
        rngs: nnx.Rngs,
        **options: Unpack[LinearOptions],
    ):
        options.setdefault("axis_name", "context")
        options.setdefault("use_bias", False)
        settings = settings_of(LinearSettings, "RingSelfAttention", options)
        self.settings = settings
        make_linear = functools.partial(
            nnx.Linear,
            use_bias=settings.use_bias,
            param_dtype=settings.param_dtype,
            kernel_init=settings.kernel_init,
            bias_init=settings.bias_init,
            rngs=rngs,
        )
        super().__init__(
            make_linear,
            make_linear,
            features,
            heads,
            kv_heads=kv_heads or heads,
            head_dim=head_dim,
            causal=causal,
            window=window,
            rope_theta=rope_theta,
            context=make_context("RingSelfAttention", settings.axis_name, layout, settings.backend),
        )

    def __call__(self, x: Float[Array, "b s d"], segment_ids: Int[Array, "b s"] | None = None) -> Float[Array, "b s d"]:
        """Applies the layer.

        Args:
          x: The input, sharded by rows.
          segment_ids: The segment of each row; a row attends only to rows of the same segment.

        Raises:
          ValueError: No mesh is set, it lacks the axis, x has other features or dimensions, is not sharded by rows over
            the axis, or has rows that cannot be shared out equally.
        """
        context = self.attention.context
        assert context is not None
        placement = self._place(x, segment_ids, self.settings.in_spec)
        if (not placement.rows_sharded and placement.size > 1) or placement.rows:
            raise ValueError(
                f"RingSelfAttention needs its input's rows sharded over {placement.axis_name!r} alone: got "
                f"{placement.in_spec}; reshard it with jax.reshard, or use ParallelSelfAttention for rows on two axes"
            )
        rows = x.shape[1] * (placement.size if placement.manual else 1)
        check_sequence_rows("RingSelfAttention", context.layout, rows, placement.size)

        def project(heads: Array, out: shards.Linear, settings: LinearSettings) -> Array:
            return shards.column(heads, (out,), settings, rows_sharded=False)[0]

        return self._attend(
            x,
            segment_ids,
            placement,
            P(*placement.in_spec[:2]),
            rows_sharded=False,
            project=project,
        )
