"""The time of matrix operations: what holds a unit, and what waits for a result."""

from flaxasync.check.player import matrix_unit
from flaxasync.check.player.bundle_text import parse_operation
from flaxasync.check.player.chips import PLAYED_CHIPS


def matrix(text, chip="v5e"):
    return matrix_unit.matrix_operation(parse_operation(text), PLAYED_CHIPS[chip])


def test_a_multiply_holds_its_unit():
    multiply = matrix("%1 = vmatmul.bf16.gmra.mxu2 %v1_v0")
    cost = matrix_unit.cost(2, [(0, (multiply,)), (1, (multiply,))], matrix_unit.IDLE, latency=100)
    assert (multiply.unit, cost.cycles, cost.stall, cost.busy) == (2, 17, 15, 32)
    other = matrix("%1 = vmatmul.bf16.gmra.mxu1 %v1_v0")
    assert matrix_unit.cost(2, [(0, (multiply,)), (1, (other,))], matrix_unit.IDLE, latency=100).stall == 0


def test_a_pop_waits_for_its_result_and_less_after_other_waits():
    multiply, pop = matrix("%1 = vmatmul.f32.gmra.mxu0 %v1_v0"), matrix("%v2_v1 = vpop.f32.mrf.mxu0")
    cost = matrix_unit.cost(1, [(0, (multiply,))], matrix_unit.IDLE, latency=100)
    assert matrix_unit.cost(1, [(0, (pop,))], cost.state, latency=100).stall == 99
    assert matrix_unit.cost(1, [(0, (pop,))], matrix_unit.aged(cost.state, 60), latency=100).stall == 39
    nothing_to_wait_for = ((0, 0, 0, (0,)),)  # but one result to pop
    assert matrix_unit.aged(cost.state, 1000) == nothing_to_wait_for
