"""Every op on every backend against one unsharded float32 reference: y, dx, dw; then composition and bad input."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import flaxasync as fa
from tests.grids import sparse

pytestmark = pytest.mark.usefixtures("quick_compile")

# In float32 sums of up to R * k terms are added in another order; bfloat16 keeps 8 bits, and partial sums travel in it.
TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2}
BACKENDS = ["xla", "none"]


def assert_close(got, want, dtype, name):
    got, want = np.asarray(got, np.float32), np.asarray(want, np.float32)
    error = np.abs(got - want).max() / max(np.abs(want).max(), 1e-6)
    assert error <= TOLERANCE[dtype], f"{name}: relative error {error:.2e}"


def specs(op):
    """Returns the specs of x, w and y: the batch is sharded over data, rows or columns over model."""
    by_rows, by_columns = P("data", "model", None), P("data", None, "model")
    return {
        "all_gather_matmul": (by_rows, P(None, "model"), by_columns),
        "matmul_reduce_scatter": (by_columns, P("model", None), by_rows),
        "matmul_all_reduce": (by_columns, P("model", None), P("data", None, None)),
    }[op]


def parity(op, size, *, rows, batch=2, dtype="float32", data=1, axis_type=AxisType.Explicit, check_vma=True, **options):
    """Compares y, dx and dw of an op on a (data, model) mesh with those of one device in float32."""
    mesh = jax.make_mesh((data, size), ("data", "model"), (axis_type,) * 2, devices=jax.devices()[: data * size])
    x_spec, w_spec, y_spec = specs(op)
    k, n = 6 * size, 4 * size
    m = rows if op == "matmul_all_reduce" else rows * size
    rng = np.random.default_rng(rows + 10 * size)
    # The dtype represents the values exactly, so the comparison measures the op and not the rounding of its input.
    x, w, dy = (
        np.asarray(rng.standard_normal(shape), jnp.dtype(dtype))
        for shape in [(batch * data, m, k), (k, n), (batch * data, m, n)]
    )
    fn = functools.partial(getattr(fa, op), axis_name="model", **options)

    @jax.jit
    def sharded(x, w, dy):
        # dy is given as an argument, so a wrong sum over a replicated axis cannot cancel out.
        y, vjp = jax.vjp(jax.shard_map(fn, in_specs=(x_spec, w_spec), out_specs=y_spec, check_vma=check_vma), x, w)
        return y, *vjp(dy)

    with jax.set_mesh(mesh):
        got = sharded(*(jax.device_put(v, s) for v, s in zip((x, w, dy), (x_spec, w_spec, y_spec), strict=True)))
    x32, w32, dy32 = (np.asarray(v, np.float32) for v in (x, w, dy))
    want = (x32 @ w32, dy32 @ w32.T, np.einsum("bmk,bmn->kn", x32, dy32))
    for name, g, r in zip(("y", "dx", "dw"), got, want, strict=True):
        assert g.dtype == jnp.dtype(dtype)
        assert_close(g, r, dtype, name)


OPS = ["all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"]
SIZES = [1, 2, 3, 5, 8]
AXIS_TYPES = [AxisType.Explicit, AxisType.Auto]


@pytest.mark.parametrize(
    ("op", "size", "directions"), sparse(OPS, SIZES, [1, 2], keep=lambda *numbers: sum(numbers) % 2 == 0)
)
def test_ring_matches_the_reference(op, size, directions):
    parity(op, size, rows=3, batch=3, backend="xla", directions=directions)


@pytest.mark.parametrize(("op", "size"), sparse(OPS, [1, 2, 5], keep=lambda op, size: op == size))
def test_one_collective_matches_the_reference(op, size):
    parity(op, size, rows=3, batch=1, backend="none")


@pytest.mark.parametrize(
    ("op", "backend", "axis_type"), sparse(OPS, BACKENDS, AXIS_TYPES, keep=lambda *numbers: sum(numbers) % 2 == 0)
)
def test_on_a_sub_axis_the_weight_gradient_is_summed_over_the_rest_once(op, backend, axis_type):
    parity(op, 4, rows=2, data=2, axis_type=axis_type, backend=backend)


@pytest.mark.parametrize("op", OPS)
def test_without_vma_checks(op):
    parity(op, 4, rows=2, data=2, check_vma=False, backend="xla")


@pytest.mark.parametrize(("batch", "k"), [(0, 8), (2, 0)])
def test_a_ring_sums_what_has_no_elements(batch, k):
    """No batch, and nothing to contract; four devices cannot share out the three rows, so the batches are merged."""
    mesh = jax.make_mesh((4,), ("model",), (AxisType.Explicit,), devices=jax.devices()[:4])
    fn = functools.partial(fa.matmul_all_reduce, axis_name="model", backend="xla")
    with jax.set_mesh(mesh):
        # The operands are cut inside: XLA cannot compile a shard_map without elements in any argument.
        local = jax.shard_map(lambda x, w: fn(x[..., :k], w[:k]), in_specs=(P(), P()), out_specs=P())
        y = jax.jit(local)(jnp.ones((batch, 3, 8)), jnp.ones((8, 4)))
    np.testing.assert_array_equal(y, np.zeros((batch, 3, 4)))


@settings(max_examples=12)
@given(
    op=st.sampled_from(OPS),
    backend=st.sampled_from(BACKENDS),
    size=st.sampled_from(SIZES),
    rows=st.integers(1, 9),
    batch=st.sampled_from([1, 3]),
    dtype=st.sampled_from(["float32", "bfloat16"]),
    directions=st.sampled_from([1, 2]),
    unroll=st.integers(1, 4),
)
def test_any_ring_any_rows_any_dtype(op, backend, size, rows, batch, dtype, directions, unroll):
    parity(op, size, rows=rows, batch=batch, dtype=dtype, backend=backend, directions=directions, unroll=unroll)


@pytest.mark.parametrize("op", ["matmul_reduce_scatter", "matmul_all_reduce"])
def test_partial_sums_travel_in_reduce_dtype(op):
    """With reduce_dtype=float32 the bfloat16 result is rounded once: within half a unit in the last place, 2**-9."""
    size = 8
    x = np.asarray(np.random.default_rng(0).standard_normal((8, 64 * size)), jnp.bfloat16)
    w = np.asarray(np.random.default_rng(1).standard_normal((64 * size, 16)), jnp.bfloat16)
    want = np.asarray(x, np.float32) @ np.asarray(w, np.float32)
    errors = {}
    with jax.set_mesh(jax.make_mesh((size,), ("model",))):
        placed = jax.device_put(x, P(None, "model")), jax.device_put(w, P("model", None))
        for dtype in (None, jnp.float32):
            fn = functools.partial(getattr(fa, op), axis_name="model", reduce_dtype=dtype)
            out = P("model", None) if op == "matmul_reduce_scatter" else P()
            y = jax.jit(jax.shard_map(fn, in_specs=(P(None, "model"), P("model", None)), out_specs=out))(*placed)
            errors[dtype] = np.abs(np.asarray(y, np.float32) - want) / np.maximum(np.abs(want), 1.0)
    assert errors[jnp.float32].max() <= 2**-8
    assert errors[None].mean() > 1.5 * errors[jnp.float32].mean()


def dense_pair():
    rng = np.random.default_rng(3)
    shapes = [(2, 8, 12), (12, 16), (12, 16), (16, 12)]
    return [np.asarray(rng.standard_normal(shape), np.float32) for shape in shapes]


def mlp_loss(x, gate, up, down, **options):
    """Returns the loss of a gated MLP, whose first two weights share one trip of x."""
    a, b = fa.all_gather_matmul(x, (gate, up), "model", **options)
    y = fa.matmul_reduce_scatter(jax.nn.silu(a) * b, down, "model", **options)
    return jax.lax.psum(jnp.sum(y * y), "model")


MLP_SPECS = (P(None, "model", None), P(None, "model"), P(None, "model"), P("model", None))


def mlp_gradients(wrap, **options):
    args = dense_pair()
    with jax.set_mesh(jax.make_mesh((4,), ("model",), devices=jax.devices()[:4])):
        placed = [jax.device_put(a, s) for a, s in zip(args, MLP_SPECS, strict=True)]
        loss = wrap(functools.partial(mlp_loss, **options))
        fn = jax.shard_map(loss, in_specs=MLP_SPECS, out_specs=P())
        return jax.jit(jax.value_and_grad(fn, argnums=(0, 1, 2, 3)))(*placed)


@functools.cache
def reference_gradients():
    def loss(x, gate, up, down):
        y = (jax.nn.silu(x @ gate) * (x @ up)) @ down
        return jnp.sum(y * y)

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2, 3)))(*dense_pair())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("wrap", [lambda f: f, jax.checkpoint], ids=["plain", "checkpoint"])
def test_a_gated_mlp_and_its_gradients(backend, wrap):
    got, want = mlp_gradients(wrap, backend=backend), reference_gradients()
    for name, g, w in zip(
        ["loss", "dx", "dgate", "dup", "ddown"], jax.tree.leaves(got), jax.tree.leaves(want), strict=True
    ):
        assert_close(g, w, "float32", name)


def test_a_shared_trip_sends_x_once():
    """Two weights in one call need as many permutes as one weight; in two calls they need twice as many."""

    def permutes(fn, *args):
        with jax.set_mesh(jax.make_mesh((4,), ("model",), devices=jax.devices()[:4])):
            placed = [jax.device_put(a, s) for a, s in zip(args, MLP_SPECS, strict=False)]
            mapped = jax.shard_map(fn, in_specs=MLP_SPECS[: len(args)], out_specs=P(None, None, "model"))
            return jax.jit(mapped).lower(*placed).as_text().count("collective_permute")

    x, gate, up, _ = dense_pair()
    one = permutes(lambda x, w: fa.all_gather_matmul(x, w, "model"), x, gate)
    shared = permutes(lambda x, g, u: sum(fa.all_gather_matmul(x, (g, u), "model")), x, gate, up)
    apart = permutes(
        lambda x, g, u: fa.all_gather_matmul(x, g, "model") + fa.all_gather_matmul(x, u, "model"), x, gate, up
    )
    assert one > 0
    assert shared == one
    assert apart == 2 * one


def test_under_scan_over_layers():
    x, w = dense_pair()[0], np.random.default_rng(5).standard_normal((3, 12, 12)).astype(np.float32) / 4

    def layers(x, ws):
        def layer(x, w):
            y = fa.all_gather_matmul(x, w, "model")
            return fa.matmul_reduce_scatter(jnp.tanh(y), w.T, "model"), None

        return jax.lax.scan(layer, x, ws)[0]

    def dense(x, ws):
        for w in ws:
            x = jnp.tanh(x @ w) @ w.T
        return x

    with jax.set_mesh(jax.make_mesh((4,), ("model",), devices=jax.devices()[:4])):
        placed = jax.device_put(x, MLP_SPECS[0]), jax.device_put(w, P(None, None, "model"))
        mapped = jax.shard_map(layers, in_specs=(MLP_SPECS[0], P(None, None, "model")), out_specs=MLP_SPECS[0])
        got = jax.jit(jax.value_and_grad(lambda x, w: jnp.sum(mapped(x, w) ** 2), argnums=(0, 1)))(*placed)
    want = jax.jit(jax.value_and_grad(lambda x, w: jnp.sum(dense(x, w) ** 2), argnums=(0, 1)))(x, w)
    for name, g, r in zip(["loss", "dx", "dw"], jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert_close(g, r, "float32", name)


@pytest.mark.parametrize("op", OPS)
def test_under_vmap(op):
    x, w, _ = dense_pair()[:3]
    xs, ws = np.stack([x, 2 * x, -x]), np.stack([w, w + 1, 3 * w])
    x_spec, w_spec, y_spec = (P(None, *(None if a == "data" else a for a in s)) for s in specs(op))
    fn = jax.vmap(functools.partial(getattr(fa, op), axis_name="model"))
    with jax.set_mesh(jax.make_mesh((4,), ("model",), devices=jax.devices()[:4])):
        mapped = jax.jit(jax.shard_map(fn, in_specs=(x_spec, w_spec), out_specs=y_spec))
        y = mapped(jax.device_put(xs, x_spec), jax.device_put(ws, w_spec))
    assert_close(y, np.einsum("vbmk,vkn->vbmn", xs, ws), "float32", "y")


def test_nothing_gathered_is_saved():
    """What the backward pass keeps is only the shards that the op was given."""
    x, w, _ = dense_pair()[:3]
    with jax.set_mesh(jax.make_mesh((4,), ("model",), devices=jax.devices()[:4])):
        fn = jax.shard_map(
            lambda x, w: fa.all_gather_matmul(x, w, "model"), in_specs=MLP_SPECS[:2], out_specs=P(None, None, "model")
        )
        vjp = jax.jit(lambda *xs: jax.vjp(fn, *xs)[1])(jax.device_put(x, MLP_SPECS[0]), jax.device_put(w, MLP_SPECS[1]))
        saved = [leaf for leaf in jax.tree.leaves(vjp) if leaf.size > 1]
    assert sorted(leaf.addressable_shards[0].data.size for leaf in saved) == sorted([x.size // 4, w.size // 4])


BAD = {
    "contracts x's last dimension": {"w": jnp.ones((7, 4))},
    r"all operands of one floating dtype: got bfloat16, float32": {"w": jnp.ones((8, 4), jnp.bfloat16)},
    r"one floating dtype: got int32": {"x": jnp.ones((4, 8), jnp.int32), "w": jnp.ones((8, 4), jnp.int32)},
    r"x of two dimensions or more": {"x": jnp.ones(8)},
    r"w of two dimensions, \[k, n\]": {"w": jnp.ones((8, 4, 2))},
    r"backend='ring': it must be one of none, xla, pallas, stateful, fused": {"backend": "ring"},
    "directions to be 1, 2 or None: got 3": {"directions": 3},
    "unroll to be 1 or more: got 0": {"unroll": 0},
    "mesh axis 'tensor' inside jax.shard_map": {"axis_name": "tensor"},
}


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("message", BAD)
def test_bad_input_is_named(op, message):
    call = {"x": jnp.ones((4, 8)), "w": jnp.ones((8, 4)), "axis_name": "model"} | BAD[message]
    x, w = call.pop("x"), call.pop("w")
    with (
        jax.set_mesh(jax.make_mesh((4,), ("model",), devices=jax.devices()[:4])),
        pytest.raises(ValueError, match=message),
    ):
        jax.eval_shape(jax.shard_map(lambda x, w: getattr(fa, op)(x, w, **call), in_specs=P(), out_specs=P()), x, w)


def test_rows_that_cannot_be_shared_out_are_refused_with_the_numbers():
    with jax.set_mesh(jax.make_mesh((4,), ("model",), devices=jax.devices()[:4])):
        fn = jax.shard_map(lambda x, w: fa.matmul_reduce_scatter(x, w, "model"), in_specs=P(), out_specs=P("model"))
        with pytest.raises(ValueError, match="got 6 rows, needed a multiple of 4"):
            jax.eval_shape(fn, jnp.ones((6, 8)), jnp.ones((8, 4)))


def test_an_axis_that_shard_map_leaves_unmapped_is_named():
    with (
        jax.set_mesh(jax.make_mesh((2, 4), ("data", "model"))),
        pytest.raises(ValueError, match="every axis that shards its operands to be mapped"),
    ):
        jax.shard_map(
            lambda x, w: fa.all_gather_matmul(x, w, "model"),
            in_specs=(P(None, "model"), P(None, "model")),
            out_specs=P(None, None, "model"),
            axis_names={"model"},
        )(
            jax.device_put(jnp.ones((2, 8, 8)), P("data", "model", None)),
            jax.device_put(jnp.ones((8, 4)), P(None, "model")),
        )


def test_pairs_must_match():
    def sums(xs, ws):
        return jax.shard_map(lambda *_: fa.matmul_reduce_scatter(xs, ws, "model"), in_specs=P(), out_specs=P("model"))(
            0
        )

    with jax.set_mesh(jax.make_mesh((4,), ("model",), devices=jax.devices()[:4])):
        with pytest.raises(ValueError, match="got 2 x and 1 w"):
            sums((jnp.ones((4, 8)), jnp.ones((4, 8))), (jnp.ones((8, 4)),))
        with pytest.raises(ValueError, match=r"pairs of one shape: got \[4, 8\] @ \[8, 4\] and \[4, 8\] @ \[8, 2\]"):
            sums((jnp.ones((4, 8)), jnp.ones((4, 8))), (jnp.ones((8, 4)), jnp.ones((8, 2))))


@pytest.mark.parametrize("backend", ["fused", "pallas", "stateful"])
def test_a_backend_that_cannot_serve_is_not_swapped(backend):
    with (
        jax.set_mesh(jax.make_mesh((4,), ("model",), devices=jax.devices()[:4])),
        pytest.raises(NotImplementedError, match="'xla'"),
    ):
        jax.shard_map(
            lambda x, w: fa.all_gather_matmul(x, w, "model", backend=backend), in_specs=P(), out_specs=P(None, "model")
        )(jnp.ones((4, 8)), jnp.ones((8, 4)))
