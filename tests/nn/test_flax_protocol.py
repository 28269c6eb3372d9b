"""What Flax's modules have, the parallel layers have: keywords of calls, attributes that may be
set, and views.
"""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import flaxasync as fa
from tests.nn.conftest import COLUMNS, ROWS, SAME, TOKENS, assert_close, drawn, make_mesh, ones

pytestmark = pytest.mark.usefixtures("quick_compile")

MODULES = {
    nnx.Linear: lambda: nnx.Linear(8, 8, rngs=nnx.Rngs(0)),
    nnx.Embed: lambda: nnx.Embed(8, 8, rngs=nnx.Rngs(0)),
    nnx.MultiHeadAttention: lambda: nnx.MultiHeadAttention(4, 8, decode=False, rngs=nnx.Rngs(0)),
    nnx.LoRA: lambda: nnx.LoRA(8, 2, 8, rngs=nnx.Rngs(0)),
}
# How to make each public layer, and its counterpart: a module, or just the one whose call it has.
LAYERS = {
    "ColumnParallelLinear": (
        lambda: fa.nn.ColumnParallelLinear(8, 8, rngs=nnx.Rngs(0)),
        nnx.Linear,
    ),
    "RowParallelLinear": (lambda: fa.nn.RowParallelLinear(8, 8, rngs=nnx.Rngs(0)), nnx.Linear),
    "MeshLinear": (
        lambda: fa.nn.MeshLinear(8, 8, axis_names=("data", "model"), rngs=nnx.Rngs(0)),
        nnx.Linear,
    ),
    "VocabParallelEmbed": (lambda: fa.nn.VocabParallelEmbed(8, 8, rngs=nnx.Rngs(0)), nnx.Embed),
    "ParallelAttention": (
        lambda: fa.nn.ParallelAttention(8, 4, rngs=nnx.Rngs(0)),
        nnx.MultiHeadAttention,
    ),
    "ParallelSelfAttention": (
        lambda: fa.nn.ParallelSelfAttention(8, 4, rngs=nnx.Rngs(0)),
        nnx.MultiHeadAttention,
    ),
    "RingSelfAttention": (
        lambda: fa.nn.RingSelfAttention(8, 4, axis_name="model", rngs=nnx.Rngs(0)),
        nnx.MultiHeadAttention,
    ),
    "ParallelLoRA": (
        lambda: fa.nn.ParallelLoRA(
            fa.nn.RowParallelLinear(8, 8, rngs=nnx.Rngs(0)), 2, rngs=nnx.Rngs(0)
        ),
        nnx.LoRA,
    ),
    "ColumnParallelProjections": (
        lambda: fa.nn.ColumnParallelProjections(8, {"q": 8, "k": 8}, rngs=nnx.Rngs(0)),
        nnx.Linear.__call__,
    ),
    "ParallelMLP": (lambda: fa.nn.ParallelMLP(8, 8, rngs=nnx.Rngs(0)), nnx.Linear.__call__),
    "ParallelMoE": (
        lambda: fa.nn.ParallelMoE(8, 8, 4, experts_per_token=2, rngs=nnx.Rngs(0)),
        nnx.Linear.__call__,
    ),
}
ALIKE = [name for name, (_, counterpart) in LAYERS.items() if inspect.isclass(counterpart)]


def test_every_public_layer_has_a_counterpart():
    public = {
        name
        for name, value in vars(fa.nn).items()
        if inspect.isclass(value) and issubclass(value, nnx.Module)
    }
    assert public == set(LAYERS)


@pytest.mark.parametrize("name", LAYERS)
def test_methods_take_the_keywords_of_flax(name):
    """By name, and by position where both have a position; self-attention has segments in the place
    of keys.
    """
    layer, counterpart = getattr(fa.nn, name), LAYERS[name][1]
    plain = inspect.isclass(counterpart)
    methods = (
        [m for m in vars(counterpart) if m in ("__call__", "attend", "set_view", "init_cache")]
        if plain
        else []
    )
    for method in methods or ["__call__"]:
        theirs = inspect.signature(
            getattr(counterpart, method) if plain else counterpart
        ).parameters
        ours = inspect.signature(getattr(layer, method)).parameters
        named = [
            key for key, value in theirs.items() if value.kind != inspect.Parameter.VAR_KEYWORD
        ]
        assert set(named) <= set(ours)
        assert list(ours)[1] == named[1]
    if name == "ParallelLoRA":  # nnx.LoRA hands its keywords to the layer that it adapts
        assert "out_sharding" in inspect.signature(layer.__call__).parameters


