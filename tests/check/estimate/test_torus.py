"""The links that a collective uses, by the compiler's notes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from benchmarks.programs import array
from flaxasync.check import CHIPS, compile_for, timeline, topology_devices
from flaxasync.check.estimate.costs import collective_seconds
from flaxasync.check.estimate.torus import Torus, torus_of

RING = "StrategyRing{colors:1 phases:1 cores:{16} nophase0:0"
PLANE = "StrategyND{colors:2 phases:2 cores:{16 16},{16 16} nophase0:0"
CUBE_OF_ROWS = "UniDirectionNDRingStrategy{colors:6 phases:3 cores:{4 4 4},{4 4 4} nophase0:0"
OPEN_PLANE = "UniDirectionNDRingStrategy{colors:4 phases:2 cores:{4 4},{4 4} nophase0:0"
HALF_OPEN_PLANE = "StrategyND{colors:2 phases:2 cores:{8 16},{8 16} nophase0:0"
TWO_COLORS = "StrategyND{colors:2 phases:3 cores:{4 4 8},{4 4 8} nophase0:0"
GATHER = '{"emitter":"3DAllGatherOnMajorDim","debug":"group_size = 64"}'


@pytest.mark.parametrize(
    ("notes", "group", "chips", "chip", "torus"),
    [
        ("", 16, 256, "v5e", None),
        (RING, 16, 256, "v5e", None),
        (PLANE, 256, 256, "v5e", Torus(4, 16)),
        (CUBE_OF_ROWS, 64, 64, "v5p", Torus(6, 6)),
        # four chips in a row of a slice without a whole cube are not closed
        (CUBE_OF_ROWS, 64, 96, "v5p", Torus(3, 9)),
        (CUBE_OF_ROWS, 32, 32, "tpu7x", Torus(3, 9)),
        (OPEN_PLANE, 16, 16, "v6e", Torus(2, 6)),
        (HALF_OPEN_PLANE, 128, 128, "v6e", Torus(3, 15)),
        # two of three dimensions at a time
        (TWO_COLORS, 128, 128, "v5p", Torus(4, 8)),
        (GATHER, 64, 64, "v5p", Torus(6, 6)),
    ],
)
def test_notes(notes, group, chips, chip, torus):
    assert torus_of(notes, group, chips, CHIPS[chip]) == torus


def test_other_collectives_have_no_form_on_a_torus():
    size = 1 << 26
    chip = CHIPS["v5p"]
    exchange = collective_seconds("all-to-all", size, size, 64, chip, Torus(6, 6))
    assert exchange == collective_seconds("all-to-all", size, size, 64, chip)


def test_a_sum_over_a_whole_torus_is_timed_on_all_of_its_links():
    topology = "v5p:4x4x4"
    devices = sorted(topology_devices(topology), key=lambda device: device.id)
    mesh = Mesh(np.array(devices), ("x",))
    mapped = jax.shard_map(lambda x: lax.psum(x, "x"), mesh=mesh, in_specs=P(), out_specs=P())
    size = (4096, 4096)
    program = compile_for(topology, jax.jit(mapped), array(size, mesh, P(), jnp.bfloat16))
    sent = 2 * size[0] * size[1]
    on_the_torus = collective_seconds(
        "all-reduce", sent, sent, 64, CHIPS["v5p"], Torus(links=6, hops=6)
    )
    on_one_ring = collective_seconds("all-reduce", sent, sent, 64, CHIPS["v5p"])
    assert timeline(program).exposed == pytest.approx(on_the_torus, rel=0.01)
    assert on_the_torus < 0.4 * on_one_ring
