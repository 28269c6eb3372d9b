"""Column- and row-parallel layers, and the MLP of three of them, against nnx.Linear."""

import dataclasses
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import flaxasync as fa
from flaxasync.nn.options import Settings
from tests.grids import sparse
from tests.nn.conftest import (
    COLUMNS,
    ROWS,
    SAME,
    check_parity,
    compiled,
    drawn,
    make_mesh,
    ones,
    permutes,
    saved,
)

pytestmark = pytest.mark.usefixtures("quick_compile")


def linear(size, **options):
    """Returns a plain layer whose features `size` divides."""
    return drawn(lambda: nnx.Linear(4 * size, 6 * size, rngs=nnx.Rngs(0), **options))


def column(size, **options):
    return lambda dtype: fa.nn.ColumnParallelLinear(
        4 * size, 6 * size, dtype=dtype, rngs=nnx.Rngs(0), **options
    )


def row(size, **options):
    return lambda dtype: fa.nn.RowParallelLinear(
        4 * size, 6 * size, dtype=dtype, rngs=nnx.Rngs(0), **options
    )


FORMS = {
    "column, rows sharded": (column, {}, ROWS, COLUMNS),
    "column, rows the same": (column, {}, SAME, COLUMNS),
    "row, rows sharded": (row, {}, COLUMNS, ROWS),
    "row, rows the same": (row, {"layout": "replicated"}, COLUMNS, SAME),
}


