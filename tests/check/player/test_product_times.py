"""Matrix products that are simulated by themselves, from the bundles of the program they are in."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from benchmarks.programs import array
from flaxasync.check import CHIPS, compile_for, parse, play, timeline, topology_mesh
from flaxasync.check.player.product_times import product_times
from flaxasync.check.player.simulation import Simulation

SIZE = 2048
# XLA then fuses a part of a gather with each product beside it
FUSED_GATHERS = {
    "xla_tpu_enable_async_collective_fusion": "true",
    "xla_tpu_enable_async_collective_fusion_fuse_all_gather": "true",
    "xla_tpu_enable_async_collective_fusion_multiple_steps": "true",
    "xla_enable_async_all_gather": "true",
}


def gated(g, u, w):
    """A product whose operand is computed within its fusion."""
    return (jax.nn.silu(g) * u) @ w


@pytest.mark.slow
@pytest.mark.parametrize("topology", ["v5e:1x1", "v6e:1x1", "v5p:1x1x1"])
def test_a_product_takes_as_long_as_in_its_program(topology, tmp_path):
    mesh = topology_mesh(topology, (1,), ("x",))
    size = 2 * SIZE  # so that the first and the last transfer hardly count
    operands = [array((size, size), mesh, P()) for _ in range(3)]
    program = compile_for(topology, jax.jit(gated), *operands, keep_dumps=tmp_path)
    whole = play(jax.jit(gated), *operands, topology=topology)
    products = timeline(program, products="play")
    assert products.seconds == pytest.approx(whole.seconds, rel=0.05)
    assert products.slowest.sources["played"] > 0.7 * products.seconds
    assert not any("not simulated" in note for note in products.notes)
    assert ("the other core" in str(products.notes)) == (CHIPS[program.chip].cores > 1)
    assert products.basis.startswith("products and kernels as they were simulated")
    assert products.seconds > products.flops / CHIPS[program.chip].flops


@pytest.mark.slow
def test_a_product_with_a_part_of_a_gather_receives_what_it_sends(tmp_path):
    topology = "v5e:2x4"
    mesh = topology_mesh(topology, (8,), ("x",))

    def local(x, *weights):
        for w in weights:
            x = x @ lax.all_gather(w, "x", tiled=True)
        return x

    rows = P("x")
    mapped = jax.jit(
        jax.shard_map(local, mesh=mesh, in_specs=rows, out_specs=rows, check_vma=False)
    )
    x = array((8 * SIZE, SIZE), mesh, rows, jnp.bfloat16)
    w = array((SIZE, SIZE), mesh, rows, jnp.bfloat16)
    program = compile_for(
        topology, mapped, x, w, w, w, keep_dumps=tmp_path, compiler_options=FUSED_GATHERS
    )
    assert "async_collective_fusion" in program.text
    said = []
    products = timeline(program, products="play", say=said.append)
    assert not any("not simulated" in note for note in products.notes)
    assert len(said) >= 3
    seconds_at_peak = products.flops / CHIPS["v5e"].flops
    multiplying = products.slowest.sources["played"]
    assert seconds_at_peak < multiplying < 1.4 * seconds_at_peak
    assert multiplying < timeline(program).slowest.sources["cycles"]


@pytest.mark.parametrize(
    ("products", "message"),
    [
        ("play", r"compile_for\(..., keep_dumps="),
        ("played", "products must be 'play', or seconds by name: got 'played'"),
        ({"convolution.7": 1.0}, "jit_matmul has no 'convolution.7'"),
    ],
)
def test_bad_input(products, message):
    mesh = topology_mesh("v5e:1x1", (1,), ("x",))
    x = array((256, 256), mesh, P())
    program = compile_for("v5e:1x1", jax.jit(jnp.matmul), x, x)
    with pytest.raises(ValueError, match=message):
        timeline(program, products=products)


def test_given_seconds_of_a_product():
    mesh = topology_mesh("v5e:1x1", (1,), ("x",))
    x = array((1024, 1024), mesh, P())
    program = compile_for("v5e:1x1", jax.jit(jnp.matmul), x, x)
    (name,) = (s.name for s in timeline(program).slices if s.kind == "compute")
    given = timeline(program, products={name: 0.25})
    assert given.seconds == pytest.approx(0.25, rel=1e-3)
    assert given.slowest.sources["given"] == pytest.approx(0.25)


def test_a_chip_that_cannot_be_simulated_is_noted(tmp_path):
    topology = "tpu7x:1x1x1"
    mesh = topology_mesh(topology, (2,), ("x",))
    x = array((512, 512), mesh, P())
    program = compile_for(topology, jax.jit(jnp.matmul), x, x, keep_dumps=tmp_path)
    t = timeline(program, products="play")
    assert t.seconds == timeline(program).seconds
    assert any(note.startswith("products were not simulated: a tpu7x has two") for note in t.notes)


@pytest.mark.slow
def test_a_product_without_bundles_or_with_too_short_a_time_keeps_its_estimate(
    tmp_path, monkeypatch
):
    """The others are simulated all the same."""
    mesh = topology_mesh("v5e:1x1", (1,), ("x",))
    x, w, v = (array(shape, mesh, P()) for shape in ((1024, 512), (512, 2048), (2048, 512)))
    program = compile_for(
        "v5e:1x1", jax.jit(lambda x, w, v: jnp.tanh(x @ w) @ v), x, w, v, keep_dumps=tmp_path
    )
    module = parse(program.text)
    names = [i.name for i in module.entry.instructions if i.contains_matmul]
    found, lines = product_times(program, module, tmp_path)
    assert (sorted(found), lines) == (sorted(names), ())
    for file in tmp_path.glob(f"*-{names[0]}-0*"):
        file.unlink()
    found, lines = product_times(program, module, tmp_path)
    assert list(found) == names[1:]
    assert len(lines) == 1
    assert names[0] in lines[0]
    assert "has no bundles" in lines[0]
    monkeypatch.setattr(Simulation, "run", lambda self: None)
    found, lines = product_times(program, module, tmp_path)
    assert found == {}
    assert any("too short for all of its work" in line for line in lines)
