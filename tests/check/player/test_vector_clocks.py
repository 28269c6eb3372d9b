"""What devices know about each other, through messages and meetings."""

from flaxasync.check.player.vector_clocks import VectorClocks


def test_a_message_carries_what_its_sender_knew():
    clocks = VectorClocks(3)
    for device in range(3):
        clocks.enter(device)
    message = clocks.known_to(1)
    assert not clocks.knows_to_have_entered(0, 1)
    clocks.learn(0, message)
    assert clocks.knows_to_have_entered(0, 1)
    assert not clocks.knows_to_have_entered(0, 2)
    clocks.learn(2, clocks.known_to(0))  # what device 0 has learned goes on
    assert clocks.knows_to_have_entered(2, 1)


def test_an_old_message_says_nothing_about_the_next_kernel():
    clocks = VectorClocks(2)
    clocks.enter(1)
    message = clocks.known_to(1)
    clocks.enter(0)
    clocks.enter(0)
    clocks.learn(0, message)
    assert not clocks.knows_to_have_entered(0, 1)


def test_devices_that_meet_know_the_same():
    clocks = VectorClocks(3)
    clocks.enter(0)
    clocks.enter(2)
    clocks.synchronize((0, 2))
    assert clocks.known_to(0) == clocks.known_to(2) == [1, 0, 1]
    assert clocks.known_to(1) == [0, 0, 0]
