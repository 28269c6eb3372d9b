"""`product_times`: what the matrix products of a program take, each simulated by itself.

The compiler notes an estimate beside each product. Its bundles take as little as 0.6 of that time.
libtpu compiles each instruction to bundles of its own, which the program calls with the addresses
of operands and results. Here one device runs the bundles of one product at a time, at addresses
that are made up.

A product may contain a part of a collective: it sends blocks to its neighbours while it multiplies.
They do the same at the same time, so what the device sends is received by itself. The table in
which such a product finds its neighbours is not in the dump, and is taken as zeros.
"""

import pathlib
from collections.abc import Callable

from flaxasync.check.compile.program import CompiledProgram
from flaxasync.check.estimate.costs import Costs
from flaxasync.check.estimate.product_flops import flops_of
from flaxasync.check.hlo.module import HloModule, Instruction
from flaxasync.check.player.chips import chip_grid, places_of_partitions, played_chip
from flaxasync.check.player.dump import read_dump
from flaxasync.check.player.errors import PlayerError, UnsimulatedError, first_sentence
from flaxasync.check.player.memory import SPACES, padded_bytes
from flaxasync.check.player.prepared import PreparedProgram, prepare_instruction
from flaxasync.check.player.simulation import Simulation
from flaxasync.check.player.state import State
from flaxasync.check.progress import progress
from flaxasync.hardware import CHIPS, DEVICES_PER_CHIP, Chip

# the bytes of the table that the program of a product may read beside its operands
_TABLE_BYTES = 1 << 20


def product_times(
    program: CompiledProgram,
    module: HloModule,
    folder: pathlib.Path,
    say: Callable[[str], None] | None = None,
) -> tuple[dict[str, float], tuple[str, ...]]:
    """Simulates the matrix products of a program that was compiled with `keep_dumps=folder`.

    `module` is the text of the program, and `say` is called with a line about each product.

    Returns the seconds of the products by the names of their instructions, and a line for each kind
    of product that could not be simulated.

    Raises:
      DumpError: The folder holds no complete dump.
    """
    if program.chip in DEVICES_PER_CHIP:
        return {}, (
            f"products were not simulated: a {program.chip} has two devices, and the simulator has "
            "one of them",
        )
    chip = CHIPS[program.chip]
    products = [
        i
        for i in Costs(module, chip).executed
        if i.contains_matmul and i.estimated_cycles is not None
    ]
    try:
        grid = chip_grid(program.topology)
        places = places_of_partitions(grid, module.num_partitions, program.coords)
    except PlayerError as error:
        return {}, (f"products were not simulated: {first_sentence(error)}",)
    with progress(f"reading the bundles in {folder}"):
        dump = read_dump(folder)
    on = played_chip(program.topology)
    lines: list[str] = []
    if chip.cores > 1:
        lines.append(
            "products were simulated on core 0 of each device; the other core is taken to keep "
            "step with it"
        )
    found: dict[str, float] = {}
    # by the bundles, which products may share; None if they cannot be simulated
    seconds_of: dict[str, float | None] = {}
    for number, product in enumerate(products, 1):
        title = f"product {number} of {len(products)}: {product.name}"
        if say is not None:
            say(f"simulating {title}")
        try:
            bundles = dump.program_of(product.name).name
            if bundles not in seconds_of:
                seconds_of[bundles] = None
                with progress(title):
                    alone = prepare_instruction(dump, bundles, grid, places, on)
                    seconds_of[bundles] = _seconds(alone, product, chip)
        except PlayerError as error:
            lines.append(f"{product.name} was not simulated: {first_sentence(error)}")
            continue
        seconds = seconds_of[bundles]
        if seconds is not None:
            found[product.name] = seconds
    return found, tuple(lines)


def _seconds(alone: PreparedProgram, product: Instruction, chip: Chip) -> float:
    state = State(alone, part={0}, mirrored=True)
    (machine,) = state.running
    addresses = _addresses(state, product)
    if len(addresses) > len(machine.registers):
        raise UnsimulatedError(
            f"it has {len(addresses)} operands and results, and a call passes "
            f"{len(machine.registers)} at most"
        )
    machine.registers[: len(addresses)] = addresses
    machine.recorder.enter_phase(product.name, machine.now)
    Simulation(state).run()
    seconds = state.chip.seconds(machine.now)
    known: dict[str, float] = {}
    fastest = max(chip.flops, chip.int8 or 0.0, chip.fp8 or 0.0)
    if seconds * fastest < sum(flops_of(body, known) for body in product.called):
        raise UnsimulatedError(
            f"it took {seconds * 1e6:.1f} us, which is too short for all of its work: it depends "
            "on scalars that the dump does not have"
        )
    return seconds


def _addresses(state: State, product: Instruction) -> list[int]:
    """Returns made-up addresses of the operands of a product, its results, and a table."""
    addresses = []
    for value in (*product.inputs, product):
        for _, leaf in value.shape.leaves():
            address = 0
            if leaf.memory_space in SPACES:
                space = SPACES[leaf.memory_space]
                address = state.addresses.new(space, padded_bytes(leaf), value.name).address
            addresses.append(address)
    table = state.addresses.new("hbm", _TABLE_BYTES, f"the table of {product.name}")
    return [*addresses, table.address]
