"""Compiled programs, played: the study's variants, small, and one at full size; XLA's collectives and loops."""

import atexit
import functools
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.player import ROWS, STEP, misses, step_ms, value_ms
from benchmarks.player_kernels import STUDY, Tiles, program
from flaxasync.check import topology_mesh
from flaxasync.check.player import UnknownOperationError, play, play_dump, played_chip

SHAPE, TILES = (2048, 2048, 1024), Tiles(256, 256, 256, 256)


@functools.cache
def dumped(variant):
    """A folder with the dumps of a small variant, and its result."""
    folder = tempfile.mkdtemp(prefix="flaxasync-test-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    fn, *arguments = program(variant, topology_mesh("v5e:2x2", (2, 2), ("x", "y")), SHAPE, TILES)
    return folder, play(fn, *arguments, topology="v5e:2x2", keep_dumps=folder)


def sharded(topology, names, shape, local, in_specs, out_specs, *shapes, dtype=jnp.bfloat16, options=None):
    """Plays a function of local shards on a mesh."""
    mesh = topology_mesh(topology, shape, names)
    arguments = [
        jax.ShapeDtypeStruct(s, dtype, sharding=NamedSharding(mesh, spec))
        for s, spec in zip(shapes, in_specs, strict=True)
    ]
    fn = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False))
    return play(fn, *arguments, topology=topology, compiler_options=options)


def sent(result):
    """Bytes that leave a device over links, for each device."""
    return [sum(size for kind, size in d.bytes.items() if "remote" in kind) for d in result.devices]


def books_balance(result):
    for device in result.devices:
        assert device.seconds == pytest.approx(
            device.issue + device.matrix_stall + sum(device.waits.values()), rel=1e-6
        )
        for part in (device, *device.phases):
            assert part.matrix_busy <= part.issue + part.matrix_stall + 1e-9
            assert all(wait >= 0 for wait in part.waits.values())


W, O = SHAPE[1] // 2 * SHAPE[2] * 2, SHAPE[0] // 2 * SHAPE[2] * 2  # noqa: E741  bytes of a shard of w and of o


@pytest.mark.parametrize(
    ("variant", "bytes_sent", "phases"),
    [
        ("collectives_and_gemm", None, ("all-gather", "gemm", "psum")),
        ("series", [W + O] * 4, ("all_gather", "gemm", "all_reduce")),
        ("fused", [W + O, O, O, W + O], ("fused", "all_reduce")),  # two devices have what the others need
        ("overlapped", [W + O, O, O, W + O], ("overlapped",)),
    ],
)
def test_variants_of_the_study(variant, bytes_sent, phases):
    _, result = dumped(variant)
    books_balance(result)
    order = [next(p.start for p in result.slowest.phases if p.name.startswith(name)) for name in phases]
    assert order == sorted(order)
    if bytes_sent:
        assert sent(result) == bytes_sent
    assert not result.notes
    flops = 2 * SHAPE[0] * SHAPE[1] * SHAPE[2] / 4
    for device in result.devices:  # every tile is full: busy time is flops over peak
        assert device.matrix_busy == pytest.approx(flops / played_chip("v5e").sheet.flops, rel=0.005)


def test_xla_s_own_permute_and_all_reduce_run_from_their_bundles():
    _, result = dumped("xla")
    books_balance(result)
    assert not result.notes
    assert sent(result) == [O, W + O, W + O, O]  # two devices permute, two have what they need


def test_the_overlapped_kernel_waits_less_for_others_than_the_fused_one():
    assert dumped("overlapped")[1].exposed < 0.6 * dumped("fused")[1].exposed
    assert dumped("overlapped")[1].seconds < dumped("fused")[1].seconds < dumped("series")[1].seconds * 1.1


def test_a_run_is_the_same_every_time():
    folder, result = dumped("fused")
    again, third = play_dump(folder), play_dump(folder)
    assert result.to_json() == again.to_json() == third.to_json()
    assert again.stretches == third.stretches


