"""The vector side: what an operation costs. Values are never computed; time is.

A bundle issues in one cycle. Three operations can hold it up, all of a matrix unit: a multiply (`vmatmul`) while the
unit still streams the one before, a weight push (`vmatpush`) while its port is busy, a pop of a result that is not
there yet. Everything else of the vector side issues and is gone. The result of a straight run of bundles depends only
on what the units had left to do when it began, so it is remembered by that.
"""

import re
from collections import deque
from typing import NamedTuple

from flaxasync.check.player.bundle_text import Operation
from flaxasync.check.player.chips import PlayedChip

# Families of the vector, permute and transpose units that were seen in dumps, by their name up to the first dot.
# They cost their slot in the bundle.
VECTOR_FAMILIES = frozenset(
    """
    vadd vand vbcast vc vceil vclampa vclamps vclz vcmask vcmp vcombine vcosq vcvt vdelay verf vexp2 vfloor
    vlaneseq vld vllmr vlog2 vmand vmatprep vmax vmin vmmov vmneg vmor vmov vmpackc vmphi vmul vnez vor vpack vpcnt
    vperm vphi vpop vpush vrcp vrng vrot vround vrsqrt vsel vset vsetiar vsetrngseed vsettm vshll vshra vshrl vsinq
    vst vstv vsub vtanh vtrace vtrunc vunpack vweird vxor vxpose
    """.split()  # noqa: SIM905  one a line would fill a page
)
MATRIX_FAMILIES = frozenset(
    ["vmatmul", "vmatpush", "vmatpush1", "vmatpush2", "vmatpush3"]
)  # pushes: to one of four places
_UNIT = re.compile(r"mxu(\d)")
_NARROW = re.compile(r"\.(?:bf16|packed|f8\w*|s8|u8|s4|u4|fp8\w*)(?:\.|$)")

MULTIPLY, PUSH, POP = 0, 1, 2


class MatrixOperation(NamedTuple):
    kind: int
    unit: int
    cycles: int
    results: int = 0


class Cost(NamedTuple):
    """Of a straight run of bundles; in cycles."""

    cycles: int
    state: tuple
    stall: int
    busy: int  # of the busiest unit


IDLE: tuple = ()


def is_vector(operation: Operation) -> bool:
    """Says whether an operation of the vector side is known: it costs its slot only, or it is one of a matrix unit."""
    return operation.unit in VECTOR_FAMILIES or operation.unit in MATRIX_FAMILIES


def matrix_operation(operation: Operation, chip: PlayedChip) -> MatrixOperation | None:
    """Returns what an operation asks of a matrix unit; None for all others."""
    if not operation.unit.startswith(("vmat", "vpop")):
        return None
    unit = int(match[1]) if (match := _UNIT.search(operation.name)) else 0
    if operation.unit == "vmatmul":
        # `lmr` multiplies 8 rows of a loaded register, as a float32 multiply does, whatever their type.
        packed = _NARROW.search(operation.name) and ".lmr." not in operation.name
        kind = "bf16" if packed else ""
        return MatrixOperation(MULTIPLY, unit, chip.occupancy[kind], chip.results[kind])
    if operation.unit.startswith("vmatpush"):
        return MatrixOperation(PUSH, unit, chip.push)
    if operation.unit == "vpop" and match:
        return MatrixOperation(POP, unit, 0)
    return None


def cost(bundles: int, work: list[tuple[int, tuple[MatrixOperation, ...]]], state: tuple, latency: int) -> Cost:
    """Returns what a straight run of bundles takes.

    Args:
      bundles: how many.
      work: (bundle, operations) for those that use a matrix unit.
      state: per unit (number, busy for, port busy for, cycles until each result): the `Cost.state` before.
      latency: cycles from a multiply to its first result.
    """
    free = {unit: until for unit, until, _, _ in state}
    port = {unit: until for unit, _, until, _ in state}
    results = {unit: deque(ready) for unit, _, _, ready in state}
    busy: dict[int, int] = {}
    now = last = stall = 0
    for index, operations in work:
        now += index - last
        last = index
        begin = now
        for kind, unit, _, _ in operations:
            if kind == MULTIPLY:
                begin = max(begin, free.get(unit, 0))
            elif kind == PUSH:
                begin = max(begin, port.get(unit, 0))
            elif results.get(unit):
                begin = max(begin, results[unit].popleft())
        stall += begin - now
        now = begin
        for kind, unit, cycles, count in operations:
            if kind == MULTIPLY:
                free[unit] = now + cycles
                busy[unit] = busy.get(unit, 0) + cycles
                ready = results.setdefault(unit, deque())
                for n in range(count):
                    ready.append(now + latency + n * (cycles // count))
            elif kind == PUSH:
                port[unit] = now + cycles
    now += bundles - last
    after = []
    for unit in sorted(free.keys() | port.keys() | results.keys()):
        left = (max(0, free.get(unit, 0) - now), max(0, port.get(unit, 0) - now))
        waiting = tuple(max(0, t - now) for t in results.get(unit, ()))
        if any(left) or waiting:
            after.append((unit, *left, waiting))
    return Cost(now, tuple(after), stall, max(busy.values(), default=0))


def aged(state: tuple, cycles: float) -> tuple:
    """Returns what is left of `state` after the core has waited for a while."""
    passed = int(cycles)
    if not state or passed <= 0:
        return state
    older = (
        (unit, max(0, free - passed), max(0, port - passed), tuple(max(0, t - passed) for t in ready))
        for unit, free, port, ready in state
    )
    return tuple(entry for entry in older if any(entry[1:3]) or entry[3])
