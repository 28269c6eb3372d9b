"""mesh_matmul: every backend against an unsharded product, with gradients; what is refused; the compiled program."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import flaxasync as fa
from benchmarks.mesh_matmul import STUDY, program
from flaxasync.check.player.errors import RaceError
from flaxasync.kernels import overlapped, walk
from flaxasync.kernels.tiles import Tiles
from tests.kernels.conftest import simulated

SPECS = P("x", "y"), P("x", None)
TILES = Tiles(16, 128, 128)
KERNELS = ("xla_gemm", "serial", "fused", "overlapped")


def operands(dtype="float32", m=128, k=512, n=256):
    shapes = [(m, k), (k, n), (m, n)]
    return [jnp.asarray(np.random.default_rng(i).standard_normal(s), dtype) for i, s in enumerate(shapes)]


def sharded(**options):
    options.setdefault("tiles", TILES)
    return jax.shard_map(functools.partial(fa.mesh_matmul, **options), in_specs=SPECS, out_specs=P("x", None))


def on_mesh(mesh, lhs, rhs):
    return tuple(jax.device_put(a, NamedSharding(mesh, spec)) for a, spec in zip((lhs, rhs), SPECS, strict=True))


def close(got, want, dtype="float32"):
    want = np.asarray(want, np.float32)
    tolerance = 1e-5 if dtype == "float32" else 2e-2  # float32: order of additions; bfloat16: sums travel rounded
    np.testing.assert_allclose(np.asarray(got, np.float32), want, rtol=tolerance, atol=tolerance * np.abs(want).max())


def parity(shape, mode="on_wait", dtype="float32", **options):
    lhs, rhs, _ = operands(dtype)
    with simulated(shape, ("x", "y"), mode) as mesh:
        got = jax.jit(sharded(**options))(*on_mesh(mesh, lhs, rhs))
        close(got, lhs.astype(jnp.float32) @ rhs.astype(jnp.float32), dtype)


@pytest.mark.parametrize("backend", KERNELS)
def test_kernels(backend):
    parity((2, 2), "eager", backend=backend)


@pytest.mark.parametrize("mode", ["on_wait", "eager"])
def test_the_overlapped_kernel_in_bfloat16(mode):
    parity((2, 2), mode, "bfloat16", backend="overlapped", tiles=Tiles(16, 256, 128))


@pytest.mark.parametrize("shape", [(1, 4), (4, 1)])
def test_serial_on_other_meshes(shape):
    parity(shape, backend="serial")


@pytest.mark.parametrize("shape", [(1, 1), (2, 2), (1, 4), (4, 1), (2, 4)])
def test_values_and_gradients_on_any_device(shape):
    lhs, rhs, do = operands(m=16, k=32, n=8)
    mesh = jax.make_mesh(shape, ("x", "y"), devices=jax.devices()[: shape[0] * shape[1]])
    with jax.set_mesh(mesh):
        fn = jax.shard_map(fa.mesh_matmul, in_specs=SPECS, out_specs=P("x", None), check_vma=shape != (2, 4))
        o, pull = jax.vjp(jax.jit(fn), *on_mesh(mesh, lhs, rhs))
        dlhs, drhs = jax.jit(pull)(jax.device_put(do, P("x", None)))
    close(o, lhs @ rhs)
    close(dlhs, do @ rhs.T)
    close(drhs, lhs.T @ do)


def test_gradients_of_a_kernel():
    lhs, rhs, do = operands()
    with simulated((2, 2), ("x", "y")) as mesh:
        fn = sharded(backend="overlapped")
        grads = jax.jit(jax.grad(lambda a, b: (fn(a, b) * do).sum(), (0, 1)))(*on_mesh(mesh, lhs, rhs))
        close(grads[0], do @ rhs.T)
        close(grads[1], lhs.T @ do)


def test_a_wrong_slot_of_w_is_seen(monkeypatch):
    """The twin: a tile of w that lands on the one in use is a race, or gives wrong values."""
    at = walk.Walk.at
    broken = lambda self, step: walk.dataclasses.replace(at(self, step), w_slot=jnp.int32(0))  # noqa: E731
    monkeypatch.setattr(walk.Walk, "at", broken)
    with pytest.raises((jax.errors.JaxRuntimeError, AssertionError)):
        parity((2, 2), "eager", backend="overlapped")


def refused(error, message, *, shape=(2, 2), lhs=(256, 512), rhs=(512, 512), dtype=jnp.float32, **options):
    with simulated(shape, ("x", "y")), pytest.raises(error, match=message):
        jax.eval_shape(sharded(**options), jax.ShapeDtypeStruct(lhs, dtype), jax.ShapeDtypeStruct(rhs, dtype))


def test_what_does_not_fit_is_refused_with_its_numbers():
    refused(ValueError, "it must be one of none, xla_gemm, serial, fused, overlapped", backend="ring")
    refused(ValueError, r"so K=512 on the left and K=1024 on the right", rhs=(1024, 512))
    refused(ValueError, "names of two mesh axes", axis_names=("x", "x"))
    refused(ValueError, "one floating dtype: got int32 and int32", dtype=jnp.int32)
    refused(NotImplementedError, "float32 and bfloat16: got lhs of float16", dtype=jnp.float16, backend="serial")
    refused(NotImplementedError, "for a mesh of 2 x 2 devices: got 1 x 4; use backend='serial'", shape=(1, 4),
            backend="overlapped")  # fmt: skip
    refused(ValueError, r"\[multiple of 8, multiple of 128\] for float32: got \[128, 64\]", lhs=(256, 128),
            rhs=(128, 512), backend="fused")  # fmt: skip
    refused(NotImplementedError, r"has 448 for them.* are 1[0-9]{3} pieces; use larger tiles", lhs=(16384, 65536),
            rhs=(65536, 32768), backend="overlapped", tiles=None)  # fmt: skip
    refused(ValueError, "got 24 rows of float32, needed a multiple of 16", lhs=(48, 512), backend="overlapped")
    refused(ValueError, r"take \d{3}\.\d MiB with all buffers, and a v5e has 120 MiB to give; the largest",
            lhs=(16384, 16384), rhs=(16384, 8192), backend="overlapped", tiles=Tiles(4096, 1024, 2048))  # fmt: skip


def test_kernels_need_tpus():
    mesh = jax.make_mesh((2, 2), ("x", "y"), devices=jax.devices()[:4])
    with (
        jax.set_mesh(mesh),
        pytest.raises(
            NotImplementedError, match="made of TPU kernels, and this mesh is of cpu devices; use backend='none'"
        ),
    ):
        jax.jit(sharded(backend="overlapped")).trace(*on_mesh(mesh, *operands()[:2]))


def test_the_study_compiles_at_full_size():
    """Also: nothing but the kernel, and the copy that XLA adds where a kernel that communicates ends a program."""
    fn, *arguments = program("overlapped", fa.check.topology_mesh("v5e:2x2", (2, 2), ("x", "y")), STUDY)
    compiled = fa.check.compile_for("v5e:2x2", fn, *arguments)
    opcodes = [i.opcode for i in fa.check.parse(compiled.as_text()).entry.instructions if i.opcode != "parameter"]
    assert sorted(set(opcodes)) == ["copy", "custom-call", "get-tuple-element"]
    assert opcodes.count("copy") == 1


def test_a_barrier_with_one_neighbour_alone_is_seen(monkeypatch):
    """The player follows who has heard of whom: a write into a device that may not have entered is a race."""
    mesh = fa.check.topology_mesh("v5e:2x2", (2, 2), ("x", "y"))
    fn, *arguments = program("overlapped", mesh, (1024, 1024, 512), Tiles(128, 256, 256))
    result = fa.check.play(fn, *arguments, topology="v5e:2x2")
    assert not result.notes
    enter = overlapped.enter
    jax.clear_caches()  # the kernel's trace, too
    monkeypatch.setattr(overlapped, "enter", lambda name, neighbours, barrier: enter(name, neighbours[:1], barrier))
    fn, *arguments = program("overlapped", mesh, (1024, 1024, 512), Tiles(128, 256, 256))
    with pytest.raises(RaceError, match="a barrier with the receiver is missing"):
        fa.check.play(fn, *arguments, topology="v5e:2x2")
    jax.clear_caches()
