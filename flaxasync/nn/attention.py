"""Tensor-parallel self-attention: heads split over a mesh axis, queries, keys and values from one trip of the input."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.typing import Initializer
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from flaxasync.nn import shards
from flaxasync.nn.linear import ColumnParallelLinear, RowParallelLinear, default_bias_init, default_kernel_init
from flaxasync.nn.placement import Layout, check_divides, check_input, place


def rotary_embedding(x: Float[Array, "*batch s h d"], *, theta: float = 10_000.0) -> Float[Array, "*batch s h d"]:
    """Rotates each pair (x[i], x[i + d/2]) by position * theta ** (-2 i / d).

    Positions are 0 .. s - 1; the rotation is computed in float32.

    Source: Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding" (2021), in the half-split layout
    of the public Llama checkpoints.
    """
    rows, dim = x.shape[-3], x.shape[-1]
    frequency = theta ** (-jnp.arange(dim // 2, dtype=jnp.float32) / (dim // 2))
    angle = jnp.arange(rows, dtype=jnp.float32)[:, None] * frequency
    cos, sin = jnp.cos(angle)[:, None, :], jnp.sin(angle)[:, None, :]
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


class ParallelSelfAttention(nnx.Module):
    """Multi-head self-attention with heads split over a mesh axis and grouped key-value heads.

    ```
    x        [b, s, features]              sharded by rows over axis_name, or the same on all of its devices
    q        [b, s, heads, head_dim]       a share of the heads on each device, all rows
    k, v     [b, s, kv_heads, head_dim]    likewise
    y        [b, s, features]              sharded as x is
    ```

    Query, key and value share one trip of x; the output projection is row-parallel. The parameters are those of four
    `nnx.Linear`: `query`, `key`, `value` and `out`, the first three with heads * head_dim output features. Rows are
    positions 0 .. s - 1.

    Args:
      features: of input and output.
      heads: query heads; a multiple of the axis and of `kv_heads`.
      kv_heads: key-value heads, each shared by heads / kv_heads query heads; a multiple of the axis. By default heads.
      head_dim: features of a head; by default features / heads.
      causal: whether a position attends only to itself and earlier ones.
      rope_theta: base of the rotary position embedding; None for none.
      axis_name: the mesh axis that splits the heads.
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
      ValueError: no mesh is set, it lacks the axis, or the heads do not divide by it or by each other.
    """

    def __init__(
        self,
        features: int,
        heads: int,
        *,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        causal: bool = True,
        rope_theta: float | None = 10_000.0,
        axis_name: str = "model",
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
        if heads % kv_heads:
            raise ValueError(
                f"ParallelSelfAttention: heads must be a multiple of kv_heads: got heads={heads}, kv_heads={kv_heads}"
            )
        if head_dim is None and features % heads:
            raise ValueError(
                f"ParallelSelfAttention: features must be divisible by heads: got features={features}, heads={heads}; "
                "or give head_dim"
            )
        head_dim = head_dim or features // heads
        if rope_theta is not None and head_dim % 2:
            raise ValueError(
                f"ParallelSelfAttention: rotary embedding rotates pairs, so head_dim must be even: got {head_dim}; "
                "use an even head_dim, or rope_theta=None"
            )
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.causal, self.rope_theta = causal, rope_theta
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

    def __call__(self, x: Float[Array, "b s d"]) -> Float[Array, "b s d"]:
        """Applies the layer.

        Raises:
          ValueError: no mesh is set, it lacks the axis, or x has other features or dimensions.
        """
        query = self.query
        placement = place("ParallelSelfAttention", x, query.axis_name, query.in_spec, sharded="rows")
        check_input("ParallelSelfAttention", x, query.in_features, placement)
        if x.ndim != 3:
            raise ValueError(f"ParallelSelfAttention needs an input [batch, rows, features]: got {list(x.shape)}")
        if placement.rows:
            raise ValueError(
                f"ParallelSelfAttention needs all rows of a sequence on {placement.axis_name!r}: its input's rows are "
                f"sharded over {', '.join(map(repr, placement.rows))}, too; reshard it with jax.reshard"
            )
        layout: Layout = "sequence" if placement.rows_sharded else "replicated"
        options = query.options(x)
        projections = (query, self.key, self.value)

        def apply(x: Array, linears: tuple[shards.Linear, ...], out: shards.Linear) -> Array:
            columns = shards.column(x, linears, options, rows_sharded=placement.rows_sharded)
            return shards.row(self.attend(*columns), out, options, layout=layout)

        return placement.run(
            apply,
            (x, tuple(linear.parameters() for linear in projections), self.out.parameters()),
            (placement.in_spec, tuple(linear.specs() for linear in projections), self.out.specs()),
            placement.in_spec,
        )

    def attend(self, query: Array, key: Array, value: Array) -> Array:
        """Attention of this device's heads: [b, s, h * d] each, heads folded into the features."""
        q, k, v = (x.reshape(*x.shape[:-1], -1, self.head_dim) for x in (query, key, value))
        if self.rope_theta is not None:
            q, k = rotary_embedding(q, theta=self.rope_theta), rotary_embedding(k, theta=self.rope_theta)
        out = jax.nn.dot_product_attention(q, k, v, is_causal=self.causal)
        return out.reshape(*out.shape[:-2], -1)
