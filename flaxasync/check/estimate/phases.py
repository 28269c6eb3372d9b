"""Which part of a training step an instruction of the compiled program belongs to, by the name of
its JAX operation.

Such a name is a path:
  jit(_train_step)/transpose(jvp())/while/body/.../shard_map/all_gather_matmul_dx/...
"""

import collections
import re
from typing import Any

from flaxasync.check.estimate.timeline import Timeline
from flaxasync.check.hlo.load import module_of

# The components of a path that come from control flow, calls and maps, and not from a named scope.
_STRUCTURE = re.compile(
    r"jit\(.*|pjit|while|body|cond|shard_map|closed_call|checkpoint|rematted_computation|eval_jaxpr|"
    r"branch_\d+_fun"
)
_TRANSFORMED = re.compile(r"(?:(?:transpose|jvp|vmap)\()+(.*?)\)+")  # "transpose(jvp(name))"


class Phases:
    """Names the phases of a step, and the ops of its layers, in one compiled program."""

    def __init__(self, program: Any):
        self._paths = {i.name: i.op_name for i in module_of(program).instructions}

    def phase(self, instruction: str) -> str:
        """Returns the phase of an instruction: "forward", "forward again", "backward", "optimizer"
        or "".
        """
        return phase_of(self._paths.get(instruction, ""))

    def part(self, instruction: str) -> str:
        """Returns the name of the op that an instruction is part of, like "all_gather_matmul_dx";
        "" for no op.
        """
        return part_of(self._paths.get(instruction, ""))

    def waits(self, timeline: Timeline) -> list[tuple[str, float]]:
        """Returns where the slowest device waits, as (op and phase, seconds), the longest wait
        first.
        """
        sums: dict[str, float] = collections.defaultdict(float)
        for cause, seconds in timeline.slowest.causes.items():
            sums[" of ".join(filter(None, (self.part(cause), self.phase(cause)))) or cause] += (
                seconds
            )
        return sorted(sums.items(), key=lambda item: -item[1])


def phase_of(path: str) -> str:
    """Returns the phase that the path of an operation belongs to, as `Phases.phase` names it."""
    if "/optimizer/" in path:
        return "optimizer"
    if "rematted_computation" in path:
        return "forward again"
    if "transpose(" in path:
        return "backward"
    if "jvp(" in path:
        return "forward"
    return ""


def layer_of(path: str) -> str:
    """Returns the scopes in the path of a JAX operation, without the primitive.

    >>> layer_of("jit(step)/while/body/closed_call/attention/shard_map/all_gather_matmul/ppermute")
    'attention/all_gather_matmul'
    """
    return "/".join(scopes_of(path.rpartition("/")[0]))


def scopes_of(path: str) -> list[str]:
    """Returns the named scopes in a path, without control flow and the transformations around
    them.
    """
    scopes = []
    for part in path.split("/"):
        transformed = _TRANSFORMED.fullmatch(part)
        name = transformed[1] if transformed else part
        if name and not _STRUCTURE.fullmatch(name):
            scopes.append(name)
    return scopes


def part_of(path: str) -> str:
    """Returns the first named scope within the last shard_map of a path; "" if there is none."""
    _, found, inside = path.rpartition("shard_map/")
    scope = layer_of(inside).partition("/")[0]
    if found and scope.isidentifier():
        return scope
    return ""
