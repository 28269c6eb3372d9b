"""gather_weight_gradient in the race-detecting simulator."""

import dataclasses
import functools

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from jax.sharding import PartitionSpec as P

from flaxasync import check
from flaxasync.kernels import weight_gradient, weight_gradient_schedule
from flaxasync.kernels.engine.operands import Tiles
from flaxasync.kernels.engine.ring import Ring
from flaxasync.kernels.engine.tiling import RowTiling, Tiling
from flaxasync.kernels.weight_gradient import (
    WeightGradientOperands,
    WeightGradientResults,
    gather_weight_gradient,
)
from flaxasync.kernels.weight_gradient_schedule import WeightGradientSchedule
from tests.kernels.conftest import as_float32, assert_close, draw
from tests.kernels.conftest import run as simulate

TILES = Tiles(128, 128, 128)


def run(
    size,
    *,
    batch=1,
    m=128,
    k=256,
    ns=(128,),
    dtype="float32",
    mode="on_wait",
    tiles=TILES,
    cores=1,
    **options,
):
    """Runs the kernel on an axis of `size` devices; returns what it gave and what it should have,
    side by side.
    """
    x = draw((batch, size * m, k), dtype)
    dys = tuple(draw((batch, size * m, size * n), dtype, i + 1) for i, n in enumerate(ns))
    local = functools.partial(
        gather_weight_gradient, axis_name="ring", tiles=tiles, cores=cores, **options
    )
    specs = P(None, "ring"), P(None, None, "ring")
    dws = simulate(local, (x, dys), specs, P(None, "ring"), shape=(size,), mode=mode, cores=cores)
    want = [np.einsum("bmk,bmn->kn", as_float32(x), dy) for dy in as_float32(dys)]
    return np.concatenate(dws, 1), np.concatenate(want, 1)


# The last tile of every side is partial; what lies beyond it in vector memory is not a number at
# first.
RAGGED = {"m": 640, "k": 640, "ns": (640,), "tiles": Tiles(384, 384, 384)}  # 384 + 256


@pytest.mark.parametrize(
    ("size", "options"),
    [
        (3, {"directions": 2, "batch": 4, "m": 64, "ns": (256, 128)}),
        (3, {"m": 256, "k": 512, "cores": 2, "mode": "eager"}),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [
                # Receive buffers of each core are written again from its third chunk on.
                (2, {"m": 256, "k": 768, "cores": 2, "ns": (256, 128), "dtype": "bfloat16"}),
                # batches 3 + 2
                (
                    3,
                    RAGGED
                    | {"batch": 5, "m": 128, "k": 128, "ns": (640, 128), "dtype": "bfloat16"},
                ),
                # Receive buffers are written again from the third chunk on.
                (3, {"directions": 2, "m": 256, "k": 512, "mode": "eager"}),
                (4, {"directions": 1, "k": 512, "mode": "eager"}),
                (
                    4,
                    RAGGED | {"batch": 10, "m": 64, "k": 128, "mode": "eager"},
                ),  # in pairs of batches
                (2, RAGGED | {"batch": 2}),  # a partial tile in the middle of a block
            ]
        ),
    ],
)
def test_values(size, options):
    assert_close(*run(size, **options), options.get("dtype", "float32"))


@pytest.mark.parametrize(("topology", "large"), [("v6e:2x2", True), ("v5p:2x2x1", False)])
def test_large_tiles_need_room_in_vector_memory(topology, large):
    """All 2432 columns of a dy at once, or a half of them."""
    x = jax.ShapeDtypeStruct((4, 512, 2560), jnp.bfloat16)
    with jax.set_mesh(check.topology_mesh(topology, (4,), ("ring",))):
        schedule, _ = weight_gradient_schedule.plan_schedule(
            x, 2560, [2432, 2432], None, 4, 2, x.dtype, scaled=False
        )
    assert (schedule.columns.size == 2432) is large


