"""Quantised collective matmuls on every executor against a NumPy model of the same quantisation."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import flaxasync as fa
from flaxasync.ops.matmul import fused
from tests.kernels.conftest import draw, simulated
from tests.kernels.conftest import run as run_kernels
from tests.ops.matmul.conftest import SPECS
from tests.ops.test_quantization import quantized

pytestmark = pytest.mark.usefixtures("quick_compile")

OPS = list(SPECS)
GATHER, SCATTER, REDUCE = OPS
BATCH, ROWS, K, N = 2, 3, 6, 4  # rows and features of one device


def specs(op):
    return [P(*(axis if axis == "model" else None for axis in spec)) for spec in SPECS[op]]


def operands(op, size, seed=0):
    """Returns x, w and dy, global. The rows of all_gather_matmul are sharded, and those of the
    others' result.
    """
    rows = ROWS if op == "matmul_all_reduce" else ROWS * size
    x, w, dy = (BATCH, rows, K * size), (K * size, N * size), (BATCH, rows, N * size)
    return [draw(shape, seed=seed + i) for i, shape in enumerate((x, w, dy))]


def run(op, arrays, size, *, mode=None, wrap=lambda fn: fn, **options):
    """Returns y, dx and dw."""
    *in_specs, out_spec = specs(op)

    def gradients(x, w, dy):
        fn = functools.partial(getattr(fa, op), axis_name="model", **options)
        y, pull = jax.vjp(
            wrap(jax.shard_map(fn, in_specs=tuple(in_specs), out_specs=out_spec)), x, w
        )
        return y, *pull(dy)

    types = (AxisType.Auto if mode else AxisType.Explicit,)
    mesh = jax.make_mesh((size,), ("model",), types, devices=jax.devices()[:size])
    with simulated((size,), ("model",), mode) if mode else jax.set_mesh(mesh):
        placed = zip(arrays, (*in_specs, out_spec), strict=True)
        return [
            np.asarray(a)
            for a in jax.jit(gradients)(
                *(jax.device_put(a, NamedSharding(mesh, s)) for a, s in placed)
            )
        ]


def model(op, arrays, size, kind):
    """Returns y, dx and dw of rows and columns that are quantised on each device by itself.

    Only all_gather_matmul has whole rows and columns on a device; the others sum over devices, in
    float64 here.
    """
    x, w, dy = arrays
    shares = 1 if op == "all_gather_matmul" else size
    y, dxs, dws = 0, [], []
    for x_part, w_part in zip(np.split(x, shares, -1), np.split(w, shares), strict=True):
        (xq, xs), (wq, ws) = quantized(x_part, kind, -1), quantized(w_part, kind, 0)
        sums = xq.astype(np.float64) @ wq.astype(np.float64)
        y = y + sums * xs * ws
        dxs.append(dy @ (wq.astype(np.float64) * ws).T)
        dws.append(np.einsum("bmk,bmn->kn", xq.astype(np.float64) * xs, dy))
    return y, np.concatenate(dxs, -1), np.concatenate(dws)


def assert_near(gots, wants, tolerance=1e-6):
    for name, got, want in zip(("y", "dx", "dw"), gots, wants, strict=False):
        error = np.abs(np.asarray(got, np.float64) - want).max()
        assert error <= tolerance * np.abs(want).max(), (
            f"{name}: an error of {error:.2e} of {np.abs(want).max():.2e}"
        )


def slow(*cases):
    return [pytest.param(*case, marks=pytest.mark.slow) for case in cases]


@pytest.mark.parametrize(
    ("op", "size", "kind", "backend"),
    [
        (GATHER, 1, "int8", "none"),
        (GATHER, 3, "fp8", "xla"),
        (SCATTER, 3, "fp8", "none"),
        (REDUCE, 3, "int8", "xla"),
        *slow(
            (GATHER, 8, "fp8", "none"),
            (SCATTER, 2, "fp8", "xla"),
            (SCATTER, 8, "int8", "xla"),
            (REDUCE, 1, "fp8", "xla"),
            (REDUCE, 8, "int8", "none"),
        ),
    ],
)
def test_results_and_gradients_are_those_of_the_model(op, size, kind, backend):
    arrays = operands(op, size)
    got = run(op, arrays, size, backend=backend, quantization=kind, directions=2)
    assert_near(got, model(op, arrays, size, kind))


@pytest.mark.parametrize("op", OPS)
def test_the_plain_op_is_further_away_by_far(op):
    """Negative test of the comparison above."""
    arrays = operands(op, 2)
    got = run(op, arrays, 2, backend="none")
    for kind in ("int8", "fp8"):
        with pytest.raises(AssertionError, match="y: an error of"):
            assert_near(got, model(op, arrays, 2, kind), 1e-4)


def integers(op, size):
    """Returns operands of integers up to 127, the largest of which is in every row and column of
    every device.

    So all scales are 1, the 8-bit values are the operands, and no sum of the products is rounded in
    float32.
    """
    arrays = [np.round(40 * a).clip(-126, 126) for a in operands(op, size)]
    arrays[0][..., ::K] = arrays[1][::K] = arrays[1][:, ::N] = arrays[2][..., ::N] = 127
    arrays[0][:, 0] = arrays[2][:, 0] = 127
    return arrays


def exact(arrays):
    x, w, dy = (a.astype(np.float64) for a in arrays)
    return x @ w, dy @ w.T, np.einsum("bmk,bmn->kn", x, dy)


def check_integer_sums(op, size, **options):
    """Compares an op and its gradients, which are quantised too, all of them, to the nearest
    integer.
    """
    arrays = integers(op, size)
    quantization = fa.Quantization("int8", "int8", "nearest", weights="int8")
    for got, want in zip(
        run(op, arrays, size, quantization=quantization, **options), exact(arrays), strict=True
    ):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(
    ("op", "size", "backend"),
    [
        (GATHER, 3, "none"),
        (SCATTER, 3, "xla"),
        (REDUCE, 2, "xla"),
        *slow((GATHER, 8, "xla"), (SCATTER, 2, "none"), (REDUCE, 1, "none")),
    ],
)
def test_integer_sums_are_equal_bit_for_bit_on_the_executors_of_every_device(op, size, backend):
    check_integer_sums(op, size, backend=backend)


@pytest.mark.slow
@pytest.mark.parametrize(("op", "size", "mode"), [
    (GATHER, 4, "eager"), (SCATTER, 3, "on_wait"), (REDUCE, 2, "eager")
])  # fmt: skip
def test_the_fused_kernels_have_the_integer_sums_and_the_model_s_results(op, size, mode):
    """With race detection, on operands that are padded to whole tiles."""
    check_integer_sums(op, size, backend="fused", mode=mode)
    arrays = operands(op, size)
    got = run(op, arrays, size, backend="fused", quantization="int8", mode=mode)
    assert_near(got, model(op, arrays, size, "int8"))


@pytest.mark.slow
def test_several_kernels_for_the_sums_of_a_large_block_have_their_scales_and_gradients(
    monkeypatch,
):
    """dx and dw of one call in 8 bits: dw is computed beside the sums of the first kernel."""
    arrays = operands(GATHER, 2)
    options = {
        "backend": "fused",
        "mode": "eager",
        "gathered_bytes": 2**20,
        "quantization": fa.Quantization("int8", backward="int8", weights="int8"),
    }
    wanted = run(GATHER, arrays, 2, **options)
    found = []
    kernel = fused.matmul_reduce_scatter

    def counted(*args, gradients, batches, **more):
        found.append((batches, len(gradients)))
        return kernel(*args, gradients=gradients, batches=batches, **more)

    monkeypatch.setattr(fused, "matmul_reduce_scatter", counted)
    monkeypatch.setattr(fused, "kernels_of_sums", lambda batches, block: batches)
    for one, other in zip(run(GATHER, arrays, 2, **options), wanted, strict=True):
        np.testing.assert_array_equal(one, other)
    assert len(found) > 1
    assert [count for _, count in found] == [1] + [0] * (len(found) - 1)


@pytest.mark.slow
def test_products_of_several_pairs_are_scaled_before_they_are_added():
    x, w, _ = operands("matmul_reduce_scatter", 2)
    fn = functools.partial(fa.matmul_reduce_scatter, axis_name="model", quantization="int8")

    def of(backend):
        specs = P(None, None, "model"), P("model")

        def local(x, w):
            return fn((x, 2 * x), (w, w), backend=backend)

        return run_kernels(
            local, (x, w), specs, P(None, "model"), shape=(2,), names=("model",), mode="eager"
        )

    np.testing.assert_allclose(of("fused"), of("none"), rtol=1e-6, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("limit", [0, 10**6])
def test_executors_agree_where_blocks_travel_whatever_is_kept(limit):
    """The owner of a block quantises it, so that y is equal bit for bit; rows that are kept are
    kept in 8 bits.
    """
    arrays, options = (
        operands("all_gather_matmul", 3),
        {"quantization": fa.Quantization("int8", "int8")},
    )
    none = run("all_gather_matmul", arrays, 3, backend="none", **options)
    ring = run(
        "all_gather_matmul",
        arrays,
        3,
        backend="xla",
        gathered_bytes=limit,
        wrap=jax.checkpoint,
        **options,
    )
    np.testing.assert_array_equal(ring[0], none[0])
    assert_near(ring, none)


@pytest.mark.parametrize(
    ("op", "kind"), [(GATHER, "int8"), (SCATTER, "fp8"), *slow((REDUCE, "int8"))]
)
def test_gradients_with_quantised_cotangents(op, kind):
    """dx is near that of the model, and not equal to it; so is dw where the cotangents travel."""
    arrays = operands(op, 3)
    y, dx, dw = run(op, arrays, 3, quantization=fa.Quantization(kind, kind))
    wants = model(op, arrays, 3, kind)
    assert_near((y,), wants)
    tolerance = {"int8": 2e-2, "fp8": 0.2}[kind]
    assert_near((y, dx, dw), wants, tolerance)
    assert np.abs(dx - wants[1]).max() > 1e-4
    assert (np.abs(dw - wants[2]).max() > 1e-4) == (op == "matmul_reduce_scatter")


@pytest.mark.parametrize(
    ("op", "kind", "limit"),
    [
        (GATHER, "fp8", 0),
        *slow((GATHER, "int8", 10**6), (SCATTER, "int8", 0), (REDUCE, "fp8", 0)),
    ],
)
def test_dw_with_quantised_products(op, kind, limit):
    """They leave y and dx as they were, and dw near that of the model; every executor has the
    same.
    """
    arrays, eight = operands(op, 3), (kind, kind)
    options = {"gathered_bytes": limit} if op == "all_gather_matmul" else {}
    y, dx, dw = run(
        op, arrays, 3, quantization=fa.Quantization(*eight, weights=kind), backend="xla", **options
    )
    old_y, old_dx, old_dw = run(
        op, arrays, 3, quantization=fa.Quantization(*eight), backend="xla", **options
    )
    np.testing.assert_array_equal(y, old_y)
    np.testing.assert_array_equal(dx, old_dx)
    assert_near((y, dx, dw), model(op, arrays, 3, kind), {"int8": 2e-2, "fp8": 0.2}[kind])
    assert np.abs(dw - old_dw).max() > 1e-4
    assert_near(
        (y, dx, dw),
        run(op, arrays, 3, quantization=fa.Quantization(*eight, weights=kind), backend="none"),
    )


@pytest.mark.parametrize(("op", "gradient", "share"), [
    (GATHER, True, 0.7),  # x in 8 bits twice, and the sums of dx
    (SCATTER, False, 1.0),
    *slow((GATHER, False, 0.55)),
])  # fmt: skip
def test_blocks_travel_in_eight_bits_and_sums_in_the_dtype_of_the_operands(op, gradient, share):
    """Counted in the compiled program, with as many features as make scales small."""
    *in_specs, out_spec = specs(op)

    def sent(quantization):
        fn = functools.partial(
            getattr(fa, op), axis_name="model", quantization=quantization, backend="xla"
        )
        mapped = jax.jit(jax.shard_map(fn, in_specs=tuple(in_specs), out_specs=out_spec))
        if gradient:
            mapped = jax.jit(
                jax.grad(
                    lambda x, w, forward=mapped: forward(x, w).astype(jnp.float32).sum(), (0, 1)
                )
            )
        with jax.set_mesh(jax.make_mesh((4,), ("model",), devices=jax.devices()[:4])):
            shapes = (1, 16, 512), (512, 512)
            args = [
                jax.device_put(np.ones(s, jnp.bfloat16), spec)
                for s, spec in zip(shapes, in_specs, strict=True)
            ]
            module = fa.check.parse(mapped.lower(*args).compile().as_text())
        return sum(
            i.shape.bytes
            for c in module.computations.values()
            for i in c.instructions
            if "permute" in i.opcode
        )

    assert 0 < sent("int8") <= share * sent(None)


def test_rows_that_are_not_finite_reach_their_products_alone():
    x, w, dy = operands("all_gather_matmul", 2)
    x[0, 1, 2], x[1, 0, 3], w[:, 5], x[0, 3] = np.inf, np.nan, 0, 0
    y = run("all_gather_matmul", (x, w, dy), 2, quantization="int8")[0]
    rows = np.zeros((BATCH, 2 * ROWS), bool)
    rows[0, 1] = rows[1, 0] = True
    np.testing.assert_array_equal(~np.isfinite(y).any(-1), rows)
    np.testing.assert_array_equal(~np.isfinite(y).all(-1), rows)
    assert (y[0, 3] == 0).all()
    assert (y[~rows][:, 5] == 0).all()


def test_float64_and_rows_of_one_element():
    x, w, dy = (a.astype(np.float64) for a in (draw((1, 4, 1)), draw((1, 2)), draw((1, 4, 2))))
    with jax.enable_x64(True):
        got = run("all_gather_matmul", (x, w, dy), 2, quantization="int8")
    assert {a.dtype for a in got} == {np.dtype("float64")}
    np.testing.assert_allclose(got[0], x @ w, rtol=1e-12)  # one value is its own scale


@pytest.mark.parametrize("op", OPS)
def test_what_cannot_be_served_is_refused(op):
    arrays = operands(op, 2)
    with pytest.raises(
        ValueError, match=f"{op} needs quantization to be None, 'int8', 'fp8' or a .*: got 'int4'"
    ):
        run(op, arrays, 2, quantization="int4")
    with pytest.raises(
        NotImplementedError, match="a quantised product has a first derivative only"
    ):
        run(
            op,
            arrays,
            2,
            quantization="int8",
            wrap=lambda fn: jax.grad(lambda x, w: fn(x, w).sum()),
        )
    with pytest.raises(
        NotImplementedError, match=f"{op} got quantization in fp8, for which a v5e has no rate"
    ):
        run(op, arrays, 2, quantization="fp8", mode="eager")
