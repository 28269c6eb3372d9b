"""Tests of parameters that are stored sharded over a second axis: parity of every layer, and what
is refused.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import flaxasync as fa
from tests.nn.conftest import assert_alike, drawn, gradients, make_fsdp_mesh

pytestmark = pytest.mark.usefixtures("quick_compile")
BATCH = ("data", "fsdp")
ROWS, COLUMNS = P(BATCH, "model", None), P(BATCH, None, "model")
CONTEXT_ROWS, RING_ROWS = P(BATCH, ("context", "model"), None), P(BATCH, "context", None)

# A layer, how its input is sharded, and the features of its output.
LAYERS = {
    "column": (functools.partial(fa.nn.ColumnParallelLinear, 16, 32), ROWS, 32),
    # its bias is stored whole
    "column_uneven": (functools.partial(fa.nn.ColumnParallelLinear, 16, 34), ROWS, 34),
    "column_pad": (
        functools.partial(fa.nn.ColumnParallelLinear, 16, 31, pad=True, use_bias=False),
        ROWS,
        31,
    ),
    "row": (functools.partial(fa.nn.RowParallelLinear, 16, 32), COLUMNS, 32),
    "mlp": (functools.partial(fa.nn.ParallelMLP, 16, 32, use_bias=True), ROWS, 16),
    "projections": (
        functools.partial(fa.nn.ColumnParallelProjections, 16, {"one": 16, "two": 16}),
        ROWS,
        16,
    ),
    "attention": (
        functools.partial(fa.nn.ParallelSelfAttention, 16, 4, kv_heads=2, use_bias=True),
        ROWS,
        16,
    ),
    "shared_heads": (functools.partial(fa.nn.ParallelSelfAttention, 16, 4, kv_heads=1), ROWS, 16),
    "context": (
        functools.partial(fa.nn.ParallelSelfAttention, 16, 4, context_axis="context"),
        CONTEXT_ROWS,
        16,
    ),
    "ring": (functools.partial(fa.nn.RingSelfAttention, 16, 4, use_bias=True), RING_ROWS, 16),
}


def parameters(module):
    return {
        ".".join(path): variable
        for path, variable in nnx.to_flat_state(nnx.state(module, nnx.Param))
    }


def first(layer, x):
    """Applies a layer, and returns the sum of its outputs."""
    y = layer(x)
    return sum(y) if isinstance(y, tuple) else y


def run(make, x, dy, *, sizes, spec_x=None, axis_type=AxisType.Explicit, apply=first, **options):
    """Returns the layer, and the gradients of its parameters and of x, and y without padding, on
    such a mesh.
    """
    with jax.set_mesh(make_fsdp_mesh(*sizes, axis_type=axis_type)):
        layer, x = (
            drawn(lambda: make(rngs=nnx.Rngs(0), **options)),
            jax.device_put(x, spec_x or P(BATCH, None)),
        )
        padding = nnx.eval_shape(apply, layer, x).shape[-1] - dy.shape[-1]
        params, dx, y = gradients(layer, x, np.pad(dy, ((0, 0), (0, 0), (0, padding))), apply=apply)
        return layer, (params, dx, np.asarray(y)[..., : dy.shape[-1]])


def compare(make, x, dy, *, sizes, stored=None, **form):
    """Compares a layer on one device with one that has the options `stored`, and returns the
    latter.
    """
    _, want = run(make, x, dy, sizes=(1, 1, 1, 1), **form)
    layer, got = run(make, x, dy, sizes=sizes, **form, **(stored or {"fsdp_axis": "fsdp"}))
    assert_alike(got, want)
    for path, variable in parameters(layer).items():
        assert parameters(got[0])[path][...].sharding == variable[...].sharding
    return layer


def data(features):
    rng = np.random.default_rng(1)
    return [rng.standard_normal((4, 8, n)).astype(np.float32) for n in (16, features)]


@pytest.mark.parametrize(
    ("name", "axis_type"),
    [
        # all kinds of parameters
        *((name, AxisType.Explicit) for name in ("mlp", "column_uneven")),
        pytest.param("mlp", AxisType.Auto, marks=pytest.mark.slow),
        *(
            pytest.param(name, AxisType.Explicit, marks=pytest.mark.slow)
            for name in (
                "column_pad",
                "projections",
                "attention",
                "shared_heads",
                "context",
                "ring",
            )
        ),
    ],
)
def test_a_layer_computes_the_same_however_its_parameters_are_stored(name, axis_type):
    make, spec_x, features = LAYERS[name]
    sizes = (1, 2, 2, 2) if name in ("context", "ring") else (2, 2, 1, 2)
    layer = compare(make, *data(features), sizes=sizes, spec_x=spec_x, axis_type=axis_type)
    for path, variable in parameters(layer).items():
        parameter = variable[...]
        whole = (
            name == "ring"
            or path in ("down.bias", "out.bias")
            or (path == "bias" and name == "column_uneven")
        )
        assert np.prod(parameter.sharding.shard_shape(parameter.shape)) == parameter.size // (
            2 if whole else 4
        ), path


@pytest.mark.parametrize(("entries", "layout"), [
    (31, "sequence"), pytest.param(32, "replicated", marks=pytest.mark.slow),
])  # fmt: skip
def test_an_embedding_computes_the_same_however_it_is_stored(entries, layout):
    ids = np.random.default_rng(2).integers(0, entries, (4, 8), np.int32)
    make = functools.partial(fa.nn.VocabParallelEmbed, entries, 16, layout=layout)
    layer = compare(
        make,
        ids,
        data(entries)[1],
        sizes=(2, 2, 1, 2),
        apply=lambda layer, x: layer.attend(layer(x)),
    )
    table = layer.embedding[...]
    assert np.prod(table.sharding.shard_shape(table.shape)) == table.size // 4


def test_weights_travel_in_the_dtype_of_the_computation_and_gradients_are_summed_in_that_of_the_parameter():
    with jax.set_mesh(make_fsdp_mesh(1, 4, 1, 2)):
        layer = drawn(lambda: fa.nn.ColumnParallelLinear(
            16, 32, use_bias=False, fsdp_axis="fsdp", dtype=jnp.bfloat16, rngs=nnx.Rngs(0)
        ))  # fmt: skip
        found = collectives(layer, jax.device_put(np.ones((4, 8, 16), np.float32), ROWS))
    assert [(kind, str(dtype)) for kind, dtype, axes in found if axes == ("fsdp",)] == [
        ("all_gather", "bfloat16"), ("reduce_scatter", "float32"),
    ]  # fmt: skip


@pytest.mark.slow
def test_a_batch_that_is_the_same_on_the_fsdp_axis_needs_no_sum_over_it():
    """Every device of the axis has the same gradient. A sum would be a multiple of it."""
    make, _, features = LAYERS["mlp"]
    x, dy = data(features)
    with jax.set_mesh(make_fsdp_mesh(2, 2, 1, 2)):
        layer = make(rngs=nnx.Rngs(0), fsdp_axis="fsdp")
        found = collectives(layer, jax.device_put(x, P("data", "model", None)))
    assert {(kind, axes) for kind, _, axes in found if "fsdp" in axes} == {
        ("all_gather_invariant", ("fsdp",))
    }
    compare(make, x, dy, sizes=(2, 2, 1, 2), spec_x=P("data", "model", None))


def collectives(layer, x, wrap=lambda apply: apply):
    """Returns the primitive, the dtype and the axes of every collective in the value and gradient
    of a layer.
    """
    graph, state = nnx.split(layer)
    apply = wrap(lambda state, x: nnx.merge(graph, state)(x))
    loss = jax.value_and_grad(lambda state, x: apply(state, x).astype(jnp.float32).sum())
    found = []

    def visit(jaxpr):
        for eqn in jaxpr.eqns:
            axes = eqn.params.get("axis_name")
            if axes is not None and eqn.primitive.name != "axis_index":
                axes = (axes,) if isinstance(axes, str) else tuple(axes)
                found.append((eqn.primitive.name, eqn.outvars[0].aval.dtype, axes))
            for value in jax.tree.leaves(
                list(eqn.params.values()), is_leaf=lambda v: hasattr(v, "jaxpr")
            ):
                inner = getattr(value, "jaxpr", value)
                if hasattr(inner, "eqns"):
                    visit(inner)

    visit(jax.make_jaxpr(loss)(state, x).jaxpr)
    return found


@pytest.mark.parametrize("options", [
    pytest.param(
        {"kernel_metadata": {"out_sharding": ("fsdp", "model"), "mine": 1}}, id="metadata"
    ),
    pytest.param(
        {"kernel_init": nnx.with_partitioning(nnx.initializers.lecun_normal(), ("fsdp", "model"))},
        id="initializer", marks=pytest.mark.slow,
    ),
])  # fmt: skip
def test_annotations_of_the_user_are_honoured_and_swapped_for_the_kernels_of_the_other_kind(
    options,
):
    """An axis that the user names beside that of the layer stores the kernel, also where the layer
    has several.
    """
    make, spec_x, features = LAYERS["mlp"]
    layer = compare(make, *data(features), sizes=(2, 2, 1, 2), spec_x=spec_x, stored=options)
    specs = {path: variable[...].sharding.spec for path, variable in parameters(layer).items()}
    assert specs["up.kernel"] == specs["gate.kernel"] == P("fsdp", "model")
    assert specs["down.kernel"] == P("model", "fsdp")
    assert "kernel_init" in options or layer.down.kernel.get_metadata()["mine"] == 1


@pytest.mark.slow
def test_what_the_map_splits_is_gathered_and_a_parameter_that_lost_its_sharding_is_refused_and_loaded_again():
    make, spec_x, features = LAYERS["mlp"]
    x, _ = data(features)
    with jax.set_mesh(make_fsdp_mesh(2, 2, 1, 2)):
        layer, x = make(rngs=nnx.Rngs(0), fsdp_axis="fsdp"), jax.device_put(x, spec_x)
        graph, state = nnx.split(layer)
        specs = jax.tree.map(lambda leaf: leaf.sharding.spec, state)
        inside = jax.shard_map(
            lambda s, x: nnx.merge(graph, s)(x), in_specs=(specs, spec_x), out_specs=spec_x
        )
        np.testing.assert_allclose(jax.jit(inside)(state, x), layer(x), rtol=1e-5)

        kernel = layer.up.kernel[...]
        # as the layer needs it, and not stored
        layer.up.kernel.set_value(jax.device_put(kernel, P(None, "model")))
        with pytest.raises(
            ValueError, match=r"the kernel \[16, 32\] must be sharded .*'fsdp', 'model'"
        ):
            layer(x)
        fa.nn.load(
            layer, {path: np.asarray(variable[...]) for path, variable in parameters(layer).items()}
        )
        assert layer.up.kernel[...].sharding.spec == P("fsdp", "model")


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (
            LAYERS["row"][0],
            {"fsdp_axis": "shards"},
            r"RowParallelLinear works on the mesh axis 'shards', and the mesh has 'data', 'fsdp'",
        ),
        (
            LAYERS["mlp"][0],
            {"fsdp_axis": "model"},
            r"fsdp_axis='model', which is its axis_name, too",
        ),
        (
            functools.partial(fa.nn.ColumnParallelLinear, 15, 34),
            {"fsdp_axis": "fsdp"},
            r"the kernel \[15, 34\], which is sharded .*, over 2 devices of the 'fsdp' axis as "
            r"well: use 16 for "
            r"dimension 0 or 36 for dimension 1, or a smaller axis",
        ),
        (
            functools.partial(fa.nn.VocabParallelEmbed, 30, 15),
            {"fsdp_axis": "fsdp"},
            r"the embedding \[30, 15\], which .*: use 16 for dimension 1 or 32 for dimension 0",
        ),
        (
            functools.partial(fa.nn.ColumnParallelLinear, 15, 32),
            {"kernel_metadata": {"out_sharding": ("fsdp", None)}},
            r"dimension 0 of the kernel \[15, 32\] must be divisible by .* 'fsdp': got 15 on 2 "
            r"devices; use 16",
        ),
        (
            LAYERS["column"][0],
            {"kernel_metadata": {"out_sharding": (None, ("fsdp", "model"))}},
            r"'model' must come before the other axes of a dimension",
        ),
        (
            LAYERS["column"][0],
            {"kernel_metadata": {"out_sharding": (None, None, "fsdp")}},
            r"the kernel \[16, 32\] has 2 dimensions: got out_sharding=",
        ),
    ],
)
def test_bad_input_is_refused_with_sizes_that_work(make, options, message):
    with jax.set_mesh(make_fsdp_mesh(2, 2, 1, 2)), pytest.raises(ValueError, match=message):
        nnx.eval_shape(lambda: make(rngs=nnx.Rngs(0), **options))


def test_parallelize_stores_a_dense_model_fully_sharded():
    with jax.set_mesh(make_fsdp_mesh(2, 2, 1, 2)):
        model = nnx.Dict(
            up=nnx.Linear(16, 32, rngs=nnx.Rngs(0)), down=nnx.Linear(32, 16, rngs=nnx.Rngs(0))
        )
        fa.nn.parallelize(model, {"up": "column", "down": "row"}, fsdp_axis="fsdp", verbose=False)
        assert model.up.kernel[...].sharding.spec == P("fsdp", "model")
        assert model.down.kernel[...].sharding.spec == P("model", "fsdp")


@pytest.mark.parametrize(
    ("policy", "gathers"),
    [
        (None, 6),
        (jax.checkpoint_policies.dots_with_no_batch_dims_saveable, 6),
        (fa.save_matmuls, 6),
        (fa.save_costly, 3),
    ],
)
def test_a_checkpointed_layer_gathers_its_parameters_again_unless_the_policy_keeps_them(
    policy, gathers
):
    x, _ = data(16)
    with jax.set_mesh(make_fsdp_mesh(2, 2, 1, 2)):
        layer = drawn(
            lambda: fa.nn.ParallelMLP(16, 32, fsdp_axis="fsdp", backend="none", rngs=nnx.Rngs(0))
        )
        x = jax.device_put(x, ROWS)
        counts = [
            sum(
                kind == "all_gather" and axes == ("fsdp",)
                for kind, _, axes in collectives(layer, x, wrap)
            )
            for wrap in (lambda apply: apply, functools.partial(jax.checkpoint, policy=policy))
        ]
    assert counts == [3, gathers]
