"""One model of an asynchronous operation for all ways in which HLO text spells it.

| spelling | start | done |
|---|---|---|
| first-class | all-gather-start, all-reduce-start, collective-permute-start, copy-start; send, recv | op-done |
| generic | async-start(...), calls=%wrapped; `parse` reads its short form, too | async-update*, async-done |
| fusion | a fusion that contains a custom call AsyncCollectiveStart | a fusion that contains AsyncCollectiveDone |
| kernel | a Pallas kernel that returns semaphores, S(2) | the custom calls that consume them |

A generic operation may wrap a collective within a fusion, or several collectives, which are one
operation then. Between start and done, the future may pass through tuples, loops and branches. A
start in a loop body whose done is in the next iteration has several windows. A start may have no
operands and get them from an update later: it is bound late.
"""

import dataclasses
import functools
import re
from typing import NamedTuple

from flaxasync.check.hlo.module import HloModule, Instruction
from flaxasync.check.hlo.shapes import HOST, SEMAPHORE, Shape
from flaxasync.check.hlo.value_flow import Span, Use, trace

FIRST_CLASS = ("all-gather", "all-reduce", "collective-permute", "copy", "send", "recv")
COLLECTIVES = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
    "send",
    "recv",
)

# The custom call of a Pallas kernel. Others that return semaphores, like BarrierStart, are no start
# of a transfer.
KERNEL = "tpu_custom_call"
# The custom calls that mark the fusions in which XLA starts and ends a collective.
_FUSED_START = "AsyncCollectiveStart"
_FUSED_DONE = "AsyncCollectiveDone"
_MARKS = frozenset({"custom-call"})
# the opcodes in a fusion that performs a collective, or is its start or its done
_PERFORMING = _MARKS.union(COLLECTIVES)

_STEP = re.compile(r"([\w\-]+)-(start|update|done)")


class Step(NamedTuple):
    """What an opcode says of the instruction's place in an asynchronous operation."""

    stem: str  # "async", "custom-call", "all-gather", ...: the opcode without its role
    role: str  # "start", "update" or "done"; "" for an opcode of none of them


# a program has few opcodes, and each is asked about in every instruction
@functools.lru_cache(1024)
def step_of(opcode: str) -> Step:
    """Returns ("custom-call", "start") for "custom-call-start", ("send", "start") for "send"."""
    match = _STEP.fullmatch(opcode)
    if match:
        return Step(match[1], match[2])
    if opcode in ("send", "recv"):
        return Step(opcode, "start")
    return Step(opcode, "")


@dataclasses.dataclass(frozen=True)
class Window:
    """What runs between a start and one of its dones."""

    done: Instruction  # it waits for the operation
    spans: tuple[Span, ...]  # what runs while the operation is under way
    crosses: tuple[str, ...]  # how the future crosses loops on its way to the done, as in `Use`


@dataclasses.dataclass(frozen=True)
class AsyncOperation:
    """A start with its updates and its dones."""

    spelling: str  # "first-class", "generic", "fusion" or "kernel"
    # The opcode of what runs: "collective-permute", "copy", "all-reduce", ...; "custom-call" for a
    # kernel. Of several collectives that are wrapped together all opcodes: "all-gather and
    # all-reduce".
    kind: str
    start: Instruction
    updates: tuple[Instruction, ...]  # they take the future and return it
    windows: tuple[Window, ...]  # one for each done
    # the wrapped instruction, if the text has one; of several collectives the largest
    inner: Instruction | None
    collectives: tuple[Instruction, ...]  # those that are wrapped
    bytes: int  # of the arrays that the operation moves or makes

    @property
    def name(self) -> str:
        return self.start.name

    @property
    def computation(self) -> str:
        """The name of the computation that has the start."""
        return self.start.computation.name

    def is_done(self, instruction: Instruction) -> bool:
        """Says whether an instruction is one of the dones, which has a name of its own."""
        return any(window.done.name == instruction.name for window in self.windows)

    @property
    def thread(self) -> str:
        return self.start.attributes.get("async_execution_thread", "").strip('"') or "main"

    @property
    def communicates(self) -> bool:
        """Whether the operation moves data between devices. For a kernel this is read from the
        backend's notes.
        """
        if self.spelling == "kernel":
            return self.start.is_communicating_kernel
        return bool(self.collectives) or self.kind in COLLECTIVES

    @property
    def with_host(self) -> str:
        """ "to host" or "from host" for a copy between the memories of the device and of its host,
        else "".
        """
        if all(leaf.memory_space != HOST for _, leaf in self.start.shape.leaves()):
            return ""
        results = [leaf for window in self.windows for _, leaf in window.done.shape.leaves()]
        if any(leaf.memory_space == HOST for leaf in results):
            return "to host"
        return "from host"


