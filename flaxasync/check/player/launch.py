"""What the runtime prepares for a program: its parameters, its outputs, the device assignment, and where it begins.

On a TPU the host prepares these before the program starts, and a preamble of the program checks that all devices were
launched together. The simulation begins after this preamble.
"""

from flaxasync.check.estimate.timeline import Slice
from flaxasync.check.hlo.shapes import Shape
from flaxasync.check.player.addresses import Addresses, Buffer, padded_bytes
from flaxasync.check.player.basic_blocks import Code
from flaxasync.check.player.bundle_text import MARK_END, MARK_RUN, MARK_START
from flaxasync.check.player.chip_grid import ChipGrid, Coords
from flaxasync.check.player.dump import Dump
from flaxasync.check.player.errors import PlayerError
from flaxasync.check.player.machine import Machine
from flaxasync.check.player.recorder import Recorder

_PROFILE_COUNTERS = 0x180000  # an address beyond all scalar memory that a program uses


class Launch:
    """The memory that every device finds when it starts. It is the same on each."""

    def __init__(self, dump: Dump, addresses: Addresses, grid: ChipGrid, coords: tuple[Coords, ...]):
        self._addresses, self._grid, self._coords = addresses, grid, coords
        self._cores = [coords[:device].count(chip) for device, chip in enumerate(coords)]
        # The number of each partition's chip (and core), as programs address it.
        self.chips = [grid.chip_id(chip) * grid.cores + core for chip, core in zip(coords, self._cores, strict=True)]
        instructions = dump.module.entry.instructions
        self._parameters = {
            i.parameter_number: self._new_address(i.shape, f"parameter {i.parameter_number} ({i.name})")
            for i in instructions
            if i.parameter_number is not None
        }
        root = next(i for i in instructions if i.is_root)
        names = root.operands if root.opcode == "tuple" else ()
        shapes = [dump.instructions[name].shape for name in names] or [root.shape]
        outputs = [self._new_address(shape, f"output {n}") for n, shape in enumerate(shapes)]
        assignment = addresses.new("hbm", 4 * len(self.chips), "the device assignment")
        table = addresses.new("hbm", 4 * len(outputs), "the table of outputs")
        self._tables = {assignment: self.chips, table: outputs}
        self._pointers = {
            "device assignment ptr": assignment.address,
            "output ptr": table.address if len(outputs) > 1 else outputs[0],
            "registry": _PROFILE_COUNTERS,
        }

    def machines(self, code: Code, slices: list[Slice]) -> list[Machine]:
        """Returns all devices at the beginning of a program. What they do is added to `slices`."""
        first = _first_bundle(code)
        machines = []
        for device, (coords, core) in enumerate(zip(self._coords, self._cores, strict=True)):
            recorder = Recorder(device, code.chip, slices)
            machine = Machine(device, self._grid.chip_id(coords), core, coords, self._addresses, code, recorder)
            machine.position, machine.parameters, machine.pointers = first, self._parameters, self._pointers
            machines.append(machine)
        return machines

    def words_of(self, buffer: Buffer | None) -> list[int] | None:
        """Returns the words of a buffer that the runtime has filled; None for any other buffer."""
        return self._tables.get(buffer) if buffer else None

    def _new_address(self, shape: Shape, label: str) -> int:
        return self._addresses.new("hbm", padded_bytes(shape), label).address


def _first_bundle(code: Code) -> int:
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
