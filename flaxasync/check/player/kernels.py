"""`kernel_times`: what the Pallas kernels of a compiled program take, each distinct one simulated once, by itself.

A kernel is taken from the text of the program, which holds its code, and made a program of its own with operands of the
same shapes on the same chips. That program is compiled and simulated, and the time of the kernel on its slowest device
is kept in the user's cache folder, by everything on which it depends. So every device enters the kernel at the same
time, and nothing else uses the links or HBM meanwhile. Operands that the program had in vector memory may be in HBM
here. The two halves of a start/done pair between devices are one program, in which nothing stands between them: their
time is that of the transfer.
"""

import dataclasses
import functools
import hashlib
import importlib.metadata
import json
import os
import pathlib
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from flaxasync import hardware
from flaxasync.check.estimate.costs import KernelTime
from flaxasync.check.hlo.async_operations import async_operations
from flaxasync.check.hlo.module import Computation, HloModule, Instruction
from flaxasync.check.hlo.shapes import SEMAPHORE
from flaxasync.check.player.constants import integer_elements
from flaxasync.check.player.errors import PlayerError
from flaxasync.check.player.transfer_engine import UNKNOWN_SCALARS

if TYPE_CHECKING:
    from flaxasync.check.compile.program import CompiledProgram

TWO_DEVICES = ("tpu7x",)
"""Chips with two devices, of which the simulator has one."""
VARIABLE = "FLAXASYNC_PLAYED_KERNELS"
"""The environment variable that names another folder for the times of kernels."""


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A kernel as a program of its own, without its names.

    Attributes:
      config: What the custom call holds: its code, and the memory that it may use.
      operands: The shapes of its operands, as texts.
      results: The shapes of its results.
      aliases: Pairs of an operand and the result that shares its memory.
      integers: The elements of integer operands that the text determines, by operand.
    """

    config: str
    operands: tuple[str, ...]
    results: tuple[str, ...]
    aliases: tuple[tuple[int, int], ...]
    integers: tuple[tuple[int, tuple[int, ...]], ...]


@dataclasses.dataclass(frozen=True)
class Pair:
    """A start and its done as one program.

    Attributes:
      start: The first half.
      done: The second half.
      wires: For each operand of the done, the number of the result of the start that it is.
    """

    start: Kernel
    done: Kernel
    wires: tuple[int, ...]


def kernel_times(
    program: "CompiledProgram", module: HloModule, say: Callable[[str], None] | None = None
) -> tuple[dict[str, KernelTime], tuple[str, ...]]:
    """Simulates the kernels of a program, and its start/done pairs between devices.

    Args:
      program: A program of `compile_for`.
      module: Its text, parsed.
      say: Is called with a line about each kernel that is not in the cache.

    Returns:
      The times by the names of the instructions, those of pairs by the names of their starts; and a line for each
      kernel that could not be simulated, or whose time is that of scalars which the program does not determine.
    """
    if program.chip in TWO_DEVICES:
        return {}, (f"kernels were not simulated: a {program.chip} has two devices, and the simulator has one of them",)
    found: dict[str, KernelTime] = {}
    lines: list[str] = []
    if hardware.chip(program.chip).cores > 1:
        lines.append("kernels were simulated on core 0 of each device; the other core is taken to keep step with it")
    by_kernel: dict[Kernel | Pair, list[str]] = {}
    for computation, instruction in _kernels(module):
        by_kernel.setdefault(_kernel_of(computation, instruction), []).append(instruction.name)
    for start, pair in _pairs(module):
        if pair is None:
            lines.append(f"{start} was not simulated: its done takes other arrays than those that it returns")
        else:
            by_kernel.setdefault(pair, []).append(start)
    for number, (kernel, names) in enumerate(by_kernel.items(), 1):
        try:
            time = _time(
                program, kernel, functools.partial(say or _silent, f"kernel {number} of {len(by_kernel)}: {names[0]}")
            )
        except (PlayerError, RuntimeError, ValueError, TypeError) as error:
            lines.append(f"{names[0]} was not simulated: {str(error).partition(chr(10))[0]}")
            continue
        found |= dict.fromkeys(names, time)
        if time.guessed:
            lines.append(f"{names[0]} was simulated with 0 for scalars that the text of the program does not determine")
    return found, tuple(lines)


def _silent(line: str) -> None:
    """Says nothing."""


def _kernels(module: HloModule) -> Iterator[tuple[Computation, Instruction]]:
    """Yields every kernel that is whole, with its computation."""
    for computation in module.computations.values():
        for i in computation.instructions:
            if i.custom_call_target != "tpu_custom_call":
                continue
            shapes = [i.shape, *(computation.by_name[o].shape for o in i.operands if o in computation.by_name)]
            if not any(leaf.memory_space == SEMAPHORE for shape in shapes for _, leaf in shape.leaves()):
                yield computation, i


def _pairs(module: HloModule) -> Iterator[tuple[str, Pair | None]]:
    """Yields the name of every start between devices, with its pair; None where the done takes something else, too."""
    for operation in async_operations(module):
        if operation.spelling != "kernel" or not operation.communicates or not operation.windows:
            continue
        start, window = operation.start, operation.windows[0]
        at, ends_at = module.computations[operation.computation], module.computations[window.computation]
        left = [(n, leaf.without_layout(), leaf.memory_space) for n, (_, leaf) in enumerate(start.shape.leaves())]
        wires: list[int] = []
        for shape in (ends_at.by_name[name].shape for name in window.done.operands):
            same = [made for made in left if made[1:] == (shape.without_layout(), shape.memory_space)]
            if same:
                left.remove(same[0])
                wires.append(same[0][0])
        whole = len(wires) == len(window.done.operands)
        pair = Pair(_kernel_of(at, start), _kernel_of(ends_at, window.done), tuple(wires)) if whole else None
        yield start.name, pair


def _kernel_of(computation: Computation, i: Instruction) -> Kernel:
    config = {
        key: value for key, value in i.backend_config.items() if key in ("custom_call_config", "scoped_memory_configs")
    }
    config["custom_call_config"] = {k: v for k, v in config["custom_call_config"].items() if k != "debug_locations"}
    operands = [computation.by_name[name].shape for name in i.operands]
    integers = []
    for number, (name, shape) in enumerate(zip(i.operands, operands, strict=True)):
        if re.match(r"[su]\d", shape.element_type) and shape.memory_space != SEMAPHORE:
            values = integer_elements(computation.by_name, name)
            if values is not None:
                integers.append((number, tuple(np.resize(values, int(np.prod(shape.dimensions))).tolist())))
    return Kernel(
        json.dumps(config, sort_keys=True),
        tuple(shape.without_layout() for shape in operands),
        tuple(leaf.without_layout() for _, leaf in i.shape.leaves()),
        tuple((alias.operand, alias.output[0] if alias.output else 0) for alias in i.aliases),
        tuple(integers),
    )


def _time(program: "CompiledProgram", kernel: Kernel | Pair, begins: Callable[[], Any]) -> KernelTime:
    key = (*dataclasses.astuple(kernel), program.topology, program.coords, _versions())
    file = _cache_folder() / f"{hashlib.sha256(repr(key).encode()).hexdigest()}.json"
    if file.exists():
        return KernelTime(**json.loads(file.read_text()))
    begins()
    time = _simulate(program, kernel)
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_suffix(f".{os.getpid()}")
    partial.write_text(json.dumps(dataclasses.asdict(time)))
    partial.replace(file)
    return time


def _simulate(program: "CompiledProgram", simulated: Kernel | Pair) -> KernelTime:
    """Compiles a kernel or a pair as a program of its own, and simulates it."""
    import jax
    from jax.sharding import AxisType, PartitionSpec

    from flaxasync.check.compile.compile_for import compile_for
    from flaxasync.check.compile.topologies import topology_devices
    from flaxasync.check.hlo.reader import parse
    from flaxasync.check.player.play import play_dump

    devices = {tuple(device.coords): device for device in topology_devices(program.topology)}
    ordered = np.array([devices[coords] for coords in program.coords], dtype=object)
    mesh = jax.sharding.Mesh(ordered, ("devices",), axis_types=(AxisType.Auto,))
    kernel = simulated.start if isinstance(simulated, Pair) else simulated
    fixed = dict(kernel.integers)
    written = {operand for operand, _ in kernel.aliases}  # made in the program: XLA would copy its arguments first
    shapes = [_type(text) for text in kernel.operands]

    def call(kernel: Kernel, *operands: Any) -> Sequence[Any]:
        return jax.ffi.ffi_call(
            "tpu_custom_call",
            [_type(text) for text in kernel.results],
            has_side_effect=True,
            input_output_aliases=dict(kernel.aliases),
            custom_call_api_version=1,
            legacy_backend_config=kernel.config,
        )(*operands)

    def run(*arrays: Any) -> Any:
        given = iter(arrays)
        results = call(kernel, *(
            np.array(fixed[n], shape.dtype).reshape(shape.shape) if n in fixed
            else jax.numpy.zeros(shape.shape, shape.dtype) if n in written
            else next(given)
            for n, shape in enumerate(shapes)
        ))  # fmt: skip
        if isinstance(simulated, Pair):
            results = call(simulated.done, *(results[n] for n in simulated.wires))
        return [result[(slice(1),) * result.ndim] for result in results]  # so that nothing copies whole results

    spec = PartitionSpec()
    mapped = jax.jit(jax.shard_map(run, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))
    sharding = jax.NamedSharding(mesh, spec)
    arrays = [
        jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)
        for n, shape in enumerate(shapes)
        if n not in fixed and n not in written
    ]
    with (
        tempfile.TemporaryDirectory(prefix="flaxasync-") as folder,
        jax.set_mesh(mesh),
    ):  # the caller may have set another
        compiled = compile_for(program.topology, mapped, *arrays, keep_dumps=folder)
        result = play_dump(folder, topology=program.topology, coords=compiled.coords)
    module = parse(compiled.text)
    if isinstance(simulated, Pair):
        (operation,) = (operation for operation in async_operations(module) if operation.spelling == "kernel")
        names = (operation.start.name, operation.windows[0].done.name)
        pairs = [[phase for phase in device.phases if phase.name in names] for device in result.devices]
        return KernelTime(max(done.start + done.seconds - start.start for start, done in pairs), 0.0)
    (name,) = (i.name for _, i in _kernels(module))
    phases = [phase for device in result.devices for phase in device.phases if phase.name == name]
    slowest = max(phases, key=lambda phase: phase.seconds)
    guessed = any(note.startswith(f"{name}: {UNKNOWN_SCALARS}") for note in result.notes)
    return KernelTime(slowest.seconds, slowest.exposed, guessed)


def _type(text: str) -> Any:
    """Returns the jax.ShapeDtypeStruct of a shape without layout, such as "bf16[8,128]"."""
    import jax
    import jax.numpy as jnp

    element, sizes = re.fullmatch(r"(\w+)\[([\d,]*)\]", text).groups()  # type: ignore[union-attr]
    kinds = {"bf16": "bfloat16", "pred": "bool", "f": "float", "s": "int", "u": "uint"}
    name = kinds.get(element) or kinds[element[0]] + element[1:]
    return jax.ShapeDtypeStruct(tuple(map(int, filter(None, sizes.split(",")))), jnp.dtype(name))


@functools.cache
def _versions() -> tuple[str, ...]:
    """Returns what the simulation itself depends on: libtpu, and the sources of the simulator."""
    sources = sorted(pathlib.Path(__file__).parent.glob("*.py"))
    digest = hashlib.sha256("\n".join(file.read_text() for file in sources).encode()).hexdigest()
    return importlib.metadata.version("libtpu"), digest


def _cache_folder() -> pathlib.Path:
    named = os.environ.get(VARIABLE)
    base = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    return pathlib.Path(named).expanduser() if named else pathlib.Path(base) / "flaxasync" / "played-kernels"
