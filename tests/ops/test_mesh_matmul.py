"""mesh_matmul: every backend against an unsharded product, with gradients; refused calls; the
compiled program.
"""

import dataclasses
import functools
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import flaxasync as fa
from benchmarks.mesh_matmul import STUDY, program
from flaxasync.check.player.errors import RaceError
from flaxasync.kernels.engine.operands import Tiles
from flaxasync.kernels.engine.slots import wait
from flaxasync.kernels.engine.tiling import Tiling
from flaxasync.kernels.mesh_matmul import overlapped, schedule, weights
from flaxasync.kernels.mesh_matmul.weights import WeightBlocks
from flaxasync.ops.choose import OPS
from tests.kernels.conftest import as_float32, draw, simulated
from tests.ops.matmul.conftest import assert_close

ROOT = pathlib.Path(__file__).parents[2]
SPECS = P("x", "y"), P("x", None)
TILES = Tiles(16, 128, 128)
BACKENDS = OPS["mesh_matmul"].backends
PARTIAL = {"n": 640, "tiles": Tiles(16, 128, 256)}  # the last of three tiles of columns is partial


def operands(dtype="float32", m=64, k=512, n=256):
    return [draw(shape, dtype, i) for i, shape in enumerate([(m, k), (k, n), (m, n)])]


def sharded(**options):
    options.setdefault("tiles", TILES)
    return jax.shard_map(
        functools.partial(fa.mesh_matmul, **options), in_specs=SPECS, out_specs=P("x", None)
    )


def on_mesh(mesh, lhs, rhs):
    return tuple(
        jax.device_put(a, NamedSharding(mesh, spec))
        for a, spec in zip((lhs, rhs), SPECS, strict=True)
    )


def parity(shape, mode="on_wait", dtype="float32", m=64, k=512, n=256, *, races=True, **options):
    lhs, rhs, _ = operands(dtype, m, k, n)
    with simulated(shape, ("x", "y"), mode, races=races) as mesh:
        got = jax.jit(sharded(**options))(*on_mesh(mesh, lhs, rhs))
        assert_close(as_float32(got), as_float32(lhs) @ as_float32(rhs), dtype, "o")


@pytest.mark.parametrize(
    ("backend", "shape", "mode", "options"),
    [
        ("fused", (2, 2), "eager", {}),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [
                ("xla_gemm", (2, 2), "eager", {}),
                ("serial", (2, 2), "eager", {}),
                # partial tiles, too
                (
                    "serial",
                    (4, 1),
                    "eager",
                    {"directions": 1, "m": 128, "tiles": Tiles(48, 384, 128)},
                ),
                (
                    "fused",
                    (4, 1),
                    "eager",
                    {"dtype": "bfloat16", "m": 128, "k": 1024, "tiles": Tiles(48, 128, 128)},
                ),
                ("fused", (4, 1), "on_wait", {"directions": 1}),
                ("overlapped", (1, 4), "on_wait", {"dtype": "bfloat16", **PARTIAL}),
                ("overlapped", (2, 2), "eager", PARTIAL),
                ("overlapped", (4, 1), "on_wait", {"directions": 1, "dtype": "bfloat16"}),
                ("overlapped", (3, 1), "on_wait", {"k": 768, "m": 96}),
                ("overlapped", (1, 1), "on_wait", {}),
            ]
        ),
    ],
)
def test_kernels_on_any_mesh(backend, shape, mode, options):
    parity(shape, mode, backend=backend, **options)


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "shape", "options"), [
    ("overlapped", (2, 4), {"m": 192, "k": 1024, "directions": 1, **PARTIAL}),
])  # fmt: skip
def test_values_on_more_devices(backend, shape, options):
    """Values alone: the simulator looks for races on four devices at most."""
    parity(shape, "eager", backend=backend, races=False, **options)


