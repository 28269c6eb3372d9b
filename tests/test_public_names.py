"""Tests of the public names: complete, documented, imported when they are used, and with correct
shapes.
"""

import importlib
import importlib.metadata
import inspect
import pkgutil
import subprocess
import sys

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


@pytest.fixture(autouse=True)
def mesh():
    with jax.set_mesh(jax.make_mesh((4,), ("model",), devices=jax.devices()[:4])):
        yield


def run(code):
    """Runs Python code in a new process and returns what it prints."""
    return subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    ).stdout.split()


def test_the_package_loads_nothing_before_it_is_used():
    loaded = run("import flaxasync, sys; print(*sys.modules)")
    assert not [
        name for name in loaded if name.startswith(("flaxasync.check", "matplotlib", "jax"))
    ]


@pytest.mark.slow  # the new process imports JAX and Flax
def test_layers_and_ops_load_neither_the_checking_tools_nor_matplotlib():
    used = "flaxasync.nn, flaxasync.all_gather_matmul, flaxasync.plan"
    loaded = run(f"import flaxasync, sys; {used}; print(*sys.modules)")
    assert "flaxasync.nn.linear" in loaded
    assert not [name for name in loaded if name.startswith(("flaxasync.check", "matplotlib"))]


def test_every_public_name_is_there():
    for name in fa.__all__:
        assert getattr(fa, name) is not None
    assert set(fa.__all__) <= set(dir(fa))
    with pytest.raises(AttributeError, match="module 'flaxasync' has no attribute 'all_gather'"):
        fa.all_gather  # noqa: B018


def test_no_submodule_has_a_public_name():
    """Importing a submodule sets an attribute of the package, which would replace a function of the
    same name.
    """
    submodules = {module.name for module in pkgutil.iter_modules(fa.__path__)}
    assert "ring" in submodules
    assert submodules & set(fa.__all__) <= {"nn", "check"}


def test_the_names_for_type_checkers_are_the_public_names():
    """They are written twice in `flaxasync/__init__.py`: once as imports, once with the modules to
    import from.
    """
    imports = [
        line.split(" as ")[1]
        for line in inspect.getsource(fa).splitlines()
        if line.startswith("    from flax")
    ]
    assert sorted(imports) == sorted(fa.__all__)


def test_help_lists_every_public_name_in_one_line():
    listed = {
        line.split()[0]: line.split(maxsplit=1)[1]
        for line in fa.__doc__.splitlines()
        if line.startswith("  ")
    }
    layers = {
        f"nn.{name}"
        for name, value in vars(fa.nn).items()
        if name[0] != "_" and not inspect.ismodule(value)
    }
    assert set(listed) == (set(fa.__all__) - {"nn"}) | layers
    assert all(line.endswith(".") for line in listed.values())


def test_the_version_is_that_of_the_package():
    assert fa.__version__ == importlib.metadata.version("flaxasync")


def public(module, prefix):
    """Yields (qualified name, object) of every public name of a module and of every public method
    of its classes.
    """
    for name, value in vars(module).items():
        if name.startswith("_") or not callable(value):
            continue
        yield f"{prefix}.{name}", value
        if inspect.isclass(value):
            for method, function in vars(value).items():
                if inspect.isfunction(function) and (
                    not method.startswith("_") or method == "__call__"
                ):
                    yield f"{prefix}.{name}.{method}", function


@pytest.mark.parametrize(
    ("name", "value"),
    [*public(fa, "fa"), *public(fa.nn, "fa.nn")],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_every_public_name_is_documented(name, value):
    documentation = inspect.getdoc(value) or ""
    assert documentation, name
    if inspect.isfunction(value) and "." not in value.__qualname__:
        explained = "Args:" in documentation or "Arguments and errors as" in documentation
        assert explained or len(inspect.signature(value).parameters) <= 3, (
            f"{name} does not explain its arguments"
        )
        assert "\n" in documentation, f"{name} has a docstring of one line only"


def checked(fn):
    """Returns `fn` with its shape annotations checked at every call."""
    return jaxtyping.jaxtyped(fn, typechecker=beartype.beartype)


def on_shards(op, specs, out_spec, *shapes):
    args = [
        jax.device_put(jnp.ones(shape), spec) for shape, spec in zip(shapes, specs, strict=True)
    ]
    fn = checked(op)
    mapped = jax.shard_map(lambda x, w: fn(x, w, "model"), in_specs=specs, out_specs=out_spec)
    return jax.eval_shape(mapped, *args)


def on_layer(cls, method, layer, x, spec):
    return nnx.eval_shape(
        lambda layer, x: checked(getattr(cls, method))(layer, x), layer, jax.device_put(x, spec)
    )


def test_ops():
    on_shards(fa.all_gather_matmul, (ROWS, ACROSS), COLUMNS, (2, 8, 4), (4, 8))
    on_shards(fa.matmul_reduce_scatter, (COLUMNS, DOWN), ROWS, (2, 8, 4), (4, 8))
    on_shards(fa.matmul_all_reduce, (COLUMNS, DOWN), P(), (2, 8, 4), (4, 8))
    heads = jax.device_put(jnp.ones((2, 8, 4, 2)), ROWS)
    ring = jax.shard_map(
        lambda x: checked(fa.ring_attention)(x, x, x, "model"), in_specs=ROWS, out_specs=ROWS
    )
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
    with pytest.raises(
        jaxtyping.TypeCheckError, match="problem arose whilst typechecking parameter 'inputs'"
    ):
        on_layer(fa.nn.ColumnParallelLinear, "__call__", layer, jnp.ones(8), P())
