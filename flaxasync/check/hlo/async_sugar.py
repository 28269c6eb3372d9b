"""The two spellings of a generic asynchronous operation, and the conversion of a module from one to the other.

The long form is `async-start(...), calls=%wrapped`. The short form, called sugar, is `op-start(...)`. It has the
attributes of the wrapped instruction and no wrapped computation. A start that wraps more than one instruction, or whose
operands are bound late, is written in sugar as `call-start(...), to_apply=%wrapped`. Operations with start and done
opcodes of their own (collective-permute, copy, ...) have neither form.

jaxlib's own parser turns sugar into the long form when it reads a text. A comparison of two programs, or of counts
with jaxlib's, must therefore convert both to one form first. Sugar loses the names of the wrapped computations and
nothing else.
"""

import dataclasses

from flaxasync.check.hlo.async_operations import FIRST_CLASS, AsyncOperation, async_operations, step_of_opcode
from flaxasync.check.hlo.module import Computation, HloModule, Instruction
from flaxasync.check.hlo.shapes import Shape

# The attributes that belong to the start itself. Every other attribute belongs to the wrapped instruction.
_OWN = (
    "async_execution_thread", "control-predecessors", "output_to_operand_aliasing", "metadata", "backend_config",
    "frontend_attributes", "sharding", "statistics", "origin",
)  # fmt: skip


def to_long_form(module: HloModule) -> HloModule:
    """Returns the module with every sugared operation as async-start, async-update and async-done."""
    made: dict[str, tuple[str, Computation]] = {}  # by name: the caller, and the new computation
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
    """Returns the module with every async-start as the operation that it wraps, with the suffix -start."""
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
            continue  # the sugar of a first-class operation would be read as its own start opcode
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
    """Returns a new computation of the wrapped instruction and its parameters."""
    shapes = _operand_shapes(module, op)
    parameters = tuple(Instruction(f"param_{n}", s, "parameter", literal=str(n)) for n, s in enumerate(shapes))
    opcode = op.start.opcode.removesuffix("-start")
    result = op.windows[0].done.shape if op.windows else op.start.shape.at((1,)) or Shape("tuple")
    root = Instruction(opcode, result, opcode, tuple(p.name for p in parameters), attributes, is_root=True)
    thread = op.start.attributes.get("async_execution_thread", '"main"').strip('"')
    return Computation(name, (*parameters, root), execution_thread=thread)


def _operand_shapes(module: HloModule, op: AsyncOperation) -> list[Shape]:
    """Returns the shapes of the operands that the start and the updates bind.

    The shape of an operand that the text does not define is taken from the result of the last step.
    """
    last = (op.updates or (op.start,))[-1]
    first = last.shape.at((0,))
    declared = list(first.elements if first is not None and first.is_tuple else [first] if first is not None else [])
    by_name = module.computations[op.computation].by_name
    operands = [*op.start.operands, *(o for update in op.updates for o in update.operands[1:])]
    if first is not None and first.is_tuple:
        operands = operands[: len(declared)]  # the rest are output buffers that an update binds
    shapes: list[Shape] = []
    for n, operand in enumerate(operands):
        defined = by_name.get(operand)
        shapes.append(defined.shape if defined is not None else declared[n] if n < len(declared) else Shape("opaque"))
    return shapes


def _only_instruction(wrapped: Computation) -> Instruction | None:
    """Returns the only instruction beside the parameters, if it takes all of them in order; None otherwise."""
    root = wrapped.root
    parameters = tuple(wrapped.parameters[n].name for n in sorted(wrapped.parameters))
    is_only = root is not None and len(wrapped.instructions) == len(parameters) + 1 and root.operands == parameters
    return root if is_only else None


def _rename_steps(
    module: HloModule, op: AsyncOperation, opcode: str, changed: dict[tuple[str, str], Instruction]
) -> None:
    """Gives the updates and dones of an operation the opcodes that go with its new start."""
    steps = {i.name for i in op.updates} | {w.done.name for w in op.windows}
    for computation in module.computations.values():
        for i in computation.instructions:
            if i.name in steps and step_of_opcode(i.opcode):
                renamed = dataclasses.replace(i, opcode=f"{opcode}-{step_of_opcode(i.opcode)}")
                changed[computation.name, i.name] = renamed


def _rebuild(
    module: HloModule,
    changed: dict[tuple[str, str], Instruction],
    made: dict[str, tuple[str, Computation]],
    gone: set[str],
) -> HloModule:
    """Returns the module with changed instructions, new computations, and without those that are gone."""
    computations: dict[str, Computation] = {}
    for name, computation in module.computations.items():
        # A callee is printed before its caller.
        computations |= {new: wrapped for new, (caller, wrapped) in made.items() if caller == name}
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
