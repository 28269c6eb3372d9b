"""One parity check for every op and every backend: y, dx and dw against unsharded products in
float32.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import flaxasync as fa
from tests.kernels.conftest import as_float32, draw, simulated

# In float32 sums of up to R * k terms are added in another order; bfloat16 keeps 8 bits, and
# partial sums travel in it.
TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2}
BY_ROWS, BY_COLUMNS = P("data", "model", None), P("data", None, "model")
SPECS = {  # of x, of w, of y: the batch is sharded over data, rows or columns over model
    "all_gather_matmul": (BY_ROWS, P(None, "model"), BY_COLUMNS),
    "matmul_reduce_scatter": (BY_COLUMNS, P("model", None), BY_ROWS),
    "matmul_all_reduce": (BY_COLUMNS, P("model", None), P("data", None, None)),
}


def assert_close(got, want, dtype, name):
    error, size = np.abs(got - want).max(), np.abs(want).max()
    assert error <= TOLERANCE[dtype] * size, f"{name}: an error of {error:.2e} of {size:.2e}"


def check_parity(
    op, size, *, m, k, ns, batch=2, dtype="float32", data=1, axis_type=AxisType.Explicit, check_vma=True, mode=None,
    **options,
):  # fmt: skip
    """Compares an op on a (data, model) mesh with one device, for a w of each of `ns` columns.

    All sizes are global, but `batch` is that of one row of the mesh. all_gather_matmul has one x
    for all w; the other ops have pairs of x and w. A `mode`, that of DMAs, asks for simulated TPUs.
    """
    gathers = op == "all_gather_matmul"
    xs = tuple(draw((batch * data, m, k), dtype, i) for i in range(1 if gathers else len(ns)))
    ws = tuple(draw((k, n), dtype, 10 + i) for i, n in enumerate(ns))
    dys = tuple(
        draw((batch * data, m, n), dtype, 20 + i) for i, n in enumerate(ns if gathers else ns[:1])
    )

    def local(xs, ws):
        y = getattr(fa, op)(xs[0] if gathers else xs, ws, "model", **options)
        return y if gathers else (y,)

    # dy is given as an argument, so a wrong sum over a replicated axis cannot cancel out
    def run(xs, ws, dys):
        *in_specs, out_spec = SPECS[op]
        fn = jax.shard_map(local, in_specs=tuple(in_specs), out_specs=out_spec, check_vma=check_vma)
        ys, pull = jax.vjp(fn, xs, ws)
        return ys, *pull(dys)

    shape, names, axis_types = (
        (data, size),
        ("data", "model"),
        (AxisType.Auto if mode else axis_type,) * 2,
    )
    mesh = jax.make_mesh(shape, names, axis_types, devices=jax.devices()[: data * size])
    with simulated(shape, names, mode) if mode else jax.set_mesh(mesh):
        operands = zip((xs, ws, dys), SPECS[op], strict=True)
        gots = jax.jit(run)(
            *(jax.device_put(values, NamedSharding(mesh, spec)) for values, spec in operands)
        )
        assert {got.dtype for got in jax.tree.leaves(gots)} == {jnp.dtype(dtype)}
        gots = as_float32(gots)
    xs, ws, dys = as_float32((xs, ws, dys))
    products = [(xs[i % len(xs)], w, dys[i % len(dys)]) for i, w in enumerate(ws)]
    ys, dxs = [x @ w for x, w, _ in products], [dy @ w.T for _, w, dy in products]
    dws = [np.einsum("bmk,bmn->kn", x, dy) for x, _, dy in products]
    wants = (ys, [sum(dxs)], dws) if gathers else ([sum(ys)], dxs, dws)
    for name, got, want in zip(("y", "dx", "dw"), gots, wants, strict=True):
        for a, b in zip(got, want, strict=True):
            assert_close(a, b, dtype, name)
