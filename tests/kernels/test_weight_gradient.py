"""gather_weight_gradient in the race-detecting simulator, what it refuses, and the program that it compiles to."""

import collections
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import flaxasync as fa
from flaxasync.kernels import weight_gradient
from flaxasync.kernels.engine.operands import Tiles
from flaxasync.kernels.engine.tiling import Tiling
from flaxasync.kernels.weight_gradient import gather_weight_gradient
from tests.kernels.conftest import simulated

TILES = Tiles(128, 128, 128)


def run(size, *, batch=1, m=128, k=256, ns=(128,), dtype="float32", mode="on_wait", tiles=TILES, **options):
    """Runs the kernel on an axis of `size` devices; returns what it gave and what it should have, side by side."""
    rng = np.random.default_rng(size)
    x = rng.standard_normal((batch, size * m, k)).astype(jnp.dtype(dtype))
    dys = tuple(rng.standard_normal((batch, size * m, size * n)).astype(jnp.dtype(dtype)) for n in ns)
    want = [np.einsum("bmk,bmn->kn", np.asarray(x, np.float32), np.asarray(dy, np.float32)) for dy in dys]
    local = functools.partial(gather_weight_gradient, axis_name="ring", tiles=tiles, **options)
    specs = P(None, "ring", None), P(None, None, "ring")
    with simulated((size,), ("ring",), mode) as mesh:
        fn = jax.jit(jax.shard_map(local, in_specs=specs, out_specs=P(None, "ring")))
        place = lambda v, spec: jax.device_put(v, NamedSharding(mesh, spec))  # noqa: E731
        dws = fn(place(x, specs[0]), tuple(place(dy, specs[1]) for dy in dys))
        return np.concatenate([np.asarray(dw, np.float32) for dw in dws], 1), np.concatenate(want, 1)


def close(got, want, tolerance=1e-5):
    assert np.abs(got - want).max() <= tolerance * np.abs(want).max()


@pytest.mark.parametrize(("size", "options"), [
    pytest.param(2, {"directions": 1, "k": 384, "mode": "eager"}, marks=pytest.mark.slow),
    (3, {"directions": 2, "batch": 4, "m": 64, "ns": (256, 128)}),
    pytest.param(4, {"directions": 2, "m": 256, "mode": "eager"}, marks=pytest.mark.slow),
    # Receive buffers are written again from the third chunk on.
    pytest.param(3, {"directions": 2, "m": 256, "k": 512, "mode": "eager"}, marks=pytest.mark.slow),
    pytest.param(4, {"directions": 1, "k": 512, "mode": "eager"}, marks=pytest.mark.slow),
])  # fmt: skip
def test_values(size, options):
    close(*run(size, **options))


@pytest.mark.slow
def test_bfloat16():
    close(*run(2, dtype="bfloat16", batch=2, m=64), 2e-2)  # dw is rounded once


RAGGED = {"m": 640, "k": 640, "ns": (640,), "tiles": Tiles(384, 384, 384)}  # 384 + 256


@pytest.mark.parametrize(("size", "options"), [
    pytest.param(2, {"directions": 1, "mode": "eager"}, marks=pytest.mark.slow),
    (3, {"batch": 5, "m": 128, "k": 128, "ns": (640, 128), "dtype": "bfloat16"}),  # batches 3 + 2
    pytest.param(4, {"batch": 10, "m": 64, "k": 128, "mode": "eager"}, marks=pytest.mark.slow),  # in pairs of batches
    pytest.param(2, {"batch": 2}, marks=pytest.mark.slow),  # a partial tile in the middle of a block
])  # fmt: skip
def test_partial_tiles(size, options):
    """The last tile of every side is partial; what lies beyond it in vector memory is not a number at first."""
    close(*run(size, **RAGGED | options), 2e-2 if options.get("dtype") == "bfloat16" else 1e-5)


