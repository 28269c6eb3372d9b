"""The loss that never has whole logits, against a softmax over whole logits."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import flaxasync as fa
from tests.nn.conftest import ROWS, TOKENS, make_fsdp_mesh, make_mesh

pytestmark = pytest.mark.usefixtures("quick_compile")
FEATURES, BATCH = 8, 4
SMALL = 28  # rows: several blocks, of which the last is not full


def arrays(rows, entries, dtype="float32", seed=0):
    """Returns x, a kernel [D, V], targets with one that is -100, and weights with one that is 0."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((BATCH, rows, FEATURES)).astype(dtype)
    kernel = (rng.standard_normal((FEATURES, entries)) / np.sqrt(FEATURES)).astype(dtype)
    targets = rng.integers(0, entries, (BATCH, rows)).astype(np.int32)
    weights = rng.uniform(0.5, 2, (BATCH, rows)).astype(np.float32)
    targets[1, 2], weights[0, 1] = -100, 0
    return x, kernel, targets, weights


def reference(x, kernel, targets, weights, *, label_smoothing=0.0, z_loss=0.0, logit_softcap=None):
    """Returns the loss, and its gradients of x and of the kernel, from whole logits in float32."""

    def loss(x, kernel):
        logits = x.astype(jnp.float32) @ kernel.astype(jnp.float32)
        if logit_softcap is not None:
            logits = logit_softcap * jnp.tanh(logits / logit_softcap)
        wanted = optax.smooth_labels(jax.nn.one_hot(targets, kernel.shape[1]), label_smoothing)
        losses = (
            optax.softmax_cross_entropy(logits, wanted)
            + z_loss * jax.nn.logsumexp(logits, axis=-1) ** 2
        )
        counted = jnp.where(targets == -100, 0, weights)
        return jnp.sum(losses * counted) / jnp.sum(counted)

    value, gradients = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(x, kernel)
    return value, *gradients


def check(mesh, output_of, given, *, x_spec=ROWS, tolerance=1e-6, **options):
    """Compares the loss and both gradients; `output_of` makes of a kernel [D, V] what the loss is
    given as output.
    """
    x, kernel, targets, weights = given
    want = reference(
        *given,
        **{name: options[name] for name in options if name not in ("block_rows", "axis_name")},
    )
    with jax.set_mesh(mesh):
        output = output_of(kernel)
        graph, state = nnx.split(output) if isinstance(output, nnx.Module) else (None, output)

        @jax.jit
        def run(x, state, targets, weights):
            def loss(x, state):
                output = state if graph is None else nnx.merge(graph, state)
                return fa.nn.linear_cross_entropy(
                    x, output, targets, weights=weights, ignore=-100, **options
                )

            return jax.value_and_grad(loss, argnums=(0, 1))(x, state)

        placed = (jax.device_put(one, TOKENS) for one in (targets, weights))
        value, (dx, dstate) = run(jax.device_put(x, x_spec), state, *placed)
    dkernel = np.asarray(jax.tree.leaves(dstate)[0], np.float32)
    got = (value, dx, dkernel.T if isinstance(output, fa.nn.VocabParallelEmbed) else dkernel)
    for name, one, other in zip(("loss", "dx", "dkernel"), got, want, strict=True):
        scale = max(float(np.abs(np.asarray(other, np.float32)).max()), 1e-6)
        np.testing.assert_allclose(
            np.float32(one) / scale, np.float32(other) / scale, atol=tolerance, err_msg=name
        )


def put(x, kernel, *per_row):
    return (
        jax.device_put(x, ROWS),
        jax.device_put(kernel, P(None, "model")),
        *(jax.device_put(a, TOKENS) for a in per_row),
    )


def column(kernel, **options):
    layer = nnx.eval_shape(lambda: fa.nn.ColumnParallelLinear(
        *kernel.shape, use_bias=False, pad=True, dtype=kernel.dtype, rngs=nnx.Rngs(0), **options
    ))  # fmt: skip
    layer.kernel.set_value(jax.device_put(np.float32(kernel), layer.stored[0]))
    return layer


