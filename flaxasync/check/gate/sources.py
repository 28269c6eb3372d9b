"""Where an instruction comes from: its source line, and its place in a training step.

Instructions that the compiler inserts often have no metadata. They are said to come from the nearest instruction that
has some: what they wrap, then the values that they are made of, then their users, and last the loop around them.
"""

import collections
import itertools
import os
from collections.abc import Iterator

from flaxasync.check.hlo.module import Computation, HloModule, Instruction
from flaxasync.check.hlo.trip_count import trip_count

STEPS = 200  # instructions that are looked at before the search for one with metadata is given up


class Origins:
    """The origins of the instructions of one program.

    Attributes:
      module: The program.
      runs: How often each computation of the control flow runs.
    """

    def __init__(self, module: HloModule):
        self.module = module
        self.runs: dict[str, int] = {module.entry.name: 1}
        self._loops: dict[str, tuple[Instruction, ...]] = {module.entry.name: ()}  # around each computation
        pending = [module.entry]
        while pending:
            computation = pending.pop()
            for i in computation.instructions:
                if i.opcode not in ("while", "conditional", "call"):
                    continue
                for name in i.called_computations:
                    if name in module.computations and name not in self.runs:
                        trips = (trip_count(module, i) or 1) if i.opcode == "while" else 1
                        self.runs[name] = self.runs[computation.name] * trips
                        outer = self._loops[computation.name]
                        self._loops[name] = (*outer, i) if i.opcode == "while" else outer
                        pending.append(module.computations[name])

    def depth(self, computation: str) -> int:
        """Returns the number of loops around a computation."""
        return len(self._loops[computation])

    def place(self, computation: Computation, *instructions: Instruction) -> str:
        """Returns the place of instructions that are one operation: "forward", "backward loop", "loop in a loop".

        JAX names the operations of a backward pass "transpose(...)", and those of a forward pass that has a backward
        pass "jvp(...)".
        """
        loops = self._loops[computation.name]
        names = [i.op_name for i in (*reversed(instructions), *reversed(loops))]
        if not any(names):
            names = [i.op_name for i in self._near(computation, instructions[0])]
        name = next(filter(None, names), "")
        part = "backward" if "transpose(" in name else "forward" if "jvp(" in name else ""
        return " ".join(filter(None, (part, " in a ".join(["loop"] * len(loops)))))

    def source(self, computation: Computation, *instructions: Instruction) -> str:
        """Returns the "file:line" of instructions that are one operation; "" if nothing near them has one.

        The file is relative to the working folder if it lies within it, so that a baseline can be used by others.
        """
        loops = reversed(self._loops[computation.name])
        near = itertools.chain(reversed(instructions), self._near(computation, instructions[0]), loops)
        return _relative(next((line for i in near if (line := self.module.source(i))), ""))

    def _near(self, computation: Computation, instruction: Instruction) -> Iterator[Instruction]:
        """Yields what an instruction wraps, then what it is made of, then its users, the nearest first."""
        yield from self.module.instructions_in(instruction)
        pending, seen = collections.deque([instruction]), {instruction.name}
        while pending and len(seen) < STEPS:
            i = pending.popleft()
            near = [m for o in i.operands if (m := computation.by_name.get(o)) is not None]
            for other in (*near, *computation.users.get(i.name, ())):
                if other.name not in seen and other.opcode not in ("parameter", "while"):
                    seen.add(other.name)
                    pending.append(other)
                    yield other
                    yield from self.module.instructions_in(other) if other.opcode == "fusion" else ()


def _relative(source: str) -> str:
    file, _, line = source.rpartition(":")
    here = os.getcwd()
    return f"{os.path.relpath(file, here)}:{line}" if file.startswith(here + os.sep) else source
