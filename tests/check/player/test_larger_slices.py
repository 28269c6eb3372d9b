"""Slices of v5e with more than 16 chips, where an address names a chip by an index of the sender's
routing table; of the devices, only a part is simulated.
"""

import functools
import importlib
import math

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import flaxasync as fa
from benchmarks.programs import array
from flaxasync.check import topology_mesh
from flaxasync.check.player import play, play_dump
from flaxasync.check.player.errors import UnsimulatedError
from flaxasync.check.player.memory import Buffer
from flaxasync.check.player.routing import ENTRIES, RoutingTable
from flaxasync.transport import direct
from tests.check.programs import play_shards

# `play` is also the name of a function of the package
play_module = importlib.import_module("flaxasync.check.player.play")
TABLE = Buffer("smem", 1000, 512, "")
ROWS = 256


def look_up(table: RoutingTable, chip: int, *, checks: bool) -> int:
    """Returns the index of a chip, as XLA's code looks it up; it also checks the index, and the
    code of Pallas kernels does not.
    """
    index = table.word(TABLE.address + chip) >> 24
    if checks:
        word = table.word(TABLE.address + ENTRIES * table.chip_id + index)
        assert word & 255 == chip
        assert word < 1 << 31
    return index


@pytest.mark.parametrize("checks", [True, False])
@pytest.mark.parametrize("chip_id", [0, 1, 2, 31])
def test_each_chip_has_an_index_of_its_own(chip_id, checks):
    """The words of chips and of indices overlap for the first chips of a slice."""
    table = RoutingTable(TABLE, chip_id, 32)
    partners = [chip for chip in range(ENTRIES) if chip != chip_id]
    sent = {}
    for chip in partners:
        sent[chip] = look_up(table, chip, checks=checks)
        assert table.chip(sent[chip]) == chip
    assert len(set(sent.values())) == len(partners)
    assert max(sent.values()) < ENTRIES
    for chip in reversed(partners):
        assert look_up(table, chip, checks=checks) == sent[chip]
    assert table.word(TABLE.address + 31 * ENTRIES + 15) >> 31 == (chip_id != 31)


def test_more_chips_than_a_table_holds_are_refused():
    table = RoutingTable(TABLE, 31, 32)
    for chip in range(ENTRIES):
        look_up(table, chip, checks=False)
    with pytest.raises(UnsimulatedError, match="more than 16 other chips"):
        look_up(table, ENTRIES, checks=False)


def test_an_index_that_was_not_looked_up_is_refused():
    with pytest.raises(UnsimulatedError, match="lacks entry 3 of the routing table"):
        RoutingTable(TABLE, 0, 32).chip(3)


def transfers(x, w, dy):
    """Returns what the transfers of training with split matmuls bring: those of the two matmuls and
    their gradients, and the direct copies of fully sharded parameters.
    """
    size = lax.axis_size("model")
    multiply = functools.partial(fa.all_gather_matmul, axis_name="model", backend="fused")
    y, pull = jax.vjp(multiply, x, w)
    dx, dw = pull(dy + y)
    summed = fa.matmul_reduce_scatter(dy, w.T, axis_name="model", backend="fused")
    gather = direct.all_gather("model", size, 0)
    gathered = gather.done(*gather.start(dw))
    scatter = direct.all_to_all("model", size, 0)
    scattered = scatter.done(*scatter.start(gathered))
    return dx + summed, scattered.sum(0)


def program(topology: str, size: int):
    """Returns `transfers` on rings of `size` devices, jitted, and its arguments."""
    devices = math.prod(map(int, topology.partition(":")[2].split("x")))
    mesh = topology_mesh(topology, (devices // size, size), ("data", "model"))
    data = devices // size
    rows, columns = P("data", "model", None), P("data", None, "model")
    kernel = P(None, "model")
    mapped = jax.shard_map(
        transfers,
        mesh=mesh,
        in_specs=(rows, kernel, columns),
        out_specs=(rows, P(("data", "model"))),
        check_vma=False,
    )
    x = array((data, size * ROWS, 512), mesh, rows, jnp.bfloat16)
    w = array((512, size * ROWS), mesh, kernel, jnp.bfloat16)
    dy = array((data, size * ROWS, size * ROWS), mesh, columns, jnp.bfloat16)
    return jax.jit(mapped), x, w, dy


@pytest.mark.slow
@pytest.mark.parametrize("size", [4, 8, 16])
def test_rings_of_the_largest_slice_are_played(size):
    topology = "v5e:16x16"
    result = play(*program(topology, size), topology=topology)
    assert result.notes == ()
    assert [d.device for d in result.devices] == sorted(d.device for d in result.devices)
    assert len(result.devices) == size
    assert f"{size} of 256 devices" in result.basis


@pytest.mark.slow
def test_a_part_of_a_slice_takes_as_long_as_all_of_it(tmp_path, monkeypatch):
    topology = "v5e:4x8"
    part = play(*program(topology, 4), topology=topology, keep_dumps=tmp_path)
    monkeypatch.setattr(play_module, "LARGEST_WHOLE", 32)
    whole = play_dump(tmp_path)
    assert (len(part.devices), len(whole.devices)) == (4, 32)
    assert part.seconds == pytest.approx(whole.seconds, rel=1e-6)
    assert part.notes == whole.notes == ()


@pytest.mark.slow
@pytest.mark.parametrize("pairs", [[(1, 0)], [(0, 1)], [(2, 3)]])
def test_where_not_all_devices_send_the_time_is_that_of_all(monkeypatch, pairs):
    def one_way(x):
        return lax.ppermute(x, "x", pairs)

    spec = P("x", None)
    times = []
    for largest in (1, 4):
        monkeypatch.setattr(play_module, "LARGEST_WHOLE", largest)
        played = play_shards("v5e:2x2", one_way, (spec,), spec, (4 * 256, 512))
        times.append(played.slowest.seconds)
    assert times[0] == pytest.approx(times[1], rel=1e-6)
