"""`fa.nn.ParallelMoE` against all experts on all rows in NumPy: meshes, routers, storage,
statistics, errors.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType

import flaxasync as fa
from flaxasync.nn.router import route, routing_facts
from tests.nn.conftest import ROWS, SAME, drawn, make_mesh

pytestmark = pytest.mark.usefixtures("quick_compile")
FEATURES, HIDDEN, BATCH, LENGTH = 16, 24, 4, 8


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def arrays(moe):
    return {
        name: np.asarray(getattr(moe, name)[...], np.float64) for name in ("up", "gate", "down")
    }


def routed(moe, x, k, options=None, bias=0.0):
    """Returns the ids and weights of the rows of x, as NumPy computes them."""
    options = options or fa.nn.RouterOptions()
    logits = x @ np.asarray(moe.router.kernel[...], np.float64)
    score = softmax if options.scores == "softmax" else sigmoid
    chosen_by = logits if options.choose_first else score(logits)
    ids = np.argsort(-(chosen_by + bias), axis=-1, kind="stable")[..., :k]
    weights = np.take_along_axis(logits if options.choose_first else score(logits), ids, -1)
    weights = score(weights) if options.choose_first else weights
    if options.normalize:
        weights = weights / weights.sum(-1, keepdims=True)
    return ids, weights * options.scale


def dense(moe, x, k, options=None, bias=0.0):
    x = np.asarray(x, np.float64)
    ids, weights = routed(moe, x, k, options, bias)
    y, w = np.zeros_like(x), arrays(moe)
    for expert in range(w["up"].shape[0]):
        gate, up = (x @ w[name][expert] for name in ("gate", "up"))
        share = np.where(ids == expert, weights, 0).sum(-1, keepdims=True)
        y += share * ((gate * sigmoid(gate) * up) @ w["down"][expert])
    return y


X = np.random.default_rng(1).standard_normal((BATCH, LENGTH, FEATURES)).astype(np.float32)


@pytest.fixture(autouse=True)
def mesh():
    with jax.set_mesh(make_mesh(2, 4)):
        yield


def make(experts=8, k=2, **options):
    return drawn(
        lambda: fa.nn.ParallelMoE(
            FEATURES, HIDDEN, experts, experts_per_token=k, rngs=nnx.Rngs(0), **options
        )
    )


@nnx.jit
def call(moe, x):
    return moe(x)


def apply(moe, x, spec=ROWS):
    return call(moe, jax.device_put(x, spec))


def close(got, want, tolerance=1e-5):
    np.testing.assert_allclose(np.asarray(got), want, rtol=0, atol=tolerance * np.abs(want).max())


@pytest.mark.parametrize(("shape", "experts", "k", "fsdp", "types"), [
    ((2, 4), 8, 2, "data", AxisType.Explicit),
    ((2, 4), 6, 1, None, AxisType.Explicit),  # padded to 8
    *(pytest.param(*case, marks=pytest.mark.slow) for case in [
        ((1, 8), 4, 2, None, AxisType.Explicit),  # hidden features are split
        ((1, 8), 16, 2, None, AxisType.Explicit), ((4, 1), 4, 4, "data", AxisType.Explicit),
        ((2, 4), 8, 2, "data", AxisType.Auto), ((1, 8), 4, 2, None, AxisType.Auto),
    ]),
])  # fmt: skip
def test_agrees_with_all_experts(shape, experts, k, fsdp, types):
    with jax.set_mesh(make_mesh(*shape, types)):
        moe = make(experts, k, fsdp_axis=fsdp)
        close(apply(moe, X), dense(moe, X, k))


@pytest.mark.slow
@pytest.mark.parametrize("backend", [None, "exchange"])
def test_gradients_agree_with_those_of_all_experts(backend):
    def loss(weights, x):
        logits = jax.nn.softmax(x @ weights["router"])
        values, ids = jax.lax.top_k(logits, 2)
        values /= values.sum(-1, keepdims=True)
        y = jnp.zeros_like(x)
        for expert in range(6):
            h = jax.nn.silu(x @ weights["gate"][expert]) * (x @ weights["up"][expert])
            y += jnp.sum(jnp.where(ids == expert, values, 0), -1, keepdims=True) * (
                h @ weights["down"][expert]
            )
        return jnp.sum(jnp.sin(y))

    moe = make(6, backend=backend)
    grad = nnx.grad(lambda moe, x: jnp.sum(jnp.sin(moe(x))), argnums=(0, 1))
    found, dx = nnx.jit(grad)(moe, jax.device_put(X, ROWS))
    weights = {
        name: jnp.asarray(np.asarray(getattr(moe, name)[...])) for name in ("up", "gate", "down")
    }
    weights["router"] = jnp.asarray(np.asarray(moe.router.kernel[...]))
    wanted, dx_wanted = jax.grad(loss, (0, 1))(weights, X)
    close(dx, dx_wanted)
    for name in ("up", "gate", "down"):
        close(found[name].get_value(), wanted[name])
    close(found["router"]["kernel"].get_value(), wanted["router"])


@pytest.mark.parametrize("rows", [pytest.param(8, marks=pytest.mark.slow), 3])
def test_rows_that_all_devices_have(rows):
    moe, x = make(), X[:, :rows]
    close(apply(moe, x, SAME), dense(moe, x, 2))


ROUTERS = [
    (fa.nn.RouterOptions(choose_first=True), 0.0),
    pytest.param(fa.nn.RouterOptions(normalize=False), 0.0, marks=pytest.mark.slow),
    (fa.nn.RouterOptions("sigmoid", scale=2.5, selection_bias=True), np.linspace(-0.5, 0.5, 8)),
]


@pytest.mark.parametrize(("options", "bias"), ROUTERS)
def test_routers(options, bias):
    moe = make(k=3, router=options)
    if options.selection_bias:
        moe.router.selection_bias[...] = jnp.asarray(bias, jnp.float32)
    close(apply(moe, X), dense(moe, X, 3, options, bias))
    gradients = jax.eval_shape(nnx.grad(lambda moe: jnp.sum(moe(jax.device_put(X, ROWS)))), moe)
    assert "selection_bias" not in gradients["router"]


def test_losses_and_statistics_are_those_of_all_rows():
    moe, x = make(), X.astype(np.float64)
    logits = x @ np.asarray(moe.router.kernel[...], np.float64)
    ids, _ = routed(moe, x, 2)
    share = np.bincount(ids.reshape(-1), minlength=8) / ids.size
    y, routing = nnx.jit(lambda moe, x: moe.with_routing(x))(moe, jax.device_put(X, ROWS))
    again, recorded = nnx.capture(moe, nnx.Intermediate)(jax.device_put(X, ROWS))
    close(again, np.asarray(y))
    close(routing.share, share)
    close(routing.load_balance_loss, 8 * np.sum(share * softmax(logits).mean((0, 1))))
    close(routing.z_loss, np.mean(np.log(np.exp(logits).sum(-1)) ** 2))
    assert float(routing.dropped) == 0
    close(recorded["routing"].get_value()[0].share, share)


def test_capacity_drops_and_says_how_much():
    moe = make(capacity_factor=2.0)
    y, routing = nnx.jit(lambda moe, x: moe.with_routing(x))(moe, jax.device_put(X, ROWS))
    ids, _ = routed(moe, X.astype(np.float64), 2)
    # A device has 2 rows of each of 2 sequences: 1.0 of them are the mean of an expert. Of each
    # sequence it takes one.
    halves = ids.reshape(BATCH, LENGTH // 2, 2 * 2)
    left_out = sum(
        np.maximum(np.bincount(half, minlength=8) - 1, 0).sum() for half in halves.reshape(-1, 4)
    )
    assert left_out > 0
    close(routing.dropped, left_out / ids.size)
    assert np.abs(np.asarray(y) - dense(moe, X, 2)).max() > 1e-3


def test_rows_that_pad_a_share_choose_no_expert():
    """Nine rows on four devices that all have them: three rows each, and the last device has none."""
    x = np.resize(X, (2, 9, FEATURES))
    with jax.set_mesh(make_mesh(2, 4)):
        moe = make(capacity_factor=1.0)
        _, routing = nnx.jit(lambda moe, x: moe.with_routing(x))(moe, jax.device_put(x, SAME))
    ids, _ = routed(moe, x.astype(np.float64), 2)
    shares = ids.reshape(2 * 3, 3, 2)
    halves = [half for share in shares for half in (share[:2], share[2:])]
    left_out = sum(
        np.maximum(np.bincount(half.reshape(-1), minlength=8) - 1, 0).sum() for half in halves
    )
    close(routing.dropped, left_out / ids.size)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["none", "exchange"])
def test_rows_that_pad_a_share_change_no_gradient(backend):
    """Against one device for the experts, whose share is not padded."""
    x = np.resize(X, (2, 9, FEATURES))

    def loss(moe, x):
        return jnp.sum(moe(x) ** 2)

    found = []
    for devices in (1, 4):
        with jax.set_mesh(make_mesh(2, devices)):
            gradients = nnx.jit(nnx.grad(loss, argnums=(0, 1)))(
                make(backend=backend), jax.device_put(x, SAME)
            )
            found.append([np.asarray(leaf) for leaf in jax.tree.leaves(gradients)])
    for whole, padded in zip(*found, strict=True):
        close(padded, whole)


def test_scores_are_those_of_float32_however_the_router_is_stored():
    with jax.set_mesh(make_mesh(2, 4)):
        routings = []
        for fsdp_axis in (None, "data"):
            moe = make(dtype=jnp.bfloat16, fsdp_axis=fsdp_axis)
            x = jax.device_put(X, ROWS)
            routings.append(nnx.jit(lambda moe, x: moe.with_routing(x)[1])(moe, x))
    for whole, gathered in zip(*map(jax.tree.leaves, routings), strict=True):
        np.testing.assert_array_equal(whole, gathered)


def test_a_shared_expert_is_added():
    moe, x = make(shared_hidden=32), X.astype(np.float64)
    gate, up, down = (
        np.asarray(getattr(moe.shared, n).kernel[...], np.float64) for n in ("gate", "up", "down")
    )
    close(apply(moe, X), dense(moe, x, 2) + (x @ gate * sigmoid(x @ gate) * (x @ up)) @ down)


def test_nan_in_a_row_stays_in_it():
    x = X.copy()
    x[1, 3, 0] = np.nan
    y = np.array(apply(make(fsdp_axis="data"), x))  # the program of the first case of this file
    assert np.isnan(y[1, 3]).all()
    y[1, 3] = 0
    assert np.isfinite(y).all()


@pytest.mark.parametrize(("options", "message"), [
    ({"experts_per_token": 9}, "experts_per_token=9; use 1 to 8"),
    ({"experts_per_token": 0}, "experts_per_token=0"),
    ({"capacity_factor": 0}, "capacity_factor above 0"),
    ({"experts": 3, "hidden": 30}, "hidden=30 on 4 devices; use 28 or 32"),
    ({"kernel_metadata": {"out_sharding": (None, "data")}}, "no out_sharding in kernel_metadata"),
])  # fmt: skip
def test_refuses_what_does_not_fit(options, message):
    options = {"experts": 8, "hidden": HIDDEN, "experts_per_token": 2} | options
    with pytest.raises(ValueError, match=message):
        fa.nn.ParallelMoE(FEATURES, rngs=nnx.Rngs(0), **options)
    with pytest.raises(ValueError, match="'softmax' or 'sigmoid'"):
        fa.nn.RouterOptions(scores="tanh")


ROUTINGS = {
    "normalised": fa.nn.RouterOptions("sigmoid"),
    "chosen first": fa.nn.RouterOptions("sigmoid", choose_first=True),
    "as they are": fa.nn.RouterOptions("sigmoid", normalize=False),
    "biased": fa.nn.RouterOptions("sigmoid", selection_bias=True),
    "softmax": fa.nn.RouterOptions("softmax"),
    "softmax of the chosen": fa.nn.RouterOptions("softmax", choose_first=True, normalize=False),
}


def weights_in_float64(logits, ids, options):
    """Returns the weights of the chosen experts as NumPy computes them, whose sigmoids are not zero
    above -700.
    """
    chosen = np.take_along_axis(logits, ids, -1)
    if options.scores == "sigmoid":
        weights = 1 / (1 + np.exp(-chosen))
    elif options.choose_first:
        weights = softmax(chosen)
    else:
        weights = np.take_along_axis(softmax(logits), ids, -1)
    if options.normalize:
        weights = weights / weights.sum(-1, keepdims=True)
    return weights


# one program for each kind of router
@functools.partial(jax.jit, static_argnames="options")
@functools.partial(jax.value_and_grad, has_aux=True)
def weigh(logits, bias, options):
    choice = route(logits, 3, options, bias)
    statistics = routing_facts(logits, choice, jnp.int32(0), frozenset())
    return jnp.sum(choice.weights * jnp.arange(1.0, 4.0)[None]), (choice, statistics)


@pytest.mark.parametrize("low", [0.0, -30.0, -46.0, -88.0, -110.0, -400.0, 40.0, 100.0])
@pytest.mark.parametrize("options", [
    pytest.param(options, marks=[pytest.mark.slow] if options.scores == "softmax" else [], id=name)
    for name, options in ROUTINGS.items()
])  # fmt: skip
def test_routers_are_finite_and_right_at_the_ends_of_float32(options, low):
    """From -88 on the sigmoid is zero in float32, and from -46 on so was the square that a gradient
    divided by.
    """
    rng = np.random.default_rng(3)
    logits = (low + rng.permutation(8) * 0.5 + np.zeros((5, 1))).astype(np.float32)
    bias = np.zeros(8, np.float32) if options.selection_bias else None
    (_, (choice, statistics)), gradient = weigh(logits, bias, options=options)
    exact = logits.astype(np.float64)
    ids = np.argsort(-exact, axis=-1)[:, :3]
    if not options.selection_bias:  # a bias is added to scores, which may be equal in float32
        np.testing.assert_array_equal(choice.ids, ids)
    want = weights_in_float64(exact, np.asarray(choice.ids), options)
    np.testing.assert_allclose(choice.weights, want, rtol=1e-5, atol=1e-30)
    assert np.isfinite(gradient).all()
    assert np.isfinite(statistics.load_balance_loss)
    if options.scores == "sigmoid":
        scores = 1 / (1 + np.exp(-exact))
        mean = (scores / scores.sum(-1, keepdims=True)).mean(0)
        np.testing.assert_allclose(
            statistics.load_balance_loss, 8 * np.sum(np.asarray(statistics.share) * mean), rtol=1e-5
        )


def test_the_gradient_of_a_sigmoid_router_is_right_where_scores_are_tiny():
    """d(w_i)/d(logit_j) = w_i (1 - s_j) ((i == j) - w_j) for normalised weights of sigmoids s."""
    logits = np.array([[-60.0, -61.0, -90.0, -62.0]], np.float32)
    options = fa.nn.RouterOptions("sigmoid")
    first = jax.grad(lambda logits: route(logits, 2, options, None).weights[0, 0])
    gradient = jax.jit(first)(logits)
    chosen = 1 / (1 + np.exp(-logits.astype(np.float64)))[0, :2]
    weights = chosen / chosen.sum()
    want = [weights[0] * (1 - weights[0]), -weights[0] * weights[1], 0, 0]
    np.testing.assert_allclose(gradient[0], want, rtol=1e-5)