def test_a_product_of_a_whole_tile_is_seen(monkeypatch):
    """Negative test: a partial tile of rows is multiplied as if it were whole, with what lies beyond it."""
    multiply = weight_gradient._Device.multiply

    def whole(self, here, n):
        rows = self.schedule.rows
        full = dataclasses.replace(rows, rows=Tiling((rows.count * rows.size,), rows.size))
        multiply(dataclasses.replace(self, schedule=dataclasses.replace(self.schedule, rows=full)), here, n)

    monkeypatch.setattr(weight_gradient._Device, "multiply", whole)
    got, want = run(2, **RAGGED | {"directions": 1, "k": 128, "ns": (128,)})
    assert np.isnan(got).any()
    assert not np.isnan(want).any()


def test_one_set_of_receive_buffers_is_seen(monkeypatch):
    """Negative test: a chunk that arrives where the one before lies overwrites what was not read."""
    monkeypatch.setattr(weight_gradient, "BUFFER_SETS", 1)
    with pytest.raises(jax.errors.JaxRuntimeError, match="RACE DETECTED"):
        run(3, directions=1, mode="eager")


def traced(size, x, dy, dtype=jnp.float32, **options):
    with simulated((size,), ("ring",)):
        local = functools.partial(gather_weight_gradient, axis_name="ring", **options)
        fn = jax.shard_map(local, in_specs=P(), out_specs=P("ring"), check_vma=False)
        jax.eval_shape(fn, jax.ShapeDtypeStruct(x, dtype), (jax.ShapeDtypeStruct(dy, dtype),))


@pytest.mark.parametrize(("error", "message", "size", "x", "dy", "options"), [
    (ValueError, "needs two devices or more on 'ring': got an axis of size 1", 1, (1, 128, 128), (1, 128, 128), {}),
    (ValueError, r"x \[B, m, k\] and dy \[B, 2\*m, n\]: got \[1, 128, 128\]", 2, (1, 128, 128), (1, 128, 128), {}),
    (ValueError, r"for float32: got \[128, 64\]; pad it", 2, (1, 128, 64), (1, 256, 128), {}),
    (ValueError, "multiple of 128 in all batches together: got 3 \\* 64; pad x", 2, (3, 64, 128), (3, 128, 128), {}),
    (NotImplementedError, "got a batch of x of float16", 2, (1, 128, 128), (1, 256, 128), {"dtype": jnp.float16}),
    (ValueError, r"take \d{3}\.\d MiB with all buffers, and a v5e has 120 MiB to give; the largest", 2,
     (1, 4096, 4096), (1, 8192, 8192), {"tiles": Tiles(4096, 4096, 2048)}),
])  # fmt: skip
def test_what_does_not_fit_is_refused_with_its_numbers(error, message, size, x, dy, options):
    with pytest.raises(error, match=message):
        traced(size, x, dy, **options)


@pytest.mark.slow
@pytest.mark.parametrize("topology", ["v5e:2x4", "v6e:2x4", "v5p:2x2x2", "tpu7x:2x2x1"])
def test_full_size_compiles(topology):
    """Rows of a sequence of 2048 in batches of 8, features of a model of 8192, hidden ones of 28672 over the ring.

    The program has the kernel and one transposition of x, and no pass over dy or dw but the copy of the result at the
    exit of a program.
    """
    size = fa.check.topology_size(topology)
    mesh = fa.check.topology_mesh(topology, (size,), ("ring",))
    specs = P(None, "ring", None), P(None, None, "ring")
    fn = jax.jit(
        jax.shard_map(
            lambda x, dy: gather_weight_gradient(x, (dy,), "ring"), mesh=mesh, in_specs=specs,
            out_specs=(P(None, "ring"),),
        )
    )  # fmt: skip
    shapes = (8, 2048, 8192), (8, 2048, 28672)
    arguments = [
        jax.ShapeDtypeStruct(s, jnp.bfloat16, sharding=NamedSharding(mesh, spec))
        for s, spec in zip(shapes, specs, strict=True)
    ]
    with jax.set_mesh(mesh):
        compiled = fa.check.compile_for(topology, fn, *arguments)
    entry = fa.check.parse(compiled.as_text()).entry.instructions
    opcodes = collections.Counter(instruction.opcode for instruction in entry)
    assert opcodes["custom-call"] == 1
    assert opcodes["copy"] + opcodes["custom-call-start"] == 2  # a tpu7x transposes on its SparseCore
    assert not {"fusion", "transpose", "slice", "concatenate", "pad"} & set(opcodes)
