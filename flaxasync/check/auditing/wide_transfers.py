"""Transfers of arrays in a wider type than the program keeps of them, and what a narrower type would gain.

The transfers of one line of Python are one finding, because one change of that line mends them all, and those for which
the text names no line are one together. The gain is the difference of two estimates: of the program, and of the same
program with the narrow type in all arrays between the products and the conversions. The second one has shorter
transfers and less traffic in memory, and the same schedule. Each estimate is of the whole program, so only the few
lines that move the most bytes get one. What the compiler would then schedule in another way is not predicted;
docs/history.md has an example. The compiler's cycle estimates of matmuls are kept, although a matmul that writes less
can be faster.
"""

from collections.abc import Iterable, Mapping

from flaxasync.check.auditing.findings import Finding, Severity, finding
from flaxasync.check.auditing.report import size_text
from flaxasync.check.auditing.wide_values import WideValues, follow, narrowed
from flaxasync.check.estimate.costs import Costs
from flaxasync.check.hlo.async_operations import AsyncOperation
from flaxasync.check.hlo.module import Computation, HloModule, Instruction

ESTIMATED = 8  # findings; no gain is estimated for the others, which move fewer bytes
SPELLINGS = ("first-class", "sugar")  # of the starts that are followed: the others wrap or fuse what they move
LARGE = 1 << 20  # bytes; transfers of less, together, are reported as information only


def wide_transfers(
    module: HloModule,
    costs: Costs,
    operations: Iterable[AsyncOperation],
    holding: Iterable[tuple[Computation, Instruction, Instruction]],
    runs: Mapping[str, int],
) -> list[Finding]:
    """Returns a finding for each line of Python whose transfers carry a wider type than is kept. Its gain is of a run.

    Args:
      module: The program, which is scheduled.
      costs: The times of its instructions.
      operations: Its asynchronous operations.
      holding: Its synchronous collectives, as (computation, instruction, collective).
      runs: How often each computation runs.
    """
    lines: dict[str, list[tuple[Computation, Instruction, WideValues]]] = {}
    started = [
        (module.computations[op.computation], op.start)
        for op in operations
        if op.communicates and op.spelling in SPELLINGS and op.windows
    ]
    for computation, i in (*started, *((c, i) for c, i, _ in holding)):
        if (values := follow(module, computation, i)) is not None:
            lines.setdefault(module.source(i), []).append((computation, i, values))
    if not lines:
        return []
    before = _seconds(module, costs)
    found = []
    moved_by = {line: sum(runs[c.name] * _bytes(c, i) for c, i, _ in lines[line]) for line in lines}
    for n, line in enumerate(sorted(lines, key=lambda line: -moved_by[line])):
        transfers, moved, gain = lines[line], moved_by[line], 0.0
        if n < ESTIMATED:
            after = narrowed(module, [values for _, _, values in transfers])
            gain = before - _seconds(after, Costs(after, costs.chip, costs.kernels, costs.copies))
        computation, i, values = max(transfers, key=lambda transfer: _bytes(*transfer[:2]))
        count = sum(runs[c.name] for c, _, _ in transfers)
        which = "of its line" if line else "without a line of Python"
        others = f" and {len(transfers) - 1} more {which} carry" if len(transfers) > 1 else " carries"
        message = (
            f"{i.name}{others} {values.wide} that is rounded to {values.narrow} when it has arrived: "
            f"{size_text(moved)} in {count} transfers of a run"
        )
        if n >= ESTIMATED:
            message += f"; its gain was not estimated, because {n} other lines move as much or more"
        severity = None if moved >= LARGE else Severity.INFO
        found.append(
            finding(
                "wide-transfer", message, computation.name, i.name, source=line, severity=severity,
                gain=max(0.0, gain), count=count,
            )
        )  # fmt: skip
    return found


def _bytes(computation: Computation, i: Instruction) -> int:
    """Returns the bytes of the largest array that a transfer takes or makes."""
    taken = [made.shape for o in i.operands if (made := computation.by_name.get(o)) is not None]
    return max(leaf.bytes for shape in (i.shape, *taken) for _, leaf in shape.leaves())


def _seconds(module: HloModule, costs: Costs) -> float:
    from flaxasync.check.estimate.lockstep import Lockstep  # here, because few programs need it, and the table is fast

    lockstep = Lockstep(module, costs)
    lockstep.run()
    return max(lockstep.clock)
