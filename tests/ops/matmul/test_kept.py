"""all_gather_matmul that keeps what it gathers for dw: the same gradients, one trip less, only within its memory."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import flaxasync as fa
from flaxasync import hardware
from flaxasync.ops import execution
from flaxasync.ops.matmul.products import weight_gradient, weight_gradients

pytestmark = pytest.mark.usefixtures("quick_compile")

SIZE, BATCH, ROWS, K = 4, 2, 3, 48
NARROW, WIDE = (8, 4, 4), (40, 40)  # columns of each w on one device; narrow ones share one product for dw
KEPT = BATCH * SIZE * ROWS * K * 4  # bytes of the gathered x in float32
X, W, Y = P(None, "model", None), P(None, "model"), P(None, None, "model")


@functools.cache
def operands(widths):
    """Returns x, the ws, and a dy for each of them."""
    rng = np.random.default_rng(7)
    make = lambda *shape: np.asarray(rng.standard_normal(shape), np.float32)  # noqa: E731
    ws, dys = ([make(*first, SIZE * n) for n in widths] for first in ((K,), (BATCH, SIZE * ROWS)))
    return make(BATCH, SIZE * ROWS, K), tuple(ws), tuple(dys)


def program(**options):
    """Returns the jitted function of x, ws and dys that returns ys, dx and dws."""

    def run(x, ws, dys):
        fn = jax.shard_map(lambda x, ws: fa.all_gather_matmul(x, ws, "model", **options), in_specs=(X, W), out_specs=Y)
        ys, pull = jax.vjp(fn, x, ws)
        return ys, *pull(dys)

    return jax.jit(run)


def placed(widths):
    x, ws, dys = operands(widths)
    put = lambda values, spec: tuple(jax.device_put(v, spec) for v in values)  # noqa: E731
    return jax.device_put(x, X), put(ws, W), put(dys, Y)


@pytest.fixture
def ring():
    with jax.set_mesh(jax.make_mesh((SIZE,), ("model",), devices=jax.devices()[:SIZE])):
        yield


@pytest.mark.usefixtures("ring")
@pytest.mark.parametrize(("backend", "widths"), [("xla", NARROW), ("none", WIDE)])
def test_values_and_gradients(backend, widths):
    x, ws, dys = operands(widths)
    ys, dx, dws = program(backend=backend, gathered_bytes=KEPT)(*placed(widths))
    wanted = [x @ w for w in ws], [sum(dy @ w.T for dy, w in zip(dys, ws, strict=True))]
    wanted = *wanted, [np.einsum("bmk,bmn->kn", x, dy) for dy in dys]
    for name, got, want in zip(("y", "dx", "dw"), (ys, [dx], dws), wanted, strict=True):
        for a, b in zip(got, want, strict=True):  # sums of up to 48 terms of float32 in another order
            assert np.abs(np.asarray(a) - b).max() <= 1e-5 * np.abs(b).max(), name


@pytest.mark.usefixtures("ring")
def test_x_makes_one_trip_less_where_memory_suffices():
    """A byte less than the gathered x takes, and x travels three times again: as itself twice, and dx once.

    This is the traced program. What XLA merges is counted by `test_what_xla_merges`.
    """

    def permutes(gathered_bytes):
        traced = jax.make_jaxpr(program(backend="xla", gathered_bytes=gathered_bytes))(*placed(NARROW))
        return str(traced).count("ppermute")

    assert permutes(0) == permutes(KEPT - 1)
    assert 3 * permutes(KEPT) == 2 * permutes(KEPT - 1)


@pytest.mark.slow
@pytest.mark.parametrize(("form", "trips"), [("alone", (2, 2)), ("scan", (3, 2)), ("scan and checkpoint", (3, 3))])
def test_what_xla_merges(form, trips):
    """A ring of two has no loop, so XLA merges trips of the same rows in one pass of the program.

    Trips are counted in the compiled program, without and with kept rows. Only a scan over layers separates the forward
    pass from the backward pass; in a checkpoint, the trip for y that is made again serves dw too.
    """
    counted = []
    for gathered_bytes in (0, KEPT):
        fn = functools.partial(fa.all_gather_matmul, axis_name="model", backend="xla", gathered_bytes=gathered_bytes)
        op = jax.shard_map(fn, in_specs=(X, W), out_specs=Y)

        def layer(x, w, op=op):  # the part after op sends nothing: every device reduces its own columns
            return x + jnp.sum(jnp.sin(op(x, w)), (1, 2), keepdims=True), None

        if form == "scan and checkpoint":
            layer = jax.checkpoint(layer)

        def loss(x, w, layer=layer):
            return jnp.sum((layer(x, w) if form == "alone" else jax.lax.scan(layer, x, jnp.stack([w, w])))[0])

        with jax.set_mesh(jax.make_mesh((2,), ("model",), devices=jax.devices()[:2])):
            x, (w, *_), _ = placed(NARROW)
            text = jax.jit(jax.grad(loss, (0, 1))).lower(x, w).compile().as_text()
        counted.append(text.count(" collective-permute("))  # one a trip
    assert tuple(counted) == trips


@pytest.mark.usefixtures("ring")
def test_what_is_saved():
    """What the backward pass keeps is w, and the gathered x or else x: only shards that the op was given."""
    x, (w, *_), _ = placed(NARROW)
    for limit, rows in ((KEPT, SIZE * ROWS), (0, ROWS)):
        fn = functools.partial(fa.all_gather_matmul, axis_name="model", gathered_bytes=limit)
        mapped = jax.shard_map(fn, in_specs=(X, W), out_specs=Y)
        saved = jax.tree.leaves(jax.jit(lambda *xs, mapped=mapped: jax.vjp(mapped, *xs)[1])(x, w))
        sizes = sorted(leaf.addressable_shards[0].data.size for leaf in saved if leaf.size > 1)
        assert sizes == sorted([BATCH * rows * K, w.size // SIZE])


@pytest.mark.slow
@pytest.mark.usefixtures("ring")
def test_second_derivatives():
    """The gradient of a function of dx and dw is that of the op which keeps nothing."""
    x, ws, _ = placed(NARROW)

    def penalty(x, w, gathered_bytes):
        def loss(x, w):
            fn = functools.partial(fa.all_gather_matmul, axis_name="model", gathered_bytes=gathered_bytes)
            return jnp.sum(jax.shard_map(fn, in_specs=(X, W), out_specs=Y)(x, w) ** 3)

        return sum(jnp.sum(g**2) for g in jax.grad(loss, (0, 1))(x, w))

    kept, sent = (jax.jit(jax.grad(functools.partial(penalty, gathered_bytes=n), (0, 1)))(x, ws[0]) for n in (KEPT, 0))
    for a, b in zip(kept, sent, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5 * float(jnp.abs(b).max()))


@pytest.mark.usefixtures("ring")
@pytest.mark.parametrize("limit", [-1, None, "1GiB", float("nan"), 1e9])
def test_memory_that_is_no_number_of_bytes_is_refused(limit):
    """The op, `plan` and the layers say the same, and a layer says it when it is built."""
    message = f"{{}} needs gathered_bytes to be an integer of 0 or more: got {limit!r}; use"
    with pytest.raises(ValueError, match=message.format("all_gather_matmul")):
        program(gathered_bytes=limit).trace(*placed(NARROW))
    with pytest.raises(ValueError, match=message.format("all_gather_matmul")):
        fa.plan(fa.all_gather_matmul, *QKV, chip="v5e", ring=8, gathered_bytes=limit)
    with pytest.raises(ValueError, match=message.format("ParallelMLP")):
        fa.nn.ParallelMLP(8, 16, gathered_bytes=limit, rngs=nnx.Rngs(0))


@pytest.mark.parametrize(("widths", "products"), [(NARROW, 1), (WIDE, 2)])
def test_narrow_gradients_share_one_product(widths, products):
    x, _, dys = operands(widths)
    dys = tuple(dy[..., :n] for dy, n in zip(dys, widths, strict=True))
    text = str(jax.make_jaxpr(weight_gradients)(x, dys))
    assert text.count("dot_general") == products
    for got, dy in zip(weight_gradients(x, dys), dys, strict=True):
        np.testing.assert_allclose(got, weight_gradient(x, dy), rtol=1e-5, atol=1e-4)


QKV, UP = ((4, 512, 4096), (4096, 768)), ((4, 512, 4096), (4096, 3584))  # of the 8B preset on a ring of eight
GATHERED = 8 * 4 * 512 * 4096 * 2


@pytest.mark.parametrize(("shapes", "chip", "kept"), [(QKV, "v5e", True), (UP, "v5e", False), (UP, "v6e", True)])
def test_plan_keeps_where_links_bind(shapes, chip, kept):
    """On v5e the products of the MLP take longer than their transfers, so that a trip less gains nothing."""
    plan = fa.plan(fa.all_gather_matmul, *shapes, chip=chip, ring=8, gathered_bytes=GATHERED)
    assert (plan.costs["fused"].kept == GATHERED) == kept
    assert ("keeps the gathered x, 128 MiB" in plan.reason) == kept == ("keeps 128 MiB of gathered x" in str(plan))
    less = fa.plan(fa.all_gather_matmul, *shapes, chip=chip, ring=8, gathered_bytes=GATHERED - 1)
    assert less == fa.plan(fa.all_gather_matmul, *shapes, chip=chip, ring=8)
    assert (less.seconds["fused"] > plan.seconds["fused"]) == kept


def test_plan_keeps_nothing_that_the_chip_cannot_hold():
    """The gathered rows alone are as large as the memory of a v5e. Not keeping them fits, and is still advised."""
    shapes, options = ((1, 65536, 16384), (16384, 1024)), {"chip": "v5e", "ring": 8}
    kept = fa.plan(fa.all_gather_matmul, *shapes, gathered_bytes=2**40, **options)
    assert kept == fa.plan(fa.all_gather_matmul, *shapes, **options)
    assert "nothing fits" not in kept.reason
    fewer_rows = (1, 8192, 16384), shapes[1]  # negative test: an eighth of them is kept
    assert fa.plan(fa.all_gather_matmul, *fewer_rows, gathered_bytes=2**40, **options).costs["xla"].kept == 2**31


def test_a_backend_that_plan_does_not_know_keeps_nothing(monkeypatch):
    """The kernel of dx refuses blocks of this size, so that `plan` has no cost of "fused", which can still multiply."""
    x, w = (1, 8192, 16384), (16384, 1024)
    monkeypatch.setattr(execution.mesh, "chip", lambda: hardware.chip("v5e"))
    monkeypatch.setattr(execution.mesh, "check_tpu", lambda *_: None)
    assert "fused" not in fa.plan(fa.all_gather_matmul, x, w, chip="v5e", ring=8).costs
    call = {"shapes": [x, w], "ring": 8, "gathered_bytes": 2**40}
    assert not execution.decide("all_gather_matmul", "fused", **call).keep
    assert execution.decide("all_gather_matmul", "stateful", **call).keep


@pytest.mark.parametrize("layer", [pytest.param("mlp", marks=pytest.mark.slow), "attention"])
def test_layers_have_the_option(layer):
    """The layers give the option to their column-parallel products; the trips are counted in a layer's gradient."""

    def permutes(gathered_bytes):
        options = {"backend": "xla", "gathered_bytes": gathered_bytes, "rngs": nnx.Rngs(0)}
        model = fa.nn.ParallelMLP(8, 16, **options) if layer == "mlp" else fa.nn.ParallelSelfAttention(8, 4, **options)
        graph, state = nnx.split(model)
        loss = lambda state, x: jnp.sum(nnx.merge(graph, state)(x))  # noqa: E731
        x = jax.device_put(jnp.ones((1, 8, 8)), X)
        return str(jax.make_jaxpr(jax.grad(loss))(state, x)).count("ppermute")

    with jax.set_mesh(jax.make_mesh((SIZE,), ("model",), devices=jax.devices()[:SIZE])):
        assert permutes(8 * 8 * 4) < permutes(0)
