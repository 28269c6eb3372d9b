"""Exposed communication of a profiled program: the time in which a device communicates and does not compute.

It is the union of the intervals of communication less the union of those of compute. Adding the times of single
instructions would count a moment as often as instructions share it, and would count a loop beside what runs in it:
summed self-times have said 3.2 s where 1.0 s was exposed.

A Pallas kernel that sends and multiplies is one instruction, and counts as compute: what it waits for inside is not in
a profile, but in the simulation of the program.
"""

import dataclasses
import re
from collections import Counter
from collections.abc import Callable, Sequence

from flaxasync.check.hlo.module import HloModule
from flaxasync.check.trace.intervals import Interval, clip, seconds, subtract, union
from flaxasync.check.trace.profile import BARRIER, DeviceProfile, Event

COMMUNICATION = (
    "all-gather", "all-reduce", "reduce-scatter", "collective-permute", "all-to-all", "ragged-all-to-all",
    "collective-broadcast", "send", "recv", "ppermute", "all_gather", "psum", "reduce_scatter", "psum_scatter",
    "all_to_all", "nccl", "rccl", BARRIER,
)  # fmt: skip
"""How the names of instructions between devices begin, where no program says what they are."""
CONTAINERS = ("while", "conditional", "call")
"""Instructions whose events last as long as those of the instructions in them, which are events of their own."""
_STRUCTURE = re.compile(
    r"jit\(.*\)|pjit|while|body|cond|shard_map|closed_call|checkpoint|rematted_computation|eval_jaxpr|"
    r"branch_\d+_fun|(?:transpose|jvp|vmap)\(+\)*"
)


@dataclasses.dataclass(frozen=True)
class Exposed:
    """Exposed communication of one instruction or one layer.

    Attributes:
      name: The name of the instruction or of the layer.
      layer: The layer of an instruction: the scopes of its JAX operation.
      count: How often it ran in one run of the program.
      seconds: Its share of the exposed time of one run. A moment in which several communicate belongs to the one that
        began first, so that the shares add up to the whole.
      busy: Its own time in one run, exposed or hidden.
    """

    name: str
    layer: str
    count: float
    seconds: float
    busy: float


@dataclasses.dataclass(frozen=True)
class DeviceTimes:
    """Where the time of one device went. All times are seconds of one run: the mean over the runs.

    Attributes:
      device: The name of the device.
      program: The name of the program.
      runs: The number of runs in the profile.
      seconds: From the beginning of a run to its end.
      compute: The time in which it computed.
      communication: The time in which it communicated.
      exposed: The time in which it communicated and did not compute.
      ops: The instructions that communicate, those with the longest exposed time first.
      layers: The same by layer.
    """

    device: str
    program: str
    runs: int
    seconds: float
    compute: float
    communication: float
    exposed: float
    ops: tuple[Exposed, ...]
    layers: tuple[Exposed, ...]


def measure_exposed(
    devices: Sequence[DeviceProfile], program: str | None = None, module: HloModule | None = None
) -> list[DeviceTimes]:
    """Measures the exposed communication of a program on every device.

    Args:
      devices: What `read_profile` returned.
      program: The name of the program in the profile, or its beginning where none has this name; by default the one
        that took longest.
      module: The program, if it is known. It says which instructions communicate, and what layers they are from.

    Raises:
      ValueError: The profile has no run of the program. The message lists the programs that it has.
    """
    names = Counter[str]()
    for device in devices:
        for event in device.runs or device.events:
            names[_short(event.name if device.runs else event.program)] += event.end - event.start  # type: ignore[assignment]
    if program is None:
        wanted = names.most_common(1)[0][0]
    else:
        matches = [name for name in names if name.startswith(program)]
        if not matches:
            raise ValueError(f"the profile has no program {program!r}: it has {', '.join(sorted(names))}")
        wanted = program if program in matches else matches[0]
    return [_times(device, wanted, module) for device in devices]


