"""Kernels of a compiled program, each simulated once: `fa.check.timeline(program, kernels="play")`."""

import dataclasses
import importlib.metadata
import json
import pathlib
import threading
import types
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import PartitionSpec as P

import flaxasync as fa
from benchmarks import tp_mlp
from benchmarks.programs import array
from flaxasync.check import parse
from flaxasync.check.hlo.shapes import HBM, VMEM, Shape
from flaxasync.check.player import kernel_times
from flaxasync.check.player.play import play_dump
from flaxasync.kernels.gemm import Tiles, gemm
from flaxasync.transport import direct
from tests.check.programs import on_all_devices

ONE_CHIP = types.SimpleNamespace(chip="v5e", topology="v5e:1x1", coords=((0, 0, 0),), axes={"x": 1})


@pytest.fixture(autouse=True)
def folder_of_times(tmp_path, monkeypatch):
    monkeypatch.setenv(kernel_times.VARIABLE, str(tmp_path / "times"))


def test_operands_of_every_type():
    types = {
        "bf16": "bfloat16",
        "f8e4m3fn": "float8_e4m3fn",
        "s4": "int4",
        "u16": "uint16",
        "pred": "bool",
    }
    for short, dtype in types.items():
        assert kernel_times._type(Shape(short, (8, 128))) == jax.ShapeDtypeStruct(
            (8, 128), jnp.dtype(dtype)
        )


PLACED = """HloModule m, is_scheduled=true

ENTRY e {
  a = f32[8,128]{1,0} parameter(0)
  b = f32[8,128]{1,0:T(8,128)S(1)} copy(a)
  start = (f32[8,128]{1,0:T(8,128)S(1)}, f32[8,128]{1,0}) custom-call(a, b), custom_call_target="tpu_custom_call", \
backend_config={"custom_call_config":{"body":"x","output_memory_space_colors":[]}}
  ROOT r = f32[8,128]{1,0} get-tuple-element(start), index=1
}
"""


def test_operands_and_results_stay_in_the_memory_in_which_the_program_has_them():
    ((_, kernel),) = kernel_times._kernels(parse(PLACED), lambda kernel, shape: None)
    call = json.loads(kernel.config)["custom_call_config"]
    assert call["input_memory_space_colors"] == [
        {"operand_index": 0, "color": HBM},
        {"operand_index": 1, "color": VMEM},
    ]
    assert call["output_memory_space_colors"] == [
        {"color": VMEM, "shape_index": [0]},
        {"color": HBM, "shape_index": [1]},
    ]


REPEATED = """HloModule m, is_scheduled=true

ENTRY e {
  a = f32[8,128]{1,0} parameter(0)
  once = f32[8,128]{1,0} custom-call(a), custom_call_target="tpu_custom_call", \
backend_config={"custom_call_config":{"body":"x"}}
  other = f32[8,128]{1,0} custom-call(once), custom_call_target="tpu_custom_call", \
backend_config={"custom_call_config":{"body":"y"}}
  ROOT again = f32[8,128]{1,0} custom-call(other), custom_call_target="tpu_custom_call", \
backend_config={"custom_call_config":{"body":"x"}}
}
"""


def test_two_kernels_are_simulated_at_a_time_and_equal_ones_once(monkeypatch):
    both = threading.Barrier(2, timeout=60)

    def simulate(program, kernel):
        both.wait()
        return kernel_times.KernelTime(1.0, 0.5)

    monkeypatch.setattr(kernel_times, "_simulate", simulate)
    said = []
    times, notes = kernel_times.kernel_times(ONE_CHIP, parse(REPEATED), said.append)
    assert times == dict.fromkeys(("once", "other", "again"), kernel_times.KernelTime(1.0, 0.5))
    assert notes == ()
    assert sorted(said) == ["kernel 1 of 2: once", "kernel 2 of 2: other"]


