"""The MLP of fused kernels: its epilogues alone, parity with one device, where it falls back, what
is kept.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import flaxasync as fa
from flaxasync import check
from flaxasync.ops.matmul.activation import FUSED, activate
from flaxasync.ops.matmul.mlp import Activate, ActivateGradient, parallel_mlp
from tests.kernels.conftest import as_float32, draw, simulated

ROWS, COLUMNS, DOWN = P(None, "model", None), P(None, "model"), P("model", None)


@pytest.mark.parametrize(
    ("activation", "columns"),
    [
        pytest.param(activation, columns, marks=[] if columns == 2 else pytest.mark.slow)
        for activation in FUSED
        for columns in (1, 2)
    ],
)
def test_the_epilogues_are_the_activation_and_its_gradient(activation, columns):
    *products, dh = (
        np.random.default_rng(0).standard_normal((columns + 1, 8, 128)).astype(np.float32)
    )
    products = tuple(products)
    h, pull = jax.vjp(lambda *values: activate(activation, values), *products)
    for got, want in (
        (Activate(activation, 0)(products, ()), (h,)),
        (Activate(activation, columns)(products, ()), (*products, h)),
        (ActivateGradient(activation, columns)((dh,), products), (*pull(dh), h)),
    ):
        np.testing.assert_array_equal(got, want)
    assert hash(Activate(activation, 2)) == hash(Activate(activation, 2))


def wanted(activation, x, ws, down):
    return activate(activation, tuple(x @ w for w in ws)) @ down


def mapped(activation, gathered_bytes, quantization=None):
    options = {
        "backend": "fused",
        "precision": None,
        "gathered_bytes": gathered_bytes,
        "quantization": quantization,
    }
    local = functools.partial(parallel_mlp, axis_name="model", activation=activation, **options)
    return jax.shard_map(local, in_specs=(ROWS, COLUMNS, DOWN), out_specs=ROWS)


def parity(size, *, columns=2, activation=jax.nn.silu, m=16, d=128, f=128, dtype="float32", gathered_bytes=0,
           mode="on_wait"):  # fmt: skip
    shapes = (2, size * m, d), (2, size * m, d), (size * f, d), *[(d, size * f)] * columns
    x, dy, down, *ws = (
        (draw(shape, seed=i) / 8).astype(jnp.dtype(dtype)) for i, shape in enumerate(shapes)
    )

    def run(x, ws, down, dy):
        y, pull = jax.vjp(mapped(activation, gathered_bytes), x, tuple(ws), down)
        return y, *pull(dy)

    with simulated((size,), ("model",), mode) as mesh:
        operands = zip((x, ws, down, dy), (ROWS, COLUMNS, DOWN, ROWS), strict=True)
        got = as_float32(
            jax.jit(run)(
                *(jax.device_put(value, NamedSharding(mesh, spec)) for value, spec in operands)
            )
        )
    x, ws, down, dy = as_float32((x, tuple(ws), down, dy))
    y, pull = jax.vjp(functools.partial(wanted, activation), x, ws, down)
    # order of additions; bfloat16 products, and sums that travel
    tolerance = 1e-5 if dtype == "float32" else 3e-2
    for name, ours, theirs in zip(("y", "dx", "dws", "d_down"), got, (y, *pull(dy)), strict=True):
        for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
            assert np.abs(a - b).max() <= tolerance * np.abs(b).max(), name


@pytest.mark.slow
@pytest.mark.parametrize("options", [
    {"size": 4, "mode": "eager", "dtype": "bfloat16", "activation": jax.nn.gelu},
    {"size": 3, "columns": 1, "activation": jax.nn.relu, "m": 10, "d": 100, "f": 70},  # padded
    {"size": 2, "gathered_bytes": 2**30, "mode": "eager"},
])  # fmt: skip
def test_values_and_gradients(options):
    parity(**options)


@pytest.mark.slow
@pytest.mark.parametrize(("weights", "kept"), [(None, 0), ("int8", 2**30)])
def test_eight_bits_are_scaled_before_the_activation(weights, kept):
    """Other roundings of h, which is computed of products in float32, move few of its 8-bit values.

    With `weights`, d_down, and dws of rows that are kept, are computed while the sums of dx travel.
    """
    shapes = (2, 32, 128), (128, 256), (128, 256), (256, 128), (2, 32, 128)
    x, up, gate, down, dy = (
        (draw(shape, seed=i) / 8).astype(np.float32) for i, shape in enumerate(shapes)
    )

    def of(backend):
        eight = fa.Quantization("int8", "int8", weights=weights)
        options = {"gathered_bytes": kept, "precision": None, "quantization": eight}
        local = functools.partial(
            parallel_mlp, axis_name="model", activation=jax.nn.silu, backend=backend, **options
        )
        mapped = jax.shard_map(local, in_specs=(ROWS, COLUMNS, DOWN), out_specs=ROWS)

        def run(x, up, gate, down, dy):
            y, pull = jax.vjp(mapped, x, (up, gate), down)
            return y, *pull(dy)

        operands = zip((x, up, gate, down, dy), (ROWS, COLUMNS, COLUMNS, DOWN, ROWS), strict=True)
        with simulated((2,), ("model",), "eager") as mesh:
            return as_float32(
                jax.jit(run)(
                    *(jax.device_put(a, NamedSharding(mesh, spec)) for a, spec in operands)
                )
            )

    for ours, theirs in zip(jax.tree.leaves(of("fused")), jax.tree.leaves(of("none")), strict=True):
        assert np.abs(ours - theirs).max() <= 2e-2 * np.abs(theirs).max()


def traced_kernels(wrap=lambda fn: fn, gathered_bytes=0, quantization=None):
    """Returns the number of each kernel in the traced gradient of a loss."""
    with jax.set_mesh(check.topology_mesh("v5e:2x4", (8,), ("model",))):
        fn = mapped(jax.nn.silu, gathered_bytes, quantization)
        loss = wrap(lambda x, ws, down: jnp.sum(jnp.sin(fn(x, ws, down))))
        x, w, down = (
            jax.ShapeDtypeStruct(s, jnp.float32) for s in [(2, 128, 128), (128, 1024), (1024, 128)]
        )
        jaxpr = jax.make_jaxpr(jax.grad(loss, (0, 1, 2)))(x, (w, w), down)
    names = re.findall(r"name=(\w+)", str(jaxpr))
    return tuple(
        map(names.count, ("all_gather_matmul", "matmul_reduce_scatter", "gather_weight_gradient"))
    )


@pytest.mark.parametrize(("wrap", "counts"), [
    (lambda fn: fn, (2, 2, 1)),
    (functools.partial(jax.checkpoint, policy=fa.save_matmuls), (2, 2, 1)),
    pytest.param(
        functools.partial(jax.checkpoint, policy=fa.save_costly), (2, 2, 1), marks=pytest.mark.slow
    ),
    (jax.checkpoint, (3, 3, 1)),
])  # fmt: skip
def test_a_policy_that_keeps_products_repeats_no_kernel(wrap, counts):
    """Without one the products are computed again; and y, for the loss here is computed from it."""
    assert traced_kernels(wrap) == counts


@pytest.mark.parametrize(
    "quantization",
    [
        None,
        pytest.param(
            fa.Quantization("int8", "int8", weights="int8"),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_the_gathered_rows_are_kept_where_they_may_be(quantization):
    assert traced_kernels(gathered_bytes=2**30, quantization=quantization)[2] == 0


def test_a_second_derivative_is_refused():
    with pytest.raises(
        NotImplementedError, match="ParallelMLP with backend='fused' has a first derivative only"
    ):
        traced_kernels(lambda loss: lambda x, *rest: jnp.sum(jax.grad(loss)(x, *rest)))


def shifted(x):
    """An activation that no kernel knows."""
    return jax.nn.silu(x + 1)


def layer(activation=jax.nn.silu, batch=4, rows=4096, d=4096, f=14336, **options):
    """Returns the function that applies an MLP forward and backward, its abstract arguments, and
    its graph.
    """
    graph, state = nnx.split(
        nnx.eval_shape(
            lambda: fa.nn.ParallelMLP(
                d,
                f,
                activation=activation,
                backend="fused",
                dtype=jnp.bfloat16,
                param_dtype=jnp.bfloat16,
                rngs=nnx.Rngs(0),
                **options,
            )
        )
    )

    def abstract(value, spec):
        return jax.ShapeDtypeStruct(
            value.shape, value.dtype, sharding=NamedSharding(jax.sharding.get_mesh(), spec)
        )

    def run(state, x, dy):
        y, pull = jax.vjp(lambda state, x: nnx.merge(graph, state)(x), state, x)
        return y, *pull(dy)

    x = abstract(jax.ShapeDtypeStruct((batch, rows, d), jnp.bfloat16), ROWS)
    return run, jax.tree.map(abstract, state, nnx.get_partition_spec(state)), x, x, graph


def has_epilogue(**options):
    """Says whether an MLP of eight v5e leaves the activation to the kernels: the fallback is under
    `jax.checkpoint`.
    """
    with jax.set_mesh(check.topology_mesh("v5e:2x4", (8,), ("model",))):
        _, state, x, _, graph = layer(**options)
        return "remat" not in str(
            jax.make_jaxpr(lambda state, x: nnx.merge(graph, state)(x))(state, x)
        )


def test_an_mlp_that_no_epilogue_serves_falls_back():
    """The fallback is the unfused form, whose numbers are those of every other backend."""
    assert has_epilogue()
    assert has_epilogue(gated=False, activation=jax.nn.relu)
    assert not has_epilogue(activation=shifted)
    assert not has_epilogue(use_bias=True)
    assert has_epilogue(batch=1, rows=1024)
    assert not has_epilogue(preferred_element_type=jnp.float16)


@pytest.mark.slow
@pytest.mark.parametrize("topology", ["v6e:2x4"])
def test_the_layer_compiles_to_kernels_without_passes_between_them(topology):
    """Forward and backward: no fusion makes an array of the size of a product of gate or up."""
    with jax.set_mesh(check.topology_mesh(topology, (8,), ("model",))):
        # the second is a negative test
        for activation, passes in ((jax.nn.silu, False), (shifted, True)):
            run, *arguments, _ = layer(activation)
            text = check.compile_for(
                topology, jax.jit(run), *arguments, compiler_options=check.HLO_ONLY
            ).text
            entry = text.partition("\nENTRY ")[2]
            made = re.findall(r"= .*bf16\[(?:4,4096|4,8,512|16384),1792\].* fusion\(", entry)
            assert bool(made) == passes
