"""A Llama-style decoder: RMSNorm, rotary positions, grouped-query attention, gated MLP. Read it top to bottom.

The residual stream is sharded over the sequence: each device of the model axis holds its own rows of it, norms and
residuals run on those, and the parallel layers gather and scatter rows while they multiply. With a context axis the
sequence is split over that, too, and keys and values travel along it. Layers are stacked along a leading dimension of
their parameters and run as one scan.

Shape suffixes: B batch, L sequence, D width, V vocabulary. On a mesh (data, model), x_BLD is sharded
P(data, model, None) and tokens_BL is P(data, None); with a context axis, P(data, (context, model), None) and
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
    """Entries of the vocabulary; a multiple of the model axis. 256 for bytes."""
    layers: int = 4
    """Decoder layers."""
    width: int = 256
    """Features of the residual stream."""
    heads: int = 8
    """Query heads of each layer; a multiple of the model axis and of kv_heads."""
    kv_heads: int = 4
    """Key-value heads of each layer; a multiple of the model axis."""
    mlp_width: int = 768
    """Hidden features of the gated MLP; a multiple of the model axis."""
    rope_theta: float = 10_000.0
    """Base of the rotary position embedding."""
    norm_epsilon: float = 1e-5
    """Added to the mean square in RMSNorm."""
    tie_embeddings: bool = False
    """Whether the output projection is the embedding, transposed."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of activations and of the operands of matmuls, which accumulate in float32."""
    param_dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the parameters and of the optimizer's state."""
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

    def __call__(self, x_BLD: Float[Array, "B L D"]) -> Float[Array, "B L D"]:
        x_BLD = x_BLD + self.attention(self.attention_norm(x_BLD))
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

    def __call__(self, tokens_BL: Int[Array, "B L"]) -> Float[Array, "B L V"]:
        """Logits of the next token at every position, sharded over the vocabulary."""

        @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry, transform_metadata={nnx.PARTITION_NAME: None})
        def run(layer: DecoderLayer, x_BLD: Array) -> Array:
            return _with_remat(self.config.remat)(layer, x_BLD)

        x_BLD = self.final_norm(run(self.layers, self.embed(tokens_BL)))
        return self.embed.attend(x_BLD) if self.output is None else self.output(x_BLD)

    def loss(self, tokens_BL: Int[Array, "B L"], targets_BL: Int[Array, "B L"]) -> Float[Array, ""]:
        """Mean cross-entropy of the targets, nats a token, float32."""
        losses_BL = fa.nn.softmax_cross_entropy(self(tokens_BL), targets_BL, axis_name=self.axis_name)
        return jnp.mean(losses_BL)


def _with_remat(remat: Remat) -> Callable[[DecoderLayer, Array], Array]:
    """A function of a layer and its input, with what the backward pass computes again."""

    def apply(layer: DecoderLayer, x_BLD: Array) -> Array:
        return layer(x_BLD)

    if remat == "none":
        return apply
    policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable if remat == "dots" else None
    return nnx.remat(apply, policy=policy)


def check_fits(
    config: TransformerConfig,
    *,
    sequence_length: int,
    mesh_shape: Mapping[str, int],
    context_layout: ContextLayout = "zigzag",
) -> None:
    """Checks that a model can be laid out on a mesh before anything is built.

    Args:
      config: the architecture.
      sequence_length: tokens of a sequence.
      mesh_shape: devices of each mesh axis; the model is split over "model", sequences over "context" if there is one.
      context_layout: the order of positions on "context".

    Raises:
      ValueError: a size is not positive, or something does not divide; the message names both and what would do.
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
