"""Stacks of layers, which nnx.vmap makes for nnx.scan, and layers that are adapted become parallel
ones.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import flaxasync as fa
from tests.nn.conftest import (
    COLUMNS,
    ROWS,
    SAME,
    Block,
    assert_close,
    check_replaced,
    drawn,
    make_mesh,
    ones,
    stack,
)

pytestmark = pytest.mark.usefixtures("quick_compile")

RULES = {"layers.attention": "attention", "layers.up": "column", "layers.down": "row"}


class AdaptedBlock(Block):
    def __init__(self, rngs):
        super().__init__(rngs)
        self.attention = nnx.MultiHeadAttention(4, 16, decode=False, normalize_qk=True, rngs=rngs)
        self.up = nnx.LoRA(16, 2, 32, base_module=self.up, rngs=rngs)
        self.down = nnx.Linear(32, 16, use_bias=False, rngs=rngs)


class Scanned(nnx.Module):
    """A model as users of Flax write it, with metadata of the stack or without."""

    def __init__(self, metadata, out_axes=0):
        self.metadata = metadata
        self.layers = stack(AdaptedBlock, transform_metadata=metadata, out_axes=out_axes)

    def __call__(self, x):
        options = {
            "in_axes": (0, nnx.Carry),
            "out_axes": nnx.Carry,
            "transform_metadata": self.metadata,
        }
        return nnx.scan(nnx.remat(lambda layer, x: layer(x)), **options)(self.layers, x)


@pytest.mark.slow
@pytest.mark.parametrize(("axis_type", "metadata"), [
    (AxisType.Explicit, {}), (AxisType.Auto, {nnx.PARTITION_NAME: None})
])  # fmt: skip
def test_a_scanned_model_computes_what_it_did(axis_type, metadata):
    def replace(model):
        done = fa.nn.parallelize(model, RULES, verbose=False)
        assert [found.after for found in done] == [
            "ParallelAttention",
            "RowParallelLinear",
            "ParallelLoRA",
        ]
        assert model.layers.down.kernel.shape == (3, 32, 16)
        assert model.layers.down.kernel[...].sharding.spec == P(None, "model", None)
        assert model.layers.down.kernel.get_metadata()["out_sharding"] == (None, "model", None)
        return model

    got = check_replaced(drawn(lambda: Scanned(metadata)), make_mesh(2, 4, axis_type), replace)
    if axis_type == AxisType.Explicit:
        assert jax.typeof(got["layers"]["down"]["kernel"][...]).sharding.spec == P(
            None, "model", None
        )


def test_a_stack_is_called_in_a_scan():
    with jax.set_mesh(make_mesh(2, 4)):
        model = nnx.eval_shape(lambda: Scanned({}))
        fa.nn.parallelize(model, RULES | {"layers.up": "row"}, verbose=False)
        model = drawn(lambda: model)
        message = r"\[3, \d+, \d+\] has 3 dimensions, .* this is a stack of layers, as"
        for name, features, spec in (
            ("down", 32, COLUMNS),
            ("attention", 16, ROWS),
            ("up", 16, COLUMNS),
        ):
            with pytest.raises(ValueError, match=message):
                getattr(model.layers, name)(ones((2, 8, features), spec))


def test_a_stack_along_another_dimension_is_refused():
    with jax.set_mesh(make_mesh(2, 4)):
        model = nnx.eval_shape(lambda: Scanned({}, out_axes=1))
        message = (
            r"has the parameters kernel Param\[32, 3, 16\], and .* has kernel Param\[32, 16\]; "
            "dimensions of a stack come first, as with out_axes=0 of nnx.vmap"
        )
        with pytest.raises(ValueError, match=message):
            fa.nn.parallelize(model, {"layers.down": "row"})


def test_what_low_rank_adaptation_lacks():
    with jax.set_mesh(make_mesh(2, 4)):
        x = jax.device_put(np.ones((2, 8, 16), np.float32), ROWS)
        for layer, name in [
            (drawn(lambda: fa.nn.ParallelAttention(16, 4, rngs=nnx.Rngs(0))), "query"),
            (drawn(lambda: fa.nn.ParallelMLP(16, 16, rngs=nnx.Rngs(0))), "up"),
            (
                drawn(lambda: fa.nn.ColumnParallelProjections(16, {"query": 16}, rngs=nnx.Rngs(0))),
                "query",
            ),
        ]:
            setattr(layer, name, fa.nn.ParallelLoRA(getattr(layer, name), 2, rngs=nnx.Rngs(0)))
            kind = type(layer).__name__
            with pytest.raises(
                NotImplementedError,
                match=f"{kind} does not call its layers, .* take a ParallelLoRA",
            ):
                layer(x)
        with pytest.raises(
            ValueError, match="adapts ColumnParallelLinear and RowParallelLinear: got Linear; for"
        ):
            fa.nn.ParallelLoRA(nnx.Linear(8, 8, rngs=nnx.Rngs(0)), 2, rngs=nnx.Rngs(0))
        padded = drawn(lambda: fa.nn.ColumnParallelLinear(8, 13, pad=True, rngs=nnx.Rngs(0)))
        with pytest.raises(
            ValueError,
            match="a ColumnParallelLinear that pads its output, which ParallelLoRA lacks",
        ):
            fa.nn.ParallelLoRA(padded, 2, rngs=nnx.Rngs(0))


class Adapted(nnx.Module):
    """Two layers that a user of Flax adapted."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.up = nnx.LoRA(16, 2, 32, base_module=nnx.Linear(16, 32, rngs=rngs), rngs=rngs)
        self.down = nnx.LoRA(32, 2, 16, base_module=nnx.Linear(32, 16, rngs=rngs), rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.gelu(self.up(x)))


