"""Layers in 8 bits: against plain layers that multiply so, fully sharded, and what is refused."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import flaxasync as fa
from flaxasync.ops.matmul.vjp import multiply
from tests.nn.conftest import (
    ROWS,
    assert_alike,
    check_parity,
    drawn,
    make_fsdp_mesh,
    make_mesh,
    ones,
    permutes,
)
from tests.nn.test_dot_general import differentiable
from tests.nn.test_fully_sharded import LAYERS, collectives, data, run
from tests.nn.test_linear import FORMS, column, linear

pytestmark = pytest.mark.usefixtures("quick_compile")


def in_shares(shares, quantization):
    """Returns a `dot_general` that quantises each share of the features by itself, as a
    row-parallel layer does.
    """

    def product(x, w, dimension_numbers, **options):
        parts = zip(jnp.split(x, shares, -1), jnp.split(w, shares), strict=True)
        return sum(multiply(quantization, None, x_part, w_part) for x_part, w_part in parts)

    return product


@pytest.mark.parametrize(("form", "quantization"), [
    ("column, rows sharded", fa.Quantization("int8")),
    ("row, rows sharded", fa.Quantization("fp8")),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in [
        ("column, rows the same", fa.Quantization("fp8")),
        ("row, rows the same", fa.Quantization("int8", "fp8", rounding="nearest")),
    ]),
])  # fmt: skip
def test_a_layer_is_the_plain_layer_with_quantised_products(form, quantization):
    make, options, x_spec, y_spec = FORMS[form]
    layer = make(4, quantization=quantization, **options)
    plain = linear(4, dot_general=in_shares(4 if "row," in form else 1, quantization))
    check_parity(layer, plain, (2, 8, 16), size=4, data=2, x_spec=x_spec, y_spec=y_spec)


@pytest.mark.parametrize(("name", "scale"), [
    ("row", "tensor"),
    *(pytest.param(name, "vector", marks=pytest.mark.slow)
      for name in ("column_uneven", "attention", "column_pad", "projections", "ring")),
])  # fmt: skip
def test_a_fully_sharded_layer_computes_the_same(name, scale):
    """Kernels are quantised before they are gathered; the devices that share a column have one
    scale for it.
    """
    quantization = fa.Quantization("int8", scale=scale)
    make, spec_x, features = LAYERS[name]
    sizes = (1, 2, 2, 2) if name == "ring" else (2, 2, 1, 2)
    results = [
        run(make, *data(features), sizes=sizes, spec_x=spec_x, quantization=quantization, **stored)[
            1
        ]
        for stored in ({}, {"fsdp_axis": "fsdp"})
    ]
    if name in ("row", "column_uneven"):
        np.testing.assert_array_equal(results[1][-1], results[0][-1])
    assert_alike(results[1], results[0])
    exact = run(make, *data(features), sizes=sizes, spec_x=spec_x)[1]
    for got, want in zip(results[0][1:], exact[1:], strict=True):
        error = np.abs(got - want).max() / np.abs(want).max()
        assert 1e-4 < error < 0.05


def test_kernels_travel_in_eight_bits_and_their_gradients_in_the_dtype_of_the_parameter():
    with jax.set_mesh(make_fsdp_mesh(1, 4, 1, 2)):
        x = jax.device_put(np.ones((4, 8, 16), np.float32), P("fsdp", None, "model"))
        layer = fa.nn.RowParallelLinear(
            16,
            32,
            use_bias=False,
            fsdp_axis="fsdp",
            dtype=jnp.bfloat16,
            quantization="int8",
            rngs=nnx.Rngs(0),
        )
        found = collectives(layer, x)
    assert [(kind, str(dtype)) for kind, dtype, axes in found if axes == ("fsdp",)] == [
        ("all_gather", "int8"), ("all_gather", "float32"), ("reduce_scatter", "float32"),
    ]  # fmt: skip


def test_a_quantised_layer_keeps_its_ring_and_trains():
    """A step along the gradient lowers the loss, through the fully sharded gather and the ring."""
    with jax.set_mesh(make_mesh(2, 4)):
        layer, x = (
            drawn(lambda: column(4, quantization="int8", fsdp_axis="data")(None)),
            ones((2, 8, 16), ROWS),
        )
        assert permutes(layer, x) > 0

        def loss(layer):
            return jnp.mean(layer(x) ** 2)

        before, gradient = nnx.value_and_grad(loss)(layer)
        nnx.update(layer, jax.tree.map(lambda p, g: p - g, nnx.state(layer, nnx.Param), gradient))
        assert loss(layer) < 0.5 * before


def test_what_is_refused():
    with jax.set_mesh(make_mesh(2, 4)):
        x = ones((2, 8, 16), ROWS)
        for make in (fa.nn.ColumnParallelLinear, fa.nn.ParallelMLP, fa.nn.ParallelAttention):
            with pytest.raises(
                ValueError,
                match=f"{make.__name__} got a dot_general and a quantization, .*: leave one out",
            ):
                make(8, 8, dot_general=differentiable, quantization="int8", rngs=nnx.Rngs(0))
            with pytest.raises(
                ValueError, match=f"{make.__name__} needs quantization to be .*: got 8"
            ):
                make(8, 8, quantization=8, rngs=nnx.Rngs(0))
        for stored in ({}, {"fsdp_axis": "data"}):
            layer = drawn(lambda stored=stored: column(4, quantization="int8", **stored)(None))
            graph, state = nnx.split(layer)

            def slope(state, graph=graph):
                gradient = jax.grad(lambda state: jnp.sum(nnx.merge(graph, state)(x) ** 2))(state)
                return sum(jnp.sum(g**2) for g in jax.tree.leaves(gradient))

            with pytest.raises(
                NotImplementedError, match="a quantised product has a first derivative only"
            ):
                jax.grad(slope)(state)
        wide = drawn(
            lambda: column(4, quantization="int8", preferred_element_type=jnp.float32)(jnp.bfloat16)
        )
        with pytest.raises(
            NotImplementedError,
            match=r"preferred_element_type=float32 is wider .*: leave one of the two",
        ):
            wide(x)
        attention = drawn(lambda: fa.nn.ParallelSelfAttention(
            16, 4, exchange_heads=True, quantization="int8", fsdp_axis="data", rngs=nnx.Rngs(0)
        ))  # fmt: skip
        with pytest.raises(
            NotImplementedError,
            match="exchange_heads=True lacks kernels that were gathered in 8 bits",
        ):
            attention(x)
        output = drawn(
            lambda: fa.nn.ColumnParallelLinear(
                16, 32, use_bias=False, quantization="fp8", rngs=nnx.Rngs(0)
            )
        )
        with pytest.raises(
            NotImplementedError, match="and the layer has a quantization: leave it out"
        ):
            fa.nn.linear_cross_entropy(x, output, np.zeros((2, 8), np.int32))


@dataclasses.dataclass
class Rule:
    """The attributes of a `qwix.QtRule` that its own test below does not set."""

    module_path: str = ".*"
    op_names: tuple = ()
    weight_qtype: str | None = "int8"
    act_qtype: str | None = "int8"
    bwd_qtype: str | None = None
    tile_size: int | None = None


def model_of_layers():
    rngs = nnx.Rngs(0)
    return nnx.Dict(
        mlp=fa.nn.ParallelMLP(16, 32, rngs=rngs), out=fa.nn.ColumnParallelLinear(16, 32, rngs=rngs)
    )


def test_rules_of_qwix_choose_layers_by_their_paths():
    with jax.set_mesh(make_mesh(2, 4)):
        model = drawn(model_of_layers)
        exact, x = model.mlp(ones((2, 8, 16), ROWS)), ones((2, 8, 16), ROWS)
        rules = [
            Rule("mlp.*", bwd_qtype="float8_e5m2"),
            Rule("ou.", weight_qtype=None, act_qtype=None),
            Rule("o.*"),
        ]
        with pytest.raises(
            ValueError, match=r"a rule for 'o\.\*', which no layer takes; the layers are mlp/down, "
        ):
            fa.nn.quantize(model, rules)
        done = fa.nn.quantize(model, rules[:2])
        assert set(done) == {"mlp", "mlp/up", "mlp/gate", "mlp/down"}
        assert set(done.values()) == {fa.Quantization("int8", "fp8", "nearest")}
        assert model.mlp.settings.quantization == model.mlp.up.quantization == done["mlp"]
        assert model.out.quantization is None
        error = np.abs(model.mlp(x) - exact).max() / np.abs(exact).max()
        assert 1e-4 < error < 0.05


@pytest.mark.parametrize(
    ("error", "message", "rule"),
    [
        (
            ValueError,
            "one quantization for all of mlp: got None for it and Quantization.* for mlp/up; give "
            "a rule for mlp",
            Rule("mlp/up"),
        ),
        (NotImplementedError, "with tile_size=32: leave it out", Rule(tile_size=32)),
        (
            NotImplementedError,
            "weight_qtype=int8, act_qtype=None and bwd_qtype=None: needed",
            Rule(act_qtype=None),
        ),
        (
            NotImplementedError,
            "weight_qtype=int4, act_qtype=int4 .*: needed one of int8, float8_e4m3fn",
            Rule(weight_qtype="int4", act_qtype="int4"),
        ),
    ],
)
def test_rules_that_the_layers_cannot_follow_change_nothing(error, message, rule):
    with jax.set_mesh(make_mesh(2, 4)):
        model = drawn(model_of_layers)
        with pytest.raises(error, match=message):
            fa.nn.quantize(model, [rule])
        assert model.mlp.up.quantization is model.out.quantization is None


def test_a_model_that_is_itself_a_layer():
    with jax.set_mesh(make_mesh(2, 4)):
        mlp = drawn(lambda: fa.nn.ParallelMLP(16, 32, rngs=nnx.Rngs(0)))
        with pytest.raises(
            ValueError,
            match=r"for all of the model: got None for it and .* for up; give a rule for \.\*",
        ):
            fa.nn.quantize(mlp, [Rule("up")])
        assert mlp.up.quantization is None
        assert set(fa.nn.quantize(mlp, [Rule()])) == {"", "up", "gate", "down"}
        assert (
            mlp.settings.quantization
            == mlp.up.quantization
            == fa.Quantization("int8", rounding="nearest")
        )


@pytest.mark.slow  # qwix comes with what the slow tests need
def test_a_rule_of_qwix_itself():
    import qwix

    rule = qwix.QtRule(
        module_path="out",
        weight_qtype="int8",
        act_qtype="int8",
        bwd_qtype="int8",
        bwd_stochastic_rounding="uniform",
    )
    with jax.set_mesh(make_mesh(2, 4)):
        model = drawn(model_of_layers)
        assert fa.nn.quantize(model, [rule]) == {"out": fa.Quantization("int8", "int8")}
        assert fa.nn.quantize(
            model, [qwix.QuantizationRule(weight_qtype="float8_e4m3fn", act_qtype="float8_e4m3fn")]
        )
        assert model.mlp.up.quantization == fa.Quantization("fp8", rounding="nearest")