@pytest.mark.parametrize("name", ALIKE)
def test_attributes_are_those_of_flax_and_setting_one_is_never_ignored(name):
    make, counterpart = LAYERS[name]
    changed = {
        "dtype": jnp.bfloat16,
        "dropout_rate": 0.5,
        "deterministic": True,
        "decode": True,
        "precision": "high",
    }
    with jax.set_mesh(make_mesh(2, 4)):
        layer, plain = nnx.eval_shape(make), nnx.eval_shape(MODULES[counterpart])
        own = [attribute for attribute in vars(plain) if not attribute.startswith("_")]
        assert [attribute for attribute in own if not hasattr(layer, attribute)] == []
        for attribute in own:
            value = changed.get(attribute, getattr(layer, attribute))
            if isinstance(value, nnx.Variable | nnx.Module):
                continue
            refused = set_attribute(layer, attribute, value)
            assert attribute in refused if refused else getattr(layer, attribute) == value


def set_attribute(layer, name, value):
    """Sets an attribute as Flax does. Returns the error, or nothing where it was set."""
    try:
        nnx.Module.set_attributes(layer, type(layer), **{name: value})
    except (AttributeError, NotImplementedError) as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", ["ParallelMLP", "ParallelMoE", *ALIKE])
def test_a_dtype_that_is_set_is_that_of_the_next_call(name):
    with jax.set_mesh(make_mesh(2, 4)):
        layer = nnx.eval_shape(LAYERS[name][0])
        x = jax.ShapeDtypeStruct((2, 8, 8), jnp.float32, sharding=P(None, "model", None))
        if name in ("RowParallelLinear", "MeshLinear", "ParallelLoRA"):
            rows = "data" if name == "MeshLinear" else None
            x = jax.ShapeDtypeStruct((2, 8, 8), jnp.float32, sharding=P(None, rows, "model"))
        if name == "VocabParallelEmbed":
            x = jax.ShapeDtypeStruct((2, 8), jnp.int32, sharding=P(None, None))
        layer.set_attributes(dtype=jnp.bfloat16)
        assert nnx.eval_shape(lambda layer, x: layer(x), layer, x).dtype == jnp.bfloat16
        layer.set_attributes(dtype=jnp.float32)
        assert nnx.eval_shape(lambda layer, x: layer(x), layer, x).dtype == jnp.float32


@pytest.mark.parametrize("name", ["ParallelMLP", "ParallelAttention", "ParallelSelfAttention"])
def test_an_option_that_is_set_is_set_for_the_layer_and_all_of_its_parts(name):
    """These layers multiply for their parts, with settings of their own."""
    with jax.set_mesh(make_mesh(2, 4)):
        layer = nnx.eval_shape(LAYERS[name][0])
        layer.set_attributes(quantization="int8", preferred_element_type=jnp.bfloat16)
        found = [part.settings for _, part in nnx.iter_modules(layer) if hasattr(part, "settings")]
        assert len(found) >= 4
        for settings in found:
            assert (settings.quantization, settings.preferred_element_type) == (
                fa.Quantization("int8"),
                jnp.bfloat16,
            )
        with pytest.raises(
            ValueError, match=f"{name} got a dot_general and a quantization, which are two ways"
        ):
            layer.dot_general = jax.lax.dot