# Rings of each size, the rows of each device, and options of the layer and of the comparison. One
# row is not halved, and odd blocks are halved unevenly.
NARROW = {"use_bias": False}, {"dtype": "bfloat16"}
MESHES = [
    (1, 3, {}, {}), (2, 1, *NARROW), (3, 2, {}, {}), (5, 3, *NARROW), (8, 5, {}, {}),
    (4, 3, {}, {"data": 2, "axis_type": AxisType.Auto}), (4, 3, {"backend": "none"}, {"data": 2}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("form", "on"),
    sparse(
        FORMS,
        MESHES,
        keep=lambda form, mesh: (form + mesh) % 4 == 0,
        slow=lambda form, mesh: (form + mesh) % 4 == 2,
    ),
)
def test_parity(form, on):
    make, options, x_spec, y_spec = FORMS[form]
    size, rows, common, more = on
    common = {"backend": "xla", "use_bias": True} | common
    if form == "column, rows the same" and "axis_type" in more:
        options = {"in_spec": SAME}
    plain, x_shape = linear(size, use_bias=common["use_bias"]), (4, rows * size, 4 * size)
    check_parity(
        make(size, **common, **options),
        plain,
        x_shape,
        size=size,
        x_spec=x_spec,
        y_spec=y_spec,
        **more,
    )


def test_rows_need_not_divide_where_they_are_not_sharded_and_two_dimensions_are_enough():
    check_parity(
        row(4, layout="replicated"), linear(4), (2, 7, 16), size=4, x_spec=COLUMNS, y_spec=SAME
    )
    check_parity(
        column(4), linear(4), (12, 16), size=4, x_spec=P("model", None), y_spec=P(None, "model")
    )


def test_rows_may_be_sharded_over_another_axis_too():
    """Rows over (data, model): the ring gathers over model, and rows stay sharded over data."""
    x = np.arange(16 * 8, dtype=np.float32).reshape(16, 8)
    with jax.set_mesh(make_mesh(2, 4)):
        layer = drawn(lambda: fa.nn.ColumnParallelLinear(8, 12, use_bias=False, rngs=nnx.Rngs(0)))
        y = nnx.jit(lambda layer, x: layer(x))(layer, jax.device_put(x, P(("data", "model"), None)))
        assert jax.typeof(y).sharding.spec == P("data", "model")
        np.testing.assert_allclose(y, x @ np.asarray(layer.kernel[...]), rtol=1e-5)


@pytest.mark.parametrize(
    "axis_type", [AxisType.Explicit, pytest.param(AxisType.Auto, marks=pytest.mark.slow)]
)
def test_parameters_are_those_of_nnx_linear_and_sharded_as_their_metadata_says(axis_type):
    def make():
        return fa.nn.ColumnParallelLinear(8, 12, rngs=nnx.Rngs(3))

    with jax.set_mesh(make_mesh(2, 4, axis_type)):
        up, down, abstract = (
            make(),
            fa.nn.RowParallelLinear(12, 8, rngs=nnx.Rngs(0)),
            nnx.eval_shape(make),
        )
    np.testing.assert_array_equal(up.kernel[...], nnx.Linear(8, 12, rngs=nnx.Rngs(3)).kernel[...])
    assert up.kernel.get_metadata()["out_sharding"] == (None, "model")
    assert (
        up.kernel[...].sharding.spec
        == abstract.kernel.get_value().sharding.spec
        == P(None, "model")
    )
    assert up.kernel[...].addressable_shards[0].data.shape == (8, 3)
    assert up.bias[...].sharding.spec == P("model")
    assert down.kernel[...].sharding.spec == P("model", None)


@pytest.mark.parametrize(
    ("cls", "kernel", "x_spec", "y_spec"),
    [
        (fa.nn.ColumnParallelLinear, P(None, "model"), ROWS, COLUMNS),
        (fa.nn.RowParallelLinear, P("model", None), COLUMNS, ROWS),
    ],
)
def test_inside_a_shard_map_of_the_caller(cls, kernel, x_spec, y_spec):
    """If the axis is mapped already, input and parameters are local shards; types say how the input
    is sharded.
    """
    x = np.random.default_rng(0).standard_normal((2, 8, 8)).astype(np.float32)
    with jax.set_mesh(make_mesh(2, 4)):
        layer = drawn(lambda: cls(8, 12, use_bias=False, rngs=nnx.Rngs(0)))
        graph, state = nnx.split(layer)
        specs = {"in_specs": (kernel, x_spec), "out_specs": y_spec}
        given = state, jax.device_put(x, x_spec)

        def apply(state, x):
            return nnx.merge(graph, state)(x)

        y = jax.jit(jax.shard_map(apply, **specs))(*given)
        np.testing.assert_allclose(y, x @ np.asarray(layer.kernel[...]), rtol=1e-4, atol=1e-5)
        with pytest.raises(ValueError, match="check_vma=False hides it"):
            jax.eval_shape(jax.shard_map(apply, **specs, check_vma=False), *given)


@pytest.mark.optimized
def test_a_weight_gradient_is_summed_over_data_once():
    """The kernel's gradient has one all-reduce over data, and the ring has none."""
    with jax.set_mesh(make_mesh(2, 4)):
        layer = drawn(
            lambda: fa.nn.ColumnParallelLinear(
                8, 12, use_bias=False, backend="xla", rngs=nnx.Rngs(0)
            )
        )
        gradient = nnx.grad(lambda layer, x, dy: jnp.sum(layer(x) * dy))
        text = compiled(gradient, layer, ones((2, 8, 8), ROWS), ones((2, 8, 12), COLUMNS))
    assert text.count(" all-reduce(") == 1
    assert text.count(" all-gather(") == 0
    assert text.count(" collective-permute(") == 3


class PlainMLP(nnx.Module):
    """The same MLP of plain layers, with the same names."""

    def __init__(self, features, hidden, *, gated=True, **options):
        self.up = nnx.Linear(features, hidden, **options)
        self.gate = nnx.Linear(features, hidden, **options) if gated else None
        self.down = nnx.Linear(hidden, features, **options)

    def __call__(self, x):
        if self.gate is None:
            return self.down(jax.nn.silu(self.up(x)))
        return self.down(jax.nn.silu(self.gate(x)) * self.up(x))


def mlp_pair(size, *, backend=None, **options):
    options = {"use_bias": False} | options

    def make(dtype):
        return fa.nn.ParallelMLP(
            8, 6 * size, dtype=dtype, backend=backend, rngs=nnx.Rngs(0), **options
        )

    return make, drawn(lambda: PlainMLP(8, 6 * size, rngs=nnx.Rngs(0), **options))


@pytest.mark.parametrize(
    ("options", "rows", "form"),
    [
        ({"gated": False, "use_bias": True}, 6, {"size": 2}),
        (
            {"use_bias": True, "backend": "none"},
            8,
            {"size": 4, "data": 2, "dtype": "bfloat16"},
        ),
        ({"use_bias": True}, 7, {"size": 4, "x_spec": SAME, "y_spec": SAME}),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [
                ({"use_bias": False}, 3, {"size": 1}),
                ({"use_bias": False}, 9, {"size": 3}),
                ({"use_bias": False}, 24, {"size": 8}),
                (
                    {"use_bias": True, "backend": "xla"},
                    8,
                    {"size": 4, "data": 2, "axis_type": AxisType.Auto},
                ),
            ]
        ),
    ],
)
def test_parity_of_an_mlp(options, rows, form):
    check_parity(*mlp_pair(form["size"], **options), (2, rows, 8), **form)


