"""A program that is ready to be simulated, as often as is needed: its code, its memory, and the
devices on which it runs.

A simulation begins where the program begins on a TPU, after the host has prepared its parameters,
its outputs and the device assignment, and after a preamble that checks that all devices were
launched together.
"""

import dataclasses
import functools

from flaxasync.check.player import routing
from flaxasync.check.player.basic_blocks import BlockCode
from flaxasync.check.player.bundle_text import MARK_END, MARK_RUN, MARK_START, Operation
from flaxasync.check.player.chips import ChipGrid, Coords, PlayedChip
from flaxasync.check.player.dump import TOP, Dump
from flaxasync.check.player.errors import PlayerError
from flaxasync.check.player.memory import Addresses, Buffer, padded_bytes
from flaxasync.check.player.scalar_operations import result_register

# The address, beyond all scalar memory that a program uses, of the words that its parts share:
# counters, and pointers to tables.
REGISTRY = 0x180000
REGISTRY_TAG = "Program registry"  # the compiler's words for them

# scalars by the compiler's words for them, before anything was fetched
_NOTHING_FETCHED = dict.fromkeys(("replica id", "launch", "hbm offset", "spec success"), 0) | {
    "registry": REGISTRY
}

# the operations that can address another chip
_REMOTE = ("vsyncadd.remote", "dma.general")


@dataclasses.dataclass(frozen=True)
class PreparedMemory:
    """What the runtime leaves in memory before a program begins."""

    parameters: dict[int, int]  # the address of each parameter of the program
    # what is in scalar memory, by the compiler's words for it
    scalars: dict[str, int]
    tables: dict[Buffer, list[int]]  # the words of the buffers that are filled


@dataclasses.dataclass(frozen=True)
class PreparedProgram:
    """A program on a grid of chips, whose partitions are on these chips and cores."""

    dump: Dump
    grid: ChipGrid
    places: tuple[tuple[Coords, int], ...]
    chip: PlayedChip
    addresses: Addresses
    codes: dict[str, BlockCode]  # that of TOP is what runs
    memory: PreparedMemory
    begin: int = 0  # the first bundle
    # the constants that are in scalar registers when it begins
    constants: dict[int, int] = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def numbers(self) -> list[int]:
        """The number of each partition's chip (and core), as programs address it."""
        return _numbers(self.grid, self.places)

    @property
    def sends(self) -> bool:
        """Whether the program has an operation that sends to another device."""
        first = {TOP: self.begin}
        return any(
            operation.name in _REMOTE
            for name, program in self.dump.programs.items()
            for bundle in program.bundles[first.get(name, 0) :]
            for operation in bundle
        )


def prepare(
    dump: Dump,
    grid: ChipGrid,
    places: tuple[tuple[Coords, int], ...],
    chip: PlayedChip,
    accept: frozenset[str],
) -> PreparedProgram:
    """Prepares a program after its preamble, with its parameters and outputs in memory."""
    addresses = Addresses(chip.hbm_unit)
    for program in dump.programs.values():
        addresses.add(program)
    codes = {
        name: BlockCode(program, addresses, chip, accept) for name, program in dump.programs.items()
    }
    memory = _prepare_memory(dump, addresses, _numbers(grid, places))
    begin = first_bundle(codes[TOP])
    constants = constants_before(codes[TOP], begin)
    return PreparedProgram(dump, grid, places, chip, addresses, codes, memory, begin, constants)


def prepare_instruction(
    dump: Dump,
    name: str,
    grid: ChipGrid,
    places: tuple[tuple[Coords, int], ...],
    chip: PlayedChip,
) -> PreparedProgram:
    """Prepares the bundles of one instruction as a program, whose memory holds nothing else. Who
    runs it passes the addresses of its operands.
    """
    whole = dump.programs[TOP]
    needed = {
        label: declaration
        for label, declaration in whole.declarations.items()
        if declaration.tag in (REGISTRY_TAG, routing.TAG)
    }
    top = dataclasses.replace(whole, declarations=needed)
    only = dataclasses.replace(dump, programs={TOP: top, name: dump.programs[name]})
    addresses = Addresses(chip.hbm_unit)
    for program in only.programs.values():
        addresses.add(program)
    code = BlockCode(dump.programs[name], addresses, chip, frozenset())
    nothing = PreparedMemory({}, dict(_NOTHING_FETCHED), {})
    return PreparedProgram(only, grid, places, chip, addresses, {TOP: code, name: code}, nothing)


def _numbers(grid: ChipGrid, places: tuple[tuple[Coords, int], ...]) -> list[int]:
    return [grid.chip_id(coords) * grid.cores + core for coords, core in places]


def _prepare_memory(dump: Dump, addresses: Addresses, chips: list[int]) -> PreparedMemory:
    """Gives addresses, which are the same on every device, to what the host prepares."""

    def new(size: int, label: str) -> Buffer:
        return addresses.new("hbm", size, label)

    instructions = dump.module.entry.instructions
    parameters = {
        i.parameter_number: new(
            padded_bytes(i.shape), f"parameter {i.parameter_number} ({i.name})"
        ).address
        for i in instructions
        if i.parameter_number is not None
    }
    root = next(i for i in instructions if i.is_root)
    shapes = [root.shape]
    if root.opcode == "tuple" and root.operands:
        shapes = [dump.instructions[name].shape for name in root.operands]
    outputs = [new(padded_bytes(shape), f"output {n}").address for n, shape in enumerate(shapes)]
    assignment = new(4 * len(chips), "the device assignment")
    table = new(4 * len(outputs), "the table of outputs")
    scalars = _NOTHING_FETCHED | {
        "device assignment ptr": assignment.address,
        "output ptr": table.address if len(outputs) > 1 else outputs[0],
    }
    return PreparedMemory(parameters, scalars, {assignment: chips, table: outputs})


def _begins(operation: Operation) -> bool:
    """Says whether an operation marks the begin of an instruction, or asks for a parameter."""
    if operation.unit == "vtrace" and operation.operands[0].isdigit():
        mark = int(operation.operands[0])
        return MARK_START <= mark < MARK_END and (mark & MARK_RUN) != MARK_RUN
    return operation.unit == "scalar_parameter_address"


def first_bundle(code: BlockCode) -> int:
    """Returns the bundle at which the program begins, after the last branch of the preamble."""
    first = 0
    for index, bundle in enumerate(code.program.bundles):
        for operation in bundle:
            if operation.unit == "sbr":
                first = index + code.chip.branch_delay + 1
            if _begins(operation):
                return first
    raise PlayerError(
        f"{code.program.path.name} has no instruction of a program: the dump was cut, or is of "
        "another version"
    )


def constants_before(code: BlockCode, bundle: int) -> dict[int, int]:
    """Returns the constants that the preamble, which is not run, leaves in scalar registers."""
    constants: dict[int, int] = {}
    for operations in code.program.bundles[:bundle]:
        for operation in operations:
            written = result_register(operation)
            if written is None or written[0] != "s":
                continue
            constants.pop(written[1], None)
            is_constant = operation.unit in ("reloc", "smov") and operation.operands[-1].isdigit()
            if is_constant and not operation.predicate:
                constants[written[1]] = int(operation.operands[-1])
    return constants