def async_operations(module: HloModule) -> tuple[AsyncOperation, ...]:
    """Returns every asynchronous operation of a program, in printed order. A start without a done
    has no window.
    """
    return tuple(
        _operation(instruction, spelling)
        for instruction in module.instructions
        if (spelling := spelling_of_start(instruction))
    )


def spelling_of_start(instruction: Instruction) -> str:
    """Returns the spelling in which an instruction is a start, or "" if it is none."""
    if instruction.opcode == "fusion":
        if _contains_mark(instruction, _FUSED_START):
            return "fusion"
        return ""
    if instruction.opcode == "custom-call":
        is_kernel = instruction.custom_call_target == KERNEL
        if is_kernel and _new_semaphores(instruction):
            return "kernel"
        return ""
    stem, role = step_of(instruction.opcode)
    if role != "start":
        return ""
    if stem in FIRST_CLASS:
        return "first-class"
    return "generic"


def collective_in_fusion(fusion: Instruction) -> Instruction | None:
    """Returns the collective that a fusion performs, or the custom call that marks it as a start or
    a done.

    Returns None for a fusion that has neither. A fusion that computes while an asynchronous
    collective is under way also contains that collective, with notes about its progress, but it
    does not perform the collective.
    """
    inside = _inside(fusion, _PERFORMING)
    for mark in inside:
        if mark.custom_call_target.startswith("AsyncCollective"):
            return mark
    collective = next((i for i in inside if i.opcode in COLLECTIVES), None)
    is_beside = collective and "async_collective_fusion_config" in collective.attributes.get(
        "backend_config", ""
    )
    if is_beside:
        return None
    return collective


def synchronous_collective(i: Instruction) -> Instruction | None:
    """Returns the collective that an instruction performs without a start, by itself or within a
    fusion.
    """
    if i.opcode == "fusion":
        collective = collective_in_fusion(i)
    else:
        collective = i
    if (
        collective is None
        or collective.opcode not in COLLECTIVES
        or collective.opcode in ("send", "recv")
    ):
        return None
    return collective


def largest_array(kernel: Instruction) -> Shape:
    """Returns the largest array that a kernel makes, or of its buffers if it aliases all of them,
    as it does with Refs.

    A kernel that only returns semaphores has an empty one.
    """
    aliased = {alias.output for alias in kernel.aliases}
    buffers = [
        (path, leaf) for path, leaf in kernel.shape.leaves() if leaf.memory_space != SEMAPHORE
    ]
    made = [leaf for path, leaf in buffers if path not in aliased] or [leaf for _, leaf in buffers]
    return max(made, key=lambda array: array.bytes, default=Shape("tuple"))


def _operation(start: Instruction, spelling: str) -> AsyncOperation:
    collectives = _wrapped_collectives(start)
    inner = max(collectives, key=_moved_by, default=None) or _wrapped(start)
    if spelling in ("kernel", "fusion"):
        updates, windows = _buffer_ends(start, spelling)
    else:
        updates, windows = _opcode_ends(start)
    runs = collectives
    if not collectives:
        runs = [start if inner is None or spelling == "kernel" else inner]
    kind = " and ".join(sorted({i.opcode.removesuffix("-start") for i in runs}))
    return AsyncOperation(
        spelling=spelling,
        kind=kind,
        start=start,
        updates=tuple(updates),
        windows=tuple(windows),
        inner=inner,
        collectives=tuple(collectives),
        bytes=_moved_bytes(start, spelling, kind, windows, inner),
    )


def _wrapped(start: Instruction) -> Instruction | None:
    """Returns the instruction that a generic start runs, if the text has it."""
    if start.opcode == "async-start" and start.called:
        return start.called[0].root
    return None


def _wrapped_collectives(start: Instruction) -> list[Instruction]:
    """Returns the collectives in what a start calls, at any depth. A start of a fusion performs the
    first one.
    """
    found: list[Instruction] = []
    pending = list(reversed(start.called))
    seen: set[str] = set()
    while pending:
        computation = pending.pop()
        if computation.name in seen:
            continue
        seen.add(computation.name)
        for i in computation.instructions:
            if i.opcode.removesuffix("-start") in COLLECTIVES:
                found.append(i)
            elif i.opcode in (
                "fusion",
                "call",
                "async-start",
                "custom-call",
                "while",
                "conditional",
            ):
                pending += reversed(i.called)
    if start.opcode == "async-start":
        return found
    return found[:1]