@pytest.mark.parametrize(
    "axis_type", [AxisType.Explicit, pytest.param(AxisType.Auto, marks=pytest.mark.slow)]
)
def test_parallelize_turns_nnx_lora_into_parallel_lora(axis_type):
    def replace(model):
        done = fa.nn.parallelize(model, {"up": "column", "down": "row"}, verbose=False)
        assert [found.after for found in done] == ["ParallelLoRA"] * 2
        return model

    got = check_replaced(drawn(Adapted), make_mesh(2, 4, axis_type), replace, wrt=nnx.LoRAParam)
    assert {path[-1] for path, _ in nnx.to_flat_state(got)} == {"lora_a", "lora_b"}


@pytest.mark.parametrize(
    ("cls", "x_spec", "y_spec"),
    [(fa.nn.ColumnParallelLinear, ROWS, COLUMNS), (fa.nn.RowParallelLinear, COLUMNS, ROWS)],
)
def test_an_adapted_layer_inside_a_shard_map_of_the_caller(cls, x_spec, y_spec):
    """Its factors are local there, of sizes that the axis need not divide once more."""
    with jax.set_mesh(make_mesh(2, 4)):
        base = drawn(lambda: cls(24, 24, rngs=nnx.Rngs(0)))
        layer = drawn(lambda: fa.nn.ParallelLoRA(base, 2, rngs=nnx.Rngs(1)))
        layer.lora_b.set_value(jnp.ones_like(layer.lora_b[...]))
        graph, state = nnx.split(layer)
        values = np.random.default_rng(0).standard_normal((2, 8, 24)).astype(np.float32)
        x = jax.device_put(values, x_spec)
        mapped = jax.shard_map(
            lambda state, x: nnx.merge(graph, state)(x),
            in_specs=(jax.tree.map(lambda leaf: leaf.sharding.spec, state), x_spec),
            out_specs=y_spec,
        )
        assert_close(jax.jit(mapped)(state, x), layer(x), "float32", "y")


@pytest.mark.parametrize(("cls", "spec"), [
    (fa.nn.RowParallelLinear, COLUMNS),
    pytest.param(fa.nn.ColumnParallelLinear, SAME, marks=pytest.mark.slow),
])  # fmt: skip
def test_nnx_lora_itself(cls, spec):
    """It works around layers whose output may be added to one that is sharded as the input's rows
    are.
    """

    def replace(plain):
        base = drawn(lambda: cls(16, 16, rngs=nnx.Rngs(0)))
        layer = drawn(lambda: lora(base))
        fa.nn.load(layer, plain)
        return layer

    plain = drawn(lambda: lora(nnx.Linear(16, 16, rngs=nnx.Rngs(0))))
    check_replaced(plain, make_mesh(2, 4), replace, spec=spec, wrt=nnx.LoRAParam)


def test_nnx_lora_around_a_column_parallel_layer_is_an_error_of_jax():
    """One addend is sharded by rows, and the other by features: docs/your_model.md names the
    remedy.
    """
    with jax.set_mesh(make_mesh(2, 4)):
        base = drawn(lambda: fa.nn.ColumnParallelLinear(16, 16, rngs=nnx.Rngs(0)))
        layer = nnx.LoRA(16, 2, 16, base_module=base, rngs=nnx.Rngs(0))
        with pytest.raises(Exception, match=r"add operation .* illegally sharded result"):
            layer(ones((2, 8, 16), ROWS))