class Dropping(nnx.Module):
    """Attention that drops, and another module that takes the same views."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.attention = fa.nn.ParallelSelfAttention(16, 4, dropout_rate=0.5, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)


def test_views_and_attributes_reach_the_dropout_of_attention():
    with jax.set_mesh(make_mesh(2, 4)):
        model = Dropping()
        x = jax.device_put(np.random.default_rng(0).standard_normal((2, 8, 16), np.float32), ROWS)
        want = model.attention(x, deterministic=True)
        assert not np.allclose(model.attention(x), want, atol=1e-3)  # the layer drops
        for view in (
            nnx.view(model, deterministic=True),
            nnx.with_attributes(model, deterministic=True),
            nnx.with_attributes(model, dropout_rate=0.0),
        ):
            assert_close(view.attention(x), want, "float32", "y")
        assert not np.allclose(model.attention(x), want, atol=1e-3)  # the model itself is as it was
        model.eval()
        assert_close(model.attention(x), want, "float32", "y")
        model.train()
        assert not np.allclose(model.attention(x), want, atol=1e-3)
        model.attention.rngs = nnx.data(None)
        with pytest.raises(
            ValueError, match=r"ParallelSelfAttention drops with dropout_rate=0.5 and has no stream"
        ):
            model.attention(x)


def test_a_view_decodes_with_a_cache_of_its_own():
    with jax.set_mesh(make_mesh(2, 4)):
        model = nnx.Dict(
            attention=drawn(lambda: fa.nn.ParallelSelfAttention(16, 4, rngs=nnx.Rngs(0)))
        )
        x = jax.device_put(np.random.default_rng(0).standard_normal((2, 8, 16), np.float32), ROWS)
        want = model.attention(x)
        view = nnx.view(model, decode=True, batch_size=2, max_length=8)
        got = jnp.concatenate(
            [view.attention(jax.device_put(np.asarray(x)[:, i : i + 4], ROWS)) for i in (0, 4)], 1
        )
        assert_close(got, want, "float32", "y")
        assert int(view.attention.cache_index[...]) == 8
        assert model.attention.cached_key is None
        assert_close(nnx.view(view, decode=False).attention(x), want, "float32", "y")
        model.set_attributes(decode=True)
        with pytest.raises(ValueError, match="and has none: call init_cache first"):
            model.attention(x)
        with pytest.raises(
            ValueError, match="got batch_size=2 and max_length=None; give both, or neither"
        ):
            nnx.view(model, decode=True, batch_size=2)
        ring = nnx.view(drawn(LAYERS["RingSelfAttention"][0]), decode=True)
        with pytest.raises(
            NotImplementedError, match=r"RingSelfAttention lacks decode .* ParallelSelfAttention"
        ):
            ring(ones((2, 8, 8), P(None, "model", None)))


@pytest.mark.parametrize(("name", "given", "wanted", "axis_type"), [
    ("ColumnParallelLinear", ROWS, SAME, AxisType.Explicit),
    ("RowParallelLinear", COLUMNS, SAME, AxisType.Auto),
    ("ParallelMLP", ROWS, COLUMNS, AxisType.Auto),
    ("VocabParallelEmbed", TOKENS, SAME, AxisType.Auto),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in [
        ("RowParallelLinear", COLUMNS, COLUMNS, AxisType.Explicit),
        ("ParallelMoE", ROWS, SAME, AxisType.Explicit),
        ("ParallelSelfAttention", ROWS, COLUMNS, AxisType.Auto),
        ("ParallelLoRA", COLUMNS, SAME, AxisType.Explicit),
    ]),
])  # fmt: skip
def test_out_sharding_says_how_the_output_is_sharded(name, given, wanted, axis_type):
    mesh = make_mesh(2, 4, axis_type)
    with jax.set_mesh(mesh):
        layer = drawn(LAYERS[name][0])
        values = np.random.default_rng(0).standard_normal((2, 8, 8)).astype(np.float32)
        if name == "VocabParallelEmbed":
            values = np.arange(16, dtype=np.int32).reshape(2, 8) % 8
        x = jax.device_put(values, given)
        want = layer(x)
        for out_sharding in (wanted, jax.NamedSharding(mesh, wanted)):
            got = layer(x, out_sharding=out_sharding)
            assert got.sharding.is_equivalent_to(jax.NamedSharding(mesh, wanted), 3)
            assert_close(got, want, "float32", "y")


def test_out_sharding_of_a_row_parallel_layer_is_its_layout():
    """The sum is reduced to all devices, where a reduce-scatter would need a gather after it."""
    with jax.set_mesh(make_mesh(2, 4)):
        x = ones((2, 8, 16), COLUMNS)
        replicated = drawn(
            lambda: fa.nn.RowParallelLinear(16, 16, layout="replicated", rngs=nnx.Rngs(0))
        )
        layer = drawn(lambda: fa.nn.RowParallelLinear(16, 16, rngs=nnx.Rngs(0)))

        def program(layer, x, **more):
            return nnx.jit(lambda layer, x: layer(x, **more)).lower(layer, x).as_text()

        assert program(layer, x, out_sharding=SAME) == program(replicated, x)
        assert program(replicated, x, out_sharding=ROWS) == program(layer, x)
        odd = ones((2, 6, 16), COLUMNS)  # rows that the axis does not divide
        assert layer(odd, out_sharding=SAME).sharding.spec == SAME


def test_attend_and_projections_take_out_sharding():
    with jax.set_mesh(make_mesh(2, 4)):
        embed = drawn(lambda: fa.nn.VocabParallelEmbed(10, 8, rngs=nnx.Rngs(0)))
        x = ones((2, 8, 8), ROWS)
        logits = embed.attend(query=x, out_sharding=SAME)
        assert logits.sharding.spec == SAME
        assert_close(logits, embed.attend(x), "float32", "logits")
        both = drawn(LAYERS["ColumnParallelProjections"][0])
        assert [y.sharding.spec for y in both(x, out_sharding=SAME)] == [SAME, SAME]


def test_what_of_out_sharding_is_refused():
    mesh = make_mesh(2, 4)
    other = jax.make_mesh((8,), ("x",))
    with jax.set_mesh(mesh):
        layer, x = drawn(LAYERS["ColumnParallelLinear"][0]), ones((2, 8, 8), ROWS)
        with pytest.raises(
            TypeError, match="ColumnParallelLinear got an out_sharding of type tuple"
        ):
            layer(x, out_sharding=("data", None, None))
        with pytest.raises(ValueError, match="nope"):
            layer(x, out_sharding=P("nope"))
        for spec in (P(), P("model")):
            with pytest.raises(ValueError, match=r"needs an input \[..., rows, features\]: got"):
                layer(ones((8,), P()), out_sharding=spec)
        embed = drawn(LAYERS["VocabParallelEmbed"][0])
        with pytest.raises(ValueError, match=r"needs ids \[..., rows\]: got a scalar"):
            embed(jnp.int32(3), out_sharding=P())
        with pytest.raises(
            ValueError, match=r"out_sharding on a mesh \{'x': 8\}, and the mesh that is set"
        ):
            layer(x, out_sharding=jax.NamedSharding(other, P("x")))

        def inside(x):
            return layer(x, out_sharding=SAME)

        with pytest.raises(
            ValueError, match=r"inside jax.shard_map .* leave it out, and say in out_specs"
        ):
            jax.shard_map(inside, in_specs=ROWS, out_specs=COLUMNS)(x)


@pytest.mark.parametrize(
    "name", ["ParallelAttention", "ParallelSelfAttention", "RingSelfAttention"]
)
def test_keywords_of_attention_are_taken_or_refused_by_name(name):
    rows = (
        P("data", "model", None, None)
        if name == "RingSelfAttention"
        else P("data", None, "model", None)
    )
    with jax.set_mesh(make_mesh(2, 4)):
        layer, x = drawn(LAYERS[name][0]), ones((2, 8, 8), ROWS)
        assert_close(layer(x, qkv_sharding=rows), layer(x), "float32", "y")
        refused = {"qkv_sharding": SAME, "sow_weights": True, "input_positions": jnp.arange(8)}
        if name != "ParallelAttention":
            refused |= {"inputs_k": x, "inputs_v": x}
        if name == "RingSelfAttention":
            refused |= {"mask": jnp.ones((8, 8), bool), "decode": True}
        for keyword, value in refused.items():
            with pytest.raises(NotImplementedError, match=f"{name} .*{keyword}"):
                layer(x, **{keyword: value})


def test_self_attention_is_causal_where_the_call_says_so():
    with jax.set_mesh(make_mesh(2, 4)):
        x = jax.device_put(np.random.default_rng(0).standard_normal((2, 8, 8), np.float32), ROWS)
        for name, cls in (
            ("ParallelSelfAttention", fa.nn.ParallelSelfAttention),
            ("Ring", fa.nn.RingSelfAttention),
        ):
            causal, whole = (
                drawn(lambda c=c: cls(8, 4, causal=c, axis_name="model", rngs=nnx.Rngs(0)))
                for c in (1, 0)
            )
            assert_close(whole(x, is_causal=True), causal(x), "float32", name)
            assert not np.allclose(whole(x), causal(x), atol=1e-3)
