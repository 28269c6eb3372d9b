"""Which part of a training step an instruction of the compiled program belongs to, by the name JAX gave its operation.

Such names are paths: jit(_train_step)/transpose(jvp())/while/body/.../shard_map/all_gather_matmul_dx/...
"""

import collections
import functools
import re

from flaxasync import check
from flaxasync.check.estimate.costs import Costs
from flaxasync.hardware import chip

_NAME = re.compile(r'op_name="([^"]*)"')
_STRUCTURE = frozenset({"while", "body", "cond", "eval_jaxpr", "checkpoint", "rematted_computation", "closed_call"})


class Phases:
    """Names of the parts of one program."""

    def __init__(self, program: check.CompiledProgram):
        self.module = check.parse(program.as_text())
        self._costs = Costs(self.module, chip(program.chip))
        self._by_name = {
            i.name: i for computation in self.module.computations.values() for i in computation.instructions
        }

    @functools.cache  # noqa: B019, one object a dry run
    def path(self, instruction: str) -> str:
        """Returns the name of the operation that an instruction came from, or ""."""
        found = self._by_name.get(instruction)
        match = _NAME.search(found.attributes.get("metadata", "")) if found is not None else None
        return match[1] if match else ""

    @functools.cache  # noqa: B019
    def multiplies(self, instruction: str) -> bool:
        """Says whether an instruction is a matmul, or a fusion with one."""
        found = self._by_name.get(instruction)
        return found is not None and self._costs.multiplies(found)

    def phase(self, instruction: str) -> str:
        """Returns "forward", "forward again", "backward", "optimizer" or ""."""
        return phase_of(self.path(instruction))

    def part(self, instruction: str) -> str:
        """Returns the op of the layers that an instruction is of, or ""."""
        return part_of(self.path(instruction))

    def waits(self, timeline: check.Timeline) -> list[tuple[str, float]]:
        """Returns (part and phase, seconds that the slowest device waits in it), the longest first."""
        sums: dict[str, float] = collections.defaultdict(float)
        for cause, seconds in timeline.slowest.causes.items():
            sums[" of ".join(filter(None, (self.part(cause), self.phase(cause)))) or cause] += seconds
        return sorted(sums.items(), key=lambda item: -item[1])


def phase_of(path: str) -> str:
    """Names the phase that a path is of."""
    if "/optimizer/" in path:
        return "optimizer"
    if "rematted_computation" in path:
        return "forward again"
    if "transpose(" in path:
        return "backward"
    return "forward" if "jvp(" in path else ""


def part_of(path: str) -> str:
    """Names the scope that stands first within the last shard_map of a path."""
    _, found, inside = path.rpartition("shard_map/")
    if not found:
        return ""
    scopes = [name for name in inside.split("/")[:-1] if name not in _STRUCTURE]  # the last one is the operation itself
    return scopes[0] if scopes and scopes[0].isidentifier() else ""
