"""Layers that multiply by a function of the caller's, such as a quantized product, against the
plain layers with it.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P

import flaxasync as fa
from tests.nn.conftest import (
    ROWS,
    assert_close,
    check_parity,
    check_replaced,
    drawn,
    make_mesh,
    ones,
    permutes,
)
from tests.nn.test_linear import FORMS, column, linear, mlp_pair

pytestmark = pytest.mark.usefixtures("quick_compile")


@jax.custom_vjp
def sine_product(x, w):
    return jnp.sin(x) @ jnp.sin(w)


def sine_product_fwd(x, w):
    return sine_product(x, w), (jnp.sin(x), jnp.sin(w))


def sine_product_bwd(saved, dy):
    """Straight-through, as quantized products have it: the derivative of the sine is left out."""
    x, w = saved
    return dy @ w.T, jnp.einsum("...k,...n->kn", x, dy)


sine_product.defvjp(sine_product_fwd, sine_product_bwd)


def with_a_rule(x, w, dimension_numbers, precision=None, out_sharding=None):
    assert dimension_numbers == (((x.ndim - 1,), (0,)), ((), ()))
    return sine_product(x, w)


def differentiable(x, w, dimension_numbers, **options):
    return lax.dot_general(jnp.sin(x), jnp.sin(w), dimension_numbers, **options)


# layers whose rows all devices have multiply in the same way
SHARDED = [
    pytest.param(form, marks=[] if "sharded" in form else [pytest.mark.slow]) for form in FORMS
]


@pytest.mark.parametrize("form", SHARDED)
def test_the_function_multiplies_and_its_rule_differentiates(form):
    make, options, x_spec, y_spec = FORMS[form]
    layer, plain = make(4, dot_general=with_a_rule, **options), linear(4, dot_general=with_a_rule)
    check_parity(layer, plain, (2, 8, 16), size=4, data=2, x_spec=x_spec, y_spec=y_spec)


def test_the_function_multiplies_in_an_mlp():
    check_parity(*mlp_pair(4, dot_general=differentiable), (2, 8, 8), size=4, data=2)


def test_replaced_layers_keep_their_functions():
    class Model(nnx.Module):
        def __init__(self):
            rngs, given = (
                nnx.Rngs(0),
                {"qkv_dot_general": differentiable, "out_dot_general": differentiable},
            )
            self.attention = nnx.MultiHeadAttention(4, 16, decode=False, rngs=rngs, **given)
            self.up = nnx.Linear(
                16, 32, dot_general=differentiable, preferred_element_type=jnp.float32, rngs=rngs
            )

        def __call__(self, x):
            return self.up(self.attention(x))

    def replace(model):
        fa.nn.parallelize(model, {"attention": "attention", "up": "column"}, verbose=False)
        assert model.attention.query.dot_general is model.up.dot_general is differentiable
        return model

    check_replaced(drawn(Model), make_mesh(2, 4), replace)


def gathering(x, w, dimension_numbers, **options):
    """Multiplies all rows, as the layer does that calls it."""
    return lax.dot_general(
        lax.all_gather(x, "model", axis=1, tiled=True), w, dimension_numbers, **options
    )


def test_functions_that_a_layer_cannot_use():
    with jax.set_mesh(make_mesh(2, 4)):
        for make in (fa.nn.RowParallelLinear, fa.nn.ParallelMLP, fa.nn.ParallelAttention):
            message = (
                f"{make.__name__} with a dot_general of its own lacks backend='xla', .* use "
                "backend='none' or N"
            )
            with pytest.raises(NotImplementedError, match=message):
                make(8, 8, dot_general=differentiable, backend="xla", rngs=nnx.Rngs(0))
        collective = drawn(
            lambda: fa.nn.ColumnParallelLinear(8, 16, dot_general=gathering, rngs=nnx.Rngs(0))
        )
        message = r"dot_general returned \[1, 32, \d\] .* needed \[1, 8, 4\]; it must be a local"
        with pytest.raises(ValueError, match=message):
            collective(ones((2, 8, 8), ROWS))
        two = nnx.eval_shape(lambda: nnx.Dict(x=nnx.MultiHeadAttention(
            4, 8, decode=False, qkv_dot_general=differentiable, rngs=nnx.Rngs(0)
        )))  # fmt: skip
        with pytest.raises(
            ValueError,
            match="x by the rule 'attention': its parts have several functions dot_general or",
        ):
            fa.nn.parallelize(two, {"x": "attention"})


class Scaled(nnx.Module):
    """A product with state, of which a compiled program would keep the first value."""

    def __init__(self):
        self.scale = nnx.Param(jnp.ones(()))

    def __call__(self, x, w, dimension_numbers, **options):
        return lax.dot_general(x, w, dimension_numbers, **options) * self.scale[...]


class Unhashable:
    __hash__ = None

    def __call__(self, x, w, dimension_numbers, **options):
        return lax.dot_general(x, w, dimension_numbers, **options)


@dataclasses.dataclass(frozen=True)
class Frozen(Unhashable):
    bits: int = 8


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            Scaled,
            "a dot_general that is the nnx.Module Scaled, whose state .* give it a pure function",
        ),
        (lambda: Scaled().__call__, "a dot_general that is the nnx.Module Scaled"),
        (
            Unhashable,
            "a dot_general of type Unhashable, which is not hashable: .* a dataclass with "
            "frozen=True",
        ),
    ],
)
def test_functions_with_state(make, message):
    """Their state would be left out of the model."""
    with jax.set_mesh(make_mesh(2, 4)):
        with pytest.raises(ValueError, match=f"RowParallelLinear got {message}"):
            fa.nn.RowParallelLinear(8, 8, layout="replicated", dot_general=make(), rngs=nnx.Rngs(0))
        model = nnx.Dict(x=nnx.Linear(8, 8, dot_general=make(), rngs=nnx.Rngs(0)))
        with pytest.raises(
            ValueError,
            match=f"parallelize cannot replace x by the rule 'row_replicated': .*{message}",
        ):
            fa.nn.parallelize(model, {"x": "row_replicated"})
        assert type(model.x) is nnx.Linear


def test_a_frozen_dataclass_and_none():
    with jax.set_mesh(make_mesh(2, 4)):
        layer = drawn(
            lambda: fa.nn.ColumnParallelLinear(8, 8, dot_general=Frozen(), rngs=nnx.Rngs(0))
        )
        assert layer(ones((2, 8, 8), ROWS)).shape == (2, 8, 8)
        layer = fa.nn.ParallelAttention(8, 4, dot_general=None, rngs=nnx.Rngs(0))
        assert layer.query.dot_general is layer.out.dot_general is lax.dot_general


def in_float32(x, w, dimension_numbers, **options):
    return lax.dot_general(
        x, w, dimension_numbers, **options | {"preferred_element_type": jnp.float32}
    )


WIDER = {"preferred_element_type": jnp.float32}, {"dot_general": in_float32}


@pytest.mark.parametrize(("form", "given"), [
    pytest.param(form, given, marks=[] if "column" in form else [pytest.mark.slow])
    for form, given in zip(FORMS, (*WIDER, *WIDER[::-1]), strict=True)
])  # fmt: skip
def test_products_that_are_wider_than_the_computation(form, given):
    """They are not rounded to the dtype of the computation on the way, as those of nnx.Linear are
    not.
    """
    make, options, x_spec, _ = FORMS[form]
    common = {"use_bias": False} | given
    x = np.random.default_rng(0).standard_normal((2, 8, 16)).astype(jnp.bfloat16)
    want = linear(4, dtype=jnp.bfloat16, **common)(x)
    with jax.set_mesh(make_mesh(2, 4)):
        layer = drawn(lambda: make(4, **common, **options)(jnp.bfloat16))
        x = jax.device_put(x, x_spec)
        y = layer(x)
        (dkernel,) = jax.tree.leaves(nnx.grad(lambda layer: layer(x).sum())(layer))
        if "dot_general" not in given:
            named = drawn(lambda: make(4, backend="xla", **common, **options)(jnp.bfloat16))
            message = (
                "preferred_element_type=float32 is wider than the computation in bfloat16, and "
                "backend='xla' .* u"
            )
            with pytest.raises(NotImplementedError, match=message):
                named(x)
    assert y.dtype == want.dtype == dkernel.dtype == jnp.float32
    np.testing.assert_allclose(y, want, atol=1e-5)


@pytest.mark.parametrize(("options", "overlaps"), [
    ({"preferred_element_type": jnp.bfloat16}, True), ({"dot_general": lax.dot_general}, True),
    ({"dot_general": differentiable}, False),
])  # fmt: skip
def test_only_a_function_of_the_callers_costs_the_ring(options, overlaps):
    with jax.set_mesh(make_mesh(2, 4)):
        layer, x = drawn(lambda: column(4, **options)(None)), ones((2, 8, 16), ROWS)
        assert (permutes(layer, x) > 0) == overlaps
        assert layer(x).dtype == options.get("preferred_element_type", jnp.float32)


def test_a_low_rank_product_is_not_that_function():
    """The factors are multiplied as `nnx.LoRA` does it; the product of the layer is the
    caller's.
    """
    base = linear(4, dot_general=differentiable)
    plain = drawn(lambda: nnx.LoRA(16, 2, 24, base_module=base, rngs=nnx.Rngs(1)))
    x = np.random.default_rng(0).standard_normal((2, 8, 16)).astype(np.float32)
    with jax.set_mesh(make_mesh(2, 4)):
        layer = drawn(
            lambda: fa.nn.ParallelLoRA(
                column(4, dot_general=differentiable)(None), 2, rngs=nnx.Rngs(1)
            )
        )
        fa.nn.load(layer, plain)
        assert_close(layer(jax.device_put(x, ROWS)), plain(x), "float32", "y")


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.slow), "bfloat16"])
def test_promotion_in_an_embedding(dtype):
    """A function that turns everything into one dtype decides for look-ups and logits alike, as in
    nnx.Embed.
    """

    def promote(arrays, *, dtype=None, inexact=True):
        return tuple(None if array is None else array.astype(wanted) for array in arrays)

    wanted = jnp.dtype(dtype)
    metadata = {"embedding_metadata": {"decay": 0.1}, "promote_dtype": promote}
    ids, x = np.arange(8, dtype=np.int32)[None], np.ones((1, 8, 8), np.float32)
    plain = drawn(lambda: nnx.Embed(8, 8, rngs=nnx.Rngs(0), **metadata))
    with jax.set_mesh(make_mesh(1, 4)):
        layer = drawn(lambda: fa.nn.VocabParallelEmbed(8, 8, rngs=nnx.Rngs(0), **metadata))
        y, logits = layer(ids), layer.attend(jax.device_put(x, P(None, "model")))
        assert layer.embedding.get_metadata()["decay"] == 0.1
    want, want_logits = plain(ids), plain.attend(x)
    assert (y.dtype, logits.dtype) == (want.dtype, want_logits.dtype) == (wanted, wanted)
    np.testing.assert_array_equal(np.asarray(y, np.float32), np.asarray(want, np.float32))
    assert_close(logits, want_logits, dtype, "logits")
