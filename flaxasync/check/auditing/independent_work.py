"""The work of a computation that a transfer does not need, and that does not need the transfer.

For every instruction, the work that it needs and the work that needs it are kept as the bits of an
integer. They are found for all instructions of a computation at once, because a large program asks
for thousands of transfers.
"""

import collections
import dataclasses

from flaxasync.check.estimate.costs import Costs
from flaxasync.check.hlo.async_operations import COLLECTIVES
from flaxasync.check.hlo.module import Computation, Instruction

OFFERED = 1e-6  # seconds; a shorter instruction is not offered as work
MOST = 2048  # instructions of a computation, the longest ones, that are offered as work


@dataclasses.dataclass(frozen=True)
class _Reach:
    """The work of one computation, the longest first, and how it hangs together with all
    instructions by name.

    The n-th bit of an integer stands for the n-th work.
    """

    work: list[tuple[float, Instruction]]
    needs: dict[str, int]  # the work that an instruction needs, and itself
    needed_by: dict[str, int]  # the work that needs an instruction, and itself


class IndependentWork:
    """Finds work that could run beside a transfer, for callers that ask of one computation after
    the other.
    """

    def __init__(self, costs: Costs):
        self.costs = costs
        self._reach: dict[str, _Reach] = {}

    def beside(
        self, start: Instruction, ends: list[Instruction], enough: float
    ) -> list[tuple[float, Instruction]]:
        """Returns work of the computation that `start` does not need and that does not need `ends`,
        the longest first.

        Each is (seconds, instruction). What follows after `enough` seconds is left out.
        Collectives, calls of computations that contain one, loops, branches and what takes less
        than a microsecond do not count.
        """
        computation = start.computation
        if computation.name not in self._reach:
            # Only the last one is kept: those of all computations would take as much memory as the
            # program.
            self._reach = {computation.name: self._read(computation)}
        reach = self._reach[computation.name]
        free = (1 << len(reach.work)) - 1
        free &= ~reach.needs[start.name]
        for end in ends:
            free &= ~reach.needed_by[end.name]
        found: list[tuple[float, Instruction]] = []
        total = 0.0
        while free and total < enough:
            longest = free & -free
            found.append(reach.work[longest.bit_length() - 1])
            total += found[-1][0]
            free ^= longest
        return found

    def _read(self, computation: Computation) -> _Reach:
        timed = [(self.costs.seconds(i), i) for i in computation.instructions]
        work = [(seconds, i) for seconds, i in timed if seconds >= OFFERED and self._is_work(i)]
        work.sort(key=lambda item: -item[0])
        del work[MOST:]
        bits: dict[str, int] = collections.defaultdict(int)
        bits.update((i.name, 1 << n) for n, (_, i) in enumerate(work))
        needs: dict[str, int] = {}
        for i in computation.instructions:
            found = bits[i.name]
            for name in (*i.operands, *i.control_predecessors):
                found |= needs.get(name, 0)  # a control predecessor may be printed later
            needs[i.name] = found
        needed_by: dict[str, int] = dict.fromkeys(needs, 0)
        for i in reversed(computation.instructions):
            needed_by[i.name] |= bits[i.name]
            for name in (*i.operands, *i.control_predecessors):
                needed_by[name] = needed_by.get(name, 0) | needed_by[i.name]
        return _Reach(work, needs, needed_by)

    def _is_work(self, i: Instruction) -> bool:
        if i.opcode == "call":
            inside = i.nested()
            return not any(one.opcode.removesuffix("-start") in COLLECTIVES for one in inside)
        return i.opcode not in COLLECTIVES and self.costs.explained(i).source not in (
            "links",
            "body",
            "nothing",
        )
