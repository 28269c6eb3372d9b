"""`kernel_times`: what the Pallas kernels of a compiled program take, each distinct one simulated
once, by itself.

A kernel is taken from the text of the program, which holds its code, and made a program of its own
with operands of the same shapes on the same chips. Its operands and results are in the memory in
which the program has them: left to itself, XLA would put results of the small program into vector
memory, and the kernel would not wait for HBM. That program is compiled and simulated. The time of
the kernel on the slowest device that was simulated is kept in the user's cache folder, by
everything on which it depends. So every device enters the kernel at the same time, and nothing else
uses the links or HBM meanwhile. The two halves of a start/done pair between devices are one
program, in which nothing stands between them: their time is that of the transfer.
"""

import contextlib
import dataclasses
import functools
import hashlib
import importlib.util
import json
import os
import pathlib
import re
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from flaxasync import hardware
from flaxasync.check.compile.compile_for import FLAGS, CompilerThreads, compile_for
from flaxasync.check.compile.program import CompiledProgram
from flaxasync.check.compile.topologies import places_of, topology_devices
from flaxasync.check.estimate.costs import KernelTime
from flaxasync.check.hlo.async_operations import async_operations
from flaxasync.check.hlo.module import HloModule, Instruction
from flaxasync.check.hlo.reader import parse
from flaxasync.check.hlo.shapes import HBM, SEMAPHORE, SMEM, VMEM, Shape
from flaxasync.check.player.errors import PlayerError, first_sentence
from flaxasync.check.player.memory import integer_elements
from flaxasync.check.player.play import play_kernel
from flaxasync.check.player.result import Result
from flaxasync.check.player.transfers import UNKNOWN_SCALARS
from flaxasync.check.progress import progress
from flaxasync.check.tested_libtpu import installed_libtpu
from flaxasync.hardware import CHIPS, DEVICES_PER_CHIP