def test_a_time_is_kept_by_the_compiler_its_flags_and_the_chips(tmp_path, monkeypatch):
    kept = {kernel_times._cache_file(ONE_CHIP, None)}
    assert kept == {kernel_times._cache_file(ONE_CHIP, None)}
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--xla_tpu_scoped_vmem_limit_kib=98304")
    kept.add(kernel_times._cache_file(ONE_CHIP, None))
    changed = tmp_path / "hardware.py"
    changed.write_text("hbm_efficiency = 0.85")
    monkeypatch.setattr(kernel_times, "hardware", types.SimpleNamespace(__file__=str(changed)))
    monkeypatch.setattr(kernel_times, "_digest", kernel_times._digest.__wrapped__)
    kept.add(kernel_times._cache_file(ONE_CHIP, None))

    def not_found(package):
        raise importlib.metadata.PackageNotFoundError(package)

    # a nightly build of libtpu has another name
    monkeypatch.setattr(importlib.metadata, "version", not_found)
    kept.add(kernel_times._cache_file(ONE_CHIP, None))
    assert len(kept) == 4


def test_a_damaged_file_of_a_time_is_made_again(monkeypatch):
    time = kernel_times.KernelTime(1.0, 0.5)
    monkeypatch.setattr(kernel_times, "_simulate", lambda program, kernel: time)
    said = []
    kernel_times._time_of(ONE_CHIP, None, "first", said.append)
    kernel_times._cache_file(ONE_CHIP, None).write_text("{")
    assert kernel_times._time_of(ONE_CHIP, None, "again", said.append) == time
    assert kernel_times._time_of(ONE_CHIP, None, "kept", said.append) == time
    assert said == ["first", "again"]


def test_two_threads_can_keep_the_time_of_one_kernel(monkeypatch):
    both = threading.Barrier(2, timeout=60)
    replace = pathlib.Path.replace

    def replace_together(partial, file):
        both.wait()
        return replace(partial, file)

    monkeypatch.setattr(pathlib.Path, "replace", replace_together)
    time = kernel_times.KernelTime(1.0, 0.5)
    monkeypatch.setattr(kernel_times, "_simulate", lambda program, kernel: time)
    with ThreadPoolExecutor(2) as pool:
        made = [pool.submit(kernel_times._time_of, ONE_CHIP, None, "", None) for _ in range(2)]
    assert [future.result() for future in made] == [time, time]


def product(x, w):
    return gemm(x, w, tiles=Tiles(512, 512, 1024))


def corner(x, w):
    """What remains of a product that XLA then puts into vector memory."""
    return product(x, w)[:8, :128]


def twice(x, w):
    """A product whose first operand is in vector memory: the result of another one."""
    return gemm(gemm(x, w), w)


def part_twice(x, w):
    """Rows of a product in vector memory that XLA copies within it, while it brings w there."""
    return gemm(product(x, w)[:512], w)


CUBE = (1024, 1024, 1024)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("topology", "fn", "shape", "dtype", "spaces"),
    [
        ("v5e:1x1", corner, CUBE, jnp.float32, {VMEM}),
        ("v5e:1x1", twice, CUBE, jnp.bfloat16, {VMEM, HBM}),
        ("v6e:1x1", product, (2048, 512, 2048), jnp.bfloat16, {HBM}),
        ("v6e:1x1", part_twice, CUBE, jnp.bfloat16, {VMEM, HBM}),
    ],
)
def test_a_program_with_simulated_kernels_takes_what_its_simulation_takes(
    topology, fn, shape, dtype, spaces, tmp_path
):
    m, k, n = shape
    mesh = fa.check.topology_mesh(topology, (1,), ("x",))
    arguments = array((m, k), mesh, P(), dtype), array((k, n), mesh, P(), dtype)
    program = fa.check.compile_for(topology, jax.jit(fn), *arguments, keep_dumps=tmp_path)
    calls = [
        i
        for i in parse(program.text).entry.instructions
        if i.custom_call_target == "tpu_custom_call"
    ]
    assert {call.shape.memory_space for call in calls} == spaces
    played = play_dump(tmp_path, topology=topology)
    timeline = fa.check.timeline(program, kernels="play")
    assert timeline.seconds == pytest.approx(played.seconds, rel=0.03)
    for call in calls:
        taken = sum(s.seconds for s in timeline.slices if (s.lane, s.name) == ("core", call.name))
        assert taken == pytest.approx(played.slowest.phase(call.name).seconds, rel=0.03)


