"""The roofline: what it ranks, what it says, and what it refuses."""

import pytest

import flaxasync as fa
from flaxasync.hardware import chip, chip_of_device

LLAMA = (1, 4096, 32, 128), (1, 4096, 8, 128)


def test_a_ring_that_hides_its_transfers_is_chosen_with_a_reason():
    plan = fa.plan(fa.ring_attention, *LLAMA, chip="v5e", ring=8, layout="zigzag")
    assert plan.backend == "xla"
    assert "waits 0.00 ms for transfers where gather waits" in plan.reason
    assert set(plan.seconds) == {"xla", "gather"}
    assert plan.seconds["xla"] < plan.seconds["gather"]
    assert str(plan).startswith("ring_attention: xla, because it waits 0.00 ms")


def test_where_blocks_are_small_steps_cost_more_than_waiting():
    """The twin: few rows a device, and gathering once is predicted to be faster."""
    plan = fa.plan("ring_attention", (1, 16, 8, 64), (1, 16, 1, 64), chip="v5e", ring=8, backward=False)
    assert plan.backend == "gather"
    assert "steps where xla takes" in plan.reason


def test_what_does_not_fit_into_memory_is_not_chosen():
    plan = fa.plan("ring_attention", (1, 131072, 16, 128), (1, 131072, 16, 128), chip="v5e", ring=8)
    assert plan.backend == "xla"
    assert "gather would hold" in plan.reason
    assert "more than a v5e has" in plan.reason


def test_predictions_follow_the_work():
    def seconds(**options):
        return fa.plan("ring_attention", *LLAMA, chip="v5e", ring=8, **options).costs["xla"].compute

    assert seconds(layout="zigzag") < 0.6 * seconds(layout="contiguous")  # the last device has every block
    assert seconds(causal=False) >= seconds(layout="contiguous")
    assert seconds(window=4096) < 0.3 * seconds()
    assert 3.4 < seconds() / seconds(backward=False) < 3.6  # seven matmuls for two
    one = fa.plan("ring_attention", *LLAMA, chip="v5e", ring=1)
    assert one.reason == "one device has every row: there is nothing to transfer"


@pytest.mark.parametrize(
    ("op", "options", "message"),
    [
        ("attention", {}, "plan knows ring_attention: got 'attention'"),
        ("ring_attention", {"chip": "v4"}, "chip must be one of"),
        ("ring_attention", {"ring": 0}, "ring of 1 device or more: got ring=0"),
        ("ring_attention", {"rows": 3}, "plan cannot take these shapes or options for ring_attention: .*'rows'"),
    ],
)
def test_what_it_cannot_plan_is_refused(op, options, message):
    with pytest.raises(ValueError, match=message):
        fa.plan(op, *LLAMA, **({"chip": "v5e", "ring": 8} | options))


def test_the_chip_of_a_device():
    assert chip_of_device("TPU v5 lite") == chip("v5e")
    assert chip_of_device("cpu") is None
    assert chip_of_device(None) is None
