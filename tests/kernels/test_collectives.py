"""all_gather and all_reduce alone, in the race-detecting simulator."""

import functools

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import flaxasync as fa
from flaxasync.kernels.collectives import all_gather, all_reduce
from flaxasync.kernels.engine.operands import Tiles
from flaxasync.kernels.engine.tiling import Tiling
from flaxasync.kernels.gemm import gemm
from tests.kernels.conftest import arranged, as_float32, assert_close, draw
from tests.kernels.conftest import run as simulate

KERNELS = {"all_gather": all_gather, "all_reduce": all_reduce}


def run(name, size, *, mode="on_wait", directions=1, dtype="float32", blocks=4, columns=512, data=1):
    """Runs a kernel on an axis of `size` devices; returns what it gave and what it should have."""
    rows = size * blocks * 8  # of one device; tiles have two of its blocks
    x = draw((data, size, rows, columns), dtype)
    tiles = {} if name == "all_gather" else {"tiles": Tiles(size * 16, 1, 256)}
    local = functools.partial(KERNELS[name], axis_name="ring", directions=directions, **tiles)
    out = P("data") if name == "all_reduce" else P(("data", "ring"))
    operands, mesh = [x.reshape(-1, columns)], {"shape": (data, size), "names": ("data", "ring")}
    got, whole = simulate(local, operands, (P(("data", "ring")),), out, mode=mode, **mesh), as_float32(x)
    if name == "all_gather":
        return got, np.tile(whole.reshape(data, 1, -1, columns), (1, size, 1, 1)).reshape(-1, columns)
    return got, whole.sum(1).reshape(-1, columns)


@pytest.mark.parametrize(("name", "size", "directions", "mode"), [
    pytest.param(name, *ring, marks=[] if ring[0] == 4 else pytest.mark.slow)
    for name in KERNELS for ring in [(2, 1, "eager"), (3, 2, "on_wait"), (4, 2, "eager")]
])  # fmt: skip
def test_values(name, size, directions, mode):
    o, want = run(name, size, mode=mode, directions=directions)
    assert_close(o, want)


@pytest.mark.parametrize("name", KERNELS)
def test_bfloat16_on_one_of_two_axes(name):
    o, want = run(name, 2, mode="eager", dtype="bfloat16", columns=512, data=2)
    assert_close(o, want, "bfloat16")


@pytest.mark.parametrize(
    ("size", "directions", "mode"), [pytest.param(2, 1, "on_wait", marks=pytest.mark.slow), (3, 2, "eager")]
)
def test_partial_tiles(size, directions, mode):
    """Of 16 rows, where there are 40, and of 256 columns, where there are 640: the last ones hang over both edges."""
    o, want = run("all_reduce", size, mode=mode, directions=directions, blocks=5, columns=640)
    assert_close(o, want)


@pytest.mark.parametrize(("side", "most", "unit", "tile"), [
    (4096, 1024, 8, 1024), (2560, 1024, 8, 640), (1536, 1024, 128, 768),  # they divide
    (5504, 1024, 128, 512), (1072, 1024, 16, 544), (384, 1024, 256, 256), (40, 16, 8, 16),
])  # fmt: skip
def test_sides_of_tiles(side, most, unit, tile):
    assert Tiling.overhanging(side, most, unit).size == tile


def test_a_sum_that_is_read_before_it_arrived_is_seen(monkeypatch):
    """A negative test: a kernel that waits for nothing."""
    monkeypatch.setattr("flaxasync.kernels.collectives.wait", lambda moved, sem: None)
    with pytest.raises((jax.errors.JaxRuntimeError, AssertionError), match=r"RACE DETECTED|non-zero count"):
        run("all_reduce", 3, mode="eager")


def test_eight_devices_play_without_a_finding():
    """The final instructions of a v5e:2x4, gemm among them; the player raises for whatever breaks a rule."""
    mesh = fa.check.topology_mesh("v5e:2x4", (8,), ("ring",))

    def local(x, w):
        for directions in (1, 2):
            ring = {"axis_name": "ring", "directions": directions}
            x = all_reduce(all_gather(x, **ring), **ring)[: len(x)]
        return gemm(x, w)

    specs = P("ring", None), P(None, "ring")
    fn = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P("ring", None), check_vma=False)
    arguments = arranged(mesh, [(8 * 128, 256), (256, 8 * 256)], specs)
    result = fa.check.play(jax.jit(fn), *arguments, topology="v5e:2x4")
    assert not result.notes
    names = [phase.name.partition(".")[0] for phase in result.slowest.phases]
    assert [names.count(name) for name in (*KERNELS, "gemm")] == [2, 2, 1]