def embedding(kernel, **options):
    layer = nnx.eval_shape(
        lambda: fa.nn.VocabParallelEmbed(*kernel.T.shape, rngs=nnx.Rngs(0), **options)
    )
    layer.embedding.set_value(jax.device_put(kernel.T, layer.stored[0]))
    return layer


@pytest.mark.parametrize(("mesh", "axis_type", "entries", "output_of", "options"), [
    ((1, 2), AxisType.Explicit, 13, column, {"block_rows": SMALL}),  # a padded vocabulary
    ((2, 4), AxisType.Explicit, 25, embedding, {"z_loss": 1e-2}),
    ((2, 4), AxisType.Explicit, 24, lambda kernel: jax.device_put(kernel, P(None, "model")), {}),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in [
        ((1, 1), AxisType.Explicit, 12, column, {}),
        ((1, 8), AxisType.Explicit, 50, column, {"block_rows": SMALL}),
        ((2, 4), AxisType.Auto, 24, column, {"block_rows": SMALL}),
        ((2, 4), AxisType.Explicit, 24, embedding, {"logit_softcap": 2.0}),
        ((2, 4), AxisType.Explicit, 25, column, {"label_smoothing": 0.1}),
    ]),
])  # fmt: skip
def test_loss_and_gradients_are_those_of_whole_logits(mesh, axis_type, entries, output_of, options):
    check(make_mesh(*mesh, axis_type), output_of, arrays(24, entries), **options)


@pytest.mark.slow
def test_rows_that_are_not_split():
    check(make_mesh(2, 4), column, arrays(7, 24), x_spec=TOKENS)


def test_bfloat16():
    check(make_mesh(2, 4), column, arrays(24, 24, jnp.bfloat16), tolerance=2e-2, block_rows=SMALL)


@pytest.mark.parametrize("axis_type", [AxisType.Explicit, AxisType.Auto])
def test_fully_sharded(axis_type):
    mesh = make_fsdp_mesh(1, 2, 1, 4, axis_type=axis_type)
    spec = P(("data", "fsdp"), "model", None)
    with_fsdp = {"fsdp_axis": "fsdp"} | ({"in_spec": spec} if axis_type == AxisType.Auto else {})

    def output_of(kernel):
        return column(kernel, **with_fsdp)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tests.nn.test_linear_cross_entropy.TOKENS", P(("data", "fsdp"), None))
        check(mesh, output_of, arrays(24, 24), x_spec=spec)


# 25 entries are padded, and lie on the devices by features
@pytest.mark.parametrize("vocabulary", [pytest.param(24, marks=pytest.mark.slow), 25])
def test_inside_shard_map_the_mean_is_that_of_all_devices(vocabulary):
    """Where nothing weighs rows, and every mesh axis is mapped, as in a scan that prefetches."""
    x, kernel, targets, _ = arrays(8, vocabulary)
    targets = np.abs(targets) % vocabulary
    want = reference(x, kernel, targets, np.ones_like(targets, np.float32))
    with jax.set_mesh(make_mesh(2, 4)):
        layer = column(kernel)
        graph, state = nnx.split(layer)

        def loss(x, state, targets):
            return fa.nn.linear_cross_entropy(x, nnx.merge(graph, state), targets)

        specs = jax.tree.map(lambda leaf: jax.typeof(leaf).sharding.spec, state)
        mapped = jax.shard_map(loss, in_specs=(ROWS, specs, TOKENS), out_specs=P())
        run = jax.jit(jax.value_and_grad(mapped, argnums=(0, 1)))
        value, (dx, dstate) = run(jax.device_put(x, ROWS), state, jax.device_put(targets, TOKENS))
    for got, wanted in zip((value, dx, jax.tree.leaves(dstate)[0]), want, strict=True):
        np.testing.assert_allclose(got, wanted, atol=1e-6)