def _moved_by(collective: Instruction) -> int:
    return collective.shape.bytes


def _opcode_ends(start: Instruction) -> tuple[list[Instruction], list[Window]]:
    """Finds the updates and dones of a spelling with opcodes of its own.

    The tuple of the future always travels as a whole, so following its first array finds every
    update and done. An empty tuple is followed as itself.
    """
    updates: list[Instruction] = []
    windows: list[Window] = []
    pending: list[tuple[Instruction, tuple[Span, ...]]] = [(start, ())]
    seen: set[str] = set()
    while pending:
        step, before = pending.pop()
        if step.name in seen:
            continue
        seen.add(step.name)
        path = next((p for p, _ in step.shape.leaves()), ())
        for use in trace(step, path, stop=_continues):
            i = use.instruction
            spans = before + use.spans
            role = step_of(i.opcode).role
            if role == "done":
                windows.append(Window(i, spans, use.crosses))
            elif role == "update" and use.operand == 0:
                updates.append(i)
                # An operation that is bound late begins only at the update that brings its
                # operands.
                if not start.operands and len(i.operands) > 1:
                    spans = ()
                pending.append((i, spans))
    return updates, windows


def _continues(i: Instruction) -> bool:
    return step_of(i.opcode).role in ("update", "done")


def _buffer_ends(start: Instruction, spelling: str) -> tuple[list[Instruction], list[Window]]:
    """Finds the ends of a pair of kernels by following its semaphores, and of a pair of fusions by
    all its results.
    """
    ends: dict[tuple[str, str], Use] = {}
    updates: dict[str, Instruction] = {}

    def is_marked(i: Instruction) -> bool:
        return spelling == "fusion" and _contains_mark(i, _FUSED_DONE)

    if spelling == "kernel":
        paths = _new_semaphores(start)
    else:
        paths = [path for path, _ in start.shape.leaves()]
    for path in paths:
        for use in trace(start, path, stop=is_marked):
            i = use.instruction
            if is_marked(i) or (
                spelling == "kernel" and not use.aliased and i.opcode in ("custom-call", "fusion")
            ):
                ends[i.computation.name, i.name] = use
            elif use.aliased and (spelling == "kernel" or i.opcode == "fusion"):
                updates[i.name] = i
    windows = [Window(use.instruction, use.spans, use.crosses) for use in ends.values()]
    return list(updates.values()), windows


def _contains_mark(fusion: Instruction, target: str) -> bool:
    if fusion.opcode != "fusion":
        return False
    return any(i.custom_call_target == target for i in _inside(fusion, _MARKS))


def _inside(fusion: Instruction, opcodes: frozenset[str]) -> list[Instruction]:
    """Returns the instructions of the called computations that have at least one of the opcodes."""
    called = [one for one in fusion.called if not opcodes.isdisjoint(one.opcodes)]
    return [i for one in called for i in one.instructions]


def _new_semaphores(instruction: Instruction) -> list[tuple[int, ...]]:
    """Returns the index paths of the semaphores that a custom call returns and did not get as an
    operand.
    """
    passed_on = {alias.output for alias in instruction.aliases}
    return [
        path
        for path, leaf in instruction.shape.leaves()
        if leaf.memory_space == SEMAPHORE and path not in passed_on
    ]


def _moved_bytes(
    start: Instruction,
    spelling: str,
    kind: str,
    windows: list[Window],
    inner: Instruction | None,
) -> int:
    """Returns the bytes of an operation's result; of an update what it writes, of a kernel its
    largest buffer.
    """
    if spelling == "kernel":
        return largest_array(start).bytes
    moved = {"send": 0, "dynamic-update-slice": 1}.get(kind)
    if moved is not None and moved < len(start.operands):
        return start.inputs[moved].shape.bytes
    if kind in ("reduce-scatter", "all-reduce") and inner is not None:
        return inner.shape.bytes
    if windows:
        return _data_bytes(windows[0].done.shape)
    if inner is not None:
        return inner.shape.bytes
    return _data_bytes(start.shape.at((1,)) or start.shape)


def _data_bytes(shape: Shape) -> int:
    return sum(leaf.bytes for _, leaf in shape.leaves() if leaf.memory_space != SEMAPHORE)
