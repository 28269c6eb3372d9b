"""The time of vector and matrix operations. Their values are never computed.

A bundle is issued in one cycle. Three operations can delay it, all of them of a matrix unit: a
multiply (`vmatmul`) while the unit still streams the one before, a weight push (`vmatpush`) while
its port is busy, and a pop of a result that is not ready. Every other vector operation costs its
slot in the bundle and no more.

The time of a basic block depends only on the state of the units when it begins: on the work that
they still have to do. It is therefore computed once for each state.
"""

import re
from collections import Counter, deque
from typing import NamedTuple

from flaxasync.check.player.bundle_text import Operation, Program
from flaxasync.check.player.chips import PlayedChip

# The operations of the vector, permute and transpose units that were seen in dumps, by their name
# up to the first dot. They cost their slot in the bundle. A unit holds four sets of weights, and
# each has its own push operation.
VECTOR_FAMILIES = frozenset(
    """
    vadd vand vbcast vc vceil vclampa vclamps vclz vcmask vcmp vcombine vcosq vcvt vdelay verf vexp2 vfloor
    vlaneseq vld vllmr vlog2 vmand vmatprep vmax vmin vmmov vmneg vmor vmov vmpackc vmphi vmul vnez vor vpack vpcnt
    vperm vphi vpop vpush vrcp vrng vrot vround vrsqrt vsel vset vsetiar vsetrngseed vsettm vshll vshra vshrl
    vsigshft vsinq vst vstv vsub vtanh vtrace vtrunc vunpack vweird vxor vxpose
    vmatmul vmatpush vmatpush1 vmatpush2 vmatpush3
    """.split()  # noqa: SIM905, one a line would fill the page
)
_UNIT = re.compile(r"mxu(\d)")
_BYTES = re.compile(r"\.(?:f8\w*|s8|u8|s4|u4|fp8\w*)(?:\.|$)")
_PACKED = re.compile(r"\.(?:bf16|packed)(?:\.|$)")

MULTIPLY = 0
PUSH = 1
POP = 2


class Operations(NamedTuple):
    """The operations in the bundles of a program, each counted once however often it is
    executed.
    """

    bundles: int
    names: int  # the number of different operations
    multiplies: int  # vmatmul, on all matrix units
    pushes: int  # of weights, to all matrix units
    pops: int  # of results, from all matrix units
    loads: int  # of vector registers
    stores: int  # of vector registers
    vector: int  # all others of the vector units


def operations(program: Program) -> Operations:
    """Counts the operations of a program."""
    names = Counter(operation.name for bundle in program.bundles for operation in bundle)
    counts: Counter[str] = Counter()
    for name, count in names.items():
        unit = name.partition(".")[0]
        if unit in VECTOR_FAMILIES:
            kinds = {"vmatmul": "multiplies", "vmatpush": "pushes", "vpop": "pops"}
            if not _UNIT.search(name):
                kinds = {"vld": "loads", "vst": "stores"}
            # each set of weights has its own push
            counts[kinds.get(unit.rstrip("123"), "vector")] += count
    return Operations(
        len(program.bundles), len(names), *(counts[kind] for kind in Operations._fields[2:])
    )


class MatrixOperation(NamedTuple):
    """What an operation asks of a matrix unit."""

    kind: int  # MULTIPLY, PUSH or POP
    unit: int
    cycles: int  # for how long it occupies the unit (a multiply) or its port (a push)
    results: int = 0  # that a multiply makes


class Cost(NamedTuple):
    """The time of a basic block, in cycles.

    `state` is the work that the matrix units still have to do at its end: for each unit its number,
    the cycles until it is free, the cycles until its port is free, and the cycles until each of its
    results is ready.
    """

    cycles: int
    state: tuple
    stall: int  # in which a bundle waited for a matrix unit
    busy: int  # in which the busiest unit multiplied


IDLE: tuple = ()  # the state of units that have no work


def matrix_operations(operation: Operation, chip: PlayedChip) -> tuple[MatrixOperation, ...]:
    """Returns what an operation asks of matrix units: of two if it pops and adds their results,
    else of one or none.
    """
    if not operation.unit.startswith(("vmat", "vpop")):
        return ()
    units = [int(unit) for unit in _UNIT.findall(operation.name)]
    unit = (*units, 0)[0]
    if operation.unit == "vmatmul":
        # `lmr` multiplies 8 rows of a loaded register, whatever their type. A float32 multiply does
        # the same.
        kind = ""
        if ".lmr." not in operation.name:
            if _BYTES.search(operation.name):
                kind = "8 bits"
            elif _PACKED.search(operation.name):
                kind = "bf16"
        return (MatrixOperation(MULTIPLY, unit, chip.occupancy[kind], chip.results[kind]),)
    if operation.unit.startswith("vmatpush"):
        return (MatrixOperation(PUSH, unit, chip.push),)
    return tuple(MatrixOperation(POP, unit, 0) for unit in units if operation.unit == "vpop")


def cost(
    bundles: int, work: list[tuple[int, tuple[MatrixOperation, ...]]], state: tuple, latency: int
) -> Cost:
    """Returns the time of a basic block, from the state of the units before it, and the latency of
    a multiply.

    `work` is (index of the bundle, operations) for each bundle that uses a matrix unit. Cycles are
    counted from the beginning of the block.
    """
    unit_free = {unit: cycle for unit, cycle, _, _ in state}
    port_free = {unit: cycle for unit, _, cycle, _ in state}
    results = {unit: deque(ready) for unit, _, _, ready in state}
    busy: dict[int, int] = {}
    now = stall = 0
    before = 0  # the index of the bundle before
    for index, bundle in work:
        now += index - before
        before = index
        needed = [now]  # when the bundle is reached, and when all that its operations need is ready
        for operation in bundle:
            if operation.kind == MULTIPLY:
                needed.append(unit_free.get(operation.unit, 0))
            elif operation.kind == PUSH:
                needed.append(port_free.get(operation.unit, 0))
            elif results.get(operation.unit):  # a pop takes the oldest result
                needed.append(results[operation.unit].popleft())
        stall += max(needed) - now
        now = max(needed)
        for operation in bundle:
            unit = operation.unit
            cycles = operation.cycles
            if operation.kind == MULTIPLY:
                unit_free[unit] = now + cycles
                busy[unit] = busy.get(unit, 0) + cycles
                ready = results.setdefault(unit, deque())
                for n in range(operation.results):  # evenly, while the multiply streams
                    ready.append(now + latency + n * (cycles // operation.results))
            elif operation.kind == PUSH:
                port_free[unit] = now + cycles
    now += bundles - before
    after = []
    for unit in sorted(unit_free.keys() | port_free.keys() | results.keys()):
        left = (max(0, unit_free.get(unit, 0) - now), max(0, port_free.get(unit, 0) - now))
        waiting = tuple(max(0, cycle - now) for cycle in results.get(unit, ()))
        if any(left) or waiting:
            after.append((unit, *left, waiting))
    return Cost(now, tuple(after), stall, max(busy.values(), default=0))


def aged(state: tuple, cycles: float) -> tuple:
    """Returns the state of the units after the core has waited for some cycles."""
    if state:
        return cost(int(cycles), [], state, 0).state
    return IDLE
