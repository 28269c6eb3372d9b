"""A Llama-style decoder: RMSNorm, rotary positions, grouped-query attention, gated MLP. Read it from top to bottom.

The residual stream is sharded over the sequence: each device of the model axis holds its own rows of it. Norms and
residuals run on those rows, and the parallel layers gather and scatter rows while they multiply. With a context axis
the sequence is split over that axis too, and keys and values travel along it. Layers are stacked along a leading
dimension of their parameters and run as one scan.

Shape suffixes: B batch, L sequence, D width, V vocabulary. On a mesh (data, model), x_BLD is sharded
P(data, model, None) and tokens_BL is P(data, None); with a context axis, they are P(data, (context, model), None) and
P(data, context).
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

import flaxasync as fa

type Remat = Literal["none", "dots", "layer"]
type ContextLayout = Literal["zigzag", "contiguous"]


@dataclasses.dataclass(frozen=True)
class TransformerConfig:
    """The architecture, and how it is computed."""

    vocab_size: int = 256
    """The entries of the vocabulary; a multiple of the model axis. Bytes need 256."""
    layers: int = 4
    """The number of decoder layers."""
    width: int = 256
    """The features of the residual stream."""
    heads: int = 8
    """The query heads of each layer; a multiple of the model axis and of kv_heads."""
    kv_heads: int = 4
    """The key-value heads of each layer; a multiple of the model axis."""
    mlp_width: int = 768
    """The hidden features of the gated MLP; a multiple of the model axis."""
    rope_theta: float = 10_000.0
    """The base of the rotary position embedding."""
    norm_epsilon: float = 1e-5
    """What RMSNorm adds to the mean square."""
    tie_embeddings: bool = False
    """Whether the output projection is the transposed embedding."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """The dtype of activations and of the operands of matmuls, which accumulate in float32."""
    param_dtype: Literal["float32", "bfloat16"] = "float32"
    """The dtype of the parameters and of the optimizer's state."""
    remat: Remat = "none"
    """What the backward pass computes again: nothing; all but the results of matmuls ("dots"); or each whole layer."""


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

    def __call__(self, x_BLD: Float[Array, "B L D"]) -> Float[Array, "B L D"]:
        x_BLD = x_BLD + self.attention(self.attention_norm(x_BLD))
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

    def __call__(self, tokens_BL: Int[Array, "B L"]) -> Float[Array, "B L V"]:
        """Returns the logits of the next token at every position, sharded over the vocabulary."""

        @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry, transform_metadata={nnx.PARTITION_NAME: None})
        def run(layer: DecoderLayer, x_BLD: Array) -> Array:
            return _with_remat(self.config.remat)(layer, x_BLD)

        x_BLD = self.final_norm(run(self.layers, self.embed(tokens_BL)))
        return self.embed.attend(x_BLD) if self.output is None else self.output(x_BLD)

    def loss(self, tokens_BL: Int[Array, "B L"], targets_BL: Int[Array, "B L"]) -> Float[Array, ""]:
        """Returns the mean cross-entropy of the targets, in nats a token, as float32."""
        losses_BL = fa.nn.softmax_cross_entropy(self(tokens_BL), targets_BL, axis_name=self.axis_name)
        return jnp.mean(losses_BL)


def check_fits(
    config: TransformerConfig,
    *,
    sequence_length: int,
    mesh_shape: Mapping[str, int],
    context_layout: ContextLayout = "zigzag",
) -> None:
    """Checks that a model can be laid out on a mesh before anything is built.

    Args:
      config: The architecture.
      sequence_length: The tokens of a sequence.
      mesh_shape: The devices of each mesh axis. The model is split over "model", and sequences over "context" if the
        mesh has it.
      context_layout: The order of positions on "context".

    Raises:
      ValueError: A size is not positive, or something does not divide; the message names both, and a size that would.
    """
    sizes = {
        field: getattr(config, field) for field in ("vocab_size", "layers", "width", "heads", "kv_heads", "mlp_width")
    }
    for name, size in {**sizes, "sequence_length": sequence_length}.items():
        if size < 1:
            raise ValueError(f"{name} must be 1 or more: got {size}")
    if config.width % config.heads or config.width // config.heads % 2:
        raise ValueError(
            f"width must be an even multiple of heads, for rotary positions: got width={config.width}, "
            f"heads={config.heads}; use a multiple of {2 * config.heads}"
        )
    if config.heads % config.kv_heads:
        raise ValueError(f"heads must be a multiple of kv_heads: got heads={config.heads}, kv_heads={config.kv_heads}")
    devices = mesh_shape["model"]
    context = mesh_shape.get("context", 1)
    shares = math.lcm(context * devices, 2 * context if context_layout == "zigzag" else 1) if context > 1 else 1
    if sequence_length % shares:
        raise ValueError(
            f"sequence_length must be divisible by {shares}, for a 'context' axis of {context} devices in "
            f"{context_layout!r} layout and a 'model' axis of {devices}: got sequence_length={sequence_length}; use "
            f"{-(-sequence_length // shares) * shares}, or smaller axes"
        )
    split = {name: sizes[name] for name in ("vocab_size", "heads", "kv_heads", "mlp_width")}
    for name, size in {**split, "sequence_length": sequence_length}.items():
        if size % devices:
            up = -(-size // devices) * devices
            raise ValueError(
                f"{name} must be divisible by the 'model' axis: got {name}={size} on {devices} devices; "
                f"use {up}, or a smaller axis"
            )


def _layer_options(config: TransformerConfig, axis_name: str, backend: str | None) -> fa.nn.LayerOptions:
    """Returns the keywords that all parallel layers share."""
    dtype, param_dtype = jnp.dtype(config.dtype), jnp.dtype(config.param_dtype)
    return {"axis_name": axis_name, "dtype": dtype, "param_dtype": param_dtype, "backend": backend}


def _with_remat(remat: Remat) -> Callable[[DecoderLayer, Array], Array]:
    """Returns a function that applies a layer to its input, and says what the backward pass computes again."""

    def apply(layer: DecoderLayer, x_BLD: Array) -> Array:
        return layer(x_BLD)

    if remat == "none":
        return apply
    policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable if remat == "dots" else None
    return nnx.remat(apply, policy=policy)