@pytest.mark.parametrize("gated", [True, False])
def test_only_products_of_the_hidden_features_are_saved(gated):
    """The products of gate and up are saved; the activation and its parts are not."""
    with jax.set_mesh(make_mesh(1, 4)):
        mlp = drawn(lambda: fa.nn.ParallelMLP(8, 24, gated=gated, rngs=nnx.Rngs(0)))
        sizes = [leaf.size for leaf in saved(mlp, ones((3, 8, 8), ROWS))]
    assert sizes.count(3 * 8 * 24) == (2 if gated else 1)
    assert max(sizes) == 3 * 8 * 24


@pytest.mark.optimized
def test_gate_and_up_share_one_trip_and_no_ring_is_run_again():
    """R - 1 permutes each for x and y, and for dy and dx: the backward pass computes h again, not
    y.
    """
    with jax.set_mesh(make_mesh(1, 4)):
        x = ones((2, 8, 8), ROWS)
        for gated in (True, False):
            mlp = drawn(
                lambda gated=gated: fa.nn.ParallelMLP(
                    8, 16, gated=gated, backend="xla", rngs=nnx.Rngs(0)
                )
            )
            assert compiled(lambda mlp, x: mlp(x), mlp, x).count(" collective-permute(") == 2 * 3
            assert not gated or permutes(mlp, x) == 4 * 3  # XLA merges the trips of x


COLUMN, ROW = fa.nn.ColumnParallelLinear, fa.nn.RowParallelLinear


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (
            lambda: COLUMN(8, 12, axis_name="tensor", rngs=nnx.Rngs(0)),
            "'tensor', and the mesh has 'data', 'model'",
        ),
        (
            lambda: COLUMN(6, 6, rngs=nnx.Rngs(0)),
            "out_features=6 on 4 devices; use 4 or 8, or a smaller axis",
        ),
        (
            lambda: ROW(6, 6, rngs=nnx.Rngs(0)),
            "in_features=6 on 4 devices; use 4 or 8, or a smaller axis",
        ),
        (
            lambda: ROW(8, 12, layout="rows", rngs=nnx.Rngs(0)),
            "it must be 'sequence' or 'replicated'",
        ),
    ],
)
def test_layers_that_cannot_be_built(make, error):
    with jax.set_mesh(make_mesh(1, 4)), pytest.raises(ValueError, match=error):
        make()


@pytest.mark.parametrize(
    ("cls", "options", "shape", "spec", "error"),
    [
        (
            COLUMN,
            {},
            (2, 4, 16),
            ROWS,
            r"built for 8 input features: got \[2, 4, 16\], needed \[..., 8\]",
        ),
        (ROW, {}, (2, 4, 16), COLUMNS, "built for 8 input features"),
        (fa.nn.ParallelMLP, {}, (2, 4, 12), ROWS, "ParallelMLP was built for 8 input features"),
        (COLUMN, {}, (8,), P(), r"needs an input \[..., rows, features\]: got \[8\]"),
        (
            ROW,
            {},
            (2, 6, 8),
            COLUMNS,
            "got 6 rows on 4 devices; pad them to 8, or use layout='replicated'",
        ),
        (COLUMN, {}, (4, 4, 8), COLUMNS, r"whose rows \(dimension -2\) are sharded over 'model'"),
        (COLUMN, {}, (4, 4, 8), P("model", None, None), "whose rows"),
        (ROW, {}, (4, 4, 8), ROWS, r"whose features \(dimension -1\) are sharded over 'model'"),
        (ROW, {}, (4, 4, 8), SAME, "whose features"),
        (
            COLUMN,
            {"in_spec": SAME},
            (4, 4, 8),
            ROWS,
            "leave in_spec out where all axes are Explicit",
        ),
    ],
)
def test_inputs_that_a_layer_does_not_take(cls, options, shape, spec, error):
    with jax.set_mesh(make_mesh(1, 4)):
        layer = drawn(lambda: cls(8, 12, rngs=nnx.Rngs(0), **options))
        with pytest.raises(ValueError, match=error):
            layer(ones(shape, spec))


