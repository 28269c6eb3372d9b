"""What the runtime prepares for a program: its parameters, its outputs, the device assignment, and where it begins.

On a TPU the host prepares these before the program starts, and a preamble of the program checks that all devices were
launched together. The simulation begins after this preamble.
"""

import dataclasses

from flaxasync.check.player.addresses import Addresses, Buffer, padded_bytes
from flaxasync.check.player.basic_blocks import Code
from flaxasync.check.player.bundle_text import MARK_END, MARK_RUN, MARK_START
from flaxasync.check.player.dump import Dump
from flaxasync.check.player.errors import PlayerError

_PROFILE_COUNTERS = 0x180000  # an address beyond all scalar memory that a program uses


@dataclasses.dataclass(frozen=True)
class Prepared:
    """The memory that every device finds when it starts. It is the same on each."""

    parameters: dict[int, int]  # the address of each parameter of the program
    pointers: dict[str, int]  # addresses in scalar memory, by the compiler's words for them
    tables: dict[Buffer, list[int]]  # the words of the buffers that the runtime has filled

    def scalars(self, device: int, chip: int, core: int) -> dict[str, int]:
        """Returns what the runtime leaves in the scalar memory of a device, by the compiler's words for it."""
        known = {"chip ID": chip, "core index": core, "partition id": device}
        # Nothing was fetched before the program began.
        return known | dict.fromkeys(("replica id", "launch", "hbm offset", "spec success"), 0) | self.pointers


def prepare_memory(dump: Dump, addresses: Addresses, chips: list[int]) -> Prepared:
    """Gives addresses to what the runtime prepares. `chips` are those of the partitions, as programs address them."""

    def new(size: int, label: str) -> Buffer:
        return addresses.new("hbm", size, label)

    instructions = dump.module.entry.instructions
    parameters = {
        i.parameter_number: new(padded_bytes(i.shape), f"parameter {i.parameter_number} ({i.name})").address
        for i in instructions
        if i.parameter_number is not None
    }
    root = next(i for i in instructions if i.is_root)
    names = root.operands if root.opcode == "tuple" else ()
    shapes = [dump.instructions[name].shape for name in names] or [root.shape]
    outputs = [new(padded_bytes(shape), f"output {n}").address for n, shape in enumerate(shapes)]
    assignment, table = new(4 * len(chips), "the device assignment"), new(4 * len(outputs), "the table of outputs")
    pointers = {
        "device assignment ptr": assignment.address,
        "output ptr": table.address if len(outputs) > 1 else outputs[0],
        "registry": _PROFILE_COUNTERS,
    }
    return Prepared(parameters, pointers, {assignment: chips, table: outputs})


def first_bundle(code: Code) -> int:
    """Returns the bundle at which the program begins, after the last branch of the preamble."""
    first = 0
    for index, bundle in enumerate(code.program.bundles):
        for operation in bundle:
            if operation.unit == "sbr":
                first = index + code.chip.branch_delay + 1
            mark = int(operation.operands[0]) if operation.unit == "vtrace" and operation.operands[0].isdigit() else 0
            begins_instruction = MARK_START <= mark < MARK_END and (mark & MARK_RUN) != MARK_RUN
            if begins_instruction or operation.unit == "scalar_parameter_address":
                return first
    raise PlayerError(
        f"{code.program.path.name} has no instruction of a program: the dump was cut, or is of another version"
    )