def lora(base, seed=1):
    return nnx.LoRA(16, 2, 16, base_module=base, rngs=nnx.Rngs(seed))


class Shared(nnx.Module):
    """One layer that is used as it is, and adapted twice."""

    def __init__(self):
        self.a = nnx.Linear(16, 16, rngs=nnx.Rngs(0))
        self.b, self.c = lora(self.a, 1), lora(self.a, 2)


class Odd(nnx.Module):
    def __init__(self):
        self.plain, self.alone = lora(nnx.Linear(16, 16, rngs=nnx.Rngs(0))), lora(None)


@pytest.mark.parametrize(
    ("make", "rules", "message"),
    [
        (
            Odd,
            {"plain.base_module": "row"},
            "nnx.LoRA would .* it is at plain: give the rule 'row' to that alone, and it becomes",
        ),
        (
            Odd,
            {"alone": "column"},
            "alone by the rule 'column': the rule replaces nnx.Linear: got NoneType",
        ),
        (Shared, {"a": "column"}, "nnx.LoRA would .* it is at b: put fa.nn.ParallelLoRA around"),
        (
            Shared,
            {"b": "column"},
            "b by the rule 'column': a and b.base_module and c.base_module are one, and would be "
            "two; put fa.nn.ParallelLoRA around the parallel layer yourself",
        ),
        (
            Odd,
            {"plain": "row", "plain.base_module": "column"},
            "plain.base_module by .* it is at plain: give the rule 'column' to that alone",
        ),
        (
            lambda: nnx.Dict(a=lora(fa.nn.RowParallelLinear(16, 16, rngs=nnx.Rngs(0)))),
            {"a": "row"},
            "a by the rule 'row': .* is around a RowParallelLinear: put fa.nn.ParallelLoRA around",
        ),
        (
            lambda: lora(nnx.Linear(16, 16, rngs=nnx.Rngs(0))),
            {"base_module": "row"},
            "base_module .* it is at the root of the model, which must be in a module such as an "
            "nnx.Dict: give",
        ),
    ],
)
def test_adaptations_that_cannot_be_replaced(make, rules, message):
    with jax.set_mesh(make_mesh(2, 4)):
        model = nnx.eval_shape(make)
        with pytest.raises(ValueError, match=f"cannot replace .*{message}"):
            fa.nn.parallelize(model, rules)
        assert not any(
            isinstance(module, fa.nn.ColumnParallelLinear) for _, module in nnx.iter_modules(model)
        )


@pytest.mark.parametrize("rule", [pytest.param("column", marks=pytest.mark.slow), "row"])
def test_factors_that_are_wider_than_the_layer(rule):
    """Everything is then computed in float32, as in nnx.LoRA."""
    x = np.random.default_rng(0).standard_normal((2, 8, 16)).astype(jnp.bfloat16)
    model = nnx.Dict(x=drawn(lambda: lora(nnx.Linear(16, 16, rngs=nnx.Rngs(0)))))
    base = model.x.base_module
    for parameter in (base.kernel, base.bias):
        parameter.set_value(parameter[...].astype(jnp.bfloat16))
    with jax.numpy_dtype_promotion("standard"), jax.set_mesh(make_mesh(2, 4)):
        want = model.x(x)
        fa.nn.parallelize(model, {"x": rule}, verbose=False)
        x = jax.device_put(x, ROWS if rule == "column" else COLUMNS)
        y = model.x(x)
        assert y.dtype == want.dtype == jnp.float32
    np.testing.assert_allclose(y, want, atol=1e-5)


@pytest.mark.parametrize("rule", ["column", pytest.param("row", marks=pytest.mark.slow)])
def test_an_adapter_with_a_dtype_of_its_own(rule):
    """It multiplies its factors in that dtype, and the layer gets x in it, as in nnx.LoRA."""

    model = nnx.Dict(x=drawn(lambda: lora(nnx.Linear(16, 16, rngs=nnx.Rngs(0)))))
    model.x.dtype = jnp.bfloat16
    x = np.random.default_rng(0).standard_normal((2, 8, 16)).astype(np.float32)
    with jax.numpy_dtype_promotion("standard"), jax.set_mesh(make_mesh(2, 4)):
        want = model.x(x)
        fa.nn.parallelize(model, {"x": rule}, verbose=False)
        y = model.x(jax.device_put(x, ROWS if rule == "column" else COLUMNS))
        assert model.x.lora_a.dtype == jnp.float32
        assert y.dtype == want.dtype == jnp.float32
    # bfloat16 keeps 8 bits of x, of the factors and of their product
    np.testing.assert_allclose(y, want, atol=2e-2)
