"""Where an instruction comes from, its source line and its place in a training step; and which ones
call Python.

Instructions that the compiler inserts often have no metadata. They are said to come from the
nearest instruction that has some: what they wrap, then the values that they are made of, then their
users, and last the loop around them.
"""

import collections
import itertools
import os
import re
from collections.abc import Iterator

from flaxasync.check.hlo.module import Computation, Instruction

STEPS = 200  # instructions that are looked at before the search for one with metadata is given up
CALLBACK = re.compile(r"xla_(?:ffi_)?(?:partitioned_)?python_(?:cpu|gpu)_callback")
# with is_host_transfer=true, these are how a TPU reaches a callback
HOST_TRANSFERS = ("send", "recv")
# The public name of each primitive that calls Python.
_PUBLIC_NAMES = {
    "debug_print": "jax.debug.print",
    "debug_callback": "jax.debug.callback",
    "pure_callback": "jax.pure_callback",
}


def origin(*instructions: Instruction) -> tuple[str, str]:
    """Returns the place and the source line of instructions that are one operation; "" for what the
    text does not say.

    The place is "forward", "backward loop", "loop in a loop", ...: JAX names the operations of a
    backward pass "transpose(...)", and those of a forward pass that has a backward pass "jvp(...)".
    The file of the "file:line" is relative to the working folder if it lies within it, so that a
    baseline can be used by others.
    """
    own = tuple(reversed(instructions))
    loops = loops_around(instructions[0].computation)
    named = itertools.chain(own, loops, _near(instructions[0]))
    name = next((i.op_name for i in named if i.op_name), "")
    if "transpose(" in name:
        part = "backward"
    elif "jvp(" in name:
        part = "forward"
    else:
        part = ""
    sourced = itertools.chain(own, _near(instructions[0]), loops)
    line = next((found for i in sourced if (found := i.source)), "")
    place = f"{part} {' in a '.join('loop' for _ in loops)}".strip()
    return place, line.removeprefix(os.getcwd() + os.sep)


def loops_around(computation: Computation) -> list[Instruction]:
    """Returns the while loops around a computation, the innermost first."""
    loops = []
    while callers := computation.callers:
        call = callers[0]
        computation = call.computation
        if call.opcode == "while":
            loops.append(call)
    return loops


def _near(instruction: Instruction) -> Iterator[Instruction]:
    """Yields what an instruction wraps, then what it is made of, then its users, the nearest
    first.
    """
    yield from instruction.inside
    pending = collections.deque([instruction])
    seen = {instruction.name}
    while pending and len(seen) < STEPS:
        i = pending.popleft()
        for other in (*i.inputs, *i.users):
            if other.name not in seen and other.opcode not in ("parameter", "while"):
                seen.add(other.name)
                pending.append(other)
                yield other
                yield from other.inside if other.opcode == "fusion" else ()


def is_host_callback(instruction: Instruction) -> bool:
    """Says whether an instruction calls Python. On TPU each operand and each result of the call is
    an instruction.
    """
    if instruction.opcode == "custom-call":
        return CALLBACK.fullmatch(instruction.custom_call_target) is not None
    return (
        instruction.opcode in HOST_TRANSFERS
        and instruction.attributes.get("is_host_transfer") == "true"
    )


def callback_name(instruction: Instruction) -> str:
    """Returns the public name of what calls Python: "jax.debug.print", "jax.pure_callback", ..."""
    primitive = instruction.op_name.rpartition("/")[2] or instruction.name.partition(".")[0]
    return _PUBLIC_NAMES.get(primitive, primitive)
