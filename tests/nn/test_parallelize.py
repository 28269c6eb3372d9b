"""Layers of a plain model are replaced in place, and plain arrays loaded under the shardings of
parallel layers.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import flaxasync as fa
from flaxasync.nn.adopt.parallelize import _match
from tests.nn.conftest import ROWS, Block, check_replaced, drawn, make_mesh, ones, permutes

pytestmark = pytest.mark.usefixtures("quick_compile")


class Model(nnx.Module):
    def __init__(self, blocks=2):
        rngs = nnx.Rngs(0)
        self.blocks = nnx.List([Block(rngs) for _ in range(blocks)])
        self.shared = self.blocks[0].up

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return x


RULES = {"blocks.*.up": "column", "blocks.*.down": "row", "blocks.*.attention": "attention"}


@pytest.mark.parametrize(
    ("blocks", "axis_type"),
    [(1, AxisType.Explicit), pytest.param(2, AxisType.Auto, marks=pytest.mark.slow)],
)
def test_a_model_computes_what_it_did(capsys, blocks, axis_type):
    def replace(model):
        done = fa.nn.parallelize(model, RULES)
        assert model.shared is model.blocks[0].up
        for block in model.blocks:
            assert (type(block.up), type(block.down)) == (
                fa.nn.ColumnParallelLinear,
                fa.nn.RowParallelLinear,
            )
            assert type(block.attention) is fa.nn.ParallelAttention
        assert capsys.readouterr().out.splitlines() == list(map(str, done))
        assert (
            "blocks.0.down: Linear -> RowParallelLinear (row), bias [16], kernel [32, 16]"
            in map(str, done)
        )
        return model

    check_replaced(drawn(lambda: Model(blocks)), make_mesh(2, 4, axis_type), replace)


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        (
            {"blocks.*.wide": "column"},
            r"no module matches 'blocks\.\*\.wide'; the model has .*, blocks\.0\.up",
        ),
        ({"blocks.*.up": "diagonal"}, "'diagonal': a rule is one of column, logits, row"),
        (
            {"blocks.0.attention": "column"},
            "attention by the rule 'column': the rule replaces nnx.Linear: got MultiHeadAttention",
        ),
        (
            {"**.up": "column", "blocks.0.*p": "row"},
            r"blocks\.0\.up matches both '\*\*\.up' and 'blocks\.0\.\*p'",
        ),
    ],
)
def test_rules_that_do_not_fit(rules, message):
    model = nnx.eval_shape(Model)
    with jax.set_mesh(make_mesh(2, 4)), pytest.raises(ValueError, match=message):
        fa.nn.parallelize(model, rules)
    assert type(model.blocks[0].up) is nnx.Linear


@pytest.mark.parametrize(
    ("pattern", "paths"),
    [
        ("**.up", ["up", "blocks.0.up", "blocks.1.up"]),
        ("blocks.**.up", ["blocks.0.up", "blocks.1.up"]),
        ("blocks.0.**", ["blocks.0", "blocks.0.up", "blocks.0.up_too"]),
        ("*.*.up*", ["blocks.0.up", "blocks.0.up_too", "blocks.1.up"]),
        ("**", ["up", "blocks.0", "blocks.0.up", "blocks.0.up_too", "blocks.1.up"]),
    ],
)
def test_two_stars_are_any_number_of_names_also_none(pattern, paths):
    modules = dict.fromkeys(["up", "blocks.0", "blocks.0.up", "blocks.0.up_too", "blocks.1.up"])
    assert list(_match(modules, {pattern: "column"})) == paths


def odd_layers():
    """Returns layers that do more than their parallel forms, or were changed after they were
    made.
    """

    def attention(decode=False, **options):
        return nnx.MultiHeadAttention(4, 16, decode=decode, rngs=nnx.Rngs(0), **options)

    def linear(features, **options):
        return nnx.Linear(16, features, rngs=nnx.Rngs(0), **options)

    model = nnx.Dict(
        cached=attention(decode=True),
        filled=attention(),
        function=attention(attention_fn=lambda q, *_, **__: q),
        dropped=attention(dropout_rate=0.5, broadcast_dropout=True),
        adapted=attention(normalize_qk=True),
        normed=attention(normalize_qk=True),
        tied=attention(),
        custom=linear(16, dot_general=lambda *a, **_: jax.lax.dot_general(*a)),
        uneven=linear(18),
        unbiased=linear(16),
        scaled=linear(16),
        a=linear(16),
        b=linear(16),
        fitting=linear(16),
    )
    model.filled.init_cache((1, 8, 16))
    model.adapted.query = nnx.LoRA(16, 2, 16, base_module=model.adapted.query, rngs=nnx.Rngs(0))
    model.normed.key_ln = nnx.RMSNorm(4, rngs=nnx.Rngs(0))
    model.tied.key = model.tied.query
    model.unbiased.bias = nnx.data(None)
    model.scaled.scale = nnx.Param(jnp.ones(8))
    model.b.kernel = model.a.kernel
    return model


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("cached", "cached by the rule 'attention': it decodes with a cache"),
        ("filled", "filled by .* a cache .*: build the model with decode=False"),
        ("function", "function by .*: it has an attention_fn of its own, which would see"),
        (
            "dropped",
            "dropped by .*: its dropout is the same for the whole batch: give it "
            "broadcast_dropout=False",
        ),
        (
            "adapted",
            "adapted by the rule 'attention': its query is a LoRA and not a LinearGeneral, whose",
        ),
        (
            "normed",
            "normed by the rule 'attention': its key_ln is a RMSNorm and not a LayerNorm, whose",
        ),
        ("tied", "tied by .*: tied.key and tied.query are one, and would be two; share the whole"),
        ("custom", "custom by the rule 'column': .* dot_general of its own lacks backend='xla'"),
        ("uneven", "uneven by the rule 'column': .*out_features=18 on 4 devices"),
        (
            "unbiased",
            r"unbiased by the rule 'column': it has the parameters kernel Param\[16, 16\], and a "
            r"layer .* has bias Param\[16\], kernel Param\[16, 16\]; dim",
        ),
        (
            "scaled",
            r"scaled by the rule 'column': it has the parameters bias .*, kernel .*, scale "
            r"Param\[8\], and .* has bias Param\[16\], kernel Param\[16, 16\]; dim",
        ),
        ("a", "a by .*: a.kernel and b.kernel are one, and would be two"),
    ],
)
def test_layers_that_cannot_be_replaced(path, message):
    with jax.set_mesh(make_mesh(2, 4)):
        model = nnx.eval_shape(odd_layers)
        rule = "attention" if isinstance(model[path], nnx.MultiHeadAttention) else "column"
        with pytest.raises(ValueError, match=f"parallelize cannot replace {message}"):
            fa.nn.parallelize(model, {"fitting": "column", path: rule}, backend="xla")
        assert type(model.fitting) is nnx.Linear


def test_parameters_keep_their_dtypes_and_metadata():
    class Model(nnx.Module):
        def __init__(self):
            self.linear = nnx.Linear(4, 8, kernel_metadata={"decay": 0.1}, rngs=nnx.Rngs(0))
            self.embed = nnx.Embed(8, 4, rngs=nnx.Rngs(0))
            self.attention = nnx.MultiHeadAttention(
                4, 4, decode=False, normalize_qk=True, rngs=nnx.Rngs(0)
            )
            self.frozen = nnx.Linear(4, 8, rngs=nnx.Rngs(0))
            self.frozen.bias = nnx.LoRAParam(self.frozen.bias[...])

    model = drawn(Model)
    nnx.update(model, jax.tree.map(lambda p: p.astype(jnp.bfloat16), nnx.state(model, nnx.Param)))
    with jax.set_mesh(make_mesh(2, 4)):
        with pytest.raises(
            ValueError, match=r"frozen by the rule .* bias LoRAParam\[8\], .* has bias Param\[8\]"
        ):
            fa.nn.parallelize(model, {"frozen": "column"})
        fa.nn.parallelize(
            model, {"linear": "column", "embed": "embed", "attention": "attention"}, verbose=False
        )
    assert {value.dtype for value in jax.tree.leaves(nnx.state(model, nnx.Param))} == {
        jnp.dtype("bfloat16")
    }
    metadata = model.linear.kernel.get_metadata()
    assert (metadata["decay"], metadata["out_sharding"]) == (0.1, (None, "model"))


@pytest.mark.parametrize("container", [lambda x: (x,), lambda x: [[x]], lambda x: {"name": x}])
def test_layers_in_plain_containers_are_refused(container):
    """They would be reported as replaced, and would not be."""

    class Holder(nnx.Module):
        def __init__(self):
            self.first, self.second = (nnx.Linear(4, 4, rngs=nnx.Rngs(0)) for _ in range(2))
            self.plain = nnx.data(container(self.second))
            self.list, self.dict = (
                nnx.List([nnx.Linear(4, 4, rngs=nnx.Rngs(0))]),
                nnx.Dict({"first": self.first}),
            )

    with jax.set_mesh(make_mesh(2, 4)):
        model = nnx.eval_shape(Holder)
        with pytest.raises(
            ValueError,
            match=r"replace (plain|second).*: it is in a tuple, list or dict; use nnx.List",
        ):
            fa.nn.parallelize(model, {"dict.first": "column", "plain.**": "column"})
        assert type(model.first) is nnx.Linear


def test_projections_of_one_input_share_one_gather():
    names = {"query": 16, "key": 8}
    with jax.set_mesh(make_mesh(2, 4)):
        x = jax.device_put(
            np.random.default_rng(0).standard_normal((2, 8, 16)).astype(np.float32), ROWS
        )
        layer = drawn(lambda: fa.nn.ColumnParallelProjections(16, names, rngs=nnx.Rngs(0)))
        assert permutes(layer, x) == permutes(layer.query, x) > 0
        query, key = layer(x)
        np.testing.assert_allclose(query, layer.query(x), rtol=1e-6)
        np.testing.assert_allclose(key, layer.key(x), rtol=1e-6)


# ---- loading plain arrays -------------------------------------------------------------------------------------------


def plain_linear():
    return drawn(lambda: nnx.Linear(8, 12, rngs=nnx.Rngs(0)), seed=1)


def parallel_linear():
    return drawn(lambda: fa.nn.ColumnParallelLinear(8, 12, rngs=nnx.Rngs(0)), seed=2)


@nnx.jit
def gradient(layer, x):
    return nnx.grad(lambda layer: jnp.sum(layer(x) ** 2))(layer)


@pytest.mark.parametrize("form", ["module", "state", "nested", "flat"])
def test_loading_keeps_shardings_metadata_and_gradients(form):
    plain = plain_linear()
    source = {
        "module": plain,
        "state": nnx.state(plain),
        "nested": nnx.to_pure_dict(nnx.state(plain)),
        "flat": {"kernel": np.asarray(plain.kernel[...]), "bias": np.asarray(plain.bias[...])},
    }[form]
    with jax.set_mesh(make_mesh(2, 4)):
        layer = parallel_linear()
        assert fa.nn.load(layer, source).names == ("bias", "kernel")
        assert layer.kernel[...].sharding.spec == P(None, "model")
        assert layer.kernel.get_metadata()["out_sharding"] == (None, "model")
        assert gradient(layer, ones((2, 8, 8), ROWS))["kernel"][...].sharding.spec == P(
            None, "model"
        )
    np.testing.assert_array_equal(layer.kernel[...], plain.kernel[...])
    np.testing.assert_array_equal(layer.bias[...], plain.bias[...])


def test_plain_arrays_of_update_are_refused_and_load_mends_the_layer():
    plain, x = plain_linear(), np.ones((2, 8, 8), np.float32)
    with jax.set_mesh(make_mesh(2, 4)):
        layer = parallel_linear()
        nnx.update(layer, nnx.state(plain))
        with pytest.raises(
            ValueError, match=r"kernel \[8, 12\] must be sharded .*'model'.*flaxasync.nn.load"
        ):
            layer(jax.device_put(x, ROWS))
        fa.nn.load(layer, plain)
        np.testing.assert_allclose(layer(jax.device_put(x, ROWS)), plain(x), rtol=1e-5, atol=1e-5)
        embed = drawn(lambda: fa.nn.VocabParallelEmbed(8, 16, rngs=nnx.Rngs(0)))
        embed.embedding.set_value(jnp.ones((8, 16)))
        with pytest.raises(
            ValueError, match=r"VocabParallelEmbed: the embedding \[8, 16\] must be sharded"
        ):
            embed(jax.device_put(np.zeros((2, 8), np.int32), P("data", None)))


def test_plain_arrays_of_update_have_sharded_gradients_under_auto_axes():
    with jax.set_mesh(make_mesh(2, 4, AxisType.Auto)):
        layer = parallel_linear()
        nnx.update(layer, nnx.state(plain_linear()))
        assert gradient(layer, ones((2, 8, 8), ROWS))["kernel"][...].sharding.spec == P(
            None, "model"
        )
        fa.nn.load(layer, plain_linear())
        assert layer.kernel[...].sharding.spec == P(None, "model")


def test_heads_that_are_a_dimension_are_merged():
    plain = drawn(
        lambda: nnx.MultiHeadAttention(4, 16, use_bias=False, decode=False, rngs=nnx.Rngs(0))
    )
    with jax.set_mesh(make_mesh(2, 4)):
        layer = drawn(lambda: fa.nn.ParallelSelfAttention(16, 4, rngs=nnx.Rngs(0)))
        loaded = fa.nn.load(layer, plain)
    assert loaded.reshaped["query.kernel"] == ((16, 4, 4), (16, 16))
    assert "  reshaped: out.kernel from [4, 4, 16] to [16, 16]" in str(loaded)
    np.testing.assert_array_equal(layer.out.kernel[...], plain.out.kernel[...].reshape(16, 16))


def test_names_and_shapes_that_do_not_fit_are_told_and_nothing_is_loaded():
    with jax.set_mesh(make_mesh(1, 4)):
        layer = parallel_linear()
        before = np.asarray(layer.kernel[...])
        with pytest.raises(
            ValueError, match=r"kernel is \[12, 8\] in the source and \[8, 12\] here"
        ):
            fa.nn.load(layer, {"kernel": np.ones((12, 8)), "bias": np.ones(12)})
        with pytest.raises(
            ValueError,
            match=r"missing in the source: bias; left over in the source: scale\.x; strict",
        ):
            fa.nn.load(layer, {"kernel": np.ones((8, 12)), "scale": {"x": np.ones(1)}})
        np.testing.assert_array_equal(layer.kernel[...], before)
        loaded = fa.nn.load(
            layer, {"kernel": np.ones((8, 12)), "scale.x": np.ones(1)}, strict=False
        )
        assert layer.kernel[...].dtype == jnp.float32
        assert (loaded.names, loaded.missing, loaded.unexpected) == (
            ("kernel",),
            ("bias",),
            ("scale.x",),
        )
        assert str(loaded).splitlines()[1:] == [
            "  missing in the source: bias",
            "  left over in the source: scale.x",
        ]


def test_a_state_of_plain_arrays_and_of_random_streams_is_loaded():
    """Without a mesh, too: what a layer then has are arrays of jax."""

    def make():
        return nnx.Sequential(
            nnx.Linear(4, 4, rngs=nnx.Rngs(0)), nnx.Dropout(0.5, rngs=nnx.Rngs(0))
        )

    model, plain = make(), make()
    fa.nn.load(model, nnx.state(plain))
    assert isinstance(model.layers[0].kernel.get_value(), jax.Array)
    arrays = nnx.State(
        {"layers": {0: {name: np.ones((4, 4)[:dim]) for name, dim in (("kernel", 2), ("bias", 1))}}}
    )
    assert fa.nn.load(model, arrays).names == ("layers.0.bias", "layers.0.kernel")
    np.testing.assert_array_equal(model.layers[0].kernel[...], np.ones((4, 4)))


def test_a_list_is_no_array():
    model = drawn(lambda: nnx.Linear(2, 2, rngs=nnx.Rngs(0)))
    for source, name in [
        ({"kernel": [[1.0]]}, r"kernel\.0\.0 is 1.0, of type float"),
        ({"a": {"b": (1.0,)}}, r"a\.b\.0 is 1.0, of type float"),
    ]:
        with pytest.raises(ValueError, match=f"load: {name}; give an array"):
            fa.nn.load(model, source)