MLP = tp_mlp.Shape(batch=2, sequence=2048, model=2048, hidden=8192)


@pytest.fixture(scope="module")
def layer(tmp_path_factory):
    """An MLP, forward and backward, on four chips: the compiled program, and the folder of its
    dumps.
    """
    folder = tmp_path_factory.mktemp("dumps")
    mesh = tp_mlp.ring(fa.check.topology_devices("v5e:2x2"), "fused")
    with jax.set_mesh(mesh):
        fn, arguments = tp_mlp.program("fused", MLP, mesh, backward=True)
        return fa.check.compile_for("v5e:2x2", fn, *arguments, keep_dumps=folder), folder


@pytest.mark.slow
def test_the_estimate_with_simulated_kernels_is_close_to_the_simulation_of_the_whole(
    layer, monkeypatch
):
    program, folder = layer
    said = []
    estimated = fa.check.timeline(program, kernels="play", say=said.append)
    assert said
    assert not [note for note in estimated.notes if "was not simulated" in note]
    played = play_dump(folder, topology=program.topology, coords=program.coords)
    assert estimated.seconds == pytest.approx(played.seconds, rel=0.05)
    assert estimated.slowest.sources["played"] > 0.8 * estimated.seconds
    assert "estimate" not in estimated.slowest.sources
    assert "played" in str(estimated)
    # At the data sheet's peak, with transfers for nothing, the kernels take less.
    assert fa.check.timeline(program).seconds < 0.95 * estimated.seconds
    products = MLP.ideal_ms("v5e:2x2", backward=True) * 1e-3 * fa.check.CHIPS["v5e"].flops
    assert estimated.flops == pytest.approx(products, rel=1e-3)

    said.clear()
    again = fa.check.timeline(program, program.topology, kernels="play", say=said.append)
    assert (again.seconds, said) == (estimated.seconds, []), (
        "the second time they come from the cache"
    )
    others = [
        dataclasses.replace(program, coords=program.coords[::-1]),
        dataclasses.replace(program, axes={"x": len(program.coords), "y": 1}),
    ]
    monkeypatch.setattr(
        kernel_times, "_simulate", lambda program, kernel: kernel_times.KernelTime(1.0, 0.5)
    )
    for other in others:
        seconds = fa.check.timeline(other, kernels="play").seconds
        assert seconds > 1, "other chips, and another mesh, are simulated anew"


@pytest.mark.slow
def test_a_kernel_that_cannot_be_simulated_takes_its_estimate_and_is_named(layer, monkeypatch):
    def refuse(program, kernel):
        raise RuntimeError("no such chip\nand more")

    monkeypatch.setattr(kernel_times, "_simulate", refuse)
    program, _ = layer
    timeline = fa.check.timeline(program, kernels="play")
    assert timeline.seconds == fa.check.timeline(program, copies="simulated").seconds
    assert any("was not simulated: no such chip" in note for note in timeline.notes)
    assert timeline.slowest.sources["estimate"] > 0


def compile_shards(topology, local, out_specs, *shapes):
    """Compiles a function of arrays that every device of a topology has."""
    program = on_all_devices(topology, local, (P(),) * len(shapes), out_specs, *shapes)
    return fa.check.compile_for(topology, *program)


