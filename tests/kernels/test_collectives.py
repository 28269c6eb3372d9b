"""The kernels of the serial mesh matmul, gemm, all_gather and all_reduce, in the race-detecting
simulator.
"""

import functools

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

import flaxasync as fa
from flaxasync.kernels.collectives import all_gather, all_reduce
from flaxasync.kernels.engine.operands import Tiles
from flaxasync.kernels.gemm import gemm, step
from tests.kernels.conftest import arranged, as_float32, assert_close, draw, simulated
from tests.kernels.conftest import run as simulate

KERNELS = {"all_gather": all_gather, "all_reduce": all_reduce}


@pytest.mark.parametrize(
    ("name", "size", "count"), [("all_gather", 193, 2 * 193), ("all_reduce", 66, 6 * 65)]
)
def test_rings_that_need_more_semaphores_than_there_are_are_refused(name, size, count):
    local = functools.partial(KERNELS[name], axis_name="ring", directions=2)
    message = f"^{name} has {count} semaphores on {size} devices, and .*"
    with jax.sharding.use_abstract_mesh(AbstractMesh((size,), ("ring",))):
        fn = jax.shard_map(local, in_specs=P(), out_specs=P(), check_vma=False)
        with pytest.raises(NotImplementedError, match=f"{message} a smaller axis, or an op with"):
            jax.eval_shape(fn, jax.ShapeDtypeStruct((size * 16, 256), np.float32))


def run(
    name, size, *, mode="on_wait", directions=1, dtype="float32", blocks=4, columns=512, data=1
):
    """Runs a kernel on an axis of `size` devices; returns what it gave and what it should have."""
    rows = size * blocks * 8  # of one device; tiles have two of its blocks
    x = draw((data, size, rows, columns), dtype)
    tiles = {} if name == "all_gather" else {"tiles": Tiles(size * 16, 1, 256)}
    local = functools.partial(KERNELS[name], axis_name="ring", directions=directions, **tiles)
    out = P("data") if name == "all_reduce" else P(("data", "ring"))
    operands, mesh = [x.reshape(-1, columns)], {"shape": (data, size), "names": ("data", "ring")}
    got, whole = (
        simulate(local, operands, (P(("data", "ring")),), out, mode=mode, **mesh),
        as_float32(x),
    )
    if name == "all_gather":
        return got, np.tile(whole.reshape(data, 1, -1, columns), (1, size, 1, 1)).reshape(
            -1, columns
        )
    return got, whole.sum(1).reshape(-1, columns)


BOTH_WAYS = {"size": 4, "directions": 2, "mode": "eager"}
HALF_OF_THE_AXES = {"size": 2, "data": 2, "mode": "eager", "dtype": "bfloat16"}
PARTIAL = {
    "blocks": 5,
    "columns": 640,
}  # tiles have 16 of 40 rows and 256 of 640 columns


@pytest.mark.parametrize(("name", "options"), [
    ("all_gather", HALF_OF_THE_AXES),
    ("all_reduce", {"size": 3, "directions": 2, "mode": "eager"} | PARTIAL),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in [
        ("all_gather", BOTH_WAYS),
        ("all_gather", {"size": 3, "directions": 2}),
        ("all_reduce", BOTH_WAYS),
        ("all_reduce", HALF_OF_THE_AXES),
        ("all_reduce", {"size": 2} | PARTIAL),
    ]),
])  # fmt: skip
def test_values(name, options):
    assert_close(*run(name, **options), options.get("dtype", "float32"))


def check_gemm(shape, tiles, dtype):
    m, k, n = shape
    x, w = draw((m, k), dtype), draw((k, n), dtype, 1)
    with simulated((1,), ("x",)):
        o = as_float32(jax.jit(functools.partial(gemm, tiles=tiles))(x, w))
    assert_close(o, as_float32(x) @ as_float32(w), dtype)


@pytest.mark.parametrize(("shape", "tiles", "dtype"), [
    ((80, 640, 384), Tiles(32, 256, 256), "float32"),  # no side divides
    pytest.param((48, 384, 256), Tiles(32, 256, 128), "bfloat16", marks=pytest.mark.slow),
])  # fmt: skip
def test_values_of_gemm(shape, tiles, dtype):
    check_gemm(shape, tiles, dtype)


def test_a_missing_mask_is_seen(monkeypatch):
    """Negative test of the partial tiles: beyond k the simulator's memory is NaN."""
    monkeypatch.setattr("flaxasync.kernels.gemm.step", lambda *args, depth: step(*args, depth=512))
    with pytest.raises(AssertionError, match="nan location mismatch"):
        check_gemm((32, 384, 128), Tiles(32, 256, 128), "float32")


def test_tiles_of_no_size_are_refused():
    with pytest.raises(ValueError, match="positive sides: got m=0"):
        Tiles(0, 128, 128)


def test_a_sum_that_is_read_before_it_arrived_is_seen(monkeypatch):
    """A negative test: a kernel that waits for nothing."""
    monkeypatch.setattr("flaxasync.kernels.collectives.wait", lambda moved, sem: None)
    with pytest.raises(
        (jax.errors.JaxRuntimeError, AssertionError), match=r"RACE DETECTED|non-zero count"
    ):
        run("all_reduce", 3, mode="eager")


@pytest.mark.slow
def test_eight_devices_play_without_a_finding():
    """The final instructions of a v5e:2x4, gemm among them; the player raises for whatever breaks a
    rule.
    """
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
