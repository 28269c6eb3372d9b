"""What runs inside the windows of compiled programs, and what the chip waits for."""

import pytest

from flaxasync.check import audit
from tests.check import programs
from tests.check.hlo_texts import LOOP

COPYING_LOOP = LOOP.replace("%c = f32[65536]{0} negate(%g)", "%c = f32[65536]{0} copy(%g)")


def test_work_in_the_window_is_counted():
    """The matmul of one step stays in its window. Nothing ties that of the other step, so the compiler moved it out."""
    report = audit(programs.async_form("value_with_compute"))
    first, second = (p for p in report.pairs if p.runs == 4)  # eight hops, two in each iteration
    assert [w.instruction for w in second.work if "convolution" in w.instruction]
    assert "repeats" in second.crosses
    assert second.overlapped
    assert not first.overlapped
    (moved,) = [f for f in report.findings if f.code == "empty-window"]
    assert (moved.instruction, "convolution" in moved.message) == (first.name, True)


def test_windowed_einsum_overlaps_two_permutes_in_each_step():
    report = audit(programs.windowed_einsum())
    body = [p for p in report.pairs if "body" in p.computation and p.kind == "collective-permute"]
    assert len(body) == 4  # the loop is unrolled by two
    assert all(p.overlapped and p.exposed == 0 for p in body), str(report)


def test_the_2x2_matmul_exposes_its_permute_and_its_all_reduce():
    report = audit(programs.mesh_matmul())
    (permute,) = report.pairs
    assert (permute.kind, permute.bytes, permute.overlapped) == ("collective-permute", 128 << 20, False)
    assert permute.exposed == pytest.approx(2.98e-3, rel=0.01)
    found = {(f.code, f.instruction) for f in report.findings}
    assert found == {("serialised", permute.name), ("synchronous-collective", "all-reduce")}
    assert report.ok  # the program is slow, and not wrong


def test_a_loop_that_copies_what_it_carries():
    assert "loop-copies" not in audit(LOOP).codes()
    (copies,) = [f for f in audit(COPYING_LOOP).findings if f.code == "loop-copies"]
    assert copies.count == 4  # the counter is 0, 3, 6, 9


def test_a_copy_in_flight_is_reported_once():
    """It is also a copy of what a loop carries, which is the lesser fault."""
    codes = audit(programs.async_form("staggered_unroll_1")).codes()
    assert "in-flight-copied" in codes
    assert "loop-copies" not in codes
