"""`audit`: did the overlap happen, is it safe, and if not, what to do.

For every asynchronous operation of a compiled program: its bytes, the work that runs inside its window, what stays
exposed. Then what is wrong, by code (findings.py). Times are estimates from the text (cost.py); the hazards and the
rules are facts of it.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from flaxasync.check.auditing.findings import CODES, Finding, Severity, finding
from flaxasync.check.auditing.hazards import kernel_hazards, sent_operands
from flaxasync.check.auditing.pairing_rules import check_async_rules
from flaxasync.check.auditing.report import Audit, Pair, Work, size_text, time_text
from flaxasync.check.estimate.costs import Costs
from flaxasync.check.hlo.async_operations import COLLECTIVES, AsyncOperation, Window, async_operations
from flaxasync.check.hlo.module import Computation, HloModule, Instruction
from flaxasync.check.hlo.reader import parse
from flaxasync.check.hlo.value_flow import Span
from flaxasync.hardware import Chip, chip_of_device
from flaxasync.hardware import chip as chip_named

LARGE = 1 << 20  # bytes; smaller collectives are bound by latency and only noted
COPIED = 1 << 16  # bytes from which a copy in a loop is worth a word
WORK = 1e-7  # s; shorter instructions are bookkeeping
DEFAULT_CHIP = "v5e"

_DUMP = "dump it with XLA_FLAGS=--xla_dump_to=DIR and audit the text of its last pass, *after_optimizations.txt"


def audit(
    compiled: Any,
    *,
    chip: str | None = None,
    expect: Mapping[str, int] | None = None,
    kernels: Mapping[str, float] | None = None,
) -> Audit:
    """Audits a compiled program.

    Args:
      compiled: what `jitted.lower(...).compile()` or `compile_for` returned, or HLO text, or a parsed module.
      chip: whose times to estimate ("v5e", "v5p:2x2x2"); that of the program where it is known, else v5e.
      expect: at least this many asynchronous operations, by a part of their name or by kind: {"permute_start": 3}.
      kernels: seconds of Pallas kernels, by name; the text has no estimate of theirs.

    Returns:
      The audit: `.ok`, `.findings`, `.pairs`; str() is a table.

    Raises:
      HloError: the text cannot be read.
      ValueError: the chip is unknown, or the program has no text on this platform.
    """
    module = module_of(compiled)
    named = chip or chip_of(compiled)
    costs = Costs(module, chip_named(named or DEFAULT_CHIP), dict(kernels or {}))
    runs = executed(module, costs)
    operations = [op for op in async_operations(module) if op.computation in runs]
    notes = _notes(module, costs.chip, named is None)
    found = list(check_async_rules(module))
    sent = sent_operands(module, operations)
    found += [f for op in operations if op.spelling == "kernel" for f in kernel_hazards(module, op, sent)]
    found += _unfinished_kernels(module, operations)
    found += _deleted(module, operations, expect or {})
    pairs = tuple(_pair(module, costs, op, runs[op.computation]) for op in operations)
    if module.is_scheduled:
        for op, pair in zip(operations, pairs, strict=True):
            found += _window_findings(module, costs, op, pair)
    else:
        message = f"{module.name or 'the text'} is not scheduled"
        found.append(finding("not-scheduled", message, module.entry.name, ""))
    found += _synchronous(module, costs, runs)
    found += _loop_copies(module, runs, {(f.computation, f.instruction) for f in found if f.code == "in-flight-copied"})
    found = [dataclasses.replace(f, count=runs.get(f.computation, 1)) for f in found]
    found.sort(key=lambda f: (-f.severity, list(CODES).index(f.code)))
    return Audit(module.name, costs.chip.name, pairs, tuple(found), notes)


def module_of(compiled: Any) -> HloModule:
    """Returns the parsed module of a compiled program, a text or a module."""
    if isinstance(compiled, HloModule):
        return compiled
    if isinstance(compiled, str):
        return _parse(compiled)
    if not hasattr(compiled, "as_text"):
        raise ValueError(
            f"expected a compiled program or HLO text: got {type(compiled).__name__}; "
            "pass jitted.lower(...).compile(), or its text"
        )
    try:
        text = compiled.as_text()
    except NotImplementedError as error:
        raise ValueError(f"this platform gives no text of a compiled program ({error}); {_DUMP}") from error
    if not isinstance(text, str) or not text:
        raise ValueError(f"the program has no text on this platform; {_DUMP}")
    return _parse(text)


def _parse(text: str) -> HloModule:
    if text.lstrip().startswith("module @"):
        raise ValueError("this is a lowered program (StableHLO), not a compiled one: call .compile(), or compile_for")
    return parse(text)


def chip_of(compiled: Any) -> str | None:
    """Returns the chip that a program was compiled for, where the object tells."""
    if isinstance(found := getattr(compiled, "chip", None), str):
        return found
    for sharding in _shardings(compiled):
        for device in getattr(sharding, "device_set", ()):
            found = chip_of_device(device.device_kind)
            return None if found is None else found.name
    return None


def _shardings(compiled: Any) -> list:
    try:
        import jax

        return jax.tree.leaves((compiled.input_shardings, compiled.output_shardings))
    except Exception:  # no compiled program, or one that does not tell
        return []


def executed(module: HloModule, costs: Costs) -> dict[str, int]:
    """Returns how often each computation of the control flow runs: the entry, loop bodies, branches, calls."""
    runs = {module.entry.name: 1}
    pending = [module.entry.name]
    while pending:
        name = pending.pop()
        for i in module.computations[name].instructions:
            if i.opcode not in ("while", "conditional", "call"):
                continue
            for called in i.called_computations:
                if called in module.computations and called not in runs:
                    runs[called] = runs[name] * (costs.trips(i) if i.opcode == "while" else 1)
                    pending.append(called)
    return runs


def _notes(module: HloModule, chip: Chip, assumed: bool) -> tuple[str, ...]:
    notes = []
    if assumed:
        notes.append(f"times are those of a {chip.name}, because the text does not name its chip: say chip=...")
    cycles = any("estimated_cycles" in i.attributes.get("backend_config", "")
                 for c in module.computations.values() for i in c.instructions)  # fmt: skip
    if not cycles:
        notes.append("the text has no cycle estimates (it is no TPU program): work is timed by its bytes only")
    return tuple(notes)


def _pair(module: HloModule, costs: Costs, op: AsyncOperation, runs: int) -> Pair:
    window = main_window(op)
    work = tuple(_work_in(module, costs, window.spans)) if window and module.is_scheduled else ()
    return Pair(
        name=op.name,
        kind=op.kind,
        spelling=op.spelling,
        computation=op.computation,
        dones=tuple(w.done.name for w in op.windows),
        bytes=op.bytes,
        runs=runs,
        communicates=op.communicates,
        work=work,
        inside=sum(w.seconds for w in work),
        transfer=costs.transfer_seconds(op),
        crosses=", ".join(window.crosses) if window else "",
        source=module.source(op.start),
    )


def main_window(op: AsyncOperation) -> Window | None:
    """Returns the window that a loop sees on most iterations: not the one that leaves it."""
    staying = [w for w in op.windows if not any(c.startswith("leaves") for c in w.crosses)]
    return next(iter(staying or op.windows), None)


def _work_in(module: HloModule, costs: Costs, spans: tuple[Span, ...]) -> list[Work]:
    work = []
    for span in spans:
        computation = module.computations[span.computation]
        for i in computation.instructions[span.first : span.stop]:
            seconds = costs.seconds(computation, i)
            if seconds >= WORK and i.opcode not in COLLECTIVES and not _plain_copy(computation, i):
                work.append(Work(span.computation, i.name, seconds))
    return work


def _plain_copy(computation: Computation, i: Instruction) -> bool:
    """Says whether a copy changes nothing, not even the layout: waste, not work."""
    made = computation.by_name.get(i.operands[0]) if i.opcode == "copy" and i.operands else None
    return made is not None and made.shape == i.shape


def _window_findings(module: HloModule, costs: Costs, op: AsyncOperation, pair: Pair) -> list[Finding]:
    offloaded = op.thread not in ("main", "")
    if not op.windows or not (op.communicates or offloaded):
        return []
    computation = module.computations[op.computation]
    severity = None if pair.bytes >= LARGE else Severity.INFO
    what = f"{pair.name} ({pair.kind}, {size_text(pair.bytes)})"
    if not pair.overlapped:
        free = _independent(costs, computation, op)
        code = "empty-window" if free else "serialised"
        detail = f": {free} could run inside" if free else ""
        message = f"{what} takes {time_text(pair.transfer)} and nothing runs meanwhile{detail}"
        return [finding(code, message, op.computation, pair.name, source=pair.source, severity=severity)]
    if pair.exposed > max(0.05 * pair.transfer, 1e-6):
        message = f"{what} takes {time_text(pair.transfer)}, the work inside {time_text(pair.inside)}"
        return [finding("exposed", message, op.computation, pair.name, source=pair.source, severity=severity)]
    return []


def _independent(costs: Costs, computation: Computation, op: AsyncOperation) -> str:
    """Returns work of the same computation that neither feeds the start nor needs the done."""
    ends = [w.done.name for w in op.windows if w.computation == computation.name and not w.crosses]
    if not ends:
        return ""
    before = _reachable(computation, [op.start.name], lambda i: (*i.operands, *i.control_predecessors))
    users: dict[str, list[str]] = {}
    for i in computation.instructions:
        for o in (*i.operands, *i.control_predecessors):
            users.setdefault(o, []).append(i.name)
    after = _reachable(computation, ends, lambda i: tuple(users.get(i.name, ())))
    for i in computation.instructions:
        free = i.name not in before and i.name not in after and i.opcode not in COLLECTIVES
        if free and costs.seconds(computation, i) >= 10 * WORK:
            return i.name
    return ""


def _reachable(computation: Computation, names: list[str], following: Any) -> set[str]:
    seen, pending = set(names), list(names)
    while pending:
        instruction = computation.by_name.get(pending.pop())
        for name in following(instruction) if instruction is not None else ():
            if name not in seen:
                seen.add(name)
                pending.append(name)
    return seen


def _synchronous(module: HloModule, costs: Costs, runs: dict[str, int]) -> list[Finding]:
    found = []
    for name in runs:
        computation = module.computations[name]
        for i in computation.instructions:
            inside = costs.fused_collective(i) if i.opcode == "fusion" else i
            if inside is None or inside.opcode not in COLLECTIVES or inside.opcode in ("send", "recv"):
                continue
            seconds = costs.seconds(computation, i)
            moved = max([i.shape.bytes] + [m.shape.bytes for o in i.operands if (m := computation.by_name.get(o))])
            message = f"{i.name} ({inside.opcode}, {size_text(moved)}) holds the chip for {time_text(seconds)}"
            severity = None if moved >= LARGE else Severity.INFO
            found.append(
                finding("synchronous-collective", message, name, i.name, source=module.source(i), severity=severity)
            )
    return found


def _loop_copies(module: HloModule, runs: dict[str, int], known: set[tuple[str, str]]) -> list[Finding]:
    found = []
    bodies = {i.attributes.get("body", "").lstrip("%") for n in runs for i in module.computations[n].instructions}
    for name in bodies & runs.keys():
        computation = module.computations[name]
        carried = _carried(computation)
        for i in computation.instructions:
            if i.opcode != "copy" or i.shape.bytes < COPIED or (name, i.name) in known or not i.operands:
                continue
            made = computation.by_name.get(i.operands[0])
            if made is not None and made.shape == i.shape and (made.name in carried or i.name in carried):
                message = f"{i.name} copies {size_text(i.shape.bytes)} of what the loop carries, {runs[name]} times"
                found.append(finding("loop-copies", message, name, i.name, source=module.source(i)))
    return found


def _carried(body: Computation) -> set[str]:
    """Returns what comes in through the loop's parameter, and what goes out through its root."""
    names = {i.name for i in body.parameters.values()}
    for i in body.instructions:
        if i.opcode in ("get-tuple-element", "bitcast") and i.operands and i.operands[0] in names:
            names.add(i.name)
    return names | set(body.root.operands if body.root else ())


def _unfinished_kernels(module: HloModule, operations: list[AsyncOperation]) -> list[Finding]:
    return [
        finding("async-unfinished", f"no kernel waits for the semaphores of {op.name}", op.computation, op.name,
                source=module.source(op.start))
        for op in operations
        if op.spelling in ("kernel", "fusion") and not op.windows
    ]  # fmt: skip


def _deleted(module: HloModule, operations: list[AsyncOperation], expect: Mapping[str, int]) -> list[Finding]:
    found = []
    for key, wanted in expect.items():
        have = sum(key in op.name or key == op.kind for op in operations)
        if have < wanted:
            message = f"expected {wanted} of '{key}', the program has {have}"
            found.append(finding("deleted", message, module.entry.name, ""))
    return found
