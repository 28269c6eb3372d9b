"""Which instructions move data between a device and the memory of its host, S(5), in which direction, and how much.

A scan that offloads what its layers keep writes it with a `dynamic-update-slice` into a stack on the host, and reads it
with a `dynamic-slice`; whole arrays are copied. Only the slice moves. Each may be asynchronous.
"""

import dataclasses

from flaxasync.check.hlo.module import Computation, HloModule, Instruction
from flaxasync.check.hlo.shapes import HOST, Shape

TO_HOST, FROM_HOST = "to the host", "from the host"


@dataclasses.dataclass(frozen=True)
class HostTransfer:
    """A transfer between a device and its host."""

    direction: str  # TO_HOST or FROM_HOST
    bytes: int


def host_transfer(module: HloModule, computation: Computation, i: Instruction) -> HostTransfer | None:
    """Returns what an instruction, or the operation that it starts, moves to or from the host; None for nothing."""
    if i.opcode == "async-start":
        found = [host_transfer(module, body, inner) for body in module.called(i) for inner in body.instructions]
        return next((one for one in found if one is not None), None)
    opcode = i.opcode.removesuffix("-start")
    operands = [made.shape for made in computation.operands(i)]
    if opcode == "dynamic-update-slice" and len(operands) > 1:
        return _between(operands[1], operands[0], operands[1].bytes)
    if opcode in ("copy", "dynamic-slice", "slice") and operands:
        result = _result(i, is_copy=opcode == "copy")
        return None if result is None else _between(operands[0], result, result.bytes)
    return None


def _result(i: Instruction, *, is_copy: bool) -> Shape | None:
    """Returns what an instruction makes: a copy-start returns (result, operand, ...), others (operands, result)."""
    if not i.shape.is_tuple:
        return i.shape
    return i.shape.at((0,) if is_copy else (1,))


def _between(source: Shape, destination: Shape, size: int) -> HostTransfer | None:
    if source.is_tuple or destination.is_tuple or (source.memory_space == HOST) == (destination.memory_space == HOST):
        return None
    return HostTransfer(FROM_HOST if source.memory_space == HOST else TO_HOST, size)
