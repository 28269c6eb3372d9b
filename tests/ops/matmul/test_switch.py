"""The collective matmuls of GPUs: their values and gradients are those of one device.

They run on CPU devices, which `mesh.platform` is told to be GPUs. What XLA for GPUs makes of them is
tested in tests/nn/test_gpu_programs.py.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import flaxasync as fa
from flaxasync import mesh as ambient
from flaxasync.hardware import GPUS
from flaxasync.ops.matmul import api
from flaxasync.ops.matmul.activation import activate
from flaxasync.ops.matmul.mlp import parallel_mlp
from flaxasync.ops.matmul.ring import RingExecutor
from flaxasync.ops.matmul.switch import LARGEST, SwitchExecutor, WholeExecutor
from tests.kernels.conftest import draw as standard_normal

pytestmark = pytest.mark.usefixtures("quick_compile")

ROWS, COLUMNS, DOWN = P(None, "model", None), P(None, "model"), P("model", None)
TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2}


@pytest.fixture(autouse=True)
def on_gpus(monkeypatch):
    monkeypatch.setattr(ambient, "platform", lambda: "gpu")


def draw(shape, seed, dtype="float32"):
    return standard_normal(shape, dtype, seed) / 4


def mesh(size):
    devices = jax.devices()[:size]
    return jax.make_mesh((size,), ("model",), axis_types=(AxisType.Auto,), devices=devices)


def check_parity(mapped, reference, operands, dy, dtype):
    """Compares y and all gradients with those of one device in float32."""

    def run(function, operands, dy):
        y, pull = jax.vjp(function, *operands)
        return y, *pull(dy)

    # two programs: in one, XLA would split the reference over the devices, and join equal products
    compiled = jax.jit(run, static_argnums=0)
    widened = jax.tree.map(lambda x: x.astype(jnp.float32), (operands, dy))
    results = compiled(mapped, operands, dy), compiled(reference, *widened)
    got, wanted = jax.tree.map(np.asarray, results)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert a.dtype == jnp.dtype(dtype)
        largest = np.abs(b).max()
        np.testing.assert_allclose(
            a.astype(np.float32) / largest, b / largest, atol=TOLERANCE[dtype]
        )


# The MLP is quick in both; it stands on the same products.
DTYPES = ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)]
SIZES = [4, *(pytest.param(size, marks=pytest.mark.slow) for size in (2, 3, 8))]


@pytest.mark.parametrize("backend", ["xla", "none"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("keep", [0, 2**20])
def test_a_gather_of_several_weights(size, dtype, keep, backend):
    def local(x, *ws):
        return fa.all_gather_matmul(x, ws, "model", backend=backend, gathered_bytes=keep)

    with jax.set_mesh(mesh(size)):
        x = draw((2, size * 4, 16), 0, dtype)
        ws = tuple(draw((16, size * width), width, dtype) for width in (8, 4))
        out = (P(None, None, "model"),) * 2
        mapped = jax.shard_map(local, in_specs=(ROWS, COLUMNS, COLUMNS), out_specs=out)

        def both(x, *ws):
            return jnp.concatenate(mapped(x, *ws), -1)

        def reference(x, *ws):
            return jnp.concatenate([x @ w for w in ws], -1)

        check_parity(both, reference, (x, *ws), draw((2, size * 4, size * 12), 9, dtype), dtype)


@pytest.mark.parametrize("backend", ["xla", "none"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("op", [fa.matmul_reduce_scatter, fa.matmul_all_reduce])
def test_a_sum_of_several_products(size, dtype, op, backend):
    out = ROWS
    if op is fa.matmul_all_reduce:
        out = P()

    def local(x, z, w, v):
        return op((x, z), (w, v), "model", backend=backend)

    with jax.set_mesh(mesh(size)):
        split = P(None, None, "model")
        mapped = jax.shard_map(local, in_specs=(split, split, DOWN, DOWN), out_specs=out)
        operands = (
            draw((2, size * 4, size * 8), 0, dtype),
            draw((2, size * 4, size * 4), 1, dtype),
            draw((size * 8, 16), 2, dtype),
            draw((size * 4, 16), 3, dtype),
        )
        dy = draw((2, size * 4, 16), 4, dtype)
        check_parity(mapped, lambda x, z, w, v: x @ w + z @ v, operands, dy, dtype)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("keep", [0, 2**20])
@pytest.mark.parametrize("columns", [2, pytest.param(1, marks=pytest.mark.slow)])
def test_an_mlp_whose_blocks_are_never_put_in_order(size, dtype, keep, columns):
    options = {"backend": "xla", "precision": None, "gathered_bytes": keep}
    local = functools.partial(parallel_mlp, axis_name="model", activation=jax.nn.silu, **options)
    with jax.set_mesh(mesh(size)):
        mapped = jax.shard_map(local, in_specs=(ROWS, COLUMNS, DOWN), out_specs=ROWS)
        x = draw((2, size * 4, 16), 0, dtype)
        ws = tuple(draw((16, size * 8), n + 1, dtype) for n in range(columns))
        down = draw((size * 8, 16), 5, dtype)

        def reference(x, ws, down):
            return activate(jax.nn.silu, tuple(x @ w for w in ws)) @ down

        dy = draw((2, size * 4, 16), 6, dtype)
        check_parity(mapped, reference, (x, ws, down), dy, dtype)


def test_sums_travel_in_the_dtype_that_is_asked_for():
    def local(x, w):
        return fa.matmul_reduce_scatter(x, w, "model", backend="xla", reduce_dtype=jnp.float32)

    with jax.set_mesh(mesh(2)):
        mapped = jax.shard_map(local, in_specs=(P(None, None, "model"), DOWN), out_specs=ROWS)
        x, w = draw((1, 8, 8), 0, "bfloat16"), draw((8, 4), 1, "bfloat16")
        text = jax.jit(mapped).lower(x, w).as_text()
        assert text.count("collective_permute") == 1
        assert "tensor<1x4x4xf32>) -> tensor<1x4x4xf32>" in text
        assert mapped(x, w).dtype == jnp.bfloat16


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({"backend": "xla"}, SwitchExecutor),
        ({"backend": "none"}, WholeExecutor),
        ({"backend": None}, SwitchExecutor),
        ({"backend": "xla", "directions": 2}, RingExecutor),
        ({"backend": "xla", "quantization": "int8"}, RingExecutor),
        ({"backend": "none", "quantization": "int8"}, RingExecutor),
    ],
)
def test_which_calls_are_those_of_gpus(options, kind):
    asked = api.Options(**options)
    shapes = [(4, 64, 64), (64, 64)]
    executor, _ = api.choose_executor(
        "all_gather_matmul", shapes, jnp.dtype("bfloat16"), "model", 8, asked
    )
    assert type(executor) is kind


def test_a_ring_that_is_too_large_to_be_written_out_is_a_loop():
    options = api.Options("xla")
    shapes = [(4, 64, 64), (64, 64)]
    for size, kind in ((LARGEST, SwitchExecutor), (LARGEST + 1, RingExecutor)):
        executor, _ = api.choose_executor(
            "all_gather_matmul", shapes, jnp.dtype("bfloat16"), "model", size, options
        )
        assert type(executor) is kind


@pytest.mark.parametrize(("size", "kind"), [(8, WholeExecutor), (16, SwitchExecutor)])
def test_a_ring_beyond_one_host_has_no_times_and_takes_the_default(monkeypatch, size, kind):
    """On eight H100, products as small as these are predicted to be faster after one collective."""
    monkeypatch.setattr(ambient, "gpu", lambda: GPUS["h100"])
    shapes = [(1, 64, 4096), (4096, 768)]
    executor, _ = api.choose_executor(
        "all_gather_matmul", shapes, jnp.dtype("bfloat16"), "model", size, api.Options(None)
    )
    assert type(executor) is kind


@pytest.mark.parametrize("backend", ["pallas", "stateful", "fused"])
def test_backends_of_tpus_are_refused(backend):
    with jax.set_mesh(mesh(2)):
        mapped = jax.shard_map(
            lambda x, w: fa.all_gather_matmul(x, w, "model", backend=backend),
            in_specs=(ROWS, COLUMNS),
            out_specs=P(None, None, "model"),
        )
        with pytest.raises(NotImplementedError, match="backend='xla', which runs on every device"):
            mapped(draw((1, 8, 8), 0), draw((8, 8), 1))


def test_an_activation_that_closes_over_an_array_is_differentiated():
    """It can be no static argument of the rule of the gradient."""

    def local(x, ws, down):
        doubled = 2 * ws[0]  # traced: the activation below has it
        options = {"backend": "xla", "precision": None, "gathered_bytes": 0}

        def activation(h):
            return jax.nn.silu(h) * doubled.sum()

        return parallel_mlp(x, ws, down, "model", activation, **options)

    def reference(x, ws, down):
        sums = (2 * ws[0]).reshape(16, 4, 8).sum((0, 2))  # of the columns of each device
        h = jax.nn.silu(x @ ws[0]) * jnp.repeat(sums, 8)[None, None]
        return h @ down

    with jax.set_mesh(mesh(4)):
        mapped = jax.shard_map(local, in_specs=(ROWS, COLUMNS, DOWN), out_specs=ROWS)
        operands = (draw((2, 16, 16), 0), (draw((16, 32), 1),), draw((32, 16), 5))
        check_parity(mapped, reference, operands, draw((2, 16, 16), 6), "float32")