@pytest.mark.slow
def test_a_product_of_a_whole_tile_is_seen(monkeypatch):
    """Negative test: a partial tile of rows is multiplied as if it were whole, with what lies
    beyond it.
    """
    multiply = weight_gradient._Device.multiply

    def whole(self, here, n):
        rows = self.schedule.rows
        full = dataclasses.replace(rows, rows=Tiling((rows.count * rows.size,), rows.size))
        multiply(
            dataclasses.replace(self, schedule=dataclasses.replace(self.schedule, rows=full)),
            here,
            n,
        )

    monkeypatch.setattr(weight_gradient._Device, "multiply", whole)
    got, want = run(2, **RAGGED | {"directions": 1, "k": 128, "ns": (128,)})
    assert np.isnan(got).any()
    assert not np.isnan(want).any()


class Anything:
    """Stands for any Ref, whose parts are never looked at."""

    at = property(lambda self: self)

    def __getitem__(self, index):
        return self


@dataclasses.dataclass(frozen=True)
class Recorded(weight_gradient._Device):
    """A device that notes (what, chunk, hop) of its sends and waits, in order."""

    events: list = dataclasses.field(default_factory=list)

    def _send(self, there, source, chunk, direction):
        self.events.append(("send", int(there.chunk), int(there.hop)))

    def _wait_for_hop(self, there, hop, chunk, direction):
        self.events.append(("wait", int(there.chunk), int(hop)))


def events_of_a_device(size, chunks):
    """Returns what each device of a ring does, in order: also when it has read what a hop brought."""
    rows = RowTiling.of(1, 128, 128, 128)
    columns = Tiling((128,), 128)
    schedule = WeightGradientSchedule(size, Tiling((chunks * 128,), 128), rows, columns, 1)
    refs = WeightGradientOperands(Anything(), (), ()), WeightGradientResults((), Anything())
    device = Recorded(Ring("ring", size, 1), schedule, *refs, scratch=None)
    with jax.disable_jit():  # or else both sides of every condition would be traced
        for step in range(schedule.grid.steps):
            here = schedule.at(step)
            device.begin_hop(here)
            device.events.append(("read", int(here.chunk), int(here.hop) - 1))
    return device.events


def overwritten_unread(size, chunks, sets):
    """Returns the (chunk, hop) whose send is not after the reads of what it overwrites, on some
    schedule of the devices.

    `known[d][e]` is how many events of device e precede what device d does next: its own and what a
    message that it waited for tells.
    """
    events = events_of_a_device(size, chunks)
    known = [[0] * size for _ in range(size)]
    sent = [{} for _ in range(size)]  # what each device knew when it sent a chunk in a hop
    while any(known[d][d] < len(events) for d in range(size)):
        before = [clock[d] for d, clock in enumerate(known)]
        for device in range(size):
            sender = (device - 1) % size
            while known[device][device] < len(events):
                what, *place = events[known[device][device]]
                if what == "wait":
                    if tuple(place) not in sent[sender]:
                        break
                    told = sent[sender][tuple(place)]
                    known[device] = list(map(max, known[device], told))
                known[device][device] += 1
                if what == "send":
                    sent[device][tuple(place)] = list(known[device])
        assert before != [clock[d] for d, clock in enumerate(known)], "the devices wait in a circle"
    found = set()
    for device in range(size):
        receiver = (device + 1) % size
        for (chunk, hop), clock in sent[device].items():
            former = chunk - sets
            uses = [
                ("read", former, hop),
                ("wait", former, hop + 1),
            ]  # the last, of its send onward
            for number, event in enumerate(events):
                if event in uses and number >= clock[receiver]:
                    found.add((chunk, hop))
    return found


@settings(max_examples=15)
@given(st.integers(2, 5), st.integers(1, 4))
def test_what_is_overwritten_was_read(size, chunks):
    """When a device sends a block of chunk c, its receiver has read what arrived there in chunk
    c - 2.
    """
    assert overwritten_unread(size, chunks, weight_gradient.BUFFER_SETS) == set()


def test_one_set_would_be_overwritten_unread():
    """Negative test of the order that the property above derives."""
    assert overwritten_unread(3, 2, sets=1)


@pytest.mark.slow
def test_one_set_of_receive_buffers_is_seen(monkeypatch):
    """Negative test: a chunk that arrives where the one before lies overwrites what was not
    read.
    """
    for module in (weight_gradient, weight_gradient_schedule):
        monkeypatch.setattr(module, "BUFFER_SETS", 1)
    with pytest.raises(jax.errors.JaxRuntimeError, match="RACE DETECTED"):
        run(3, directions=1, mode="eager")
