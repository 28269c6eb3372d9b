"""Layers in 8 bits: against plain layers that multiply so, fully sharded, and what is refused."""

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


def test_layers_are_quantised_after_they_were_built():
    with jax.set_mesh(make_mesh(2, 4)):
        model = drawn(
            lambda: nnx.Dict(
                mlp=fa.nn.ParallelMLP(16, 32, rngs=nnx.Rngs(0)),
                out=fa.nn.ColumnParallelLinear(16, 32, rngs=nnx.Rngs(0)),
            )
        )
        x = ones((2, 8, 16), ROWS)
        exact = model.mlp(x)
        for _, layer in nnx.iter_modules(model):
            if isinstance(layer, fa.nn.ParallelMLP):
                layer.quantization = "int8"
        assert model.mlp.quantization == fa.Quantization("int8")
        assert model.out.quantization is None
        error = np.abs(model.mlp(x) - exact).max() / np.abs(exact).max()
        assert 1e-4 < error < 0.05
