"""A layer of the decoder of `models.transformer`: attention and an MLP, or a mixture of experts,
between norms.

Shape suffixes: B batch, L sequence, D width; `models.transformer` says how they are sharded.
"""

from typing import Any, Unpack

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

import flaxasync as fa
from flaxasync.ops.saved import ADDED
from models.config import ContextLayout, TransformerConfig

_ACTIVATIONS = {"silu": jax.nn.silu, "gelu": jax.nn.gelu}


class DecoderLayer(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)); with `post_norms`, attention and MLP are
    normalized once more.

    With experts, `mlp` is a mixture of them.
    """

    def __init__(
        self,
        config: TransformerConfig,
        *,
        context_axis: str | None = None,
        context_layout: ContextLayout = "zigzag",
        rngs: nnx.Rngs,
        **given: Unpack[fa.nn.LayerOptions],
    ):
        shared: Any = layer_options(config, given)
        options = shared | {
            "gathered_bytes": config.gathered_bytes,
            "quantization": quantization_of(config),
        }
        self.attention_norm = RMSNorm(config, rngs=rngs)
        self.attention = fa.nn.ParallelSelfAttention(
            config.width,
            config.heads,
            kv_heads=config.kv_heads,
            head_dim=config.head_dim,
            rope_theta=config.rope_theta,
            rope_scaling=_rope_scaling(config),
            normalize_qk="rms" if config.qk_norm else False,
            qk_epsilon=config.norm_epsilon,
            softmax_scale=config.attention_scale,
            logit_softcap=config.attention_softcap,
            use_bias=config.attention_bias,
            context_axis=context_axis,
            context_layout=context_layout,
            exchange_heads=config.exchange_heads,
            rngs=rngs,
            **options,
        )
        self.mlp_norm = RMSNorm(config, rngs=rngs)
        activation = _ACTIVATIONS[config.activation]
        self.mlp: fa.nn.ParallelMLP | fa.nn.ParallelMoE
        if config.experts:
            self.mlp = fa.nn.ParallelMoE(
                config.width,
                config.expert_features,
                config.experts,
                experts_per_token=config.experts_per_token,
                router=fa.nn.RouterOptions(
                    config.router_scores, normalize=config.normalize_expert_weights
                ),
                shared_hidden=config.shared_expert_width,
                capacity_factor=config.capacity_factor,
                activation=activation,
                rngs=rngs,
                **shared,
            )
        else:
            self.mlp = fa.nn.ParallelMLP(
                config.width,
                config.mlp_width,
                activation=activation,
                use_bias=config.mlp_bias,
                rngs=rngs,
                **options,
            )
        self.post_attention_norm: RMSNorm | None
        self.post_mlp_norm: RMSNorm | None
        if config.post_norms:
            self.post_attention_norm = RMSNorm(config, rngs=rngs)
            self.post_mlp_norm = RMSNorm(config, rngs=rngs)
        else:
            self.post_attention_norm = None
            self.post_mlp_norm = None

    def __call__(
        self,
        x_BLD: Float[Array, "B L D"],
        segment_ids_BL: Int[Array, "B L"] | None = None,
        mask: Array | None = None,
        *,
        decode: bool = False,
    ) -> Float[Array, "B L D"]:
        return self.with_losses(x_BLD, None, segment_ids_BL, mask, decode=decode)[0]

    def with_losses(
        self,
        x_BLD: Float[Array, "B L D"],
        losses: Float[Array, "2"] | None,
        segment_ids_BL: Int[Array, "B L"] | None = None,
        mask: Array | None = None,
        *,
        decode: bool = False,
    ) -> tuple[Float[Array, "B L D"], Float[Array, "2"] | None]:
        """Applies the layer, and adds its load-balancing loss and its z-loss to `losses`, unless
        that is None.
        """
        y_BLD = self.attention(self.attention_norm(x_BLD), segment_ids_BL, mask=mask, decode=decode)
        y_BLD = checkpoint_name(y_BLD, ADDED)
        if self.post_attention_norm is not None:
            y_BLD = self.post_attention_norm(y_BLD)
        x_BLD += y_BLD
        normed_BLD = self.mlp_norm(x_BLD)
        if isinstance(self.mlp, fa.nn.ParallelMoE):
            y_BLD, routing = self.mlp.with_routing(normed_BLD)
            if losses is not None:
                losses += jnp.stack([routing.load_balance_loss, routing.z_loss]).astype(
                    losses.dtype
                )
        else:
            y_BLD = self.mlp(normed_BLD)
        y_BLD = checkpoint_name(y_BLD, ADDED)
        if self.post_mlp_norm is not None:
            y_BLD = self.post_mlp_norm(y_BLD)
        return x_BLD + y_BLD, losses


class RMSNorm(nnx.Module):
    """Root-mean-square normalisation of the width, computed in float32: `nnx.RMSNorm`, or Gemma's,
    with 1 + scale.
    """

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        self.config = config
        init = nnx.initializers.ones
        if config.norm_plus_one:
            init = nnx.initializers.zeros
        self.scale = nnx.Param(init(rngs.params(), (config.width,), jnp.dtype(config.param_dtype)))

    def __call__(self, x_BLD: Float[Array, "B L D"]) -> Float[Array, "B L D"]:
        x = x_BLD.astype(jnp.float32)
        scale_D = self.scale[...].astype(jnp.float32)
        mean_square = jnp.mean(jnp.square(x), axis=-1, keepdims=True)
        if self.config.norm_plus_one:
            scale_D = 1 + scale_D
        inverse = jax.lax.rsqrt(mean_square + self.config.norm_epsilon)
        normed = x * (inverse * jax.lax.broadcast_to_rank(scale_D, x.ndim))
        return normed.astype(self.config.dtype)


def layer_options(config: TransformerConfig, given: fa.nn.LayerOptions) -> fa.nn.LayerOptions:
    """Returns the keywords that all parallel layers share: those that are given, and those of the
    configuration.
    """
    return {**given, "dtype": jnp.dtype(config.dtype), "param_dtype": jnp.dtype(config.param_dtype)}


def quantization_of(config: TransformerConfig) -> fa.Quantization | None:
    """Returns how the decoder layers are quantised."""
    kind = config.quantization
    backward = config.quantization_backward
    weights = config.quantization_weights
    return kind and fa.Quantization(kind, backward, weights=weights)


def _rope_scaling(config: TransformerConfig) -> fa.nn.RopeScaling | None:
    if config.rope_factor == 1:
        return None
    return fa.nn.RopeScaling(
        config.rope_factor,
        config.rope_low_frequency,
        config.rope_high_frequency,
        config.rope_original_length,
    )
