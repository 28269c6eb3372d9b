"""MeshLinear against nnx.Linear on meshes of two axes; its kernels in the simulator; the compiled
backward pass.
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
from benchmarks.programs import array, split_layer
from tests.kernels.conftest import simulated
from tests.nn.conftest import check_parity, drawn, ones

pytestmark = pytest.mark.usefixtures("quick_compile")

X_SPEC, Y_SPEC = P(None, "x", "y"), P(None, "x", None)


def mesh_of(shape, axis_type=AxisType.Explicit, names=("x", "y")):
    return jax.make_mesh(
        shape, names, (axis_type,) * len(shape), devices=jax.devices()[: np.prod(shape)]
    )


def plain(features=16, **options):
    return drawn(lambda: nnx.Linear(features, 12, rngs=nnx.Rngs(0), **options))


def ours(features=16, **options):
    return lambda dtype: fa.nn.MeshLinear(features, 12, dtype=dtype, rngs=nnx.Rngs(0), **options)


def parity(
    mesh,
    features=16,
    x_shape=(2, 8),
    x_spec=X_SPEC,
    y_spec=Y_SPEC,
    dtype="float32",
    use_bias=True,
    **options,
):
    make, reference = (
        ours(features, use_bias=use_bias, **options),
        plain(features, use_bias=use_bias),
    )
    check_parity(
        make, reference, (*x_shape, features), mesh=mesh, x_spec=x_spec, y_spec=y_spec, dtype=dtype
    )


@pytest.mark.parametrize(("shape", "axis_type"), [
    ((4, 2), AxisType.Explicit), ((2, 2), AxisType.Auto),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in [
        ((1, 2), AxisType.Explicit), ((2, 1), AxisType.Explicit), ((2, 4), AxisType.Auto),
    ]),
])  # fmt: skip
def test_parity(shape, axis_type):
    parity(mesh_of(shape, axis_type))


@pytest.mark.slow
def test_parity_in_other_forms():
    # four devices cannot share 6 rows of the kernel: gradients of XLA
    parity(mesh_of((2, 2)), features=6)
    parity(mesh_of((2, 2)), dtype="bfloat16", use_bias=False, backend="none")
    parity(
        mesh_of((2, 2)), x_shape=(8,), x_spec=P("x", "y"), y_spec=P("x", None), precision="highest"
    )
    # the kernel is gathered along y before it is used
    stored = {"kernel_metadata": {"out_sharding": ("x", "y")}}
    parity(mesh_of((2, 2)), features=32, **stored)


@pytest.mark.parametrize(
    "axis_type", [AxisType.Explicit, pytest.param(AxisType.Auto, marks=pytest.mark.slow)]
)
def test_the_batch_may_be_sharded_over_another_axis(axis_type):
    names = ("data", "rows", "features")
    specs = {"x_spec": P("data", "rows", "features"), "y_spec": P("data", "rows", None)}
    parity(mesh_of((2, 2, 2), axis_type, names), axis_names=("rows", "features"), **specs)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["overlapped", "xla_gemm", "serial", "fused"])
def test_kernels_and_their_gradients_on_simulated_tpus(backend, monkeypatch):
    """JAX's simulator raises for a race. The kernels take whole hardware tiles."""
    # of the mesh that `check_parity` sets, too
    monkeypatch.setattr(fa.mesh, "platform", lambda: "tpu")
    reference = drawn(lambda: nnx.Linear(512, 128, rngs=nnx.Rngs(0)))
    make = lambda dtype: fa.nn.MeshLinear(512, 128, dtype=dtype, backend=backend, rngs=nnx.Rngs(0))  # noqa: E731
    with simulated((2, 2), ("x", "y")) as mesh:
        check_parity(make, reference, (2, 32, 512), mesh=mesh, x_spec=X_SPEC, y_spec=Y_SPEC)


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False])
def test_the_transfers_of_the_compiled_backward_pass_run_beside_its_products(tied, monkeypatch):
    """Five permutes: a block of the kernel arrives and goes around; its gradient is summed, returns
    and goes around.

    Negative test: if the products of partial sums are not tied, XLA adds what arrives within them,
    and so waits.
    """
    if not tied:
        monkeypatch.setattr("flaxasync.ops.mesh_matmul.tie", lambda product: product)
    mesh = fa.check.topology_mesh("v5e:2x2", (2, 2), ("x", "y"))
    with jax.set_mesh(mesh):

        def make():
            return fa.nn.MeshLinear(8192, 4096, use_bias=False, backend="none", rngs=nnx.Rngs(0))

        graph, state = split_layer(make, mesh, jnp.bfloat16)

        def gradients(state, x, dy):
            return jax.vjp(lambda state, x: nnx.merge(graph, state)(x), state, x)[1](dy)

        x, dy = array((8192, 8192), mesh, P("x", "y")), array((8192, 4096), mesh, P("x", None))
        fn = jax.jit(gradients)
        report = fa.check.audit(
            fa.check.compile_for("v5e:2x2", fn, state, x, dy, compiler_options=fa.check.HLO_ONLY)
        )
    sent = [pair for pair in report.pairs if pair.communicates]
    assert report.ok
    assert "synchronous-collective" not in report.codes()
    assert [pair.kind for pair in sent] == ["collective-permute"] * 5
    assert len([pair for pair in sent if pair.exposed > pair.transfer / 10]) == (
        0 if tied else 1
    ), str(report)


