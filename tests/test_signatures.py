"""Tests that the shapes in the signatures are correct and that every public name is documented."""

import inspect
import types

import beartype
import jax
import jax.numpy as jnp
import jaxtyping
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import flaxasync as fa
from models.config import TransformerConfig
from models.transformer import Transformer

ROWS, COLUMNS, TOKENS = P(None, "model", None), P(None, None, "model"), P(None, None)
DOWN, ACROSS = P("model", None), P(None, "model")


def checked(fn):
    """Returns `fn` with its shape annotations checked at every call."""
    return jaxtyping.jaxtyped(fn, typechecker=beartype.beartype)


def on_shards(op, specs, out_spec, *shapes):
    args = [jax.device_put(jnp.ones(shape), spec) for shape, spec in zip(shapes, specs, strict=True)]
    fn = checked(op)
    mapped = jax.shard_map(lambda x, w: fn(x, w, "model"), in_specs=specs, out_specs=out_spec)
    return jax.eval_shape(mapped, *args)


def on_layer(cls, method, layer, x, spec):
    return nnx.eval_shape(lambda layer, x: checked(getattr(cls, method))(layer, x), layer, jax.device_put(x, spec))


@pytest.fixture(autouse=True)
def mesh():
    with jax.set_mesh(jax.make_mesh((4,), ("model",), devices=jax.devices()[:4])):
        yield


def test_ops():
    on_shards(fa.all_gather_matmul, (ROWS, ACROSS), COLUMNS, (2, 8, 4), (4, 8))
    on_shards(fa.matmul_reduce_scatter, (COLUMNS, DOWN), ROWS, (2, 8, 4), (4, 8))
    on_shards(fa.matmul_all_reduce, (COLUMNS, DOWN), P(), (2, 8, 4), (4, 8))
    heads = jax.device_put(jnp.ones((2, 8, 4, 2)), ROWS)
    ring = jax.shard_map(lambda x: checked(fa.ring_attention)(x, x, x, "model"), in_specs=ROWS, out_specs=ROWS)
    jax.eval_shape(ring, heads)


def test_layers():
    nn, x = fa.nn, jnp.ones((2, 8, 8))

    def layer(cls, *sizes, **options):
        return nnx.eval_shape(lambda: cls(*sizes, **options, rngs=nnx.Rngs(0)))

    on_layer(nn.ColumnParallelLinear, "__call__", layer(nn.ColumnParallelLinear, 8, 12), x, ROWS)
    on_layer(nn.RowParallelLinear, "__call__", layer(nn.RowParallelLinear, 8, 12), x, COLUMNS)
    on_layer(nn.ParallelMLP, "__call__", layer(nn.ParallelMLP, 8, 12), x, ROWS)
    on_layer(nn.ParallelSelfAttention, "__call__", layer(nn.ParallelSelfAttention, 8, 4), x, ROWS)
    ring = layer(nn.RingSelfAttention, 8, 4, axis_name="model")
    on_layer(nn.RingSelfAttention, "__call__", ring, x, ROWS)
    embed = layer(nn.VocabParallelEmbed, 16, 8)
    on_layer(nn.VocabParallelEmbed, "__call__", embed, jnp.zeros((2, 8), jnp.int32), TOKENS)
    on_layer(nn.VocabParallelEmbed, "attend", embed, x, ROWS)


def test_loss_and_model():
    logits = jax.device_put(jnp.ones((2, 8, 16)), COLUMNS)
    targets = jax.device_put(jnp.zeros((2, 8), jnp.int32), TOKENS)
    nnx.eval_shape(checked(fa.nn.softmax_cross_entropy), logits, targets)
    config = TransformerConfig(vocab_size=16, layers=1, width=16, heads=4, mlp_width=8)
    model = nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0)))
    nnx.eval_shape(lambda model: checked(Transformer.__call__)(model, targets), model)
    nnx.eval_shape(lambda model: checked(Transformer.loss)(model, targets, targets), model)


def test_a_shape_that_the_signature_excludes_is_detected():
    """The negative test: a vector is not [..., rows, features]."""
    layer = nnx.eval_shape(lambda: fa.nn.ColumnParallelLinear(8, 12, rngs=nnx.Rngs(0)))
    with pytest.raises(jaxtyping.TypeCheckError, match="problem arose whilst typechecking parameter 'x'"):
        on_layer(fa.nn.ColumnParallelLinear, "__call__", layer, jnp.ones(8), P())


def public(module, prefix):
    """Yields (qualified name, object) of every public name of a module and of every public method of its classes."""
    for name, value in vars(module).items():
        if name.startswith("_") or not callable(value) or isinstance(value, types.ModuleType):
            continue
        yield f"{prefix}.{name}", value
        if inspect.isclass(value):
            for method, function in vars(value).items():
                if inspect.isfunction(function) and (not method.startswith("_") or method == "__call__"):
                    yield f"{prefix}.{name}.{method}", function


@pytest.mark.parametrize(
    ("name", "value"), [*public(fa, "fa"), *public(fa.nn, "fa.nn")], ids=lambda v: v if isinstance(v, str) else ""
)
def test_every_public_name_is_documented(name, value):
    documentation = inspect.getdoc(value) or ""
    assert documentation, name
    if inspect.isfunction(value) and "." not in value.__qualname__:
        explained = "Args:" in documentation or "Arguments and errors as" in documentation
        assert explained or len(inspect.signature(value).parameters) <= 3, f"{name} does not explain its arguments"
        assert "\n" in documentation, f"{name} has a docstring of one line only"
