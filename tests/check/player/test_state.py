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
    clocks.enter(0, "start")  # an old message says nothing about the next kernel
    assert not clocks.knows_to_have_entered(0, 1, "start")


def test_devices_that_meet_know_the_same_though_one_skipped_a_branch():
    """Device 1 skips the product of a branch, as in causal ring attention."""
    clocks = VectorClocks(3)
    clocks.enter(0, "product")
    for device in range(2):
        clocks.enter(device, "start")
    assert not clocks.knows_to_have_entered(0, 1, "start")
    clocks.synchronize((0, 1))
    assert clocks.knows_to_have_entered(0, 1, "start")
    assert (clocks.known_to(0), clocks.known_to(2)) == ([2, 1, 0], [0, 0, 0])
