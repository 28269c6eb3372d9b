"""What the backward pass keeps: rows that all_gather_matmul gathered, in limited memory, and what a
policy asks for.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import flaxasync as fa
from flaxasync import hardware
from flaxasync.ops import choose
from flaxasync.ops.matmul.products import weight_gradient, weight_gradients
from tests.kernels.conftest import draw
from tests.ops.matmul.conftest import check_parity

pytestmark = pytest.mark.usefixtures("quick_compile")

# rows, and columns of w or features of x, are those of one device
SIZE, BATCH, ROWS, K, N = 4, 2, 3, 48, 6
# columns of each w on one device; narrow ones share one product for dw
NARROW, WIDE = (8, 4, 4), (40, 40)
KEPT = BATCH * SIZE * ROWS * K * 4  # bytes of the gathered x in float32
X, W, Y = P(None, "model", None), P(None, "model"), P(None, None, "model")
OPS = {  # op -> the shapes of x and w, their specs, and the spec of y
    fa.all_gather_matmul: ((SIZE * ROWS, K), (K, SIZE * N), X, W, Y),
    fa.matmul_reduce_scatter: ((SIZE * ROWS, SIZE * K), (SIZE * K, N), Y, P("model", None), X),
    fa.matmul_all_reduce: ((ROWS, SIZE * K), (SIZE * K, N), Y, P("model", None), P()),
}
JAX_POLICY = jax.checkpoint_policies.dots_with_no_batch_dims_saveable


@pytest.fixture(autouse=True)
def ring():
    with jax.set_mesh(jax.make_mesh((SIZE,), ("model",), devices=jax.devices()[:SIZE])):
        yield


def mapped(op, **options):
    """Returns an op on global arrays, and operands x and w."""
    x_shape, w_shape, x_spec, w_spec, y_spec = OPS[op]
    fn = jax.shard_map(
        functools.partial(op, axis_name="model", **options),
        in_specs=(x_spec, w_spec),
        out_specs=y_spec,
    )
    return (
        fn,
        jax.device_put(draw((BATCH, *x_shape)), x_spec),
        jax.device_put(draw(w_shape, seed=1), w_spec),
    )


def loss_of(op, wrap, **options):
    """Returns a loss, which is a function of x and w, and the operands x and w."""
    fn, x, w = mapped(op, **options)
    return wrap(lambda x, w: jnp.sum(jnp.sin(fn(x, w)) ** 2)), x, w


def traced(op, wrap=lambda loss: loss, **options):
    """Returns the text of the traced gradient."""
    loss, x, w = loss_of(op, wrap, **options)
    return str(jax.make_jaxpr(jax.grad(loss, (0, 1)))(x, w))


def with_policy(policy):
    return functools.partial(jax.checkpoint, policy=policy)


def counts(op, wrap=lambda loss: loss, **options):
    """Returns the numbers of matmuls and of transfers in the traced gradient, of which "none" has
    one for each trip.
    """
    text = traced(op, wrap, backend="none", **options)
    return text.count(" dot_general["), sum(
        map(text.count, (" all_gather[", " reduce_scatter[", " psum_invariant["))
    )


def sizes_of_saved(fn, x, w):
    """Returns the sizes of the arrays, of all devices together, that a function keeps for its
    gradient.
    """
    saved = jax.tree.leaves(jax.eval_shape(lambda x, w: jax.vjp(fn, x, w)[1], x, w))
    return sorted(leaf.size for leaf in saved if leaf.size > 1)


@pytest.mark.parametrize(("backend", "widths"), [("xla", NARROW), ("none", WIDE)])
def test_values_and_gradients(backend, widths):
    ns, options = [SIZE * n for n in widths], {"backend": backend, "gathered_bytes": KEPT}
    check_parity("all_gather_matmul", SIZE, batch=BATCH, m=SIZE * ROWS, k=K, ns=ns, **options)


def test_x_makes_one_trip_less_where_memory_suffices():
    """A byte less than the gathered x takes, and x travels three times again: as itself twice, and
    dx once.

    This is the traced program. What XLA merges is counted by `test_what_xla_merges`.
    """
    limits = 0, KEPT - 1, KEPT
    permutes = [
        traced(fa.all_gather_matmul, backend="xla", gathered_bytes=n).count("ppermute")
        for n in limits
    ]
    assert permutes[0] == permutes[1]
    assert 3 * permutes[2] == 2 * permutes[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "trips"), [("alone", (2, 2)), ("scan", (3, 2)), ("scan and checkpoint", (3, 3))]
)
def test_what_xla_merges(form, trips):
    """A ring of two has no loop, so XLA merges trips of the same rows in one pass of the program.

    Trips are counted in the compiled program, without and with kept rows. Only a scan over layers
    separates the forward pass from the backward pass; in a checkpoint, the trip for y that is made
    again serves dw too.
    """
    counted = []
    for gathered_bytes in (0, KEPT):
        fn = functools.partial(
            fa.all_gather_matmul, axis_name="model", backend="xla", gathered_bytes=gathered_bytes
        )
        op = jax.shard_map(fn, in_specs=(X, W), out_specs=Y)

        # the part after op sends nothing: every device reduces its own columns
        def layer(x, w, op=op):
            return x + jnp.sum(jnp.sin(op(x, w)), (1, 2), keepdims=True), None

        if form == "scan and checkpoint":
            layer = jax.checkpoint(layer)

        def loss(x, w, layer=layer):
            return jnp.sum(
                (layer(x, w) if form == "alone" else jax.lax.scan(layer, x, jnp.stack([w, w])))[0]
            )

        with jax.set_mesh(jax.make_mesh((2,), ("model",), devices=jax.devices()[:2])):
            x, w = (
                jax.device_put(draw((BATCH, SIZE * ROWS, K)), X),
                jax.device_put(draw((K, SIZE * N)), W),
            )
            text = jax.jit(jax.grad(loss, (0, 1))).lower(x, w).compile().as_text()
        counted.append(text.count(" collective-permute("))  # one a trip
    assert tuple(counted) == trips


@pytest.mark.parametrize(("limit", "trips"), [(0, 3), (KEPT, 2)])
def test_what_is_saved(limit, trips):
    """The op keeps w, and the gathered x or else x. fa.save_matmuls keeps the product, too, and
    repeats no trip.

    x travels for y and, unless its gathered rows are kept, for dw; the sums of dx make the other
    trip.
    """
    op, options = fa.all_gather_matmul, {"gathered_bytes": limit}
    x, w, y = BATCH * SIZE * ROWS * K, K * SIZE * N, BATCH * SIZE * ROWS * SIZE * N
    rows = SIZE * x if limit else x  # every device has all rows
    assert sizes_of_saved(*mapped(op, **options)) == sorted([rows, w])
    assert sizes_of_saved(*loss_of(op, with_policy(fa.save_matmuls), **options)) == sorted(
        [rows, w, y]
    )
    assert counts(op, with_policy(fa.save_matmuls), **options)[1] == trips
    # Negative test: the policy of JAX keeps the operands alone.
    assert sizes_of_saved(*loss_of(op, with_policy(JAX_POLICY), **options)) == sorted([x, w])
    assert counts(op, with_policy(JAX_POLICY), **options)[1] == trips + 1


@pytest.mark.slow
def test_second_derivatives():
    """The gradient of a function of dx and dw is that of the op which keeps nothing."""
    results = []
    for limit in (KEPT, 0):
        fn, x, w = mapped(fa.all_gather_matmul, gathered_bytes=limit)

        def penalty(x, w, fn=fn):
            return sum(
                jnp.sum(g**2) for g in jax.grad(lambda x, w: jnp.sum(fn(x, w) ** 3), (0, 1))(x, w)
            )

        results.append(jax.jit(jax.grad(penalty, (0, 1)))(x, w))
    for kept, sent in zip(*results, strict=True):
        np.testing.assert_allclose(kept, sent, rtol=1e-4, atol=1e-5 * float(jnp.abs(sent).max()))


@pytest.mark.parametrize("limit", [-1, None, "1GiB", float("nan"), 1e9])
def test_memory_that_is_no_number_of_bytes_is_refused(limit):
    """The op, `plan` and the layers say the same, and a layer says it when it is built."""
    message = f"{{}} needs gathered_bytes to be an integer of 0 or more: got {limit!r}; use"
    with pytest.raises(ValueError, match=message.format("all_gather_matmul")):
        traced(fa.all_gather_matmul, gathered_bytes=limit)
    with pytest.raises(ValueError, match=message.format("all_gather_matmul")):
        fa.plan(fa.all_gather_matmul, *QKV, chip="v5e", ring=8, gathered_bytes=limit)
    with pytest.raises(ValueError, match=message.format("ParallelMLP")):
        fa.nn.ParallelMLP(8, 16, gathered_bytes=limit, rngs=nnx.Rngs(0))


@pytest.mark.parametrize(("widths", "products"), [(NARROW, 1), (WIDE, 2)])
def test_narrow_gradients_share_one_product(widths, products):
    x, dys = (
        draw((BATCH, SIZE * ROWS, K)),
        tuple(draw((BATCH, SIZE * ROWS, n), seed=n) for n in widths),
    )
    text = str(jax.make_jaxpr(weight_gradients)(x, dys))
    assert text.count("dot_general") == products
    for got, dy in zip(weight_gradients(x, dys), dys, strict=True):
        np.testing.assert_allclose(got, weight_gradient(x, dy), rtol=1e-5, atol=1e-4)


# of the 8B preset on a ring of eight
QKV, UP = ((4, 512, 4096), (4096, 768)), ((4, 512, 4096), (4096, 3584))
GATHERED = 8 * 4 * 512 * 4096 * 2


@pytest.mark.parametrize(
    ("shapes", "chip", "kept"), [(QKV, "v5e", True), (UP, "v5e", False), (UP, "v6e", True)]
)
def test_plan_keeps_where_links_bind(shapes, chip, kept):
    """On v5e the products of the MLP take longer than their transfers, so that a trip less gains
    nothing.
    """
    plan = fa.plan(fa.all_gather_matmul, *shapes, chip=chip, ring=8, gathered_bytes=GATHERED)
    assert (plan.costs["fused"].kept == GATHERED) == kept
    (line,) = [line for line in str(plan).splitlines() if line.startswith("  fused ")]
    assert (
        ("keeps the gathered x, 128 MiB" in plan.reason)
        == kept
        == ("keeps 128 MiB of gathered x" in line)
    )
    less = fa.plan(fa.all_gather_matmul, *shapes, chip=chip, ring=8, gathered_bytes=GATHERED - 1)
    assert less == fa.plan(fa.all_gather_matmul, *shapes, chip=chip, ring=8)
    assert (less.seconds["fused"] > plan.seconds["fused"]) == kept


def test_plan_keeps_nothing_that_the_chip_cannot_hold():
    """The gathered rows alone are as large as the memory of a v5e. Not keeping them fits, and is
    still advised.
    """
    shapes, options = ((1, 65536, 16384), (16384, 1024)), {"chip": "v5e", "ring": 8}
    kept = fa.plan(fa.all_gather_matmul, *shapes, gathered_bytes=2**40, **options)
    assert kept == fa.plan(fa.all_gather_matmul, *shapes, **options)
    assert "nothing fits" not in kept.reason
    fewer_rows = (1, 8192, 16384), shapes[1]  # negative test: an eighth of them is kept
    assert (
        fa.plan(fa.all_gather_matmul, *fewer_rows, gathered_bytes=2**40, **options)
        .costs["xla"]
        .kept
        == 2**31
    )


def test_a_backend_that_plan_does_not_know_keeps_nothing(monkeypatch):
    """The kernel of dx refuses blocks of this size, so that `plan` has no cost of "fused", which
    can still multiply.
    """
    x, w = (1, 8192, 16384), (16384, 1024)
    monkeypatch.setattr(choose.mesh, "chip", lambda: hardware.chip("v5e"))
    monkeypatch.setattr(choose.mesh, "check_tpu", lambda *_: None)
    assert "fused" not in fa.plan(fa.all_gather_matmul, x, w, chip="v5e", ring=8).costs
    call = {"shapes": [x, w], "ring": 8, "gathered_bytes": 2**40}
    assert not choose.decide("all_gather_matmul", "fused", **call).keep
    assert choose.decide("all_gather_matmul", "stateful", **call).keep


@pytest.mark.slow
@pytest.mark.parametrize("layer", ["mlp", "attention"])
def test_layers_have_the_option(layer):
    """The layers give the option to their column-parallel products; the trips are counted in a
    layer's gradient.
    """

    def permutes(gathered_bytes):
        options = {"backend": "xla", "gathered_bytes": gathered_bytes, "rngs": nnx.Rngs(0)}
        model = (
            fa.nn.ParallelMLP(8, 16, **options)
            if layer == "mlp"
            else fa.nn.ParallelSelfAttention(8, 4, **options)
        )
        graph, state = nnx.split(model)
        loss = lambda state, x: jnp.sum(nnx.merge(graph, state)(x))  # noqa: E731
        x = jax.device_put(jnp.ones((1, 8, 8)), X)
        return str(jax.make_jaxpr(jax.grad(loss))(state, x)).count("ppermute")

    assert permutes(8 * 8 * 4) < permutes(0)


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.__name__)
def test_neither_products_nor_transfers_are_repeated(op):
    plain = counts(op)
    assert counts(op, with_policy(fa.save_matmuls)) == plain
    assert counts(op, with_policy(jax.checkpoint_policies.nothing_saveable)) == (
        plain[0] + 1,
        plain[1] + 1,
    )


def test_policies_that_do_not_ask_for_the_names_are_as_without_them():
    op = fa.all_gather_matmul
    repeated = counts(op, with_policy(None))
    assert counts(op, with_policy(JAX_POLICY)) == repeated
    assert (
        counts(op, with_policy(jax.checkpoint_policies.save_only_these_names("another")))
        == repeated
    )


def test_matmuls_that_are_none_of_ours_are_kept_as_by_the_policy_of_jax():
    x = jnp.ones((4, 4))

    def matmuls(policy):
        loss = jax.checkpoint(lambda x: jnp.sum(jnp.sin(jnp.sin(x @ x) @ x)), policy=policy)
        return str(jax.make_jaxpr(jax.grad(loss))(x)).count("dot_general")

    assert matmuls(fa.save_matmuls) == matmuls(JAX_POLICY) < matmuls(None)


@pytest.mark.parametrize(
    ("op", "backend"),
    [
        (fa.all_gather_matmul, "none"),
        (fa.matmul_reduce_scatter, "xla"),
        (fa.matmul_all_reduce, "none"),
    ],
)
def test_gradients_are_those_of_the_loss_without_a_checkpoint(op, backend):
    gradients = []
    for wrap in (lambda loss: loss, with_policy(fa.save_matmuls)):
        loss, x, w = loss_of(op, wrap, backend=backend)
        gradients.append(jax.jit(jax.grad(loss, (0, 1)))(x, w))
    for name, want, got in zip(("dx", "dw"), *gradients, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6, err_msg=name)
