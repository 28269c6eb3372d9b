"""The two ways to write a generic asynchronous operation: `to_long_form` and `to_sugar`.

Long form is `async-start(...), calls=%wrapped`; sugar is `op-start(...)` with the wrapped instruction's attributes
and no wrapped computation. Operations with start and done opcodes of their own (collective-permute, copy, ...) have
neither. A start that wraps more than one instruction, or binds operands late, is sugared as `call-start(...),
to_apply=%wrapped`. The names of wrapped computations do not survive sugar; nothing else is lost.
"""

import dataclasses

from flaxasync.check.hlo.async_operations import FIRST_CLASS, AsyncOperation, async_operations, is_step
from flaxasync.check.hlo.module import Computation, HloModule, Instruction, Shape

# What belongs to the start itself; every other attribute is the wrapped instruction's.
_OWN = (
    "async_execution_thread", "control-predecessors", "output_to_operand_aliasing", "metadata", "backend_config",
    "frontend_attributes", "sharding", "statistics", "origin",
)  # fmt: skip


def to_long_form(module: HloModule) -> HloModule:
    """Writes every sugared operation as async-start, async-update and async-done."""
    made: dict[str, tuple[str, Computation]] = {}  # by name: for whom, what
    changed: dict[tuple[str, str], Instruction] = {}
    for op in async_operations(module):
        if op.spelling != "sugar":
            continue
        own = {k: v for k, v in op.start.attributes.items() if k in _OWN}
        rest = {k: v for k, v in op.start.attributes.items() if k not in _OWN}
        if op.start.opcode == "call-start" and "to_apply" in rest:
            name = rest.pop("to_apply").lstrip("%")
        else:
            name = _free_name("async_computation", module.computations.keys() | made.keys())
            made[name] = op.computation, _wrap(module, op, name, rest)
        start = dataclasses.replace(op.start, opcode="async-start", attributes=own | {"calls": f"%{name}"})
        changed[op.computation, op.name] = start
        _rename_steps(module, op, "async", changed)
    return _rebuild(module, changed, made, set())


def to_sugar(module: HloModule) -> HloModule:
    """Writes every async-start as the operation that it wraps, with the suffix -start."""
    changed: dict[tuple[str, str], Instruction] = {}
    gone: set[str] = set()
    for op in async_operations(module):
        name = op.start.attributes.get("calls", "").lstrip("%")
        if op.spelling != "generic" or name not in module.computations:
            continue
        own = {k: v for k, v in op.start.attributes.items() if k != "calls"}
        root = _only_instruction(module.computations[name])
        late = len(op.start.operands) < len(module.computations[name].parameters)
        if root is not None and root.opcode in FIRST_CLASS:
            continue  # its sugar would read as another opcode
        if root is None or late or len(module.callers.get(name, ())) > 1:
            opcode, attributes = "call", own | {"to_apply": f"%{name}"}
        else:
            opcode, attributes = root.opcode, dict(root.attributes) | own
            gone.add(name)
        start = dataclasses.replace(op.start, opcode=f"{opcode}-start", attributes=attributes)
        changed[op.computation, op.name] = start
        _rename_steps(module, op, opcode, changed)
    return _rebuild(module, changed, {}, gone)


def _wrap(module: HloModule, op: AsyncOperation, name: str, attributes: dict[str, str]) -> Computation:
    """Makes the computation that holds the wrapped instruction and its parameters."""
    shapes = _operand_shapes(module, op)
    parameters = tuple(Instruction(f"param_{n}", s, "parameter", literal=str(n)) for n, s in enumerate(shapes))
    opcode = op.start.opcode.removesuffix("-start")
    result = op.windows[0].done.shape if op.windows else op.start.shape.at((1,)) or Shape("tuple")
    root = Instruction(opcode, result, opcode, tuple(p.name for p in parameters), attributes, is_root=True)
    thread = op.start.attributes.get("async_execution_thread", '"main"').strip('"')
    return Computation(name, (*parameters, root), execution_thread=thread)


def _operand_shapes(module: HloModule, op: AsyncOperation) -> list[Shape]:
    """Returns the shapes of the operands that start and updates bind; where undefined, what the start's result says."""
    last = (op.updates or (op.start,))[-1]
    first = last.shape.at((0,))
    said = list(first.elements if first is not None and first.is_tuple else [first] if first is not None else [])
    by_name = module.computations[op.computation].by_name
    operands = [*op.start.operands, *(o for update in op.updates for o in update.operands[1:])]
    if first is not None and first.is_tuple:
        operands = operands[: len(said)]  # what follows are output buffers that an update binds
    shapes: list[Shape] = []
    for n, operand in enumerate(operands):
        defined = by_name.get(operand)
        shapes.append(defined.shape if defined is not None else said[n] if n < len(said) else Shape("opaque"))
    return shapes


def _only_instruction(wrapped: Computation) -> Instruction | None:
    """Returns the instruction of a computation that holds no other and gives it the parameters in order."""
    root = wrapped.root
    parameters = tuple(wrapped.parameters[n].name for n in sorted(wrapped.parameters))
    lone = root is not None and len(wrapped.instructions) == len(parameters) + 1 and root.operands == parameters
    return root if lone else None


def _rename_steps(
    module: HloModule, op: AsyncOperation, opcode: str, changed: dict[tuple[str, str], Instruction]
) -> None:
    steps = {i.name for i in op.updates} | {w.done.name for w in op.windows}
    for computation in module.computations.values():
        for i in computation.instructions:
            if i.name in steps and is_step(i.opcode):
                renamed = dataclasses.replace(i, opcode=f"{opcode}-{is_step(i.opcode)}")
                changed[computation.name, i.name] = renamed


def _rebuild(
    module: HloModule,
    changed: dict[tuple[str, str], Instruction],
    made: dict[str, tuple[str, Computation]],
    gone: set[str],
) -> HloModule:
    computations: dict[str, Computation] = {}
    for name, computation in module.computations.items():
        computations |= {
            new: wrapped for new, (caller, wrapped) in made.items() if caller == name
        }  # callees come first
        if name not in gone:
            instructions = tuple(changed.get((name, i.name), i) for i in computation.instructions)
            computations[name] = dataclasses.replace(computation, instructions=instructions)
    return dataclasses.replace(module, computations=computations)


def _free_name(name: str, taken: set[str]) -> str:
    free, n = name, 0
    while free in taken:
        n += 1
        free = f"{name}.{n}"
    return free
