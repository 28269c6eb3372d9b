"""`play` and `play_dump`: from a function, or from a folder of dumps, to the result of its
simulation.
"""

import functools
import math
import os
import pathlib
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from flaxasync.check.auditing.hazards import unsafe_buffers
from flaxasync.check.estimate.estimator import timeline
from flaxasync.check.estimate.timeline import WHOLE_PLAYED
from flaxasync.check.player.chips import (
    PlayedChip,
    chip_grid,
    places_of_partitions,
    played_chip,
)
from flaxasync.check.player.dump import Note, read_dump, write_note
from flaxasync.check.player.errors import MeshMismatchError, PlayerError, UnsimulatedError
from flaxasync.check.player.matrix_unit import operations
from flaxasync.check.player.prepared import PreparedProgram, prepare
from flaxasync.check.player.result import Result
from flaxasync.check.player.simulation import Simulation
from flaxasync.check.player.state import State
from flaxasync.check.progress import progress
from flaxasync.check.tested_libtpu import installed_libtpu, untested
from flaxasync.hardware import is_gpu

# the most devices that are all simulated; of more only a part, where that is enough
LARGEST_WHOLE = 16
# the share by which times of an instruction on devices that do the same may differ
_ALIKE = 1e-3


def play(
    fn: Callable,
    *args: Any,
    topology: str,
    keep_dumps: str | os.PathLike | None = None,
    accept: Iterable[str] = (),
    compiler_options: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> Result:
    """Compiles a function for a topology in a child process, dumps its final bundles, and simulates
    them.

    Args:
      fn, *args, **kwargs: A function and its arguments, as for `compile_for`.
      topology: The chip and its grid: "v5e:2x4", ...
      keep_dumps: An empty folder in which the dumps are left. By default they are deleted.
      accept: Names of operations that the player does not know. They are assumed to cost only their
        slot in a bundle.
      compiler_options: libtpu's own options.

    Returns:
      Where the time and the bytes of the program went. `print` shows a table.
      `fa.check.save_picture` and `fa.check.save_trace` write it to files.

    Raises:
      ValueError: The topology is unknown, or does not fit the arguments.
      RuntimeError: The compiler refused the program.
      UnsimulatedError: The program cannot be simulated, because it has an operation that the player
        does not know, for example. The message ends with the estimate of `fa.check.timeline`. It is
        a PlayerError.
      PlayerError: The program breaks a rule of the machine, or its dumps cannot be read.
    """
    # imports JAX, which play_dump does not need
    from flaxasync.check.compile.compile_for import compile_for

    if is_gpu(topology):
        raise ValueError(
            f"play simulates TPUs alone: got {topology!r}; fa.check.timeline estimates programs for "
            "GPUs"
        )
    with (
        progress(f"playing for {topology}"),
        tempfile.TemporaryDirectory(prefix="flaxasync-") as temporary,
    ):
        folder = pathlib.Path(temporary if keep_dumps is None else keep_dumps)
        if folder.is_dir() and any(folder.iterdir()):
            raise ValueError(
                f"keep_dumps must be an empty folder: {folder} is not; dumps of two programs "
                "cannot be told apart"
            )
        compiled = compile_for(
            topology, fn, *args, keep_dumps=folder, compiler_options=compiler_options, **kwargs
        )
        write_note(folder, Note(topology, installed_libtpu(), compiled.coords))
        return play_dump(folder, accept=accept)


def play_dump(
    folder: str | os.PathLike,
    *,
    topology: str | None = None,
    coords: Iterable[tuple[int, ...]] | None = None,
    chip: PlayedChip | None = None,
    accept: Iterable[str] = (),
) -> Result:
    """Simulates a folder of bundle dumps.

    Args:
      folder: The folder that `--xla_jf_dump_to` named.
      topology: The topology of the program. By default that in the note (player.json), which `play`
        writes.
      coords: The chip of each partition, in the order of the mesh. By default those in the note;
        without a note, the chips in the order of their numbers.
      chip: A chip whose numbers differ from those of the table, like
        `dataclasses.replace(played_chip("v5e"), link_efficiency=1.0)`.
      accept: As for `play`.

    Raises:
      UnsimulatedError: As for `play`.
      PlayerError: The program breaks a rule of the machine, or its dumps cannot be read; see
        errors.py.
    """
    return _play_dump(folder, topology, coords, chip, accept, _simulate)


def play_kernel(
    folder: pathlib.Path,
    topology: str,
    coords: tuple[tuple[int, ...], ...],
    axes: Mapping[str, int],
) -> Result:
    """Simulates a dump whose only work is one kernel. Where all devices do the same, as in a ring
    of neighbours, one of them is simulated, which takes a fraction of the time.

    `axes` are the sizes of the mesh, {"data": 2, "model": 4}, in the order of `coords`.
    """
    simulate = functools.partial(_simulate_kernel, axes=axes)
    return _play_dump(folder, topology, coords, None, (), simulate)


def _play_dump(
    folder: str | os.PathLike,
    topology: str | None,
    coords: Iterable[tuple[int, ...]] | None,
    chip: PlayedChip | None,
    accept: Iterable[str],
    simulate: Callable[[PreparedProgram], State],
) -> Result:
    with progress(f"reading the bundles in {folder}"):
        dump = read_dump(pathlib.Path(folder))
    devices = dump.module.num_partitions
    named = topology or dump.note.topology
    if not named:
        raise MeshMismatchError(
            f"{folder} does not say which topology it was compiled for: name it, "
            "topology='v5e:2x2' for example"
        )
    if dump.note.topology not in ("", named):
        raise MeshMismatchError(
            f"{folder} was compiled for {dump.note.topology}, not for {topology}: compile again, "
            "or leave it out"
        )
    order = dump.note.coords
    if coords is not None:
        order = tuple(tuple(c) for c in coords)
    notes = []
    if not order and devices > 1:
        notes.append(
            "the order of the mesh is not known: partitions are taken to be the chips in their "
            "order"
        )
    version = untested(dump.note.libtpu)
    if version is not None:
        notes.append(version)
    try:
        grid = chip_grid(named)
        places = places_of_partitions(grid, devices, order)
        prepared = prepare(dump, grid, places, chip or played_chip(named), frozenset(accept))
        state = simulate(prepared)
    except UnsimulatedError as error:
        why = str(error)
        if version is not None:
            why += f"; {version}"
        t = timeline(dump.module, named)
        raise type(error)(
            f"{why}.\nFrom its text alone, it is estimated at {t.seconds * 1e3:.3f} ms, of which "
            f"{t.exposed * 1e3:.3f} ms are exposed communication (fa.check.timeline)."
        ) from error
    return _result(state, notes)


def _simulate(prepared: PreparedProgram) -> State:
    """Simulates the devices of a small slice; of a larger one device 0 and all to which it sends,
    directly or through others, if these need nothing of other devices and use no links of them.

    The other devices are not compared with them.
    """
    state = None
    if len(prepared.places) > LARGEST_WHOLE:
        state = _closed_part(prepared)
    return state or _run(State(prepared))


def _simulate_kernel(prepared: PreparedProgram, axes: Mapping[str, int]) -> State:
    """Simulates one device that receives what it sends, and where others may do other things than
    that one, all of them.
    """
    return _one_of_a_ring(prepared, axes) or _simulate(prepared)


def _run(state: State) -> State:
    with progress(state.progress):
        Simulation(state).run()
    return state


def _closed_part(prepared: PreparedProgram) -> State | None:
    """Simulates a part of all devices that grows until its devices reach no other. Returns None if
    it is more than half of all, or needs others or their links.
    """
    part = {0}
    while len(part) <= len(prepared.places) // 2:
        state = State(prepared, part)
        failed = False
        try:
            _run(state)
        except PlayerError:  # perhaps because it waits for devices that do not run yet
            failed = True
        if not state.reached <= part:
            part |= state.reached
            continue
        only_others_send = not state.reached and prepared.sends
        chips = {prepared.places[device][0] for device in part}
        if failed or only_others_send or not state.passed <= chips:
            return None
        return state
    return None


def _one_of_a_ring(prepared: PreparedProgram, axes: Mapping[str, int]) -> State | None:
    """Simulates the first device, the last and, on a small slice, one between them, each as if all
    did the same as it does. Returns the one that takes longest; None unless they take as long, and
    send in the same directions to neighbours in rings whose hops are one link each: then no device
    uses a link of another one.

    A device that sends what it does not wait for, or waits for what it does not send, breaks the
    protocol here, and so is not taken for one of many that do the same. Neither are the two ends of
    a line, which send in opposite directions. What another device alone does is not seen, and
    neither are races between devices: `play` looks for those.
    """
    sizes = tuple(axes.values())
    count = len(prepared.places)
    if math.prod(sizes) != count:
        return None
    strides = [math.prod(sizes[axis + 1 :]) for axis in range(len(sizes))]
    samples = {0, count - 1}
    if count <= LARGEST_WHOLE:  # on a larger slice `_simulate` does not compare devices either
        samples.add(sum(size // 2 * stride for size, stride in zip(sizes, strides, strict=True)))
    states: list[State] = []
    directions: frozenset[tuple[int, str]] | None = None
    for device in sorted(samples):
        state = State(prepared, {device}, mirrored=True)
        try:
            _run(state)
        except UnsimulatedError:
            raise
        except PlayerError:
            return None
        found = _directions(state, device, sizes, strides)
        if found is None or (states and found != directions):
            return None
        if states and not _are_alike(states[0], state):
            return None
        directions = found
        states.append(state)
    return max(states, key=lambda state: state.running[0].now)


def _are_alike(one: State, other: State) -> bool:
    """Says whether each instruction takes as long on the device of one state as on the other's."""
    times = [
        [(phase.name, phase.seconds) for phase in machine.recorder.device((), machine.now).phases]
        for machine in (one.running[0], other.running[0])
    ]
    return len(times[0]) == len(times[1]) and all(
        name == other_name and math.isclose(seconds, other_seconds, rel_tol=_ALIKE)
        for (name, seconds), (other_name, other_seconds) in zip(*times, strict=True)
    )


def _directions(
    state: State, sender: int, sizes: Sequence[int], strides: Sequence[int]
) -> frozenset[tuple[int, str]] | None:
    """Returns the mesh axes and ways along which a device sends to its neighbours; nothing if no
    device sends. None if it sends to other devices as well, or if the two ends of a hop along one
    of these axes are not always one link apart.

    `strides` are the differences of the numbers of neighbours along each axis.
    """
    prepared = state.prepared
    others = state.reached - {sender}
    if not others:
        return None if prepared.sends else frozenset()
    places = [place for place, _ in prepared.places]
    found: set[tuple[int, str]] = set()
    neighbours: set[int] = set()
    for axis, (size, stride) in enumerate(zip(sizes, strides, strict=True)):
        ways = {
            "next": _onward(sender, 1, size, stride),
            "previous": _onward(sender, -1, size, stride),
        }
        used = {(axis, way) for way, device in ways.items() if device in others}
        if not used:
            continue
        found |= used
        neighbours.update(ways.values())
        hops = [(place, places[_onward(d, 1, size, stride)]) for d, place in enumerate(places)]
        if any(len(prepared.grid.route(*hop)) != 1 for hop in hops):
            return None
    if not others <= neighbours:
        return None
    return frozenset(found)


def _onward(device: int, shift: int, size: int, stride: int) -> int:
    """Returns the device `shift` places on from another one around a mesh axis of `size`
    devices.
    """
    place = device // stride % size
    return device + ((place + shift) % size - place) * stride


def _result(state: State, notes: list[str]) -> Result:
    """Returns the result of a simulation that has ended, whose first notes are those given."""
    chip = state.chip
    devices = tuple(m.recorder.device(m.coords, m.now) for m in state.running)
    all_notes = list(notes)
    for text, count in sorted(state.notes.items()):
        if count > 1:
            all_notes.append(f"{text} ({count} times)")
        else:
            all_notes.append(text)
    if analytic := sorted({p.name for d in devices for p in d.phases if p.analytic}):
        all_notes.append(f"timed by a ring model, not by their bundles: {', '.join(analytic)}")
    executed = f"{len(devices)} devices,"
    if state.mirrored and len(state.machines) > 1:
        executed = (
            f"device {state.running[0].device} of {len(state.machines)}, which receives what it "
            "sends, as others that were simulated do the same in as much time,"
        )
    elif len(devices) < len(state.machines):
        executed = (
            f"{len(devices)} of {len(state.machines)} devices, device 0 and those with which it "
            "exchanges data, as the others are taken to do the same,"
        )
    basis = (
        f"a simulated prediction, nothing was run on a TPU: libtpu "
        f"{state.dump.note.libtpu or 'unknown'}'s final bundles executed for {executed} "
        f"{chip.clock / 1e9:g} GHz, HBM {chip.hbm / 1e9:.0f} GB/s, links "
        f"{chip.link / 1e9:.1f} GB/s in each direction"
    )
    return Result(
        name=state.dump.module.name,
        topology=state.grid.name,
        chip=chip.name,
        basis=basis,
        known_error=chip.known_error,
        devices=devices,
        notes=tuple(all_notes),
        operations={name: operations(program) for name, program in state.dump.programs.items()},
        slices=tuple(state.slices),
        all_waits=tuple(state.waits),
        unsafe=unsafe_buffers(state.dump.module),
        preference=WHOLE_PLAYED,
    )
