"""all_gather, reduce_scatter and all_reduce alone, in the race-detecting simulator; what is refused."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import flaxasync as fa
from flaxasync.kernels.collectives import all_gather, all_reduce, reduce_scatter
from flaxasync.kernels.engine.operands import Tiles
from flaxasync.kernels.engine.tiling import Tiling
from flaxasync.kernels.gemm import gemm
from tests.kernels.conftest import simulated

KERNELS = {"all_gather": all_gather, "reduce_scatter": reduce_scatter, "all_reduce": all_reduce}
TILES = Tiles(16, 1, 256)


def run(name, size, *, mode="on_wait", directions=1, dtype="float32", blocks=4, columns=512, data=1):
    """Runs a kernel on an axis of `size` devices; returns what it gave and what it should have."""
    rows = size * blocks * 8  # of one device; tiles have two of its blocks
    x = np.random.default_rng(size).standard_normal((data, size, rows, columns)).astype(jnp.dtype(dtype))
    tiles = {} if name == "all_gather" else {"tiles": Tiles(size * 16, 1, 256) if name == "all_reduce" else TILES}
    local = functools.partial(KERNELS[name], axis_name="ring", directions=directions, **tiles)
    out = P("data", None) if name == "all_reduce" else P(("data", "ring"), None)
    with simulated((data, size), ("data", "ring"), mode) as mesh:
        fn = jax.jit(jax.shard_map(local, in_specs=P(("data", "ring"), None), out_specs=out))
        placed = jax.device_put(x.reshape(-1, columns), NamedSharding(mesh, P(("data", "ring"), None)))
        o = np.asarray(fn(placed), np.float32)
    whole = x.astype(np.float32)
    if name == "all_gather":
        return o, np.tile(whole.reshape(data, 1, -1, columns), (1, size, 1, 1)).reshape(-1, columns)
    return o, whole.sum(1).reshape(-1, columns)


QUICK = {"all_gather": 4, "reduce_scatter": 3, "all_reduce": 4}  # one size each; two devices are tested in bfloat16


@pytest.mark.parametrize(("name", "size", "directions", "mode"), [
    pytest.param(name, *ring, marks=[] if ring[0] == QUICK[name] else pytest.mark.slow)
    for name in KERNELS for ring in [(2, 1, "eager"), (3, 2, "on_wait"), (4, 2, "eager")]
])  # fmt: skip
def test_values(name, size, directions, mode):
    o, want = run(name, size, mode=mode, directions=directions)
    np.testing.assert_allclose(o, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", KERNELS)
def test_bfloat16_on_one_of_two_axes(name):
    o, want = run(name, 2, mode="eager", dtype="bfloat16", columns=512, data=2)
    np.testing.assert_allclose(o, want, rtol=2e-2, atol=2e-2)  # one sum, rounded


@pytest.mark.parametrize(
    ("size", "directions", "mode"), [pytest.param(2, 1, "on_wait", marks=pytest.mark.slow), (3, 2, "eager")]
)
@pytest.mark.parametrize("name", ["reduce_scatter", "all_reduce"])
def test_partial_tiles(name, size, directions, mode):
    """Of 16 rows, where there are 40, and of 256 columns, where there are 640: the last ones hang over both edges."""
    o, want = run(name, size, mode=mode, directions=directions, blocks=5, columns=640)
    np.testing.assert_allclose(o, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("side", "most", "unit", "tile"), [
    (4096, 1024, 8, 1024), (2560, 1024, 8, 640), (1536, 1024, 128, 768),  # they divide
    (5504, 1024, 128, 512), (1072, 1024, 16, 544), (384, 1024, 256, 256), (40, 16, 8, 16),
])  # fmt: skip
def test_sides_of_tiles(side, most, unit, tile):
    assert Tiling.overhanging(side, most, unit).size == tile


def test_receive_buffers_that_are_used_again_at_once_are_seen(monkeypatch):
    """A negative test: with one set of receive buffers a device overwrites what its neighbour has not read."""
    monkeypatch.setattr("flaxasync.kernels.collectives._buffer_set", lambda: 0)
    with pytest.raises(jax.errors.JaxRuntimeError, match="RACE DETECTED"):
        np.testing.assert_allclose(*run("reduce_scatter", 3, mode="eager"), rtol=1e-5, atol=1e-5)


def traced(name, shape, size, **options):
    with simulated((size,), ("ring",)):
        fn = jax.shard_map(
            functools.partial(KERNELS[name], axis_name="ring", **options),
            in_specs=P("ring", None), out_specs=P("ring", None), check_vma=False,
        )  # fmt: skip
        jax.eval_shape(fn, jax.ShapeDtypeStruct((size * shape[0], shape[1]), options.pop("dtype", jnp.float32)))


@pytest.mark.parametrize(("name", "shape", "size", "options", "message"), [
    ("all_gather", (32, 128), 1, {}, "needs two devices or more on 'ring': got an axis of size 1"),
    ("all_reduce", (32, 128), 1, {}, "needs two devices or more on 'ring': got an axis of size 1"),
    ("all_gather", (30, 128), 2, {}, r"multiple of 8, multiple of 128\] for float32: got \[30, 128\]"),
    ("all_gather", (24, 128), 2, {"directions": 2}, "half of the rows of x each way: got 24, needed a multiple of 16"),
    ("all_gather", (32, 128), 2, {"directions": 3}, "directions to be 1 or 2: got 3"),
    ("reduce_scatter", (24, 128), 2, {}, "got 24 rows of float32, needed a multiple of 16"),
    ("all_reduce", (24, 128), 2, {}, "got 24 rows of float32, needed a multiple of 16"),
    ("all_reduce", (32, 128), 2, {"directions": 2}, "half of the columns of a tile each way: got 128"),
    ("all_reduce", (8192, 8192), 2, {"tiles": Tiles(8192, 1, 8192)}, "a v5e has 120 MiB to give; the largest of this"),
])  # fmt: skip
def test_what_does_not_fit_is_refused_with_its_numbers(name, shape, size, options, message):
    with pytest.raises(ValueError, match=message):
        traced(name, shape, size, **options)


def test_eight_devices_play_without_a_finding():
    """The final instructions of a v5e:2x4, gemm among them; the player raises for whatever breaks a rule."""
    mesh = fa.check.topology_mesh("v5e:2x4", (8,), ("ring",))

    def local(x, w):
        for directions in (1, 2):
            ring = {"axis_name": "ring", "directions": directions}
            x = reduce_scatter(all_reduce(all_gather(x, **ring), **ring), **ring)
        return gemm(x, w)

    specs = P("ring", None), P(None, "ring")
    fn = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P("ring", None), check_vma=False)
    shapes = zip(((8 * 128, 256), (256, 8 * 256)), specs, strict=True)
    arguments = [jax.ShapeDtypeStruct(s, jnp.bfloat16, sharding=NamedSharding(mesh, spec)) for s, spec in shapes]
    result = fa.check.play(jax.jit(fn), *arguments, topology="v5e:2x4")
    assert not result.notes
    names = [phase.name.partition(".")[0] for phase in result.slowest.phases]
    assert sorted(names.count(name) for name in (*KERNELS, "gemm")) == [1, 2, 2, 2]