def layer_of(path: str) -> str:
    """Returns the scopes in the path of a JAX operation, without control flow, transformations and the primitive.

    >>> layer_of("jit(step)/while/body/closed_call/attention/shard_map/all_gather_matmul/ppermute")
    'attention/all_gather_matmul'
    """
    parts = [part for part in path.split("/")[:-1] if not _STRUCTURE.fullmatch(part)]
    return "/".join(parts)


def _times(device: DeviceProfile, program: str, module: HloModule | None) -> DeviceTimes:
    runs = [run.interval for run in device.runs if _short(run.name) == program]
    if device.runs:
        events = [e for e in device.events if any(start <= e.start < end for start, end in runs)]
    else:
        events = [e for e in device.events if _short(e.program) == program]
        runs = _runs(events)
    count = max(len(runs), 1)
    opcode, path = _facts(module)
    leaves = [e for e in events if not _begins(opcode(e.name), CONTAINERS)]
    communicating = [e for e in leaves if _begins(opcode(e.name), COMMUNICATION)]
    computing = [e for e in leaves if not _begins(opcode(e.name), COMMUNICATION) and "Async" not in e.line]
    compute = union(e.interval for e in computing)
    exposed = subtract((e.interval for e in communicating), compute)
    ops = _shares(communicating, exposed, count, path)
    layers: dict[str, Exposed] = {}
    for op in ops:
        before = layers.get(op.layer, Exposed(op.layer, op.layer, 0, 0.0, 0.0))
        layers[op.layer] = Exposed(
            op.layer, op.layer, before.count + op.count, before.seconds + op.seconds, before.busy + op.busy
        )
    return DeviceTimes(
        device.name,
        program,
        len(runs),
        seconds(runs) / count,
        seconds(compute) / count,
        seconds(e.interval for e in communicating) / count,
        seconds(exposed) / count,
        tuple(sorted(ops, key=lambda op: -op.seconds)),
        tuple(sorted(layers.values(), key=lambda layer: -layer.seconds)),
    )


def _runs(events: Sequence[Event]) -> list[Interval]:
    """Returns the time from the first to the last event of each run, in a profile without events of whole runs."""
    by_run: dict[str, list[Event]] = {}
    for event in events:
        by_run.setdefault(event.run, []).append(event)
    return sorted((min(e.start for e in found), max(e.end for e in found)) for found in by_run.values())


def _shares(
    communicating: Sequence[Event], exposed: list[Interval], runs: int, path: Callable[[Event], str]
) -> list[Exposed]:
    """Divides the exposed time among the instructions."""
    shares: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    busy: dict[str, list[Interval]] = {}
    layers: dict[str, str] = {}
    rest = exposed
    for event in sorted(communicating, key=lambda e: e.start):
        mine = clip(rest, event.interval)
        shares[event.name] += seconds(mine)  # type: ignore[assignment]
        rest = subtract(rest, mine) if mine else rest
        rest = [interval for interval in rest if interval[1] > event.start]
        counts[event.name] += 1
        busy.setdefault(event.name, []).append(event.interval)
        layers[event.name] = layer_of(path(event))
    return [
        Exposed(name, layers[name], counts[name] / runs, shares[name] / runs, seconds(busy[name]) / runs)
        for name in counts
    ]


def _facts(module: HloModule | None) -> tuple[Callable[[str], str], Callable[[Event], str]]:
    """Returns functions to the opcode of an instruction, and to the path of its JAX operation."""
    if module is None:
        return lambda name: name, lambda event: event.scope
    known = {i.name: i for computation in module.computations.values() for i in computation.instructions}

    def opcode(name: str) -> str:
        found = known.get(name)
        if found is None:
            return name
        wrapped = "async-start", "async-update", "async-done", "fusion"
        return found.name if found.opcode in wrapped else found.opcode

    def path(event: Event) -> str:
        found = known.get(event.name)
        return (found.op_name if found is not None else "") or event.scope

    return opcode, path


def _begins(name: str, prefixes: Sequence[str]) -> bool:
    return name.removeprefix("%").startswith(tuple(prefixes))


def _short(program: str) -> str:
    """Returns the name of a program without the number that a TPU's profile appends, as in "jit_step(123)"."""
    return program.partition("(")[0]
