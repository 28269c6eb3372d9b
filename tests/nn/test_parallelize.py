"""Tests that layers of a plain model are replaced in place, or refused by the reason why they cannot be."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import flaxasync as fa
from tests.nn.conftest import COLUMNS, ROWS, check_replaced, drawn

pytestmark = pytest.mark.usefixtures("quick_compile")


class Block(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(16, rngs=rngs)
        self.up, self.down = nnx.Linear(16, 32, rngs=rngs), nnx.Linear(32, 16, rngs=rngs)

    def __call__(self, x):
        return x + self.down(nnx.gelu(self.up(self.norm(x))))


class Model(nnx.Module):
    def __init__(self, rngs=None):
        rngs = nnx.Rngs(0) if rngs is None else rngs
        self.blocks = nnx.List([Block(rngs) for _ in range(2)])
        self.shared = self.blocks[0].up
        self.attention = nnx.MultiHeadAttention(4, 16, decode=False, rngs=rngs)

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return x + self.attention(x)


RULES = {"blocks.*.up": "column", "blocks.*.down": "row", "attention": "attention"}


@pytest.mark.parametrize("axis_type", [AxisType.Explicit, pytest.param(AxisType.Auto, marks=pytest.mark.slow)])
def test_a_model_computes_what_it_did(mesh_of, capsys, axis_type):
    def replace(model):
        done = fa.nn.parallelize(model, RULES)
        assert model.shared is model.blocks[0].up
        for block in model.blocks:
            assert (type(block.up), type(block.down)) == (fa.nn.ColumnParallelLinear, fa.nn.RowParallelLinear)
        assert type(model.attention) is fa.nn.ParallelAttention
        assert capsys.readouterr().out.splitlines() == list(map(str, done))
        assert "blocks.0.down: Linear -> RowParallelLinear (row), bias [16], kernel [32, 16]" in map(str, done)
        return model

    check_replaced(drawn(Model), mesh_of(2, 4, axis_type), replace)


@pytest.mark.parametrize(("rules", "message"), [
    ({"blocks.*.wide": "column"}, r"no module matches 'blocks\.\*\.wide'; the model has attention, .*blocks\.0\.up"),
    ({"blocks.*.up": "diagonal"}, "'diagonal': a rule is one of column, logits, row"),
    ({"attention": "column"}, "attention is a MultiHeadAttention, and 'column' replaces Linear"),
    ({"**.up": "column", "blocks.0.*p": "row"}, r"blocks\.0\.up matches both '\*\*\.up' and 'blocks\.0\.\*p'"),
])  # fmt: skip
def test_rules_that_do_not_fit(mesh_of, rules, message):
    model = nnx.eval_shape(Model)
    with jax.set_mesh(mesh_of(2, 4)), pytest.raises(ValueError, match=message):
        fa.nn.parallelize(model, rules)
    assert type(model.blocks[0].up) is nnx.Linear


def odd_layers():
    """Returns layers that do more than their parallel forms, or were changed after they were made."""

    def attention(decode=False, **options):
        return nnx.MultiHeadAttention(4, 16, decode=decode, rngs=nnx.Rngs(0), **options)

    def linear(features, **options):
        return nnx.Linear(16, features, rngs=nnx.Rngs(0), **options)

    model = nnx.Dict(
        cached=attention(decode=True), filled=attention(), function=attention(attention_fn=lambda q, *_, **__: q),
        dropped=attention(dropout_rate=0.5, broadcast_dropout=True), adapted=attention(normalize_qk=True),
        normed=attention(normalize_qk=True), custom=linear(16, dot_general=lambda *a, **_: jax.lax.dot_general(*a)),
        uneven=linear(18), unbiased=linear(16), scaled=linear(16), a=linear(16), b=linear(16), fitting=linear(16),
    )  # fmt: skip
    model.filled.init_cache((1, 8, 16))
    model.adapted.query = nnx.LoRA(16, 2, 16, base_module=model.adapted.query, rngs=nnx.Rngs(0))
    model.normed.key_ln = nnx.RMSNorm(4, rngs=nnx.Rngs(0))
    model.unbiased.bias = nnx.data(None)
    model.scaled.scale = nnx.Param(jnp.ones(8))
    model.b.kernel = model.a.kernel
    return model


@pytest.mark.parametrize(("path", "message"), [
    ("cached", "cached by the rule 'attention': it decodes with a cache"),
    ("filled", "filled by .* a cache .*: build the model with decode=False"),
    ("function", "function by .*: it has an attention_fn of its own, which would see"),
    ("dropped", "dropped by .*: its dropout is the same for the whole batch: give it broadcast_dropout=False"),
    ("adapted", "adapted by the rule 'attention': its query is a LoRA and not a LinearGeneral, whose"),
    ("normed", "normed by the rule 'attention': its key_ln is a RMSNorm and not a LayerNorm, whose"),
    ("custom", "custom by the rule 'column': .* dot_general of its own lacks backend='xla'"),
    ("uneven", "uneven by the rule 'column': .*out_features=18 on 4 devices"),
    ("unbiased", "unbiased by the rule 'column': it has the parameters kernel, and a layer .* has bias, kernel"),
    ("scaled", "scaled by the rule 'column': it has the parameters bias, kernel, scale, and .* has bias, kernel"),
    ("a", r"a: a.kernel and b.kernel are one parameter, and would be two"),
])  # fmt: skip
def test_layers_that_cannot_be_replaced(mesh_of, path, message):
    with jax.set_mesh(mesh_of(2, 4)):
        model = nnx.eval_shape(odd_layers)
        rule = "attention" if isinstance(model[path], nnx.MultiHeadAttention) else "column"
        with pytest.raises(ValueError, match=f"parallelize cannot replace {message}"):
            fa.nn.parallelize(model, {"fitting": "column", path: rule}, backend="xla")
        assert type(model.fitting) is nnx.Linear


def test_parameters_keep_their_dtypes_and_metadata(mesh_of):
    class Model(nnx.Module):
        def __init__(self):
            self.linear = nnx.Linear(4, 8, kernel_metadata={"decay": 0.1}, rngs=nnx.Rngs(0))
            self.embed = nnx.Embed(8, 4, rngs=nnx.Rngs(0))
            self.attention = nnx.MultiHeadAttention(4, 4, decode=False, normalize_qk=True, rngs=nnx.Rngs(0))
            self.frozen = nnx.Linear(4, 8, rngs=nnx.Rngs(0))
            self.frozen.bias = nnx.LoRAParam(self.frozen.bias[...])

    model = drawn(Model)
    nnx.update(model, jax.tree.map(lambda p: p.astype(jnp.bfloat16), nnx.state(model, nnx.Param)))
    with jax.set_mesh(mesh_of(2, 4)):
        with pytest.raises(ValueError, match=r"frozen by the rule .* its bias is of type LoRAParam, and that of a"):
            fa.nn.parallelize(model, {"frozen": "column"})
        fa.nn.parallelize(model, {"linear": "column", "embed": "embed", "attention": "attention"}, verbose=False)
    assert {value.dtype for value in jax.tree.leaves(nnx.state(model, nnx.Param))} == {jnp.dtype("bfloat16")}
    metadata = model.linear.kernel.get_metadata()
    assert (metadata["decay"], metadata["out_sharding"]) == (0.1, (None, "model"))


@pytest.mark.parametrize("container", [lambda x: (x,), lambda x: [[x]], lambda x: {"name": x}])
def test_layers_in_plain_containers_are_refused(mesh_of, container):
    """They would be reported as replaced, and would not be."""

    class Holder(nnx.Module):
        def __init__(self):
            self.first, self.second = (nnx.Linear(4, 4, rngs=nnx.Rngs(0)) for _ in range(2))
            self.plain = nnx.data(container(self.second))
            self.list, self.dict = nnx.List([nnx.Linear(4, 4, rngs=nnx.Rngs(0))]), nnx.Dict({"first": self.first})

    with jax.set_mesh(mesh_of(2, 4)):
        model = nnx.eval_shape(Holder)
        with pytest.raises(ValueError, match=r"replace (plain|second).*: it is in a tuple, list or dict; use nnx.List"):
            fa.nn.parallelize(model, {"dict.first": "column", "plain.**": "column"})
        assert type(model.first) is nnx.Linear


@pytest.mark.parametrize("split", ["column", "row"])
def test_a_dot_general_for_layers_that_stay(mesh_of, split):
    """The same product, and the same collectives, as those of the parallel layer."""
    cls, spec, kernel_spec = {
        "column": (fa.nn.ColumnParallelLinear, ROWS, (None, "model")),
        "row": (fa.nn.RowParallelLinear, COLUMNS, ("model", None)),
    }[split]

    def programs(layer, x):
        run = jax.jit(lambda x: nnx.merge(*nnx.split(layer))(x))
        return run(x), run.lower(x).compile().as_text().count(" collective-permute(")

    with jax.set_mesh(mesh_of(2, 4)):
        x = jax.device_put(np.random.default_rng(0).standard_normal((2, 8, 16)).astype(np.float32), spec)
        theirs = drawn(lambda: nnx.Linear(
            16, 16, dot_general=fa.nn.parallel_dot_general(split), kernel_metadata={"out_sharding": kernel_spec},
            bias_metadata={"out_sharding": ("model",) if split == "column" else (None,)}, rngs=nnx.Rngs(0),
        ))  # fmt: skip
        ours = drawn(lambda: cls(16, 16, rngs=nnx.Rngs(0)))
        (y, count), (want, wanted) = programs(theirs, x), programs(ours, x)
    assert count == wanted > 0
    np.testing.assert_allclose(y, want, rtol=1e-6)


def test_a_dot_general_refuses_other_products(mesh_of):
    with pytest.raises(ValueError, match="parallel_dot_general got 'diagonal': it must be 'column' or 'row'"):
        fa.nn.parallel_dot_general("diagonal")
    multiply = fa.nn.parallel_dot_general("column")
    with jax.set_mesh(mesh_of(2, 4)):
        x, kernel = np.ones((2, 8, 16), np.float32), np.ones((16, 16), np.float32)
        with pytest.raises(ValueError, match="contracts the last dimension of x with the first of a kernel"):
            multiply(x, kernel, (((2,), (1,)), ((), ())))
        with pytest.raises(ValueError, match="shards its output itself"):
            multiply(x, kernel, (((2,), (0,)), ((), ())), out_sharding=P())


def test_projections_of_one_input_share_one_gather(mesh_of):
    names = {"query": 16, "key": 8}
    with jax.set_mesh(mesh_of(2, 4)):
        x = jax.device_put(np.random.default_rng(0).standard_normal((2, 8, 16)).astype(np.float32), ROWS)
        layer = drawn(lambda: fa.nn.ColumnParallelProjections(16, names, rngs=nnx.Rngs(0)))
        graph, state = nnx.split(layer)
        run = jax.jit(lambda state, x: nnx.merge(graph, state)(x))
        query, key = run(state, x)
        alone = jax.jit(lambda kernel, x: nnx.merge(*nnx.split(layer.query))(x))
        counts = [
            fn.lower(*args).compile().as_text().count(" collective-permute(")
            for fn, args in ((run, (state, x)), (alone, (0, x)))
        ]
        np.testing.assert_allclose(query, layer.query(x), rtol=1e-6)
        np.testing.assert_allclose(key, layer.key(x), rtol=1e-6)
    assert counts[0] == counts[1] > 0
    assert key.shape == (2, 8, 8)