@pytest.mark.slow
def test_values_on_four_rows_of_four():
    """Of all backends, with the gradients, which are the same for all: on 16 devices in a process
    of its own.
    """
    command = [sys.executable, "-m", "tests.ops.sixteen_devices"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.splitlines() == [
        "none: o, dlhs, drhs",
        "xla_gemm, directions=None: o",
        "serial, directions=2: o",
        "fused, directions=1: o",
        "overlapped, directions=1: o",
        "overlapped, directions=2: o",
    ], done.stderr[-2000:]


def check_gradients(mesh, fn, **sizes):
    lhs, rhs, do = operands(**sizes)

    def run(lhs, rhs, do):
        o, pull = jax.vjp(fn, lhs, rhs)
        return o, *pull(do)

    gots = jax.jit(run)(
        *on_mesh(mesh, lhs, rhs), jax.device_put(do, NamedSharding(mesh, P("x", None)))
    )
    for name, got, want in zip(
        ("o", "dlhs", "drhs"), gots, (lhs @ rhs, do @ rhs.T, lhs.T @ do), strict=True
    ):
        assert_close(as_float32(got), want, "float32", name)


@pytest.mark.parametrize(
    "shape",
    [(2, 4), *(pytest.param(s, marks=pytest.mark.slow) for s in ((1, 1), (1, 4), (4, 1)))],
)
def test_values_and_gradients_on_any_device(shape):
    mesh = jax.make_mesh(shape, ("x", "y"), devices=jax.devices()[: shape[0] * shape[1]])
    with jax.set_mesh(mesh):
        fn = jax.shard_map(
            fa.mesh_matmul, in_specs=SPECS, out_specs=P("x", None), check_vma=shape != (1, 4)
        )
        check_gradients(mesh, fn, m=16, k=32, n=8)


def test_values_and_gradients_of_a_kernel():
    with simulated((2, 2), ("x", "y")) as mesh:
        check_gradients(mesh, sharded(backend="overlapped"))


@pytest.mark.slow
def test_a_wrong_slot_of_w_is_seen(monkeypatch):
    """Negative test: a tile of w that arrives where the one in use lies is a race."""
    at = schedule.MeshSchedule.at
    broken = lambda self, step: dataclasses.replace(at(self, step), w_slot=jnp.int32(0))  # noqa: E731
    monkeypatch.setattr(schedule.MeshSchedule, "at", broken)
    with pytest.raises(jax.errors.JaxRuntimeError, match="RACE DETECTED"):
        parity((2, 2), "eager", backend="overlapped")


@pytest.mark.slow
def test_a_block_that_is_sent_on_before_it_arrived_is_seen(monkeypatch):
    """Negative test of the waits: the block is read while it arrives."""

    def early(self, chunk, t):
        def receive(_, columns):
            block = self.received.at[self.blocks.needed_rows(t), columns]
            pl.when(self.blocks.goes_on(t))(lambda: self._send(chunk, t, columns, block))
            wait(block, self.scratch.recv_sem.at[chunk, t])

        self.columns.on_slice(chunk, receive)

    monkeypatch.setattr(weights.Weights, "_receive", early)
    with pytest.raises(jax.errors.JaxRuntimeError, match="RACE DETECTED"):
        parity((4, 1), "eager", backend="overlapped")


@pytest.mark.slow
def test_a_wait_for_the_columns_of_another_tile_is_seen(monkeypatch):
    """Negative test of the partial tile: it is not as wide as the tile that was sent from its slot
    before.
    """
    wait_until_left = overlapped._Device.wait_until_left

    def broken(self, number):
        narrow = dataclasses.replace(self.tiles, columns=Tiling((3 * 128,), 128))
        wait_until_left(dataclasses.replace(self, tiles=narrow), number)

    monkeypatch.setattr(overlapped._Device, "wait_until_left", broken)
    with pytest.raises(AssertionError, match=r"has non-zero count .* at kernel exit"):
        parity((2, 2), "eager", backend="overlapped", **PARTIAL)


def refused(
    error, message, *, shape=(2, 2), lhs=(256, 512), rhs=(512, 512), dtype=jnp.float32, **options
):
    with simulated(shape, ("x", "y")), pytest.raises(error, match=message):
        jax.eval_shape(
            sharded(**options), jax.ShapeDtypeStruct(lhs, dtype), jax.ShapeDtypeStruct(rhs, dtype)
        )


def test_operands_that_do_not_fit_are_refused_with_their_numbers():
    refused(
        ValueError, "it must be one of none, xla_gemm, serial, fused, overlapped", backend="ring"
    )
    refused(ValueError, r"so K=512 on the left and K=1024 on the right", rhs=(1024, 512))
    refused(ValueError, "names of two mesh axes", axis_names=("x", "x"))
    refused(ValueError, "one floating dtype: got int32 and int32", dtype=jnp.int32)
    refused(
        NotImplementedError,
        "float32 and bfloat16: got lhs of float16",
        dtype=jnp.float16,
        backend="serial",
    )
    refused(
        ValueError,
        r"for a mesh of 4 x 1, in whole hardware tiles: got K=256 in blocks of 64",
        shape=(4, 1),
        lhs=(256, 256),
        rhs=(256, 512),
        backend="overlapped",
    )
    refused(
        ValueError,
        r"half of the rows each way around 'y': got 32 rows of float32, needed a multiple of 64",
        shape=(1, 4),
        lhs=(32, 512),
        backend="overlapped",
        directions=2,
    )
    refused(NotImplementedError, "default precision: got precision=highest; .* use backend='none'",
            backend="serial", precision="highest")  # fmt: skip
    refused(ValueError, "directions to be 1, 2 or None: got 3", directions=3)
    refused(
        ValueError,
        r"\[multiple of 8, multiple of 128\] for float32: got \[128, 64\]",
        lhs=(256, 128),
        rhs=(128, 512),
        backend="fused",
    )
    refused(
        NotImplementedError,
        r"has 384 for them.* are 1[0-9]{3} arrivals; use larger tiles",
        lhs=(16384, 65536),
        rhs=(65536, 32768),
        backend="overlapped",
        tiles=None,
    )
    refused(
        NotImplementedError,
        r"fused has a semaphore for each block of w.* are 1024 arrivals",
        lhs=(16384, 65536),
        rhs=(65536, 32768),
        backend="fused",
        tiles=None,
    )
    refused(
        ValueError,
        "got 24 rows of float32, needed a multiple of 16",
        lhs=(48, 512),
        backend="overlapped",
    )
    refused(
        ValueError,
        r"take \d{3}\.\d MiB with all buffers, and a v5e has 120 MiB to give; the largest",
        lhs=(16384, 16384),
        rhs=(16384, 8192),
        backend="overlapped",
        tiles=Tiles(4096, 1024, 2048),
    )


def test_a_call_that_names_no_backend_does_what_is_planned():
    mesh = fa.check.topology_mesh("v5e:2x2", (2, 2), ("x", "y"))
    # the kernels take no 130 columns
    for shape, planned in ((STUDY, True), ((4096, 4096, 130), False)):
        fn, *arguments = program(None, mesh, shape)
        assert ("pallas_call" in str(fn.trace(*arguments).jaxpr)) == planned


def test_kernels_need_tpus():
    mesh = jax.make_mesh((2, 2), ("x", "y"), devices=jax.devices()[:4])
    message = "made of TPU kernels, and this mesh is of cpu devices; use backend='none'"
    with jax.set_mesh(mesh), pytest.raises(NotImplementedError, match=message):
        jax.eval_shape(sharded(backend="overlapped"), *on_mesh(mesh, *operands()[:2]))


@pytest.mark.slow
def test_the_study_compiles_at_full_size():
    """The program is the kernel alone, and the copy that XLA adds where a kernel that communicates
    ends a program.
    """
    fn, *arguments = program(
        "overlapped", fa.check.topology_mesh("v5e:2x2", (2, 2), ("x", "y")), STUDY
    )
    compiled = fa.check.compile_for("v5e:2x2", fn, *arguments)
    instructions = fa.check.parse(compiled.as_text()).entry.instructions
    # a bitcast moves nothing
    opcodes = [i.opcode for i in instructions if i.opcode not in ("parameter", "bitcast")]
    assert sorted(set(opcodes)) == ["copy", "custom-call", "get-tuple-element"]
    assert opcodes.count("copy") == 1


@pytest.mark.slow
@pytest.mark.parametrize(("topology", "shape"), [
    ("tpu7x:2x2x1", (2, 4)), ("v6e:2x4", (2, 4)), ("v5e:4x4", (4, 4))
])  # fmt: skip
def test_other_meshes_compile_at_full_size(topology, shape):
    """A core of a v5p or tpu7x has 64 MiB of vector memory."""
    mesh = fa.check.topology_mesh(topology, shape, ("x", "y"))
    fns = [program(backend, mesh, STUDY) for backend in BACKENDS]
    together = jax.jit(lambda *arguments: [fn(*arguments) for fn, *_ in fns])
    fa.check.compile_for(topology, together, *fns[0][1:], compiler_options=fa.check.HLO_ONLY)


@pytest.mark.slow
def test_eight_devices_play_without_a_finding():
    """Executes the final instructions for two rows of four devices; the player raises if one of
    them breaks a rule.
    """
    mesh = fa.check.topology_mesh("v5e:2x4", (2, 4), ("x", "y"))
    tiles, forms = Tiles(64, 128, 256), [("serial", 1), ("fused", 2), ("overlapped", 2)]
    fns = [program(name, mesh, (1024, 1024, 512), tiles, directions) for name, directions in forms]
    together = jax.jit(lambda *arguments: sum(fn(*arguments).astype(jnp.float32) for fn, *_ in fns))
    assert not fa.check.play(together, *fns[0][1:], topology="v5e:2x4").notes


@pytest.mark.slow
@pytest.mark.parametrize("directions", [1, 2])
def test_four_rows_of_four_play_without_a_finding(directions):
    """No scalar is read before it was written: the order of blocks, whose last one comes over the
    most hops here.
    """
    mesh = fa.check.topology_mesh("v5e:4x4", (4, 4), ("x", "y"))
    fn, *arguments = program("overlapped", mesh, (1024, 2048, 512), Tiles(64, 256, 256), directions)
    assert not fa.check.play(fn, *arguments, topology="v5e:4x4").notes


def test_a_barrier_with_one_neighbour_alone_is_seen(monkeypatch):
    """Negative test: without the barrier a device may write to one that has not entered the kernel,
    a race.
    """
    mesh = fa.check.topology_mesh("v5e:2x2", (2, 2), ("x", "y"))
    enter = WeightBlocks.enter
    monkeypatch.setattr(
        WeightBlocks, "enter", lambda self, tag, collective_id, _: enter(self, tag, collective_id)
    )
    fn, *arguments = program("overlapped", mesh, (1024, 1024, 512), Tiles(128, 256, 256))
    with pytest.raises(RaceError, match="a barrier with the receiver is missing"):
        fa.check.play(fn, *arguments, topology="v5e:2x2")
    jax.clear_caches()  # the kernel's trace, too