def test_measured_gives_an_error_and_constants_can_be_replaced():
    import dataclasses

    folder, result = dumped("series")
    assert play_dump(folder, measured=result.seconds / 1.1).error == pytest.approx(0.1)
    slow = dataclasses.replace(played_chip("v5e"), link_efficiency=0.5)
    assert play_dump(folder, chip=slow).exposed > 1.7 * result.exposed


@pytest.fixture(scope="module")
def fused(tmp_path_factory):
    """The one full-size run of CI (benchmarks/player.py has the others): dumps, result, seconds of a core."""
    folder = tmp_path_factory.mktemp("fused")
    fn, *arguments = program("fused", topology_mesh("v5e:2x2", (2, 2), ("x", "y")), STUDY)
    begin = time.process_time()
    result = play(fn, *arguments, topology="v5e:2x2", measured=12.3e-3, keep_dumps=folder)
    return folder, result, time.process_time() - begin


def test_the_published_times_of_the_fused_kernel(fused):
    _, result, seconds = fused
    assert abs(result.error) < 0.02
    assert misses([(row, value_ms(row, result)) for row in ROWS if row.variant == "fused"]) == []
    assert seconds < 60
    assert "prediction" in result.basis
    assert importlib.metadata.version("libtpu") in result.basis


ALONE = """
import resource, sys
from flaxasync.check.player.__main__ import main
main(sys.argv[1:])
print("KiB:", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def test_a_process_of_its_own_finds_the_same_in_little_memory(fused, tmp_path):
    folder, result, _ = fused
    command = [sys.executable, "-c", ALONE, folder, "--json", tmp_path / "r.json"]
    done = subprocess.run(command, env=os.environ | {"PYTHONHASHSEED": "1"}, check=True, capture_output=True, text=True)
    assert json.loads((tmp_path / "r.json").read_text())["devices"] == json.loads(result.to_json())["devices"]
    assert int(done.stdout.split("KiB:")[1]) < 2 << 20


@pytest.mark.slow
def test_the_step_of_the_gemm_kernel():
    assert misses([(STEP, step_ms(Tiles()))]) == []


def test_the_table_notices_what_is_too_far_and_what_is_out_of_order():
    exact = [(row, row.measured) for row in (*ROWS, STEP) if row.measured]
    assert misses(exact) == []
    factors = {"total": (1.019, 1.021), "phase": (1.09, 1.11), "step": (1.009, 1.011)}
    for chosen in ("xla", "step"):
        for row, value in exact:
            if row.variant == chosen:
                near, far = factors["step" if row is STEP else "phase" if row.phases else "total"]
                assert misses([(row, value * near)]) == []
                assert len(misses([(row, value * far)])) == 1
    swapped = {"collectives_and_gemm": 12.3, "fused": 12.4}
    (text,) = misses([(row, value if row.phases else swapped.get(row.variant, value)) for row, value in exact])
    assert "another order: xla, collectives_and_gemm, fused, series" in text


@pytest.mark.parametrize("topology", ["v5e:2x2", "v6e:2x4", "v5p:2x2x1", "tpu7x:2x2x1"])
def test_a_while_loop_of_permutes(topology):
    size, turns = {"v5e:2x2": 4, "v6e:2x4": 8, "v5p:2x2x1": 4, "tpu7x:2x2x1": 8}[topology], 5

    def local(x, w):
        def turn(x, _):
            return lax.ppermute(jnp.tanh(x @ w), "model", [(i, (i + 1) % size) for i in range(size)]), None

        return lax.scan(turn, x, None, length=turns)[0]

    result = sharded(
        topology, ("model",), (size,), local, (P("model", None), P()), P("model", None), (256 * size, 256), (256, 256)
    )
    books_balance(result)
    permutes = result.slowest.phase("collective-permute-done")
    assert (permutes.runs, permutes.depth) == (turns, 1)
    assert sent(result) == [turns * 256 * 256 * 2] * size
    assert (result.slowest.phase("collective-permute-start").runs, len(result.notes) > 0) == (
        turns,
        topology == "v5p:2x2x1",
    )
    if topology != "v5e:2x2":
        assert "assumed" in result.known_error


def test_collectives_without_tables_are_played_and_others_are_marked():
    def local(x):
        return lax.all_to_all(x, "model", 1, 0, tiled=True), lax.psum(x, "model")

    result = sharded("v5e:2x2", ("model",), (4,), local, (P("model", None),), (P("model", None), P()), (1024, 512))
    assert not result.slowest.phase("all_to_all").analytic
    assert result.slowest.phase("psum").analytic
    assert any("ring model" in note and "psum" in note for note in result.notes)
    ring = 2 * 3 / 4 * 256 * 512 * 2 / (2 * played_chip("v5e").link)
    assert ring < result.slowest.phase("psum").waits["collective"] < 3 * ring  # hops and additions come on top


def gather_beside_a_matmul(options):
    def local(x, w, v):
        return v @ w, lax.all_gather(x, "model", tiled=True) @ w

    return sharded(
        "v5e:2x2", ("model",), (4,), local, (P("model"), P(None, "model"), P("model")), (P("model"), P(None, "model")),
        (1024, 512), (512, 4096), (1024, 512), options=options,
    )  # fmt: skip


SYNCHRONOUS = {"xla_tpu_enable_async_collective_fusion": "false"}


def test_an_asynchronous_collective_is_refused_with_the_option_that_makes_it_synchronous():
    with pytest.raises(UnknownOperationError, match="asynchronous all-gather of XLA reads a table") as refused:
        gather_beside_a_matmul(None)
    assert f"compiler_options={json.dumps(SYNCHRONOUS)}" in str(refused.value)


@pytest.mark.slow
def test_the_option_makes_it_synchronous():
    result = gather_beside_a_matmul(SYNCHRONOUS)
    assert [p.analytic for p in result.slowest.phases if "all" in p.name] == [True]


def test_xla_s_windowed_einsum_on_v6e():
    mesh = topology_mesh("v6e:2x4", (8,), ("model",))
    rows, features, hidden = 16384, 256, 512
    arguments = [
        jax.ShapeDtypeStruct(s, jnp.bfloat16, sharding=NamedSharding(mesh, spec))
        for s, spec in (
            ((rows, features), P("model", None)),
            ((features, hidden), P(None, "model")),
            ((hidden, features), P("model", None)),
        )
    ]  # fmt: skip
    fn = jax.jit(lambda x, a, b: jax.nn.relu(x @ a) @ b, out_shardings=NamedSharding(mesh, P("model", None)))
    result = play(fn, *arguments, topology="v6e:2x4")
    books_balance(result)
    loops = [p for p in result.slowest.phases if p.name.startswith("while")]
    permutes = [p for p in result.slowest.phases if p.name.startswith("collective-permute-start") and p.depth == 1]
    assert len(loops) == 2
    assert all(p.runs > 1 for p in permutes)
    assert min(sent(result)) == max(sent(result)) > 0
    assert not any("ring model" in note for note in result.notes)


def test_json_trace_picture_and_table(tmp_path):
    _, result = dumped("fused")
    content = json.loads(result.to_json())
    assert content["seconds"] == result.seconds
    assert len(content["devices"]) == 4
    result.save_trace(tmp_path / "trace.json")
    trace = json.loads((tmp_path / "trace.json").read_text())
    assert max(e.get("ts", 0) + e.get("dur", 0) for e in trace["traceEvents"]) == pytest.approx(
        result.seconds * 1e6, rel=1e-3
    )
    result.save_picture(tmp_path / "run.png")
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")
    timeline = result.timeline()
    assert timeline.seconds == result.seconds
    assert timeline.exposed == pytest.approx(result.exposed)
    for text in (result.slowest.phase("fused").name, "basis:", "known error:", "device 3", "bytes of all devices"):
        assert text in str(result)
