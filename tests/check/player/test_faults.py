"""Compiled kernels that break a rule of the machine: each planted fault is found and named."""

import re

import pytest

from flaxasync.check.player import DeadlockError, LeftoverSemaphoreError, OutOfBoundsError, RaceError
from tests.check.player.programs import play_exchange

EXPECTED = {
    "no barrier": (RaceError, r"device 0 writes into device 1 .*barrier with the receiver is missing"),
    "wrong barrier": (RaceError, r"device \d writes into device \d .*barrier with the receiver is missing"),
    "no wait for the send": (LeftoverSemaphoreError, r"scratch argument 0\) has a nonzero value"),
    "no wait for the receipt": (LeftoverSemaphoreError, r"scratch argument 1\) has a nonzero value"),
    "wrong neighbour": (
        RaceError,
        r"device 3: dma.general in exchange.1 .* writes output of exchange.1@\{1\} .*"
        r"while dma.general of exchange.1 .* still writes it",
    ),
    "reads early": (RaceError, "reads output of exchange.1.* still writes it"),
    "too far": (OutOfBoundsError, "bounds check stops a transfer"),
}


def test_the_correct_form_has_no_fault():
    assert play_exchange().seconds > 0


@pytest.mark.parametrize("fault", EXPECTED)
def test_planted_faults(fault):
    kind, message = EXPECTED[fault]
    with pytest.raises(kind, match=message):
        play_exchange(fault)


def test_a_second_wait_is_a_deadlock_that_names_every_device_and_the_line_that_made_the_kernel():
    stuck = r"device 3 waits in exchange.1 for semaphore \d+, scratch operand .* which is 16384"
    with pytest.raises(DeadlockError, match=stuck) as caught:
        play_exchange("waits twice")
    for device, line in enumerate(str(caught.value).splitlines()[1:]):
        assert re.search(rf"device {device} waits .*exchange.1-02-final_bundles.txt:.* made at .*programs.py:\d+", line)
