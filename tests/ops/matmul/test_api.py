"""Every op on every backend against unsharded products in float32; composition; what is refused;
fused kernels.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AbstractDevice, AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

import flaxasync as fa
from flaxasync.ops import roofline
from flaxasync.ops.matmul import fused
from tests.grids import sparse
from tests.kernels.conftest import as_float32, draw
from tests.ops.matmul.conftest import SPECS, assert_close, check_parity

pytestmark = pytest.mark.usefixtures("quick_compile")

OPS, BACKENDS = list(SPECS), ["xla", "none"]
SIZES = [1, 2, 3, 5, 8]
SIZES_WITH_ALL_PATHS = [3, 8]  # three have two different neighbours, and eight have a loop
MESH_FORMS = [{}, {"axis_type": AxisType.Auto}, {"check_vma": False}]


def parity(op, size, *, rows, **options):
    """Compares an op with `rows` rows on each device, and with few features."""
    check_parity(
        op,
        size,
        m=rows if op == "matmul_all_reduce" else rows * size,
        k=6 * size,
        ns=[4 * size],
        **options,
    )


@pytest.mark.parametrize(
    ("op", "size", "directions"),
    [
        *sparse(
            OPS,
            SIZES_WITH_ALL_PATHS,
            [1, 2],
            keep=lambda *numbers: sum(numbers) % 2 == 0,
            slow=lambda *numbers: True,
        ),
        *(pytest.param(op, size, 2, marks=pytest.mark.slow) for op in OPS for size in (1, 2)),
    ],
)
def test_ring_matches_the_reference(op, size, directions):
    """The property test below draws the sizes."""
    parity(op, size, rows=3, batch=3, backend="xla", directions=directions)


def test_one_row_in_bfloat16_with_a_loop_of_three_turns():
    options = {"dtype": "bfloat16", "backend": "xla", "directions": 2, "unroll": 3}
    parity("matmul_reduce_scatter", 5, rows=1, batch=1, **options)


@pytest.mark.parametrize(("op", "size"), list(zip(OPS, (1, 2, 5), strict=True)))
def test_one_collective_matches_the_reference(op, size):
    parity(op, size, rows=3, batch=1, backend="none")


@pytest.mark.parametrize(("op", "backend", "form"), sparse(
    OPS, BACKENDS, MESH_FORMS, keep=lambda op, backend, form: (op + backend) % 3 == form,
    slow=lambda op, backend, form: BACKENDS[backend] == "xla",
))  # fmt: skip
def test_on_a_sub_axis_the_weight_gradient_is_summed_over_the_rest_once(op, backend, form):
    parity(op, 4, rows=2, data=2, backend=backend, **form)


def on_ring(fn, in_specs, out_specs, size=4):
    """Returns the function that maps `fn` over a ring of devices and applies a jitted
    transformation to it.
    """

    def run(transform, *arrays):
        with jax.set_mesh(jax.make_mesh((size,), ("model",), devices=jax.devices()[:size])):
            placed = [
                jax.device_put(array, spec) for array, spec in zip(arrays, in_specs, strict=True)
            ]
            return transform(jax.shard_map(fn, in_specs=in_specs, out_specs=out_specs))(*placed)

    return run


@pytest.mark.parametrize(("batch", "k"), [(0, 8), (2, 0)])
def test_a_ring_sums_what_has_no_elements(batch, k):
    """No batch, and nothing to contract; four devices cannot share out the three rows, so the
    batches are merged.
    """

    # cuts the operands: XLA cannot compile a shard_map without elements in any argument
    def local(x, w):
        return fa.matmul_all_reduce(x[..., :k], w[:k], "model", backend="xla")

    y = on_ring(local, (P(), P()), P())(jax.jit, np.ones((batch, 3, 8)), np.ones((8, 4)))
    np.testing.assert_array_equal(y, np.zeros((batch, 3, 4)))


@pytest.mark.slow
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
    parity(
        op,
        size,
        rows=rows,
        batch=batch,
        dtype=dtype,
        backend=backend,
        directions=directions,
        unroll=unroll,
    )


@pytest.mark.parametrize(
    "op", ["matmul_reduce_scatter", pytest.param("matmul_all_reduce", marks=pytest.mark.slow)]
)
def test_partial_sums_travel_in_reduce_dtype(op):
    """With reduce_dtype=float32 the bfloat16 result is rounded once: within half a unit in the last
    place, 2**-9.
    """
    size = 8
    x, w = draw((8, 64 * size), "bfloat16"), draw((64 * size, 16), "bfloat16", 1)
    want = as_float32(x) @ as_float32(w)
    errors = {}
    for dtype in (None, jnp.float32):
        fn = functools.partial(getattr(fa, op), axis_name="model", reduce_dtype=dtype)
        out = P("model", None) if op == "matmul_reduce_scatter" else P()
        y = on_ring(fn, (P(None, "model"), P("model", None)), out, size)(jax.jit, x, w)
        errors[dtype] = np.abs(as_float32(y) - want) / np.maximum(np.abs(want), 1.0)
    assert errors[jnp.float32].max() <= 2**-8
    assert errors[None].mean() > 1.5 * errors[jnp.float32].mean()


def dense_pair():
    return [
        draw(shape, seed=i) for i, shape in enumerate([(2, 8, 12), (12, 16), (12, 16), (16, 12)])
    ]


MLP_SPECS = (P(None, "model", None), P(None, "model"), P(None, "model"), P("model", None))


def compare(got, want):
    for i, (g, w) in enumerate(zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)):
        assert_close(g, w, "float32", f"result {i}")


def check_gated_mlp(backend, wrap):
    """Compares a gated MLP and its gradients with the dense one. The first two weights share one
    trip of x.
    """

    def loss(x, gate, up, down):
        a, b = fa.all_gather_matmul(x, (gate, up), "model", backend=backend)
        y = fa.matmul_reduce_scatter(jax.nn.silu(a) * b, down, "model", backend=backend)
        return jax.lax.psum(jnp.sum(y * y), "model")

    def dense(x, gate, up, down):
        y = (jax.nn.silu(x @ gate) * (x @ up)) @ down
        return jnp.sum(y * y)

    gradients = functools.partial(jax.value_and_grad, argnums=(0, 1, 2, 3))
    got = on_ring(wrap(loss), MLP_SPECS, P())(lambda fn: jax.jit(gradients(fn)), *dense_pair())
    compare(got, jax.jit(gradients(dense))(*dense_pair()))


@pytest.mark.parametrize(
    ("backend", "wrap"),
    [("none", lambda f: f), ("xla", jax.checkpoint)],
    ids=["none", "xla under checkpoint"],
)
def test_a_gated_mlp_and_its_gradients(backend, wrap):
    check_gated_mlp(backend, wrap)


def test_a_shared_trip_sends_x_once():
    """Two weights in one call need as many permutes as one weight; in two calls they need twice as
    many.
    """

    def permutes(fn, *args):
        lowered = on_ring(fn, MLP_SPECS[: len(args)], P(None, None, "model"))(
            lambda fn: jax.jit(fn).lower, *args
        )
        return lowered.as_text().count("collective_permute")

    x, gate, up, _ = dense_pair()
    one = permutes(lambda x, w: fa.all_gather_matmul(x, w, "model"), x, gate)
    shared = permutes(lambda x, g, u: sum(fa.all_gather_matmul(x, (g, u), "model")), x, gate, up)
    apart = permutes(
        lambda x, g, u: fa.all_gather_matmul(x, g, "model") + fa.all_gather_matmul(x, u, "model"),
        x,
        gate,
        up,
    )
    assert one > 0
    assert shared == one
    assert apart == 2 * one


@pytest.mark.slow
def test_under_scan_over_layers():
    x, w = dense_pair()[0], draw((3, 12, 12)) / 4

    def layers(x, ws):
        def layer(x, w):
            y = fa.all_gather_matmul(x, w, "model")
            return fa.matmul_reduce_scatter(jnp.tanh(y), w.T, "model"), None

        return jax.lax.scan(layer, x, ws)[0]

    def dense(x, ws):
        for w in ws:
            x = jnp.tanh(x @ w) @ w.T
        return x

    def gradients(fn):
        return jax.jit(jax.value_and_grad(lambda x, w: jnp.sum(fn(x, w) ** 2), argnums=(0, 1)))

    got = on_ring(layers, (MLP_SPECS[0], P(None, None, "model")), MLP_SPECS[0])(gradients, x, w)
    compare(got, gradients(dense)(x, w))


@pytest.mark.parametrize("op", OPS)
def test_under_vmap(op):
    x, w, _ = dense_pair()[:3]
    xs, ws = np.stack([x, 2 * x, -x]), np.stack([w, w + 1, 3 * w])
    x_spec, w_spec, y_spec = (P(None, *(None if a == "data" else a for a in s)) for s in SPECS[op])
    fn = jax.vmap(functools.partial(getattr(fa, op), axis_name="model"))
    y = on_ring(fn, (x_spec, w_spec), y_spec)(jax.jit, xs, ws)
    assert_close(y, np.einsum("vbmk,vkn->vbmn", xs, ws), "float32", "y")


X, W = np.ones((4, 8), np.float32), np.ones((8, 4), np.float32)


def refused(error, message, x=X, w=W, op="all_gather_matmul", axis_name="model", **options):
    with pytest.raises(error, match=message):
        on_ring(lambda: getattr(fa, op)(x, w, axis_name, **options), (), P())(lambda fn: fn)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(
    ("message", "call"),
    [
        ("contracts x's last dimension", {"w": jnp.ones((7, 4))}),
        (
            "all operands of one floating dtype: got bfloat16, float32",
            {"w": jnp.ones((8, 4), jnp.bfloat16)},
        ),
        (
            "one floating dtype: got int32",
            {"x": jnp.ones((4, 8), jnp.int32), "w": jnp.ones((8, 4), jnp.int32)},
        ),
        ("x of two dimensions or more", {"x": jnp.ones(8)}),
        (r"w of two dimensions, \[k, n\]", {"w": jnp.ones((8, 4, 2))}),
        (
            "backend='ring': it must be one of none, xla, pallas, stateful, fused",
            {"backend": "ring"},
        ),
        ("directions to be 1, 2 or None: got 3", {"directions": 3}),
        ("unroll to be 1 or more: got 0", {"unroll": 0}),
        ("mesh axis 'tensor' inside jax.shard_map", {"axis_name": "tensor"}),
    ],
)
def test_bad_input_is_named(op, message, call):
    refused(ValueError, message, op=op, **call)


def test_rows_and_pairs_that_do_not_fit_are_refused_with_the_numbers():
    refuse = functools.partial(refused, ValueError, op="matmul_reduce_scatter")
    one, xs = jnp.ones((8, 4)), (jnp.ones((4, 8)),) * 2
    refuse("got 6 rows, needed a multiple of 4", jnp.ones((6, 8)))
    refuse("got 2 x and 1 w", xs, (one,))
    refuse(
        r"pairs of one shape: got \[4, 8\] @ \[8, 4\] and \[4, 8\] @ \[8, 2\]",
        xs,
        (one, jnp.ones((8, 2))),
    )


@pytest.mark.parametrize("backend", ["fused", "pallas", "stateful"])
def test_a_backend_that_cannot_serve_is_not_swapped(backend):
    message = "mesh is of cpu devices; use backend='xla', which runs on every device"
    refused(
        NotImplementedError,
        f"all_gather_matmul with backend='{backend}' .*{message}",
        backend=backend,
    )


def test_an_axis_that_shard_map_leaves_unmapped_is_named():
    fn, spec = functools.partial(fa.all_gather_matmul, axis_name="model"), P(None, "model")
    with jax.set_mesh(jax.make_mesh((2, 4), ("data", "model"))):
        mapped = jax.shard_map(
            fn, in_specs=(spec, spec), out_specs=P(None, None, "model"), axis_names={"model"}
        )
        x, w = (
            jax.device_put(jnp.ones((2, 8, 8)), P("data", "model")),
            jax.device_put(jnp.ones((8, 4)), spec),
        )
        with pytest.raises(ValueError, match="every axis that shards its operands to be mapped"):
            mapped(x, w)


@pytest.mark.parametrize(
    ("op", "size", "options"),
    [
        ("matmul_all_reduce", 3, {"m": 20, "k": 3 * 128, "mode": "eager"}),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [
                (
                    "matmul_reduce_scatter",
                    3,
                    {"batch": 3, "m": 3 * 10, "k": 3 * 50, "ns": [100], "mode": "eager"},
                ),
                ("all_gather_matmul", 4, {"dtype": "bfloat16", "ns": [512], "batch": 4}),
                (
                    "all_gather_matmul",
                    3,
                    {
                        "batch": 1,
                        "m": 3 * 10,
                        "k": 100,
                        "ns": [3 * 70],
                        "mode": "eager",
                        "check_vma": False,
                    },
                ),
                ("matmul_reduce_scatter", 2, {"ns": [256] * 2, "check_vma": False}),
            ]
        ),
    ],
)
def test_fused_kernels_in_the_simulator(op, size, options):
    check_parity(
        op,
        size,
        backend="fused",
        **{"m": 16 * size, "k": 256, "ns": [256], "mode": "on_wait"} | options,
    )


@pytest.mark.slow
@pytest.mark.parametrize("op", ["all_gather_matmul", "matmul_reduce_scatter"])
def test_several_kernels_for_the_sums_of_a_large_block(op, monkeypatch):
    """Three kernels, each with the sums of one batch; dx of all_gather_matmul has such sums."""
    found = []
    kernel = fused.matmul_reduce_scatter

    def counted(*args, batches, **options):
        found.append(batches)
        return kernel(*args, batches=batches, **options)

    monkeypatch.setattr(fused, "matmul_reduce_scatter", counted)
    monkeypatch.setattr(roofline, "LARGEST_BLOCK", 16 * 256)
    check_parity(
        op, 2, backend="fused", batch=3, m=32, k=256, ns=[256], mode="on_wait", check_vma=False
    )
    assert found == [range(n, n + 1) for n in range(3)]


@pytest.mark.parametrize(
    ("message", "options"),
    [
        ("got an axis 'model' of size 1; use backend='none'", {"size": 1}),
        (r"got x \[1, 0, 128\] and w \[128, 128\]; use backend='none'", {"x": (1, 0, 128)}),
        (r"got x \[0, 32, 128\] and w \[128, 128\]; use backend='none'", {"x": (0, 32, 128)}),
        (
            "float32 and bfloat16: got float16; cast the operands, or use backend='xla'",
            {"dtype": jnp.float16},
        ),
        (
            "default precision: got precision=highest; leave it out, or use backend='xla'",
            {"precision": "highest"},
        ),
        (
            "operands' dtype, float32: got reduce_dtype=bfloat16; leave it out",
            {"reduce_dtype": jnp.bfloat16},
        ),
        ("does not reach: got unroll=4; leave it out", {"unroll": 4}),
        (
            "rings of up to 97 devices: got an axis 'model' of size 98; use backend='xla'",
            {"size": 98, "x": (1, 98, 128)},
        ),
    ],
)
@pytest.mark.parametrize("op", OPS)
def test_a_call_that_fused_kernels_cannot_serve_is_refused_with_an_alternative(
    op, message, options
):
    def trace(size=2, dtype=jnp.float32, x=(1, 32, 128), **options):
        local = functools.partial(getattr(fa, op), axis_name="model", backend="fused", **options)
        tpu = AbstractDevice(device_kind="TPU v5p", num_cores=2, platform="tpu")
        with jax.sharding.use_abstract_mesh(AbstractMesh((size,), ("model",), abstract_device=tpu)):
            fn = jax.shard_map(local, in_specs=P(), out_specs=P(), check_vma=False)
            jax.eval_shape(
                fn, jax.ShapeDtypeStruct(x, dtype), jax.ShapeDtypeStruct((128, 128), dtype)
            )

    with pytest.raises(NotImplementedError, match=f"^{op} with backend='fused' .*{message}"):
        trace(**options)
