"""Compiling for GPUs that are not there: topologies, their descriptions, and what is refused."""

import importlib.metadata
import importlib.util
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import flaxasync as fa
from benchmarks.programs import array
from flaxasync.check import GPUS, HbmError, audit, compile_for, play, timeline, topology_mesh
from flaxasync.check.compile.gpu_topologies import GpuTopology, target_description


def test_a_product_compiles_for_eight_gpus_and_its_text_says_so():
    mesh = topology_mesh("h100:8", (2, 4), ("data", "model"))
    x = array((4096, 8192), mesh, P("data", "model"))
    w = array((8192, 2048), mesh, P("model", None))
    program = compile_for("h100:8", jax.jit(jnp.matmul), x, w)
    assert (program.chip, program.topology, program.libtpu) == ("h100", "h100:8", "")
    assert program.axes == {"data": 2, "model": 4}
    assert program.coords == tuple((0, 0, place) for place in range(8))
    assert "__cublas$lt$matmul" in program.text
    assert program.bytes_by_kind["total"] > 2048 * 2048 * 2
    found = timeline(program)
    assert found.chip == "h100"
    assert found.flops == 2 * 2048 * 2048 * 2048
    assert audit(program).chip == "h100"


@pytest.mark.parametrize(
    ("topology", "gpu", "hosts", "each"),
    [("h100:8", "h100", 1, 8), ("a100:2x4", "a100", 2, 4), ("b200:32x8", "b200", 32, 8)],
)
def test_a_name_is_that_of_hosts_with_gpus(topology, gpu, hosts, each):
    found = GpuTopology.of(topology)
    assert found == GpuTopology(GPUS[gpu], hosts, each)
    assert found.arguments["topology"] == f"1x{hosts}x{each}"


@pytest.mark.parametrize("name", ["v5e:2x4", "h100", "h100:2x2x2", "k80:8", "h100:0", "h100:8*2"])
def test_other_names_are_those_of_no_gpus(name):
    assert GpuTopology.of(name) is None


@pytest.mark.parametrize(
    ("topology", "message"),
    [
        ("h100:9", "at most 8 GPUs a host and 512 hosts.*got 'h100:9'"),
        ("h100:513x8", "at most 8 GPUs a host and 512 hosts"),
        ("k80:2", "or GPUs, like 'h100:8': got 'k80:2'.*GPUs: a100, h100, h200, b200"),
        ("h100", "or GPUs, like 'h100:8': got 'h100'"),
    ],
)
def test_a_topology_that_is_not_there_is_refused(topology, message):
    with pytest.raises(ValueError, match=message):
        fa.check.topology_devices(topology)


def test_the_mesh_keeps_the_last_axis_within_a_host():
    mesh = topology_mesh("h100:2x4", (2, 4), ("data", "model"))
    hosts = np.vectorize(lambda device: device.process_index)(mesh.devices)
    assert hosts.tolist() == [[0] * 4, [1] * 4]
    devices = fa.check.topology_devices("h100:2x4")
    made = fa.make_mesh((2, 4), ("data", "model"), devices=devices)
    numbers = np.vectorize(lambda device: device.id)
    assert numbers(made.devices).tolist() == numbers(mesh.devices).tolist()


def test_arguments_move_from_cpu_devices_and_from_abstract_meshes():
    mesh = jax.make_mesh((8,), ("model",), axis_types=(AxisType.Auto,))
    x = jax.device_put(jnp.ones((8, 128), jnp.float32), NamedSharding(mesh, P("model")))
    program = compile_for("h100:8", lambda x: x + 1, x)
    assert program.memory["argument_size_in_bytes"] == 128 * 4
    abstract = NamedSharding(mesh.abstract_mesh, P("model"))
    alike = jax.ShapeDtypeStruct((8, 128), jnp.float32, sharding=abstract)
    assert compile_for("h100:8", lambda x: x + 1, alike).axes == {"model": 8}


