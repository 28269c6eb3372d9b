"""backend="fused" of the collective matmuls in the simulator: y, dx and dw against one device; refused calls."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import flaxasync as fa
from tests.kernels.conftest import simulated

# In float32 only the order of additions differs; bfloat16 keeps 8 bits, and partial sums travel in it.
TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2}
BY_ROWS, BY_COLUMNS, WHOLE = P(None, "model", None), P(None, None, "model"), P()
SPECS = {  # of x, of w, of y
    "all_gather_matmul": (BY_ROWS, P(None, "model"), BY_COLUMNS),
    "matmul_reduce_scatter": (BY_COLUMNS, P("model", None), BY_ROWS),
    "matmul_all_reduce": (BY_COLUMNS, P("model", None), WHOLE),
}


def operands(op, size, pairs, batch, m, k, n, dtype):
    """Returns xs, ws and a dy for each y. all_gather_matmul has one x for all w; the other ops have pairs."""
    rng = np.random.default_rng(size)
    make = lambda *shape: np.asarray(rng.standard_normal(shape), jnp.dtype(dtype))  # noqa: E731
    gathers = op == "all_gather_matmul"
    xs = tuple(make(batch, m, k) for _ in range(1 if gathers else pairs))
    return xs, tuple(make(k, n) for _ in range(pairs)), tuple(make(batch, m, n) for _ in range(pairs if gathers else 1))


def wanted(xs, ws, dys):
    """Returns y, dx and dw of unsharded products: of one x with every w, or summed over pairs."""
    trips = [(xs[i % len(xs)], w, dys[i % len(dys)]) for i, w in enumerate(ws)]
    ys, dxs = [x @ w for x, w, _ in trips], [dy @ w.T for _, w, dy in trips]
    return (
        ys if len(dys) == len(ws) else [sum(ys)],
        dxs if len(xs) == len(ws) else [sum(dxs)],
        [np.einsum("bmk,bmn->kn", x, dy) for x, _, dy in trips],
    )


def parity(op, size, *, pairs=1, batch=2, m=None, k=256, n=256, dtype="float32", mode="on_wait", check_vma=True,
           backend="fused"):  # fmt: skip
    m = m or 16 * size
    xs, ws, dys = operands(op, size, pairs, batch, m, k, n, dtype)
    x_spec, w_spec, y_spec = SPECS[op]

    def local(xs, ws):
        if op == "all_gather_matmul":
            return fa.all_gather_matmul(xs[0], ws, "model", backend=backend)
        return (getattr(fa, op)(xs, ws, "model", backend=backend),)

    def run(xs, ws, dys):
        fn = jax.shard_map(local, in_specs=(x_spec, w_spec), out_specs=y_spec, check_vma=check_vma)
        ys, pull = jax.vjp(fn, xs, ws)
        return ys, *pull(dys)

    with simulated((size,), ("model",), mode) as mesh:
        place = lambda values, spec: tuple(jax.device_put(v, NamedSharding(mesh, spec)) for v in values)  # noqa: E731
        got = jax.jit(run)(place(xs, x_spec), place(ws, w_spec), place(dys, y_spec))
        got = jax.tree.map(lambda v: np.asarray(v, np.float32), got)

    wide = jax.tree.map(lambda v: v.astype(np.float32), (xs, ws, dys))
    for name, ours, theirs in zip(("y", "dx", "dw"), got, wanted(*wide), strict=True):
        for a, b in zip(ours, theirs, strict=True):
            assert np.abs(a - b).max() <= TOLERANCE[dtype] * np.abs(b).max(), name


@pytest.mark.parametrize(("op", "size", "options"), [
    pytest.param("all_gather_matmul", 2, {"pairs": 2, "n": 512}, marks=pytest.mark.slow),
    ("matmul_reduce_scatter", 3, {"batch": 3, "m": 3 * 10, "k": 3 * 50, "n": 100, "mode": "eager"}),
    pytest.param("matmul_all_reduce", 3, {"m": 20, "k": 3 * 128, "mode": "eager"}, marks=pytest.mark.slow),
    pytest.param("all_gather_matmul", 4, {"dtype": "bfloat16", "n": 512, "batch": 4}, marks=pytest.mark.slow),
    pytest.param("matmul_reduce_scatter", 4, {"dtype": "bfloat16", "k": 512}, marks=pytest.mark.slow),
    pytest.param("all_gather_matmul", 3, {"batch": 1, "m": 3 * 10, "k": 100, "n": 3 * 70, "mode": "eager",
                 "check_vma": False}, marks=pytest.mark.slow),
    pytest.param("matmul_reduce_scatter", 2, {"pairs": 2, "check_vma": False}, marks=pytest.mark.slow),
    pytest.param("matmul_all_reduce", 2, {"check_vma": False}, marks=pytest.mark.slow),
])  # fmt: skip
def test_values_and_gradients(op, size, options):
    parity(op, size, **options)


def traced(op, size, dtype=jnp.float32, x=(1, 32, 128), **options):
    with simulated((size,), ("model",)):
        local = functools.partial(getattr(fa, op), axis_name="model", backend="fused", **options)
        fn = jax.shard_map(local, in_specs=P(), out_specs=P(), check_vma=False)
        jax.eval_shape(fn, jax.ShapeDtypeStruct(x, dtype), jax.ShapeDtypeStruct((128, 128), dtype))


@pytest.mark.parametrize(("message", "options"), [
    ("got an axis 'model' of size 1; use backend='none'", {"size": 1}),
    (r"got x \[1, 0, 128\] and w \[128, 128\]; use backend='none'", {"x": (1, 0, 128)}),
    (r"got x \[0, 32, 128\] and w \[128, 128\]; use backend='none'", {"x": (0, 32, 128)}),
    ("float32 and bfloat16: got float16; cast the operands, or use backend='xla'", {"dtype": jnp.float16}),
    ("default precision: got precision=highest; leave it out, or use backend='xla'", {"precision": "highest"}),
    ("operands' dtype, float32: got reduce_dtype=bfloat16; leave it out", {"reduce_dtype": jnp.bfloat16}),
    ("does not reach: got unroll=4; leave it out", {"unroll": 4}),
])  # fmt: skip
@pytest.mark.parametrize("op", SPECS)
def test_a_call_that_the_kernels_cannot_serve_is_refused_with_an_alternative(op, message, options):
    with pytest.raises(NotImplementedError, match=f"^{op} with backend='fused' .*{message}"):
        traced(op, **{"size": 2, **options})
