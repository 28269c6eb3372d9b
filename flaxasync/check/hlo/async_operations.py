"""One model of an asynchronous operation, in every spelling that compilers print.

| spelling | start | done |
|---|---|---|
| first-class | all-gather-, all-reduce-, collective-permute- and copy-start; send, recv | op-done |
| generic | async-start(...), calls=%wrapped | async-update*, async-done |
| sugar | op-start of any other opcode: slice-start, custom-call-start, reduce-scatter-start | op-update*, op-done |
| fusion | a fusion that holds a custom call AsyncCollectiveStart | a fusion that holds AsyncCollectiveDone |
| kernel | a custom call that returns semaphores, S(2): a Pallas start | the custom calls that consume them |

The future may pass through tuples, loops and branches between the two; a start in a loop's body whose done is in the
next iteration has several windows. Late-bound starts have no operands: they arrive at an update.
"""

import dataclasses

from flaxasync.check.hlo.module import SEMAPHORE, Computation, HloModule, Instruction, Shape
from flaxasync.check.hlo.value_flow import Span, Use, trace

FIRST_CLASS = ("all-gather", "all-reduce", "collective-permute", "copy", "send", "recv")
COLLECTIVES = (
    "all-gather", "all-reduce", "reduce-scatter", "all-to-all", "ragged-all-to-all", "collective-permute",
    "collective-broadcast", "send", "recv",
)  # fmt: skip

_MARKS = ("AsyncCollectiveStart", "AsyncCollectiveDone")  # inside the fusions that start and end a collective


@dataclasses.dataclass(frozen=True)
class Window:
    """What lies between a start and one done: the spans of the schedule that run while the operation is under way."""

    done: Instruction
    computation: str  # of the done
    spans: tuple[Span, ...]
    crosses: tuple[str, ...]
    copies: tuple[tuple[str, Instruction], ...]


@dataclasses.dataclass(frozen=True)
class AsyncOperation:
    """A start, its updates and its dones."""

    spelling: str  # first-class, generic, sugar, fusion, kernel
    kind: str  # the opcode of what runs: collective-permute, copy, all-reduce, ...; custom-call for a kernel
    computation: str
    start: Instruction
    updates: tuple[Instruction, ...]
    windows: tuple[Window, ...]
    inner: Instruction | None  # the wrapped instruction, where there is one
    bytes: int  # of the arrays that it moves or makes

    @property
    def name(self) -> str:
        return self.start.name

    @property
    def thread(self) -> str:
        return self.start.attributes.get("async_execution_thread", '"main"').strip('"')

    @property
    def communicates(self) -> bool:
        """Says whether it moves data between devices; the compiler notes that of a kernel."""
        if self.spelling == "kernel":
            return '"has_communication":true' in self.start.attributes.get("backend_config", "")
        return self.kind in COLLECTIVES


def async_operations(module: HloModule) -> tuple[AsyncOperation, ...]:
    """Returns every asynchronous operation of a program, in printed order. A start without a done has no window."""
    return tuple(
        _operation(module, computation, instruction, spelling)
        for computation in module.computations.values()
        for instruction in computation.instructions
        if (spelling := spelling_of_start(module, instruction))
    )


def spelling_of_start(module: HloModule, instruction: Instruction) -> str:
    """Returns how an instruction spells a start, or "" when it is none."""
    opcode = instruction.opcode
    if opcode == "async-start":
        return "generic"
    if opcode in ("send", "recv"):
        return "first-class"
    if opcode.endswith("-start"):
        return "first-class" if opcode.removesuffix("-start") in FIRST_CLASS else "sugar"
    if opcode == "fusion":
        return "fusion" if _holds(module, instruction, _MARKS[0]) else ""
    if opcode == "custom-call" and instruction.custom_call_target not in _MARKS and semaphores_made(instruction):
        return "kernel"
    return ""


def semaphores_made(instruction: Instruction) -> list[tuple[int, ...]]:
    """Returns the index paths of the semaphores that a custom call returns and that are no operand of it passed on."""
    passed = {alias.output for alias in instruction.aliases}
    return [path for path, leaf in instruction.shape.leaves() if leaf.memory_space == SEMAPHORE and path not in passed]


def is_step(opcode: str) -> str:
    """Returns "update" or "done" for the opcodes that continue or end a first-class, generic or sugared operation."""
    for step in ("update", "done"):
        if opcode.endswith("-" + step):
            return step
    return ""


def wrapped(module: HloModule, start: Instruction) -> Instruction | None:
    """Returns the instruction that a generic, sugared or fused start runs, where the text has it."""
    for name in start.called_computations:
        computation = module.computations.get(name)
        if computation is None:
            continue
        collectives = [i for i in computation.instructions if i.opcode in COLLECTIVES]
        if collectives:
            return collectives[0]
        if start.opcode == "async-start":
            return computation.root
    return None


