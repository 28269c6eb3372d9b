"""A decoder in plain JAX as large code bases write it: no layer of this package, and XLA chooses
every collective.

It is a Llama-style decoder with rotary positions, grouped key-value heads, a gated MLP and untied
embeddings. Its layers are stacked and scanned, each under `jax.checkpoint`. Parameters are float32
and are cast to bfloat16 where they are used. Each kernel is sharded over both axes of the mesh: its
model dimension over "fsdp", and its heads, hidden width or vocabulary over "tensor".

Shape suffixes: B batch, L length, D model width, H heads, K key-value heads, A head size, F hidden
width, V vocabulary, N layers.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.programs import array

type Parameters = Mapping[str, Any]

RESIDUAL = P("fsdp", None, "tensor")  # of the residual stream [B, L, D]


@dataclasses.dataclass(frozen=True)
class Decoder:
    layers: int = 4
    width: int = 4096
    heads: int = 32
    kv_heads: int = 8
    head_size: int = 128
    hidden: int = 14336
    vocabulary: int = 32000
    batch: int = 16
    length: int = 2048
    # whether projections to the model width are summed in float32, and rounded after it
    float32_sums: bool = False

    def parameter_shapes(self) -> dict[str, tuple[tuple[int, ...], P]]:
        """Returns the shape and the sharding of each parameter. Those of the layers are stacked."""
        n, d, f, v = self.layers, self.width, self.hidden, self.vocabulary
        qa, ka = self.heads * self.head_size, self.kv_heads * self.head_size
        return {
            "embedding": ((v, d), P("tensor", "fsdp")),
            "attention_scale": ((n, d), P(None, "tensor")),
            "query": ((n, d, qa), P(None, "fsdp", "tensor")),
            "key": ((n, d, ka), P(None, "fsdp", "tensor")),
            "value": ((n, d, ka), P(None, "fsdp", "tensor")),
            "out": ((n, qa, d), P(None, "tensor", "fsdp")),
            "mlp_scale": ((n, d), P(None, "tensor")),
            "gate": ((n, d, f), P(None, "fsdp", "tensor")),
            "up": ((n, d, f), P(None, "fsdp", "tensor")),
            "down": ((n, f, d), P(None, "tensor", "fsdp")),
            "final_scale": ((d,), P("tensor")),
            "logits": ((d, v), P("fsdp", "tensor")),
        }

    def arguments(self, mesh: Mesh) -> tuple[dict[str, jax.ShapeDtypeStruct], jax.ShapeDtypeStruct]:
        """Returns the types of the parameters and of the tokens [B, L + 1]."""
        shapes = self.parameter_shapes().items()
        parameters = {name: array(shape, mesh, spec, jnp.float32) for name, (shape, spec) in shapes}
        return parameters, array((self.batch, self.length + 1), mesh, P("fsdp", None), jnp.int32)


def training_step(
    decoder: Decoder, mesh: Mesh
) -> Callable[[Parameters, jax.Array], tuple[jax.Array, Parameters]]:
    """Returns the jitted step: (parameters, tokens) -> (loss, parameters after one step of gradient
    descent).
    """

    def step(parameters: Parameters, tokens: jax.Array) -> tuple[jax.Array, Parameters]:
        value, gradients = jax.value_and_grad(functools.partial(loss, decoder))(parameters, tokens)
        return value, jax.tree.map(lambda p, g: p - 1e-3 * g, parameters, gradients)

    specs = {
        name: NamedSharding(mesh, spec) for name, (_, spec) in decoder.parameter_shapes().items()
    }
    return jax.jit(step, donate_argnums=0, out_shardings=(NamedSharding(mesh, P()), specs))


def loss(decoder: Decoder, parameters: Parameters, tokens_BL: jax.Array) -> jax.Array:
    """Returns the mean cross-entropy of the next token, in nats."""
    inputs_BL, targets_BL = tokens_BL[:, :-1], tokens_BL[:, 1:]
    x_BLD = lax.with_sharding_constraint(
        parameters["embedding"].astype(jnp.bfloat16)[inputs_BL], RESIDUAL
    )
    names = ("attention_scale", "query", "key", "value", "out", "mlp_scale", "gate", "up", "down")

    @jax.checkpoint
    def layer(x_BLD: jax.Array, weights: Parameters) -> tuple[jax.Array, None]:
        attended_BLD = attention(decoder, weights, normalise(x_BLD, weights["attention_scale"]))
        x_BLD = x_BLD + lax.with_sharding_constraint(attended_BLD, RESIDUAL)
        x_BLD = lax.with_sharding_constraint(x_BLD, RESIDUAL)
        x_BLD = x_BLD + mlp(decoder, weights, normalise(x_BLD, weights["mlp_scale"]))
        return lax.with_sharding_constraint(x_BLD, RESIDUAL), None

    x_BLD, _ = lax.scan(layer, x_BLD, {name: parameters[name] for name in names})
    x_BLD = normalise(x_BLD, parameters["final_scale"])
    logits_BLV = jnp.einsum("bld,dv->blv", x_BLD, parameters["logits"].astype(jnp.bfloat16))
    logits_BLV = lax.with_sharding_constraint(logits_BLV, P("fsdp", None, "tensor")).astype(
        jnp.float32
    )
    chosen_BL = jnp.sum(jax.nn.one_hot(targets_BL, decoder.vocabulary) * logits_BLV, axis=-1)
    return jnp.mean(jax.nn.logsumexp(logits_BLV, axis=-1) - chosen_BL)


def attention(decoder: Decoder, weights: Parameters, x_BLD: jax.Array) -> jax.Array:
    """Returns causal self-attention with rotary positions."""
    B, L, _ = x_BLD.shape

    def heads(name: str, count: int) -> jax.Array:
        y = jnp.einsum("bld,df->blf", x_BLD, weights[name].astype(jnp.bfloat16))
        y = y.reshape(B, L, count, decoder.head_size)
        return lax.with_sharding_constraint(y, P("fsdp", None, "tensor", None))

    q_BLHA, k_BLKA = rotate(heads("query", decoder.heads)), rotate(heads("key", decoder.kv_heads))
    v_BLKA = heads("value", decoder.kv_heads)
    o_BLHA = jax.nn.dot_product_attention(q_BLHA, k_BLKA, v_BLKA, is_causal=True)
    o_BLF = lax.with_sharding_constraint(o_BLHA.reshape(B, L, -1), P("fsdp", None, "tensor"))
    return project(decoder, o_BLF, weights["out"])


def mlp(decoder: Decoder, weights: Parameters, x_BLD: jax.Array) -> jax.Array:
    """Returns down(silu(gate(x)) * up(x))."""
    gate_BLF = jnp.einsum("bld,df->blf", x_BLD, weights["gate"].astype(jnp.bfloat16))
    up_BLF = jnp.einsum("bld,df->blf", x_BLD, weights["up"].astype(jnp.bfloat16))
    hidden_BLF = lax.with_sharding_constraint(
        jax.nn.silu(gate_BLF) * up_BLF, P("fsdp", None, "tensor")
    )
    return project(decoder, hidden_BLF, weights["down"])


def project(decoder: Decoder, x_BLF: jax.Array, kernel_FD: jax.Array) -> jax.Array:
    """Returns the product that goes back to the model width. Its sum over F is a sum over the
    "tensor" devices.
    """
    dtype = jnp.float32 if decoder.float32_sums else jnp.bfloat16
    y_BLD = jnp.einsum(
        "blf,fd->bld", x_BLF, kernel_FD.astype(jnp.bfloat16), preferred_element_type=dtype
    )
    return lax.with_sharding_constraint(y_BLD, RESIDUAL).astype(jnp.bfloat16)


def normalise(x_BLD: jax.Array, scale_D: jax.Array) -> jax.Array:
    """Returns x divided by its root mean square along D, times a scale."""
    x32_BLD = x_BLD.astype(jnp.float32)
    x32_BLD = x32_BLD * lax.rsqrt(jnp.mean(x32_BLD**2, axis=-1, keepdims=True) + 1e-6)
    return x32_BLD.astype(x_BLD.dtype) * scale_D.astype(x_BLD.dtype)


def rotate(x_BLHA: jax.Array) -> jax.Array:
    """Rotates pairs of features by an angle that is proportional to the position."""
    half = x_BLHA.shape[-1] // 2
    angle_LA = jnp.arange(x_BLHA.shape[1])[:, None] / 1e4 ** (jnp.arange(half) / half)
    sin_LHA, cos_LHA = (f(angle_LA)[:, None, :].astype(x_BLHA.dtype) for f in (jnp.sin, jnp.cos))
    a, b = x_BLHA[..., :half], x_BLHA[..., half:]
    return jnp.concatenate([a * cos_LHA - b * sin_LHA, b * cos_LHA + a * sin_LHA], axis=-1)
