"""Self-attention over a sequence that is split over a mesh axis: every device has all heads, and rows of its own."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn.dtypes import canonicalize_dtype
from flax.typing import Initializer
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from flaxasync.nn import shards
from flaxasync.nn.heads import HeadAttention, check_heads, check_segments, check_window, make_context
from flaxasync.nn.linear import default_bias_init, default_kernel_init
from flaxasync.nn.placement import check_input, place
from flaxasync.ops.attention.layouts import AttentionLayout, check_rows


class RingSelfAttention(nnx.Module):
    """Multi-head self-attention whose keys and values travel between devices that each hold rows of the sequence.

    ```
    x        [b, s, features]              sharded by rows over axis_name, as is everything below
    q        [b, s, heads, head_dim]
    k, v     [b, s, kv_heads, head_dim]
    y        [b, s, features]
    ```

    This is `flaxasync.ring_attention` between four `nnx.Linear`s: `query`, `key`, `value` and `out`, whose parameters
    are the same on all devices. Nothing but keys and values crosses the axis. To split the heads, too, over another
    axis, use `ParallelSelfAttention` with `context_axis`.

    Args:
      features: of input and output.
      heads: query heads; a multiple of `kv_heads`.
      kv_heads: key-value heads, each shared by heads / kv_heads query heads. By default heads.
      head_dim: features of a head; by default features / heads.
      causal: whether a position attends only to itself and earlier ones.
      layout: the order of the rows: "contiguous", or "zigzag", which shares causal work out equally. The input is then
        in the order of `flaxasync.sequence_order`.
      window: a position attends only to those fewer than so many away; None for any distance.
      rope_theta: base of the rotary position embedding; None for none.
      axis_name: the mesh axis that splits the sequence.
      use_bias: whether the projections have biases.
      dtype: of the computation; by default the input's and the parameters' common type.
      param_dtype: of the parameters.
      precision: of the projections.
      kernel_init: of the kernels.
      bias_init: of the biases.
      backend: see `flaxasync.ring_attention`.
      in_spec: how the input is sharded, under Auto axes; see `ColumnParallelLinear`.
      rngs: the random streams; draws from `params`.

    Raises:
      ValueError: no mesh is set, it lacks the axis, or the heads do not divide by each other.
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
        axis_name: str = "context",
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
        context = make_context("RingSelfAttention", axis_name, layout, backend)
        kv_heads = kv_heads or heads
        head_dim = check_heads("RingSelfAttention", features, heads, kv_heads, head_dim, rope_theta)
        check_window("RingSelfAttention", window)
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.attention = HeadAttention(head_dim, causal, window, rope_theta, context)
        self.context, self.dtype, self.precision, self.in_spec = context, dtype, precision, in_spec
        options: dict[str, Any] = {
            "use_bias": use_bias,
            "param_dtype": param_dtype,
            "kernel_init": kernel_init,
            "bias_init": bias_init,
            "rngs": rngs,
        }
        self.query = nnx.Linear(features, heads * head_dim, **options)
        self.key = nnx.Linear(features, kv_heads * head_dim, **options)
        self.value = nnx.Linear(features, kv_heads * head_dim, **options)
        self.out = nnx.Linear(heads * head_dim, features, **options)

    def __call__(self, x: Float[Array, "b s d"], segment_ids: Int[Array, "b s"] | None = None) -> Float[Array, "b s d"]:
        """Applies the layer.

        Args:
          x: the input, sharded by rows.
          segment_ids: a position attends only to positions of the same id.

        Raises:
          ValueError: no mesh is set, it lacks the axis, x has other features or dimensions, is not sharded by rows
            over the axis, or has rows that cannot be shared out.
        """
        axis_name = self.context.axis_name
        placement = place("RingSelfAttention", x, axis_name, self.in_spec, sharded="rows")
        check_input("RingSelfAttention", x, self.query.in_features, placement)
        check_segments("RingSelfAttention", x, segment_ids)
        if x.ndim != 3:
            raise ValueError(f"RingSelfAttention needs an input [batch, rows, features]: got {list(x.shape)}")
        if (not placement.rows_sharded and placement.size > 1) or placement.rows:
            raise ValueError(
                f"RingSelfAttention needs its input's rows sharded over {axis_name!r} alone: got {placement.in_spec}; "
                "reshard it with jax.reshard, or use ParallelSelfAttention for rows on two axes"
            )
        check_rows("RingSelfAttention", self.context.layout, x.shape[1] * (placement.size if placement.manual else 1),
                   placement.size)  # fmt: skip
        linears = tuple(
            (linear.kernel[...], None if linear.bias is None else linear.bias[...]) for linear in self._linears
        )
        dtype = canonicalize_dtype(x, *(p for linear in linears for p in linear), dtype=self.dtype)
        options = shards.Options(axis_name, dtype, None, self.precision)

        @jax.checkpoint  # or the output of the heads would be saved twice: as it is, and flattened
        def project(heads: Array, out: shards.Linear) -> Array:
            return shards.column(heads.reshape(*heads.shape[:-2], -1), (out,), options, rows_sharded=False)[0]

        def apply(x: Array, linears: tuple[shards.Linear, ...], ids: Array | None) -> Array:
            *projections, out = linears
            q, k, v = shards.column(x, tuple(projections), options, rows_sharded=False)
            return project(self.attention.attend(q, k, v, ids), out)

        specs = tuple((P(None, None), None if bias is None else P(None)) for _, bias in linears)
        ids_spec = None if segment_ids is None else P(*placement.in_spec[:2])
        return placement.run(apply, (x, linears, segment_ids), (placement.in_spec, specs, ids_spec), placement.in_spec)

    @property
    def _linears(self) -> tuple[nnx.Linear, ...]:
        return self.query, self.key, self.value, self.out