def _operation(module: HloModule, computation: Computation, start: Instruction, spelling: str) -> AsyncOperation:
    inner = wrapped(module, start)
    if spelling == "kernel":
        updates, windows = _kernel_ends(module, computation, start)
    elif spelling == "fusion":
        updates, windows = _fusion_ends(module, computation, start)
    else:
        updates, windows = _opcode_ends(module, computation, start)
    kind = start.opcode.removesuffix("-start")
    if spelling in ("generic", "fusion") or (inner is not None and inner.opcode in COLLECTIVES):
        kind = inner.opcode if inner is not None else kind
    moved = _moved_bytes(computation, start, spelling, kind, updates, windows, inner)
    return AsyncOperation(spelling, kind, computation.name, start, tuple(updates), tuple(windows), inner, moved)


def _opcode_ends(
    module: HloModule, computation: Computation, start: Instruction
) -> tuple[list[Instruction], list[Window]]:
    """Follows the future's tuple as a whole: its users are updates, dones, or a loop that carries it."""
    updates: list[Instruction] = []
    windows: list[Window] = []
    pending: list[tuple[Computation, Instruction, tuple[Span, ...]]] = [(computation, start, ())]
    seen: set[str] = set()
    while pending:
        where, step, before = pending.pop()
        if step.name in seen:
            continue
        seen.add(step.name)
        path = next((p for p, _ in step.shape.leaves()), ())
        for use in _whole_uses(module, where, step, path):
            spans = before + use.spans
            role = is_step(use.instruction.opcode)
            if role == "done":
                windows.append(Window(use.instruction, use.computation, spans, use.crosses, ()))
            elif role == "update" and use.operand == 0:
                updates.append(use.instruction)
                late = not start.operands and len(use.instruction.operands) > 1  # it only begins when it has operands
                pending.append((module.computations[use.computation], use.instruction, () if late else spans))
    return updates, windows


def _whole_uses(module: HloModule, computation: Computation, step: Instruction, path: tuple[int, ...]) -> list[Use]:
    # The tuple travels whole, so following its first array finds every user; an empty tuple is followed as itself.
    uses = trace(module, computation, step, path, stop=lambda i: bool(is_step(i.opcode)))
    return [use for use in uses if is_step(use.instruction.opcode)]


def _kernel_ends(
    module: HloModule, computation: Computation, start: Instruction
) -> tuple[list[Instruction], list[Window]]:
    ends: dict[tuple[str, str], Use] = {}
    updates: dict[str, Instruction] = {}
    for path in semaphores_made(start):
        for use in trace(module, computation, start, path):
            if use.aliased:
                updates[use.instruction.name] = use.instruction
            elif use.instruction.opcode in ("custom-call", "fusion"):
                ends[use.computation, use.instruction.name] = use
    windows = [Window(u.instruction, u.computation, u.spans, u.crosses, u.copies) for u in ends.values()]
    return list(updates.values()), windows


def _fusion_ends(
    module: HloModule, computation: Computation, start: Instruction
) -> tuple[list[Instruction], list[Window]]:
    ends: dict[tuple[str, str], Use] = {}
    updates: dict[str, Instruction] = {}
    for path, _ in start.shape.leaves():
        for use in trace(module, computation, start, path, stop=lambda i: _holds(module, i, _MARKS[1])):
            if _holds(module, use.instruction, _MARKS[1]):
                ends.setdefault((use.computation, use.instruction.name), use)
            elif use.aliased and use.instruction.opcode == "fusion":
                updates[use.instruction.name] = use.instruction
    windows = [Window(u.instruction, u.computation, u.spans, u.crosses, ()) for u in ends.values()]
    return list(updates.values()), windows


def _holds(module: HloModule, fusion: Instruction, target: str) -> bool:
    if fusion.opcode != "fusion":
        return False
    return any(
        i.opcode == "custom-call" and i.custom_call_target == target
        for name in fusion.called_computations
        if (computation := module.computations.get(name))
        for i in computation.instructions
    )


def _moved_bytes(
    computation: Computation,
    start: Instruction,
    spelling: str,
    kind: str,
    updates: list[Instruction],
    windows: list[Window],
    inner: Instruction | None,
) -> int:
    """The result's bytes, which a gather makes and a permute moves; of a kernel, its largest buffer."""
    if spelling == "kernel":
        fresh = {alias.output for alias in start.aliases}
        arrays = [(path, s) for path, s in start.shape.leaves() if s.memory_space != SEMAPHORE]
        sizes = [s.bytes for path, s in arrays if path not in fresh] or [s.bytes for _, s in arrays]
        return max(sizes, default=0)
    if kind == "send" and start.operands and (sent := computation.by_name.get(start.operands[0])) is not None:
        return sent.shape.bytes
    if kind in ("reduce-scatter", "all-reduce") and inner is not None:
        return inner.shape.bytes
    if windows:
        return _data_bytes(windows[0].done.shape)
    return inner.shape.bytes if inner is not None else _data_bytes(start.shape.at((1,)) or start.shape)


def _data_bytes(shape: Shape) -> int:
    return sum(leaf.bytes for _, leaf in shape.leaves() if leaf.memory_space != SEMAPHORE)