def test_a_mesh_is_needed():
    for make in (COLUMN, fa.nn.VocabParallelEmbed):
        with pytest.raises(
            ValueError, match=f"{make.__name__} needs a mesh with the axis 'model', and none is set"
        ):
            make(8, 12, rngs=nnx.Rngs(0))
    with jax.set_mesh(make_mesh(1, 4)):
        layer = drawn(lambda: ROW(12, 8, rngs=nnx.Rngs(0)))
    with pytest.raises(ValueError, match="RowParallelLinear needs a mesh with the axis 'model'"):
        layer(np.ones((2, 4, 12), np.float32))


def test_the_keywords_are_those_of_nnx_with_its_defaults_and_every_option_has_a_setting():
    plain, ours = (
        inspect.signature(cls.__init__).parameters for cls in (nnx.Linear, fa.nn.RowParallelLinear)
    )
    assert list(ours)[1:3] == list(plain)[1:3] == ["in_features", "out_features"]
    for name in set(list(plain)[3:]) - {"rngs"}:
        assert name in fa.nn.LinearOptions.__annotations__
        assert (
            name.endswith(("_init", "_metadata"))
            or getattr(Settings(), name) == plain[name].default
        )
    plain, ours = (
        inspect.signature(cls.__init__).parameters for cls in (nnx.Embed, fa.nn.VocabParallelEmbed)
    )
    assert set(plain) <= set(ours) | set(fa.nn.LayerOptions.__annotations__)
    assert {
        field.name for field in dataclasses.fields(Settings)
    } == fa.nn.LinearOptions.__annotations__.keys()
    assert fa.nn.LayerOptions.__annotations__.items() <= fa.nn.LinearOptions.__annotations__.items()


@pytest.mark.parametrize(
    "make",
    [
        fa.nn.ColumnParallelLinear,
        fa.nn.RowParallelLinear,
        fa.nn.ParallelMLP,
        fa.nn.ParallelSelfAttention,
        fa.nn.RingSelfAttention,
        fa.nn.VocabParallelEmbed,
    ],
)
def test_an_unknown_keyword_is_named(make):
    message = (
        rf"^{make.__name__} got an unexpected keyword argument 'use_biases'; .* axis_name, "
        rf"fsdp_axis, dtype, "
    )
    with jax.set_mesh(make_mesh(1, 4)), pytest.raises(TypeError, match=message):
        make(8, 8, use_biases=True, rngs=nnx.Rngs(0))


@pytest.mark.parametrize("shape", [(0, 8, 16), pytest.param((2, 0, 16), marks=pytest.mark.slow)])
def test_an_input_without_elements(shape):
    """A last batch may be empty. Gradients are zeros, and no collective is run: without elements it
    never ends.
    """
    with jax.set_mesh(make_mesh(2, 4)):
        x, ids = ones(shape, ROWS), jax.device_put(np.ones(shape[:2], np.int32), P("data", None))
        embed = drawn(lambda: fa.nn.VocabParallelEmbed(16, 16, rngs=nnx.Rngs(0)))
        for make in (
            lambda: fa.nn.ColumnParallelLinear(16, 16, rngs=nnx.Rngs(0)),
            lambda: fa.nn.ParallelMLP(16, 16, rngs=nnx.Rngs(0)),
            lambda: fa.nn.ParallelSelfAttention(16, 4, rngs=nnx.Rngs(0)),
        ):
            layer = drawn(make)
            gradients, y = nnx.grad(
                lambda layer: (lambda y: (jnp.sum(y), y))(layer(x)), has_aux=True
            )(layer)
            assert y.shape == shape
            assert not any(np.any(g) for g in jax.tree.leaves(gradients))
            assert nnx.jit(lambda layer, x: layer(x))(layer, x).sharding.spec[0] == "data"
        losses = fa.nn.softmax_cross_entropy(embed.attend(embed(ids)), ids)
    assert losses.shape == shape[:2]