# Kernels that are simulated at a time: the compiler of one works in a process of its own while the
# other one is simulated in this one.
AT_ONCE = 2
# the environment variable that names another folder for the times of kernels
VARIABLE = "FLAXASYNC_PLAYED_KERNELS"
# the folders of `flaxasync.check` on which a simulated time depends
_SOURCES = ("compile", "estimate", "hlo", "player")
_CALL = "tpu_custom_call"
# (kernel, shape of an integer operand) -> elements
type Given = Callable[[str, tuple[int, ...]], Sequence[int] | None]
# of beginnings
_TYPES = {
    "bf16": "bfloat16",
    "pred": "bool",
    "f8": "float8_",
    "f": "float",
    "s": "int",
    "u": "uint",
}


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A kernel, or the start of a pair, as a program of its own. Names do not matter to it."""

    # what the custom call holds: its code, the memory that it may use, and where operands and
    # results are
    config: str
    operands: tuple[jax.ShapeDtypeStruct, ...]
    results: tuple[jax.ShapeDtypeStruct, ...]
    # pairs of an operand and the result that shares its memory
    aliases: tuple[tuple[int, int], ...]
    # the elements of operands that the text determines, by operand
    integers: tuple[tuple[int, tuple[int, ...]], ...]
    done: "Kernel | None" = None  # the other half of a pair
    # for each operand of the done, the number of the result of the start that it is
    wires: tuple[int, ...] = ()


def kernel_times(
    program: CompiledProgram,
    module: HloModule,
    say: Callable[[str], None] | None = None,
    integers: Given = lambda kernel, shape: None,
) -> tuple[dict[str, KernelTime], tuple[str, ...]]:
    """Simulates the kernels of a program, and its start/done pairs between devices.

    `module` is the text of the program, `say` is called with a line about each kernel that is not
    in the cache, and `integers` says what the operands are that the text does not determine.

    Returns the times by the names of the instructions, those of pairs by the names of their starts;
    and a line for each kernel that could not be simulated, or whose time is that of scalars which
    the program does not determine.
    """
    if program.chip in DEVICES_PER_CHIP:
        return {}, (
            f"kernels were not simulated: a {program.chip} has two devices, and the simulator has "
            "one of them",
        )
    found: dict[str, KernelTime] = {}
    lines: list[str] = []
    if CHIPS[program.chip].cores > 1:
        lines.append(
            "kernels were simulated on core 0 of each device; the other core is taken to keep step "
            "with it"
        )
    names_of: dict[Kernel, list[str]] = {}
    for name, kernel in _kernels(module, integers):
        if kernel is None:
            lines.append(
                f"{name} was not simulated: its done takes other arrays than those that it returns"
            )
        else:
            names_of.setdefault(kernel, []).append(name)
    threads = CompilerThreads(AT_ONCE)
    times: dict[Kernel, Future[KernelTime]] = {}
    try:
        for number, (kernel, names) in enumerate(names_of.items(), 1):
            title = f"kernel {number} of {len(names_of)}: {names[0]}"
            times[kernel] = threads.submit(_time_of, program, kernel, title, say)
        for kernel, names in names_of.items():
            try:
                time = times[kernel].result()
            # it cannot be simulated, or not be compiled
            except (PlayerError, RuntimeError) as error:
                lines.append(f"{names[0]} was not simulated: {first_sentence(error)}")
                continue
            found |= dict.fromkeys(names, time)
            if time.guessed:
                lines.append(
                    f"{names[0]} was simulated with 0 for scalars that the text of the program "
                    "does not determine; where its own cost estimate is longer, that counts"
                )
    finally:
        threads.end()
    return found, tuple(lines)


def _time_of(
    program: CompiledProgram, kernel: Kernel, title: str, say: Callable[[str], None] | None
) -> KernelTime:
    """Returns the time of a kernel that the cache has, or else simulates it and keeps its time."""
    file = _cache_file(program, kernel)
    with contextlib.suppress(
        FileNotFoundError, ValueError, TypeError
    ):  # there is none, or it is damaged
        return KernelTime(**json.loads(file.read_text()))
    if say is not None:
        say(title)
    with progress(title):
        time = _simulate(program, kernel)
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_suffix(f".{os.getpid()}-{threading.get_ident()}")
    partial.write_text(json.dumps(dataclasses.asdict(time)))
    partial.replace(file)  # so that no process or thread ever reads a part of it
    return time


def _kernels(module: HloModule, given: Given) -> Iterator[tuple[str, Kernel | None]]:
    """Yields each whole kernel and each start between devices by name; None if its done takes more
    than its results.
    """
    for i in module.instructions:
        shapes = (one.shape for one in (i, *i.inputs))
        spaces = {leaf.memory_space for shape in shapes for _, leaf in shape.leaves()}
        if i.custom_call_target == _CALL and SEMAPHORE not in spaces:
            yield i.name, _kernel_of(i, given)
    for operation in async_operations(module):
        if operation.spelling == "kernel" and operation.communicates and operation.windows:
            window = operation.windows[0]
            wires = _wires(operation.start, window.done.inputs)
            start = _kernel_of(operation.start, given)
            pair = dataclasses.replace(start, done=_kernel_of(window.done, given), wires=wires)
            yield operation.start.name, pair if wires else None


def _wires(start: Instruction, operands: Sequence[Instruction]) -> tuple[int, ...]:
    """Returns which result of a start each operand of its done is, by their shapes; () if one is
    none of them.
    """
    left = [(leaf.without_layout(), leaf.memory_space) for _, leaf in start.shape.leaves()]
    wires = []
    for operand in operands:
        wanted = (operand.shape.without_layout(), operand.shape.memory_space)
        if wanted not in left:
            return ()
        wires.append(left.index(wanted))
        left[wires[-1]] = ("", -1)  # taken
    return tuple(wires)


def _kernel_of(i: Instruction, given: Given) -> Kernel:
    call = {
        key: v
        for key, v in i.backend_config["custom_call_config"].items()
        if key != "debug_locations"
    }
    config = {key: v for key, v in i.backend_config.items() if key == "scoped_memory_configs"}
    operands = [made.shape for made in i.inputs]
    call |= _places(operands, [leaf for _, leaf in i.shape.leaves()])
    integers = []
    for number, (name, shape) in enumerate(zip(i.operands, operands, strict=True)):
        if re.match(r"[su]\d", shape.element_type) and shape.memory_space != SEMAPHORE:
            values: Sequence[int] | None = integer_elements(i.computation.by_name, name)
            if values is None:
                values = given(i.name, tuple(shape.dimensions))
            if values is not None:
                elements = np.resize(values, int(np.prod(shape.dimensions)))
                integers.append((number, tuple(elements.tolist())))
    aliases = [(alias.operand, (*alias.output, 0)[0]) for alias in i.aliases]
    return Kernel(
        config=json.dumps(config | {"custom_call_config": call}, sort_keys=True),
        operands=tuple(map(_type, operands)),
        results=tuple(_type(leaf) for _, leaf in i.shape.leaves()),
        aliases=tuple(aliases),
        integers=tuple(integers),
    )


def _places(operands: Sequence[Shape], results: Sequence[Shape]) -> dict[str, list[dict[str, Any]]]:
    """Returns the entries of a custom call with which XLA leaves its operands and results where the
    program has them.

    They are those that JAX writes for `pltpu.HBM(shape, dtype)` and its like. JAX constrains no
    operand in scalar or semaphore memory.
    """
    inputs = [
        {"operand_index": number, "color": shape.memory_space}
        for number, shape in enumerate(operands)
        if shape.memory_space in (HBM, VMEM)
    ]
    outputs: list[dict[str, Any]] = []
    for number, shape in enumerate(results):
        if shape.memory_space in (HBM, VMEM, SEMAPHORE, SMEM):
            output: dict[str, Any] = {"color": shape.memory_space}
            if len(results) > 1:  # a single result is no tuple
                output["shape_index"] = [number]
            outputs.append(output)
    return {"input_memory_space_colors": inputs, "output_memory_space_colors": outputs}


def _simulate(program: CompiledProgram, kernel: Kernel) -> KernelTime:
    described = topology_devices(program.topology)
    coords_of = places_of(described)
    device_at = {coords_of[device.id]: device for device in described}
    ordered = np.array([device_at[coords] for coords in program.coords], dtype=object)
    mesh = Mesh(ordered, ("devices",), axis_types=(AxisType.Auto,))
    declared = kernel.operands
    # The numbers of operands: of those with known elements; of others that a result overwrites,
    # which are made in the program, because XLA would copy its arguments first; and of the rest.
    fixed = dict(kernel.integers)
    overwritten = {operand for operand, _ in kernel.aliases} - fixed.keys()
    passed = [n for n in range(len(declared)) if n not in fixed and n not in overwritten]

    def run(*arrays: Any) -> Any:
        operands = dict(zip(passed, arrays, strict=True))
        for n, elements in fixed.items():
            operands[n] = np.array(elements, declared[n].dtype).reshape(declared[n].shape)
        for n in overwritten:
            operands[n] = jnp.zeros(declared[n].shape, declared[n].dtype)
        results = _call(kernel, *(operands[n] for n in range(len(declared))))
        if kernel.done is not None:
            results = _call(kernel.done, *(results[n] for n in kernel.wires))
        # so that nothing copies whole results
        return [result[(slice(1),) * result.ndim] for result in results]

    spec = PartitionSpec()
    mapped = jax.jit(jax.shard_map(run, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))
    arguments = [declared[n].update(sharding=NamedSharding(mesh, spec)) for n in passed]
    # the mesh that the caller has set may be another
    with tempfile.TemporaryDirectory(prefix="flaxasync-") as folder, jax.set_mesh(mesh):
        compiled = compile_for(program.topology, mapped, *arguments, keep_dumps=folder)
        dumps = pathlib.Path(folder)
        result = play_kernel(dumps, program.topology, compiled.coords, program.axes)
    names = [i.name for i in parse(compiled.text).instructions if i.custom_call_target == _CALL]
    return _time_in(result, names, 1 if kernel.done is None else 2)


def _time_in(result: Result, names: Sequence[str], calls: int) -> KernelTime:
    """Returns the time of a kernel, or of the two calls of a pair, on the slowest device."""
    phases = [
        [phase for phase in device.phases if phase.name in names] for device in result.devices
    ]
    if any(len(of_device) != calls for of_device in phases):
        counts = sorted({len(of_device) for of_device in phases})
        raise PlayerError(f"a device ran {counts} kernels where the program has {calls}")
    guesses = tuple(f"{name}: {UNKNOWN_SCALARS}" for name in names)
    guessed = any(note.startswith(guesses) for note in result.notes)
    if calls == 2:  # from the begin of the start to the end of the done
        seconds = max(done.start + done.seconds - start.start for start, done in phases)
        return KernelTime(seconds, 0.0, guessed)
    slowest = max((phase for (phase,) in phases), key=lambda phase: phase.seconds)
    return KernelTime(slowest.seconds, slowest.exposed, guessed)


def _call(kernel: Kernel, *operands: Any) -> Sequence[Any]:
    return jax.ffi.ffi_call(
        _CALL,
        kernel.results,
        has_side_effect=True,
        input_output_aliases=dict(kernel.aliases),
        custom_call_api_version=1,
        legacy_backend_config=kernel.config,
    )(*operands)


def _type(shape: Shape) -> jax.ShapeDtypeStruct:
    name = next(
        name + shape.element_type.removeprefix(short)
        for short, name in _TYPES.items()
        if shape.element_type.startswith(short)
    )
    return jax.ShapeDtypeStruct(shape.dimensions, jnp.dtype(name))


def _cache_file(program: CompiledProgram, kernel: Kernel) -> pathlib.Path:
    mesh = program.coords, tuple(program.axes.values())
    key = repr((kernel, program.topology, mesh, simulator()))
    base = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    folder = os.environ.get(VARIABLE) or pathlib.Path(base) / "flaxasync" / "played-kernels"
    return pathlib.Path(folder).expanduser() / f"{hashlib.sha256(key.encode()).hexdigest()}.json"


def simulator() -> tuple[str, ...]:
    """Returns what every simulated time depends on: the version and the flags of libtpu, and a
    digest of our sources.
    """
    version = installed_libtpu() or _build()
    return version, os.environ.get(FLAGS["TPU"], ""), _digest()


def _build() -> str:
    """Tells nightly builds of libtpu from each other, by the size and the time of its file."""
    found = importlib.util.find_spec("libtpu")
    if found is None or not found.submodule_search_locations:
        return ""
    stat = (pathlib.Path(found.submodule_search_locations[0]) / "libtpu.so").stat()
    return f"{stat.st_size} {stat.st_mtime_ns}"


@functools.cache
def _digest() -> str:
    check = pathlib.Path(__file__).parents[1]
    sources = [file for folder in _SOURCES for file in sorted((check / folder).glob("*.py"))]
    texts = [file.read_text() for file in (*sources, pathlib.Path(hardware.__file__))]
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()