@pytest.mark.slow
def test_a_start_and_its_done_are_simulated_together():
    """The blocks of an all-to-all on a square of four chips: two of them cross each link, and not
    all on one.
    """

    def exchange(x):
        sent, future = direct.all_to_all("x", 4, 0).start(x)
        y = direct.all_to_all("x", 4, 0).done(sent, future)
        return y[:1, :1, :1]

    program = compile_shards("v5e:2x2", exchange, P("x"), (4096, 1024))
    block, link = 1024 * 1024 * 2, fa.check.CHIPS["v5e"].link_bandwidth
    timeline = fa.check.timeline(program, kernels="play")
    assert not [note for note in timeline.notes if "was not simulated" in note]
    assert timeline.exposed == pytest.approx(2 * block / link, rel=0.1)
    assert fa.check.timeline(program).exposed == pytest.approx(4 * block / link, rel=0.1), (
        "by its bytes on one link"
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("topology", "note"), [("v5p:2x2x1", "on core 0"), ("tpu7x:2x2x1", "were not simulated")]
)
def test_of_two_cores_one_is_simulated_and_of_two_devices_none(topology, note):
    program = compile_shards(topology, gemm, P(), (1024, 1024), (1024, 1024))
    timeline = fa.check.timeline(program, kernels="play")
    assert [line for line in timeline.notes if note in line]
    assert ("played" in timeline.slowest.sources) == topology.startswith("v5p")


def compiled(steps, folder=None, dtype=jnp.int32, *, argument=False):
    """Compiles a kernel whose steps look up in a table whether they multiply; the first two of a
    constant table do.
    """

    def body(table, x, y, o):
        @pl.when(table[pl.program_id(0)].astype(jnp.int32) > 0)
        def _():
            o[...] = jnp.dot(x[...], y[...], preferred_element_type=jnp.float32)

    spec = pl.BlockSpec((512, 512), lambda i, table: (0, 0))
    grid = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=1, grid=(steps,), in_specs=[spec, spec], out_specs=spec
    )
    cost = pl.CostEstimate(flops=2 * 512**3 * steps, transcendentals=0, bytes_accessed=0)
    result = jax.ShapeDtypeStruct((512, 512), jnp.float32)
    call = pl.pallas_call(body, result, grid_spec=grid, cost_estimate=cost)
    table = (np.arange(steps) < 2).astype(dtype)
    x = jax.ShapeDtypeStruct((512, 512), jnp.bfloat16)

    def with_the_table(x, y):
        return call(table, x, y)

    if argument:
        arguments = jax.ShapeDtypeStruct((steps,), dtype), x, x
        return fa.check.compile_for("v5e:1x1", call, *arguments, keep_dumps=folder)
    return fa.check.compile_for("v5e:1x1", with_the_table, x, x, keep_dumps=folder)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.int32, jnp.int8], ids=["words", "bytes"])
def test_a_kernel_reads_its_table(dtype, tmp_path):
    """Two of sixteen steps multiply; with a table of zeros none would."""
    played = play_dump(compiled(16, tmp_path, dtype).dumps, topology="v5e:1x1")
    product = 2 * 512**3 / fa.check.CHIPS["v5e"].flops
    assert played.slowest.matrix_busy == pytest.approx(2 * product, rel=0.1)
    assert not [note for note in played.notes if "taken as 0" in note]


@pytest.mark.slow
@pytest.mark.parametrize(("steps", "argument", "known"), [
    (8, False, True),
    (16, False, False),  # the text leaves a longer table out
    (8, True, False),
])  # fmt: skip
def test_a_kernel_whose_table_is_not_known_is_named_and_counts_with_all_it_can_have_to_do(
    steps, argument, known
):
    timeline = fa.check.timeline(compiled(steps, argument=argument), kernels="play")
    guessed = "with 0 for scalars that the text of the program does not determine"
    assert known != any(guessed in note for note in timeline.notes)
    assert ("played" if known else "estimate") in timeline.slowest.sources
    assert (
        known
        or timeline.slowest.sources["estimate"] >= 2 * 512**3 * steps / fa.check.CHIPS["v5e"].flops
    )
