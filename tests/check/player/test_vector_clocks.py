"""What devices know about each other, through messages and meetings."""

from flaxasync.check.player.state import VectorClocks


def test_a_message_carries_what_its_sender_knew():
    clocks = VectorClocks(3)
    for device in range(3):
        clocks.enter(device, "start")
    message = clocks.known_to(1)
    assert not clocks.knows_to_have_entered(0, 1, "start")
    clocks.learn(0, message)
    assert clocks.knows_to_have_entered(0, 1, "start")
    assert not clocks.knows_to_have_entered(0, 2, "start")
    clocks.learn(2, clocks.known_to(0))  # what device 0 has learned goes on
    assert clocks.knows_to_have_entered(2, 1, "start")


def test_an_old_message_says_nothing_about_the_next_kernel():
    clocks = VectorClocks(2)
    clocks.enter(1, "start")
    clocks.enter(0, "start")
    clocks.learn(0, clocks.known_to(1))
    assert clocks.knows_to_have_entered(0, 1, "start")
    clocks.enter(0, "start")
    assert not clocks.knows_to_have_entered(0, 1, "start")


def test_devices_that_meet_know_the_same():
    clocks = VectorClocks(3)
    clocks.enter(0, "start")
    clocks.enter(2, "start")
    clocks.synchronize((0, 2))
    assert clocks.known_to(0) == clocks.known_to(2) == [1, 0, 1]
    assert clocks.known_to(1) == [0, 0, 0]


def test_devices_that_take_different_branches_may_still_be_in_the_same_kernel():
    """Device 1 skips the product of a branch, as in causal ring attention, and signals from its start."""
    clocks = VectorClocks(2)
    clocks.enter(0, "product")
    for device in range(2):
        clocks.enter(device, "start")
    assert not clocks.knows_to_have_entered(0, 1, "start")
    clocks.learn(0, clocks.known_to(1))
    assert clocks.knows_to_have_entered(0, 1, "start")