def test_options_reach_the_compiler_which_names_a_wrong_one():
    mesh = topology_mesh("h100:1", (1,), ("x",))
    x = array((1024, 1024), mesh, P())
    triton = {"xla_gpu_enable_triton_gemm": True}
    assert "__cublas" not in compile_for("h100:1", jnp.dot, x, x, compiler_options=triton).text
    with pytest.raises(RuntimeError, match=r"the GPU compiler refused: .*xla_gpu_no_such_thing"):
        compile_for("h100:1", jnp.dot, x, x, compiler_options={"xla_gpu_no_such_thing": 1})


def test_flags_that_are_set_after_jax_began_reach_the_compiler(monkeypatch):
    """As a dry run sets them; this process has read the variable long before."""
    x = jax.ShapeDtypeStruct((512, 512), jnp.bfloat16)
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_enable_triton_gemm")
    assert "__cublas" not in compile_for("h100:1", jnp.dot, x, x).text
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_enable_triton_gemm=false")
    assert "__cublas" in compile_for("h100:1", jnp.dot, x, x).text


def test_a_program_that_does_not_fit_says_what_it_needs():
    mesh = topology_mesh("a100:1", (1,), ("x",))
    x = array((50_000, 1_000_000), mesh, P())
    with pytest.raises(HbmError, match=r"needs 18\d.\d\d GiB of the 79.15 that a100 has") as error:
        compile_for("a100:1", lambda x: x + 1, x)
    assert error.value.needed > error.value.available == int(GPUS["a100"].hbm_bytes)


def test_what_only_tpus_have_is_refused():
    mesh = topology_mesh("h100:1", (1,), ("x",))
    x = array((128, 128), mesh, P())
    with pytest.raises(ValueError, match="libtpu's bundles, which programs of h100:1 do not have"):
        compile_for("h100:1", jnp.dot, x, x, keep_dumps=True)
    with pytest.raises(ValueError, match=r"only programs for TPUs can be simulated: got .* h100"):
        timeline(compile_for("h100:1", jnp.dot, x, x), kernels="play")
    with pytest.raises(ValueError, match="play simulates TPUs alone: got 'h100:1'"):
        play(jnp.dot, x, x, topology="h100:1")


def test_missing_wheels_and_those_of_another_version_name_the_command(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"pip install 'flaxasync\[gpu-compile\]'"):
        fa.check.topology_devices("h100:8")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.1")
    with pytest.raises(ImportError, match=f"version of jax, which is {jax.__version__}: got 0.1"):
        fa.check.topology_devices("h100:8")


@pytest.mark.slow
def test_a_plugin_that_refused_to_load_is_loaded_after_all():
    """JAX has looked for plugins before, on a machine without a driver, and without JAX_PLATFORMS."""
    program = "import jax; jax.devices(); import flaxasync as fa; print(len(fa.check.topology_devices('h100:4')))"
    without = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=without, capture_output=True, text=True
    )
    assert done.stdout == "4\n", done.stderr


def test_the_description_of_a_gpu_has_the_figures_of_its_data_sheet():
    text = target_description(GPUS["b200"])
    assert "core_count: 148" in text
    assert "cuda_compute_capability { major: 10 minor: 0" in text
    assert "memory_bandwidth: 8000000000000" in text
    assert 'device_description_str: "NVIDIA B200"' in text
    assert "fpus_per_core: 64" in target_description(GPUS["a100"])


def test_attention_by_cudnn_compiles_without_the_library():
    """JAX asks the library for its version only; XLA leaves the call as it is."""
    mesh = topology_mesh("h100:2", (2,), ("model",))
    heads = P(None, None, "model")
    q, k = (array((2, 512, count, 64), mesh, heads) for count in (8, 2))
    mapped = jax.shard_map(jax.grad(attended), mesh=mesh, in_specs=(heads, heads), out_specs=heads)
    program = compile_for("h100:2", mapped, q, k)
    assert "__cudnn$fmhaSoftmaxBackward" in program.text
    with pytest.raises(ValueError, match=r"custom_partitioning.* call it inside jax.shard_map"):
        compile_for("h100:2", jax.grad(attended), q, k)
    scores = 2 * 4 * 512 * 512
    assert timeline(program).flops == pytest.approx((2 + 5) * 2 * scores * 64 / 2)


def attended(q, k):
    o = jax.nn.dot_product_attention(q, k, k, is_causal=True, implementation="cudnn")
    return o.astype(jnp.float32).sum()
