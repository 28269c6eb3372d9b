"""A Llama-style decoder: RMSNorm, rotary positions, grouped-query attention, gated MLP. Read it top to bottom.

The residual stream is sharded over the sequence: each device of the model axis holds its own rows of it, norms and
residuals run on those, and the parallel layers gather and scatter rows while they multiply. With a context axis the
sequence is split over that, too, and keys and values travel along it. Layers are stacked along a leading dimension of
their parameters and run as one scan.

Shape suffixes: B batch, L sequence, D width, V vocabulary. On a mesh (data, model), x_BLD is sharded
P(data, model, None) and tokens_BL is P(data, None); with a context axis, P(data, (context, model), None) and
P(data, context).
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

import flaxasync as fa
from models.config import ContextLayout, Remat, TransformerConfig


class DecoderLayer(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(
        self,
        config: TransformerConfig,
        *,
        axis_name: str,
        context_axis: str | None,
        context_layout: ContextLayout,
        backend: str | None,
        rngs: nnx.Rngs,
    ):
        dtype, param_dtype = jnp.dtype(config.dtype), jnp.dtype(config.param_dtype)
        self.attention_norm = RMSNorm(config, rngs=rngs)
        self.attention = fa.nn.ParallelSelfAttention(
            config.width,
            config.heads,
            kv_heads=config.kv_heads,
            rope_theta=config.rope_theta,
            axis_name=axis_name,
            context_axis=context_axis,
            context_layout=context_layout,
            context_backend={"none": "gather", "fused": None}.get(backend or "", backend),
            dtype=dtype,
            param_dtype=param_dtype,
            backend=backend,
            rngs=rngs,
        )
        self.mlp_norm = RMSNorm(config, rngs=rngs)
        self.mlp = fa.nn.ParallelMLP(
            config.width,
            config.mlp_width,
            axis_name=axis_name,
            dtype=dtype,
            param_dtype=param_dtype,
            backend=backend,
            rngs=rngs,
        )

    def __call__(
        self, x_BLD: Float[Array, "B L D"], segment_ids_BL: Int[Array, "B L"] | None = None
    ) -> Float[Array, "B L D"]:
        x_BLD = x_BLD + self.attention(self.attention_norm(x_BLD), segment_ids_BL)
        return x_BLD + self.mlp(self.mlp_norm(x_BLD))


def RMSNorm(config: TransformerConfig, *, rngs: nnx.Rngs) -> nnx.RMSNorm:  # noqa: N802 (used as a module)
    """Root-mean-square normalisation of the width, computed in float32."""
    return nnx.RMSNorm(
        config.width,
        epsilon=config.norm_epsilon,
        dtype=jnp.dtype(config.dtype),
        param_dtype=jnp.dtype(config.param_dtype),
        rngs=rngs,
    )


class Transformer(nnx.Module):
    """Tokens to logits.

    Args:
      config: the architecture.
      axis_name: the mesh axis that splits heads, hidden features, vocabulary and sequence.
      context_axis: the mesh axis that splits sequences; None for none.
      context_layout: the order of positions on it. Tokens and targets are given in the order of
        `flaxasync.sequence_order`.
      backend: of all rings; see `flaxasync.all_gather_matmul`. With "none" keys and values are gathered, too. With
        "fused" embeddings and attention, which have no such kernel, choose for themselves.
      rngs: the random streams; draws from `params`.

    Raises:
      ValueError: no mesh is set, or a size does not divide by the axis.
    """

    def __init__(
        self,
        config: TransformerConfig,
        *,
        axis_name: str = "model",
        context_axis: str | None = None,
        context_layout: ContextLayout = "zigzag",
        backend: str | None = None,
        rngs: nnx.Rngs,
    ):
        dtype, param_dtype = jnp.dtype(config.dtype), jnp.dtype(config.param_dtype)
        self.config = config
        self.axis_name = axis_name
        self.embed = fa.nn.VocabParallelEmbed(
            config.vocab_size,
            config.width,
            axis_name=axis_name,
            dtype=dtype,
            param_dtype=param_dtype,
            embedding_init=nnx.initializers.normal(0.02),
            backend=None if backend == "fused" else backend,
            rngs=rngs,
        )

        @nnx.split_rngs(splits=config.layers)
        @nnx.vmap(in_axes=(0,), out_axes=0, transform_metadata={nnx.PARTITION_NAME: None})
        def stack(rngs: nnx.Rngs) -> DecoderLayer:
            return DecoderLayer(
                config,
                axis_name=axis_name,
                context_axis=context_axis,
                context_layout=context_layout,
                backend=backend,
                rngs=rngs,
            )

        self.layers = stack(rngs)
        self.final_norm = RMSNorm(config, rngs=rngs)
        self.output = (
            None
            if config.tie_embeddings
            else fa.nn.ColumnParallelLinear(
                config.width,
                config.vocab_size,
                axis_name=axis_name,
                use_bias=False,
                dtype=dtype,
                param_dtype=param_dtype,
                backend=backend,
                rngs=rngs,
            )
        )

    def __call__(
        self, tokens_BL: Int[Array, "B L"], segment_ids_BL: Int[Array, "B L"] | None = None
    ) -> Float[Array, "B L V"]:
        """Logits of the next token at every position, sharded over the vocabulary.

        With segment ids, a position attends only to positions of the same id.
        """

        @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry, transform_metadata={nnx.PARTITION_NAME: None})
        def run(layer: DecoderLayer, x_BLD: Array) -> Array:
            return _with_remat(self.config.remat)(layer, x_BLD, segment_ids_BL)

        x_BLD = self.final_norm(run(self.layers, self.embed(tokens_BL)))
        return self.embed.attend(x_BLD) if self.output is None else self.output(x_BLD)

    def loss(
        self,
        tokens_BL: Int[Array, "B L"],
        targets_BL: Int[Array, "B L"],
        *,
        segment_ids_BL: Int[Array, "B L"] | None = None,
        weights_BL: Float[Array, "B L"] | None = None,
    ) -> Float[Array, ""]:
        """Mean cross-entropy of the targets in nats per token, float32; weights make it a weighted mean."""
        logits_BLV = self(tokens_BL, segment_ids_BL)
        losses_BL = fa.nn.softmax_cross_entropy(logits_BLV, targets_BL, axis_name=self.axis_name)
        if weights_BL is None:
            return jnp.mean(losses_BL)
        return jnp.sum(losses_BL * weights_BL) / jnp.maximum(jnp.sum(weights_BL), 1)


def _with_remat(remat: Remat) -> Callable[[DecoderLayer, Array, Array | None], Array]:
    """A function of a layer and its input, with what the backward pass computes again."""

    def apply(layer: DecoderLayer, x_BLD: Array, segment_ids_BL: Array | None) -> Array:
        return layer(x_BLD, segment_ids_BL)

    if remat == "none":
        return apply
    policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable if remat == "dots" else None
    return nnx.remat(apply, policy=policy)
