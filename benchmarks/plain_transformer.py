"""The decoder of models/transformer.py made of nnx.Linear and nnx.Embed, with XLA's automatic
sharding.

This is what a user would write without flaxasync. The kernels are annotated as those of
models/transformer.py (columns, then rows), the residual stream is constrained to the same layout,
and XLA chooses every collective operation. The parameters have the same names and shapes, so that
either model loads the parameters of the other. The mesh must have Auto axes. With an fsdp axis,
kernels are stored sharded over it as well, and XLA gathers them.
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

import flaxasync as fa
from models.config import TransformerConfig
from models.layer import RMSNorm


@dataclasses.dataclass(frozen=True)
class Layout:
    batch: tuple[str, ...] = ("data",)  # they shard the batch
    fsdp: str | None = None  # shards kernels as well
    # whether attention is `flaxasync.attention`, a kernel that XLA cannot partition itself
    flash: bool = False

    @property
    def columns(self) -> tuple[str | None, ...]:  # of a kernel whose output features are split
        return (self.fsdp, "model")

    @property
    def rows(self) -> tuple[str | None, ...]:  # of a kernel whose input features are split
        return ("model", self.fsdp)


PLAIN = Layout()


def linear(
    inputs: int, outputs: int, sharding: tuple, config: TransformerConfig, rngs: nnx.Rngs
) -> nnx.Linear:
    """Makes an nnx.Linear without a bias, whose kernel is annotated with a sharding."""
    return nnx.Linear(
        inputs,
        outputs,
        use_bias=False,
        dtype=jnp.dtype(config.dtype),
        param_dtype=jnp.dtype(config.param_dtype),
        kernel_metadata={"out_sharding": sharding},
        rngs=rngs,
    )


def constrain(x: Array, *spec: str | tuple[str, ...] | None) -> Array:
    return lax.with_sharding_constraint(x, P(*spec))


class PlainMLP(nnx.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, config: TransformerConfig, *, layout: Layout = PLAIN, rngs: nnx.Rngs):
        self.layout = layout
        self.up = linear(config.width, config.mlp_width, layout.columns, config, rngs)
        self.gate = linear(config.width, config.mlp_width, layout.columns, config, rngs)
        self.down = linear(config.mlp_width, config.width, layout.rows, config, rngs)

    def __call__(self, x: Float[Array, "B L D"]) -> Float[Array, "B L D"]:
        hidden = jax.nn.silu(self.gate(x)) * self.up(x)
        batch = self.layout.batch
        return constrain(self.down(constrain(hidden, batch, None, "model")), batch, "model", None)


class PlainExperts(nnx.Module):
    """All experts, applied to all rows; what a row did not choose has the weight 0."""

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        self.k = config.experts_per_token
        shape = config.experts, config.width, config.expert_features
        self.router = linear(config.width, config.experts, (None, None), config, rngs)
        self.up, self.gate = (self._kernel(shape, config, rngs) for _ in range(2))
        self.down = self._kernel((shape[0], *shape[:0:-1]), config, rngs)

    def _kernel(
        self, shape: tuple[int, ...], config: TransformerConfig, rngs: nnx.Rngs
    ) -> nnx.Param:
        init = nnx.initializers.lecun_normal(batch_axis=0)
        return nnx.Param(
            init(rngs.params(), shape, jnp.dtype(config.param_dtype)),
            out_sharding=("model", None, None),
        )

    def __call__(self, x: Float[Array, "B L D"]) -> Float[Array, "B L D"]:
        values, ids = lax.top_k(jax.nn.softmax(self.router(x).astype(jnp.float32)), self.k)
        values /= jnp.sum(values, axis=-1, keepdims=True)
        weights = jnp.sum(
            jax.nn.one_hot(ids, self.up.shape[0]) * values[..., None], axis=-2
        ).astype(x.dtype)
        up, gate, down = (kernel[...].astype(x.dtype) for kernel in (self.up, self.gate, self.down))
        hidden = jax.nn.silu(jnp.einsum("bld,edf->eblf", x, gate)) * jnp.einsum(
            "bld,edf->eblf", x, up
        )
        hidden = constrain(hidden, "model", PLAIN.batch, None, None)
        return constrain(
            jnp.einsum("eblf,efd,ble->bld", hidden, down, weights), PLAIN.batch, "model", None
        )


class PlainAttention(nnx.Module):
    """Causal self-attention with rotary positions and grouped key-value heads."""

    def __init__(self, config: TransformerConfig, *, layout: Layout = PLAIN, rngs: nnx.Rngs):
        self.layout = layout
        self.head_dim = config.head_features
        self.rope_theta = config.rope_theta
        self.query = linear(
            config.width, config.heads * self.head_dim, layout.columns, config, rngs
        )
        self.key = linear(
            config.width, config.kv_heads * self.head_dim, layout.columns, config, rngs
        )
        self.value = linear(
            config.width, config.kv_heads * self.head_dim, layout.columns, config, rngs
        )
        self.out = linear(config.heads * self.head_dim, config.width, layout.rows, config, rngs)

    def __call__(self, x: Float[Array, "B L D"]) -> Float[Array, "B L D"]:
        q, k, v = (
            constrain(
                y.reshape(*y.shape[:-1], -1, self.head_dim), self.layout.batch, None, "model", None
            )
            for y in (self.query(x), self.key(x), self.value(x))
        )
        q, k = (fa.nn.rotary_embedding(y, theta=self.rope_theta) for y in (q, k))
        out = self.attend(q, k, v)
        return constrain(
            self.out(out.reshape(*out.shape[:-2], -1)), self.layout.batch, "model", None
        )

    def attend(
        self, q: Float[Array, "B L H A"], k: Float[Array, "B L K A"], v: Float[Array, "B L K A"]
    ) -> Array:
        if self.layout.flash:
            heads = P(self.layout.batch, None, "model", None)
            return jax.shard_map(fa.attention, in_specs=(heads, heads, heads), out_specs=heads)(
                q, k, v
            )
        return jax.nn.dot_product_attention(q, k, v, is_causal=True)


class PlainLayer(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: TransformerConfig, *, layout: Layout = PLAIN, rngs: nnx.Rngs):
        self.attention_norm = RMSNorm(config, rngs=rngs)
        self.attention = PlainAttention(config, layout=layout, rngs=rngs)
        self.mlp_norm = RMSNorm(config, rngs=rngs)
        self.mlp = PlainMLP(config, layout=layout, rngs=rngs)

    def __call__(self, x: Float[Array, "B L D"]) -> Float[Array, "B L D"]:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class PlainTransformer(nnx.Module):
    """The whole decoder from tokens to logits, without rematerialization."""

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        self.embed = nnx.Embed(
            config.vocab_size,
            config.width,
            dtype=jnp.dtype(config.dtype),
            param_dtype=jnp.dtype(config.param_dtype),
            embedding_init=nnx.initializers.normal(0.02),
            embedding_metadata={"out_sharding": PLAIN.rows},
            rngs=rngs,
        )

        @nnx.split_rngs(splits=config.layers)
        @nnx.vmap(in_axes=(0,), out_axes=0, transform_metadata={nnx.PARTITION_NAME: None})
        def stack(rngs: nnx.Rngs) -> PlainLayer:
            return PlainLayer(config, rngs=rngs)

        self.layers = stack(rngs)
        self.final_norm = RMSNorm(config, rngs=rngs)
        self.output = linear(config.width, config.vocab_size, PLAIN.columns, config, rngs)

    def __call__(self, tokens: Int[Array, "B L"]) -> Float[Array, "B L V"]:
        @nnx.scan(
            in_axes=(0, nnx.Carry),
            out_axes=nnx.Carry,
            transform_metadata={nnx.PARTITION_NAME: None},
        )
        def run(layer: PlainLayer, x: Array) -> Array:
            return layer(x)

        batch = PLAIN.batch
        x = constrain(self.embed(tokens), batch, "model", None)
        return constrain(self.output(self.final_norm(run(self.layers, x))), batch, None, "model")

    def loss(self, tokens: Int[Array, "B L"], targets: Int[Array, "B L"]) -> Float[Array, ""]:
        """Returns the mean cross-entropy of the targets, in nats per token."""
        log_probabilities = jax.nn.log_softmax(self(tokens).astype(jnp.float32))
        return -jnp.mean(jnp.take_along_axis(log_probabilities, targets[..., None], axis=-1))
