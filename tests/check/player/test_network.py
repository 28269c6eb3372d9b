"""How transfers share HBM and links."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flaxasync.check.player.network import Network


def run_network(flows):
    """Returns when flows (start, size, uses) end. An HBM moves 10 bytes per cycle, a link 1."""
    network, ends, pending = Network({"hbm": 10.0, "link": 1.0}), {}, sorted(enumerate(flows), key=lambda f: f[1][0])
    while pending or network.next < math.inf:
        if pending and pending[0][1][0] <= network.next:
            number, (start, size, uses) = pending.pop(0)
            network.start(start, size, uses, lambda now, flow, number=number: ends.update({number: now}))
        else:
            network.finish()
    return [ends[n] for n in range(len(flows))]


HBM, LINK, OTHER = ("hbm", 0), ("link", 0, 1), ("link", 1, 2)


def test_transfers_within_a_chip_go_one_at_a_time():
    assert run_network([(0, 100, ((HBM, 1.0),)), (0, 100, ((HBM, 2.0),))]) == pytest.approx([10, 30])


def test_a_transfer_between_chips_goes_before_those_within_a_chip():
    assert run_network([(0, 100, ((HBM, 1.0),)), (0, 10, ((LINK, 1.0), (HBM, 1.0)))]) == pytest.approx([11, 10])


def test_a_chip_sends_one_transfer_at_a_time_over_a_link_and_chips_share_it():
    assert run_network([(0, 10, ((LINK, 1.0),)), (0, 10, ((LINK, 1.0),))]) == pytest.approx([10, 20])
    passing = (0, 10, ((LINK, 1.0), (OTHER, 1.0)))
    assert run_network([passing, (0, 10, ((OTHER, 1.0),))]) == pytest.approx([20, 20])


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 100)), min_size=1, max_size=8))
def test_no_byte_is_lost_and_no_transfer_is_faster_than_its_link(flows):
    ends = run_network([(start, size, ((LINK, 1.0),)) for start, size in flows])
    for (start, size), end in zip(flows, ends, strict=True):
        assert end - start >= size * (1 - 1e-6)
    busy = sum(size for _, size in flows)
    assert max(ends) <= max(start for start, _ in flows) + busy + 1e-3
