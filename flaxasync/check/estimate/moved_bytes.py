"""How many bytes an instruction moves in each memory. Of an array that it slices or updates, only the slice counts.

A loop over stacked layers reads the weights of one layer by `dynamic-slice` and stores its results by
`dynamic-update-slice`. XLA fuses both with the work around them, so the operand of the fusion is the array of all
layers, of which each iteration touches one. An update is done in place if nothing reads the old array later, and the
rest of the array is then neither read nor written. The compiler's cycle estimates count the array of all layers.
"""

from flaxasync.check.hlo.module import Computation, HloModule, Instruction
from flaxasync.check.hlo.shapes import Shape

_SLICES = frozenset({"dynamic-slice", "gather", "slice"})


def moved_bytes(module: HloModule, computation: Computation, i: Instruction) -> list[tuple[int, int]]:
    """Returns (memory space, bytes) of every array that an instruction reads or writes.

    `i` is a fusion, or any other instruction that computes its result from all of its operands or from slices.
    """
    operands = [made.shape if (made := computation.by_name.get(o)) else None for o in i.operands]
    known = [shape for shape in operands if shape is not None]
    if i.opcode in _SLICES:
        return _leaves(i.shape) * 2
    if i.opcode == "dynamic-update-slice" and len(known) > 2:
        return _leaves(known[1]) * 2
    body = next((module.computations[n] for n in i.called_computations if n in module.computations), None)
    if i.opcode != "fusion" or body is None or (root := body.root) is None:
        return [leaf for shape in (i.shape, *known) for leaf in _leaves(shape)]
    moved, in_place = _written(computation, i, body, root)
    for number, shape in enumerate(operands):
        if shape is not None and number not in in_place:
            parameter = body.parameters.get(number)
            most = shape.bytes if parameter is None else _read(body, parameter)
            moved += [(space, min(size, most)) for space, size in _leaves(shape)]
    return moved


def _read(body: Computation, parameter: Instruction) -> int:
    """Returns the bytes of a parameter that a fusion reads: those of its slices if it only slices it."""
    read, pending = 0, [parameter]
    while pending:
        step = pending.pop()
        for user in body.users.get(step.name, ()):
            if user.opcode == "bitcast":
                pending.append(user)
            elif user.opcode in _SLICES and user.operands[0] == step.name:
                read += user.shape.bytes
            else:
                return parameter.shape.bytes
    return read


def _written(
    computation: Computation, i: Instruction, body: Computation, root: Instruction
) -> tuple[list[tuple[int, int]], set[int]]:
    """Returns the (memory space, bytes) of each result of a fusion, and the operands that it updates in place."""
    results = [body.by_name.get(o) for o in root.operands] if root.opcode == "tuple" else [root]
    written, in_place = [], set()
    for (_, leaf), result in zip(i.shape.leaves(), results, strict=False):
        size, update = leaf.bytes, _source(body, result)
        if update is not None and update.opcode == "dynamic-update-slice" and len(update.operands) > 1:
            old, new = (_source(body, body.by_name.get(o)) for o in update.operands[:2])
            number = None if old is None else old.parameter_number
            if old is not None and new is not None and number is not None and number < len(i.operands):
                users = computation.users[i.operands[number]]
                if users[-1] is i and len(body.users[old.name]) == 1:
                    size = new.shape.bytes
                    in_place.add(number)
        written.append((leaf.memory_space, size))
    return written, in_place


def _source(body: Computation, i: Instruction | None) -> Instruction | None:
    """Returns the instruction whose result a chain of bitcasts renames."""
    while i is not None and i.opcode == "bitcast" and i.operands:
        i = body.by_name.get(i.operands[0])
    return i


def _leaves(shape: Shape) -> list[tuple[int, int]]:
    return [(leaf.memory_space, leaf.bytes) for _, leaf in shape.leaves()]
