"""Every transport of the package, simulated on two meshes; then pairs and kernels that break a rule
of the machine.
"""

import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from flaxasync import transport
from flaxasync.check import topology_size
from flaxasync.check.player import (
    DeadlockError,
    LeftoverSemaphoreError,
    OutOfBoundsError,
    RaceError,
)
from tests.check import async_forms
from tests.check.programs import assert_times_add_up, play_exchange, play_shards, sent_bytes
from tests.transport.forms import FORMS
from tests.transport.test_jax_scenarios import SCENARIOS
from tests.transport.test_simulated import faulty, permute_with

ROWS, COLUMNS, HOPS = 64, 1024, 5
BLOCK = ROWS * COLUMNS * 2  # bytes that a device holds
LOCAL = {  # copies and slices within a device, and how many blocks each moves
    "multiple_copies": 2,
    "staggered_copy_in_a_loop": 8,
    "static_slice": 1 / 4,
    "staggered_full_copy_in_a_loop": 1,
    "stateful_copies": 2,
    "pair_of_ones_own": 1 / 4,
}


@pytest.mark.parametrize(("form", "unsafe"), [("value", False), ("read_in_flight", True)])
def test_a_result_says_first_that_a_buffer_in_flight_is_touched(form, unsafe):
    """The transfer may be over by then in the simulation; on a chip the results would be wrong."""
    result = play_shards("v5e:2x2", getattr(async_forms, form), (P("x"),), P("x"), (4 * 256, 1024))
    assert (
        any(
            found.startswith("in-flight-copied: the destination buffer of ")
            for found in result.unsafe
        )
        == unsafe
    )
    assert ("results are wrong on a chip" in str(result).splitlines()[0]) == unsafe


def play_block(topology, local):
    """Compiles and simulates a function of one device's block, on a ring of all devices."""
    return play_shards(
        topology, local, (P("x"),), P("x"), (topology_size(topology) * ROWS, COLUMNS), typed=True
    )


# Each group is one program. In a program with more Refs, XLA prefetches both slots of a Ref while
# one is in flight.
GROUPS = {
    "value futures": [n for n in FORMS if "stateful" not in n and n != "swap"],
    "Refs": [n for n in FORMS if "stateful" in n or n == "swap"],
}


@pytest.mark.parametrize(
    ("topology", "group"),
    [
        ("v5e:2x2", "value futures"),
        pytest.param("v5e:2x4", "value futures", marks=pytest.mark.slow),
        pytest.param("v5e:2x2", "Refs", marks=pytest.mark.slow),
    ],
)
def test_every_form_of_a_transport(topology, group):
    """Blocks are passed on, accumulated, gathered and reduced, in one direction and in both.

    test_collectives.py simulates the rings of lax.ppermute.
    """
    forms = {name: FORMS[name] for name in GROUPS[group]}
    result = play_block(
        topology, lambda x: jax.tree.leaves([form.run(x, HOPS) for form in forms.values()])
    )
    around = topology_size(topology) - 1
    blocks = sum(around if name.startswith(("gather", "reduce")) else HOPS for name in forms)
    assert sent_bytes(result) == [blocks * BLOCK] * topology_size(topology)
    assert_times_add_up(result)
    assert not any("ring model" in note for note in result.notes)


def test_copies_and_slices_within_a_device():
    result = play_block(
        "v5e:2x2", lambda x: jax.tree.leaves([SCENARIOS[name].run(x) for name in LOCAL])
    )
    for device in result.devices:
        assert device.bytes["hbm to hbm"] == sum(LOCAL.values()) * BLOCK
        assert device.exposed == 0


# Negative tests: pairs with one rule broken, then a kernel with one rule broken.


def never_waited_for(x):
    return transport.ppermute_start(x, "x", backend="pallas")[0] + 1


def waited_for_twice(x):
    """Takes Refs, because a value future refuses the second done while it is traced."""
    x_ref, y_ref = jax.new_ref(x), jax.new_ref(jnp.zeros_like(x))
    sems = transport.ppermute_start_stateful(x_ref, y_ref, "x")
    transport.ppermute_done_stateful(*sems, x_ref, y_ref)
    transport.ppermute_done_stateful(*sems, x_ref, y_ref)
    return y_ref[...]


SEND, RECEIVE = "output of ppermute_start.1@{0}", "output of ppermute_start.1@{1}"


@pytest.mark.parametrize(("local", "left"), [
    (permute_with(faulty(wait_send=False)), {SEND}),
    (permute_with(faulty(wait_recv=False)), {RECEIVE}),
    (never_waited_for, {SEND, RECEIVE}),
], ids=["no wait for the send", "no wait for the receipt", "no done"])  # fmt: skip
def test_a_missing_wait_leaves_its_semaphore_on_every_device(local, left):
    with pytest.raises(LeftoverSemaphoreError) as caught:
        play_block("v5e:2x2", local)
    listed = str(caught.value).splitlines()[1:]
    assert len(listed) == 4 * len(left)
    assert {semaphore for semaphore in (SEND, RECEIVE) if semaphore in str(caught.value)} == left


def test_a_second_done_is_a_deadlock():
    with pytest.raises(
        DeadlockError, match=r"waits in ppermute_stateful_done.*which is 0"
    ) as caught:
        play_block("v5e:2x2", waited_for_twice)
    assert len(str(caught.value).splitlines()) == 1 + 4


def test_a_slice_past_the_end_of_its_array():
    """The scenario has four planes and picks one by the number of the device, so on eight devices
    half of them miss.
    """
    with pytest.raises(OutOfBoundsError, match="on device 4 reads outside every buffer"):
        play_block("v5e:2x4", SCENARIOS["two_dynamic_slices"].run)


NO_BARRIER = r"device \d writes into device \d .*barrier with the receiver is missing"
TWO_WRITES = (
    r"device 3: dma.general in exchange.1 .* writes output of exchange.1@\{1\} .*"
    r"while dma.general of exchange.1 .* still writes it"
)


@pytest.mark.parametrize(
    ("fault", "kind", "message"),
    [
        ("no barrier", RaceError, NO_BARRIER),
        ("wrong barrier", RaceError, NO_BARRIER),
        (
            "no wait for the send",
            LeftoverSemaphoreError,
            r"scratch argument 0\) has a nonzero value",
        ),
        (
            "no wait for the receipt",
            LeftoverSemaphoreError,
            r"scratch argument 1\) has a nonzero value",
        ),
        ("wrong neighbour", RaceError, TWO_WRITES),
        ("reads early", RaceError, "reads output of exchange.1.* still writes it"),
        ("too far", OutOfBoundsError, "bounds check stops a transfer"),
    ],
)
def test_planted_faults(fault, kind, message):
    """test_dumps.py simulates the kernel without a fault."""
    with pytest.raises(kind, match=message):
        play_exchange(fault)


def test_a_second_wait_is_a_deadlock_that_names_every_device_and_the_line_that_made_the_kernel():
    stuck = r"device 3 waits in exchange.1 for semaphore \d+, scratch operand .* which is 16384"
    with pytest.raises(DeadlockError, match=stuck) as caught:
        play_exchange("waits twice")
    for device, line in enumerate(str(caught.value).splitlines()[1:]):
        assert re.search(
            rf"device {device} waits .*exchange.1-02-final_bundles.txt:.* made at "
            rf".*programs.py:\d+",
            line,
        )