def test_a_checkpoint_of_nnx_linear_loads_and_parameters_are_sharded_as_their_metadata_says():
    with jax.set_mesh(mesh_of((2, 4))):
        layer, linear = ours()("float32"), nnx.Linear(16, 12, rngs=nnx.Rngs(0))
        np.testing.assert_array_equal(layer.kernel[...], linear.kernel[...])  # drawn alike
        assert set(fa.nn.load(layer, nnx.to_pure_dict(nnx.state(plain()))).names) == {
            "kernel",
            "bias",
        }
        np.testing.assert_array_equal(layer.kernel[...], plain().kernel[...])
        assert layer.kernel.get_metadata()["out_sharding"] == ("x", None)
        assert layer.kernel[...].addressable_shards[0].data.shape == (8, 12)
        assert layer.bias[...].addressable_shards[0].data.shape == (12,)
        assert layer(ones((0, 8, 16), X_SPEC)).shape == (0, 8, 12)


def test_two_layers_inside_a_shard_map_of_the_caller():
    x = np.random.default_rng(0).standard_normal((8, 16)).astype(np.float32)
    with jax.set_mesh(mesh_of((2, 4))):
        graph, state = nnx.split(drawn(functools.partial(ours(), "float32")))
        mapped = jax.shard_map(
            lambda state, x: nnx.merge(graph, state)(x),
            in_specs=(nnx.get_partition_spec(state), P("x", "y")), out_specs=P("x", None),
        )  # fmt: skip
        y = jax.jit(mapped)(state, jax.device_put(x, P("x", "y")))
    np.testing.assert_allclose(y, plain()(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("shape", "spec", "error"),
    [
        ((2, 8, 12), X_SPEC, r"built for 16 input features: got \[2, 8, 12\]"),
        (
            (2, 8, 16),
            P(None, "y", "x"),
            r"rows \(dimension -2\) are sharded over 'x', and whose features .* over 'y': got",
        ),
        ((2, 8, 16), Y_SPEC, r"over 'y': got P\(None, 'x', None\); reshard it with jax.reshard"),
        ((2, 8, 16), P("x", None, "y"), "whose rows"),
        (
            (2, 3, 16),
            P(None, None, "y"),
            "rows must be divisible by the 'x' axis: got rows=3 on 2 devices; use 2 or 4",
        ),
    ],
)
def test_inputs_that_the_layer_does_not_take(shape, spec, error):
    with jax.set_mesh(mesh_of((2, 4))):
        layer = drawn(functools.partial(ours(), "float32"))
        with pytest.raises(ValueError, match=error):
            layer(ones(shape, spec))


def test_layers_that_cannot_be_built_or_run():
    with pytest.raises(
        ValueError, match="MeshLinear needs a mesh with the axis 'x', and none is set"
    ):
        ours()("float32")
    with jax.set_mesh(mesh_of((2, 4))):
        with pytest.raises(
            ValueError, match="by the 'y' axis: got in_features=6 on 4 devices; use 4 or 8"
        ):
            ours(6)("float32")
        with pytest.raises(ValueError, match="names of two mesh axes"):
            ours(axis_names=("x", "x"))("float32")
        with pytest.raises(ValueError, match="'rows', and the mesh has 'x', 'y'"):
            ours(axis_names=("rows", "y"))("float32")
        with pytest.raises(
            TypeError, match=r"^MeshLinear got an unexpected keyword argument 'fsdp_axis'"
        ):
            ours(fsdp_axis="y")("float32")
        layer = drawn(functools.partial(ours(backend="xla"), "float32"))
        with pytest.raises(NotImplementedError, match="no 'xla' backend: it has none, xla_gemm"):
            layer(ones((2, 8, 16), X_SPEC))