def test_a_kernel_inside_shard_map_is_this_devices_columns():
    x, kernel, targets, _ = arrays(8, 24)
    targets = np.abs(targets) % 24
    with jax.set_mesh(make_mesh(2, 4)):
        mapped = jax.shard_map(
            fa.nn.linear_cross_entropy, in_specs=(ROWS, P(None, "model"), TOKENS), out_specs=P()
        )  # fmt: skip
        value = jax.jit(mapped)(*put(x, kernel, targets))
    np.testing.assert_allclose(
        value, reference(x, kernel, targets, np.ones((BATCH, 8), np.float32))[0], rtol=1e-6
    )


def test_float64_and_no_rows_at_all():
    x, kernel, targets, weights = arrays(8, 24, "float64")
    with jax.enable_x64(True), jax.set_mesh(make_mesh(2, 4)):
        placed = put(x, kernel, np.abs(targets) % 24, weights)
        loss, gradient = jax.jit(
            jax.value_and_grad(
                lambda x, kernel, targets, weights: fa.nn.linear_cross_entropy(
                    x, kernel, targets, weights=weights, block_rows=SMALL
                )
            )
        )(*placed)
        assert loss.dtype == gradient.dtype == jnp.float64
        nothing = fa.nn.linear_cross_entropy(placed[0][:, :0], placed[1], placed[2][:, :0])
    assert float(nothing) == 0.0


def test_weights_have_no_gradient_and_no_loss_where_all_are_zero():
    with jax.set_mesh(make_mesh(2, 4)):
        *placed, weights = put(*arrays(8, 24))
        loss = jax.jit(
            jax.value_and_grad(
                lambda w: fa.nn.linear_cross_entropy(*placed, weights=w, ignore=-100)
            )
        )
        value, gradient = loss(weights)
        assert value > 0
        np.testing.assert_array_equal(gradient, 0)
        assert loss(jnp.zeros_like(weights))[0] == 0


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"targets": np.zeros((BATCH, 8), np.float32)}, ValueError, "integer dtype: got float32"),
        (
            {"targets": np.zeros((BATCH, 16), np.int32)},
            ValueError,
            "one element of targets a row of x: got [4, 16]",
        ),
        (
            {"weights": np.zeros((BATCH, 4), np.float32)},
            ValueError,
            "one element of weights a row of x: got [4, 4]",
        ),
        ({"block_rows": 0}, ValueError, "block_rows to be 1 or more: got 0"),
        ({"axis_name": "tensor"}, ValueError, "tensor"),
        (
            {"layer": fa.nn.ColumnParallelLinear},
            NotImplementedError,
            "the layer has a bias: leave it out",
        ),
        (
            {"layer": fa.nn.RowParallelLinear},
            NotImplementedError,
            "or a kernel: got RowParallelLinear",
        ),
    ],
)
def test_errors(change, error, message):
    x, kernel, targets, weights = arrays(8, 16)
    given = {"targets": targets, "weights": weights} | change
    with jax.set_mesh(make_mesh(2, 4)):
        x, output, given["targets"], given["weights"] = put(
            x, kernel, given["targets"], given["weights"]
        )
        if layer := given.pop("layer", None):
            output = layer(FEATURES, 16, rngs=nnx.Rngs(0))
        with pytest.raises(error, match=re.escape(message)):
            fa.nn.linear_cross_entropy(x, output, **given)


@pytest.mark.slow
def test_temporary_memory_on_a_tpu():
    """The temporaries of loss and gradients are less than a twentieth of the logits that never
    exist.
    """
    sequences, rows, features, entries, devices = 16, 3 * 8192, 4096, 128256, 8
    mesh = fa.check.topology_mesh("v6e:2x4", (1, devices), ("data", "model"))

    def array(shape, dtype, *spec):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=jax.NamedSharding(mesh, P(*spec)))

    x = array((sequences, rows, features), jnp.bfloat16, "data", "model", None)
    kernel, targets = (
        array((features, entries), jnp.float32, None, "model"),
        array((sequences, rows), jnp.int32, "data"),
    )
    with jax.set_mesh(mesh):
        gradients = jax.jit(jax.grad(fa.nn.linear_cross_entropy, (0, 1)))
        program = fa.check.compile_for("v6e:2x4", gradients, x, kernel, targets)
    assert program.bytes_by_kind["temporaries"] < 4 * sequences * rows * entries / devices / 20
