"""The roofline on GPUs: what is chosen, and how far its seconds are from those of the compiled
program.
"""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import flaxasync as fa
from benchmarks.programs import array
from flaxasync import check, hardware

# x and w of one device, on eight H100
GATHERS = {
    "the products of an MLP": ((4, 512, 4096), (4096, 3584), "xla"),
    "one sequence": ((1, 1024, 4096), (4096, 768), "none"),
    "few rows": ((1, 64, 4096), (4096, 768), "none"),
}


@pytest.mark.parametrize("name", GATHERS)
def test_small_shapes_take_one_collective_and_large_ones_blocks(name):
    x, w, backend = GATHERS[name]
    found = fa.plan(fa.all_gather_matmul, x, w, chip="h100", ring=8)
    assert found.backend == found.trusted == backend
    assert set(found.costs) == {"none", "xla"}
    assert found.unverified == ()


def test_one_device_has_nothing_to_transfer():
    found = fa.plan(fa.all_gather_matmul, (64, 64), (64, 64), chip=hardware.GPUS["a100"], ring=1)
    assert found.backend == "none"
    assert found.costs["none"].exposed == 0


@pytest.mark.parametrize("op", [fa.matmul_all_reduce, fa.matmul_reduce_scatter])
def test_one_device_has_no_sums_to_transfer(op):
    found = fa.plan(op, (64, 64), (64, 64), chip="h100", ring=1)
    assert found.costs["none"].exposed == 0


def test_one_all_reduce_begins_once():
    gpu = hardware.GPUS["h100"]
    found = fa.plan(fa.matmul_all_reduce, (64, 64), (64, 64), chip="h100", ring=8, backward=False)
    sent = 2 * 7 * 8 * 64 * 2
    expected = gpu.hop_latency + sent / (gpu.link_bandwidth * gpu.link_share)
    assert found.costs["none"].exposed == pytest.approx(expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ring": 16}, "rings of at most 8 GPUs, those of one host: got ring=16"),
        ({"ring": 8, "quantization": "int8"}, "no times of 8-bit products on GPUs: got 'int8'"),
    ],
)
def test_what_it_has_no_times_of(options, message):
    with pytest.raises(ValueError, match=message):
        fa.plan(fa.all_gather_matmul, (64, 64), (64, 64), chip="h100", **options)


@pytest.mark.parametrize(
    ("op", "shapes", "message"),
    [
        (fa.ring_attention, [(1, 8, 2, 8)] * 2, "plan knows all_gather_matmul, .* on GPUs"),
        (fa.all_gather_matmul, [(8, 8), (16, 8)], "cannot be contracted"),
    ],
)
def test_what_it_cannot_plan(op, shapes, message):
    with pytest.raises(ValueError, match=message):
        fa.plan(op, *shapes, chip="h100", ring=2)


def test_an_unknown_chip_lists_those_that_there_are():
    with pytest.raises(ValueError, match=r"v5e, .*tpu7x, a100, h100, h200, b200: got 'k80'"):
        fa.plan(fa.all_gather_matmul, (8, 8), (8, 8), chip="k80", ring=2)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["none", "xla"])
@pytest.mark.parametrize("name", GATHERS)
def test_the_seconds_are_those_of_the_compiled_program_within_a_quarter(name, backend):
    x, w, _ = GATHERS[name]
    mesh = check.topology_mesh("h100:8", (8,), ("model",))
    batch, rows, features = x
    specs = (P(None, "model"), P(None, "model"))
    arguments = (
        array((batch, 8 * rows, features), mesh, specs[0]),
        array((features, 8 * w[1]), mesh, specs[1]),
    )

    def run(x, w):
        def local(x, w):
            return fa.all_gather_matmul(x, w, "model", backend=backend)

        mapped = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P(None, None, "model"))
        y, pull = jax.vjp(mapped, x, w)
        return y, *pull(y.astype(jnp.bfloat16))

    program = check.compile_for("h100:8", run, *arguments)
    seconds = fa.plan(fa.all_gather_matmul, x, w, chip="h100", ring=8).seconds[backend]
    assert seconds == pytest.approx(check.timeline(program).seconds, rel=0.25)
