"""A Llama-style decoder: RMSNorm, rotary positions, grouped-query attention, gated MLP. Read it from top to bottom.

The residual stream is sharded over the sequence: each device of the model axis holds its own rows of it. Norms and
residuals run on those rows, and the parallel layers gather and scatter rows while they multiply. With a context axis
the sequence is split over that axis too, and keys and values travel along it. Layers are stacked along a leading
dimension of their parameters and run as one scan.

Shape suffixes: B batch, L sequence, D width, V vocabulary. On a mesh (data, model), x_BLD is sharded
P(data, model, None) and tokens_BL is P(data, None); with a context axis, they are P(data, (context, model), None) and
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
        options = _layer_options(config, axis_name, backend)
        self.attention_norm = RMSNorm(config, rngs=rngs)
        self.attention = fa.nn.ParallelSelfAttention(
            config.width,
            config.heads,
            kv_heads=config.kv_heads,
            rope_theta=config.rope_theta,
            context_axis=context_axis,
            context_layout=context_layout,
            rngs=rngs,
            **options,
        )
        self.mlp_norm = RMSNorm(config, rngs=rngs)
        self.mlp = fa.nn.ParallelMLP(config.width, config.mlp_width, rngs=rngs, **options)

    def __call__(
        self, x_BLD: Float[Array, "B L D"], segment_ids_BL: Int[Array, "B L"] | None = None
    ) -> Float[Array, "B L D"]:
        x_BLD = x_BLD + self.attention(self.attention_norm(x_BLD), segment_ids_BL)
        return x_BLD + self.mlp(self.mlp_norm(x_BLD))


def RMSNorm(config: TransformerConfig, *, rngs: nnx.Rngs) -> nnx.RMSNorm:  # noqa: N802 (used as a module)
    """Returns a root-mean-square normalisation of the width, computed in float32."""
    return nnx.RMSNorm(
        config.width,
        epsilon=config.norm_epsilon,
        dtype=jnp.dtype(config.dtype),
        param_dtype=jnp.dtype(config.param_dtype),
        rngs=rngs,
    )


class Transformer(nnx.Module):
    """Turns tokens into logits.

    Args:
      config: The architecture.
      axis_name: The mesh axis that splits heads, hidden features, vocabulary and sequence.
      context_axis: The mesh axis that splits sequences; None if they are not split.
      context_layout: The order of positions on it. Tokens and targets are given in the order of
        `flaxasync.sequence_order`.
      backend: What executes the collective ops of all layers; see `flaxasync.all_gather_matmul`. An op that lacks this
        backend chooses for itself.
      rngs: The random streams; the model draws from `params`.

    Raises:
      ValueError: No mesh is set, or the axis does not divide a size.
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
        options = _layer_options(config, axis_name, backend)
        self.config = config
        self.axis_name = axis_name
        self.embed = fa.nn.VocabParallelEmbed(
            config.vocab_size, config.width, embedding_init=nnx.initializers.normal(0.02), rngs=rngs, **options
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
            else fa.nn.ColumnParallelLinear(config.width, config.vocab_size, use_bias=False, rngs=rngs, **options)
        )

    def __call__(
        self, tokens_BL: Int[Array, "B L"], segment_ids_BL: Int[Array, "B L"] | None = None
    ) -> Float[Array, "B L V"]:
        """Returns the logits of the next token at every position, sharded over the vocabulary.

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
        """Returns the mean cross-entropy of the targets, in nats a token, as float32.

        Weights make it a weighted mean.
        """
        logits_BLV = self(tokens_BL, segment_ids_BL)
        losses_BL = fa.nn.softmax_cross_entropy(logits_BLV, targets_BL, axis_name=self.axis_name)
        if weights_BL is None:
            return jnp.mean(losses_BL)
        return jnp.sum(losses_BL * weights_BL) / jnp.maximum(jnp.sum(weights_BL), 1)


def _layer_options(config: TransformerConfig, axis_name: str, backend: str | None) -> fa.nn.LayerOptions:
    """Returns the keywords that all parallel layers share."""
    dtype, param_dtype = jnp.dtype(config.dtype), jnp.dtype(config.param_dtype)
    return {"axis_name": axis_name, "dtype": dtype, "param_dtype": param_dtype, "backend": backend}


def _with_remat(remat: Remat) -> Callable[[DecoderLayer, Array, Array | None], Array]:
    """Returns a function that applies a layer to its input, and says what the backward pass computes again."""

    def apply(layer: DecoderLayer, x_BLD: Array, segment_ids_BL: Array | None) -> Array:
        return layer(x_BLD, segment_ids_BL)

    if remat == "none":
        return apply
    policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable if remat == "dots" else None
    return nnx.remat(apply, policy=policy)
