"""Tells which part of a training step an instruction of the compiled program belongs to.

It goes by the name that JAX gave the operation. Such a name is a path:
jit(_train_step)/transpose(jvp())/while/body/.../shard_map/all_gather_matmul_dx/...
"""

import collections
from typing import Any

from flaxasync.check.estimate.timeline import Timeline
from flaxasync.check.hlo.load import module_of

# The components of a path that come from control flow and not from a named scope.
_STRUCTURE = frozenset({"while", "body", "cond", "eval_jaxpr", "checkpoint", "rematted_computation", "closed_call"})


class Phases:
    """Names the phases of a step, and the ops of its layers, in one compiled program."""

    def __init__(self, program: Any):
        """Reads a compiled program, or its text."""
        module = module_of(program)
        instructions = [i for computation in module.computations.values() for i in computation.instructions]
        self._by_name = {i.name: i for i in instructions}
        self._matmuls = {i.name for i in instructions if i.kernel_flops or module.contains_matmul(i)}

    def path(self, instruction: str) -> str:
        """Returns the name of the JAX operation that an instruction came from; "" if the program does not say."""
        found = self._by_name.get(instruction)
        return found.op_name if found is not None else ""

    def multiplies(self, instruction: str) -> bool:
        """Says whether an instruction is a matmul, a fusion that contains one, or a Pallas kernel that multiplies."""
        return instruction in self._matmuls

    def phase(self, instruction: str) -> str:
        """Returns the phase of an instruction: "forward", "forward again", "backward", "optimizer" or ""."""
        return phase_of(self.path(instruction))

    def part(self, instruction: str) -> str:
        """Returns the name of the op that an instruction is part of, like "all_gather_matmul_dx"; "" for no op."""
        return part_of(self.path(instruction))

    def waits(self, timeline: Timeline) -> list[tuple[str, float]]:
        """Returns where the slowest device waits, as (op and phase, seconds), the longest wait first."""
        sums: dict[str, float] = collections.defaultdict(float)
        for cause, seconds in timeline.slowest.causes.items():
            sums[" of ".join(filter(None, (self.part(cause), self.phase(cause)))) or cause] += seconds
        return sorted(sums.items(), key=lambda item: -item[1])


def phase_of(path: str) -> str:
    """Returns the phase that the path of an operation belongs to, as `Phases.phase` names it."""
    if "/optimizer/" in path:
        return "optimizer"
    if "rematted_computation" in path:
        return "forward again"
    if "transpose(" in path:
        return "backward"
    return "forward" if "jvp(" in path else ""


def part_of(path: str) -> str:
    """Returns the first named scope within the last shard_map of a path; "" if there is none."""
    _, found, inside = path.rpartition("shard_map/")
    if not found:
        return ""
    # The last component is the operation itself.
    scopes = [name for name in inside.split("/")[:-1] if name not in _STRUCTURE]
    return scopes[0] if scopes and scopes[0].isidentifier() else ""
