"""How many bytes an instruction moves in each memory. Of an array that it slices or updates, only
the slice counts.

A loop over stacked layers reads the weights of one layer by `dynamic-slice` and stores its results
by `dynamic-update-slice`. XLA fuses both with the work around them, so the operand of the fusion is
the array of all layers, of which each iteration touches one. An update is done in place if nothing
reads the old array later, and the rest of the array is then neither read nor written. The
compiler's cycle estimates count the array of all layers.
"""

from flaxasync.check.hlo.module import Computation, Instruction
from flaxasync.check.hlo.shapes import Shape

_SLICES = frozenset({"dynamic-slice", "gather", "slice"})


def moved_bytes(i: Instruction) -> list[tuple[int, int]]:
    """Returns (memory space, bytes) of every array that an instruction reads or writes."""
    operands = [made.shape for made in i.inputs]
    if i.opcode in _SLICES and operands:
        return [*_leaves(i.shape), (operands[0].memory_space, i.shape.bytes)]
    if i.opcode == "dynamic-update-slice" and len(operands) > 2:
        return [*_leaves(operands[1]), (i.shape.memory_space, operands[1].bytes)]
    bodies = i.called
    if i.opcode != "fusion" or not bodies:
        return [leaf for shape in (i.shape, *operands) for leaf in _leaves(shape)]
    moved, in_place = _written(i, bodies[0])
    for number, shape in enumerate(operands):
        if number not in in_place:
            parameter = bodies[0].parameters.get(number)
            if parameter is None:
                most = shape.bytes
            else:
                most = _read(parameter)
            moved += [(space, min(size, most)) for space, size in _leaves(shape)]
    return moved


def _read(parameter: Instruction) -> int:
    """Returns the bytes of a parameter that a fusion reads: those of its slices if it only slices
    it.
    """
    read = 0
    pending = [parameter]
    while pending:
        step = pending.pop()
        for user in step.users:
            if user.opcode == "bitcast":
                pending.append(user)
            elif user.opcode in _SLICES and user.operands[0] == step.name:
                read += user.shape.bytes
            else:
                return parameter.shape.bytes
    return read


def _written(i: Instruction, body: Computation) -> tuple[list[tuple[int, int]], set[int]]:
    """Returns the (memory space, bytes) of each result of a fusion, and the operands that it
    updates in place.
    """
    if body.root.opcode == "tuple":
        results = body.root.inputs
    else:
        results = [body.root]
    written = []
    in_place = set()
    for (_, leaf), result in zip(i.shape.leaves(), results, strict=False):
        size = leaf.bytes
        update = _source(result)
        if update.opcode == "dynamic-update-slice" and len(update.operands) > 1:
            old, new = (_source(operand) for operand in update.inputs[:2])
            number = old.parameter_number
            if (
                number is not None
                and number < len(i.operands)
                and i.inputs[number].users[-1] is i
                and len(old.users) == 1
            ):
                size = new.shape.bytes
                in_place.add(number)
        written.append((leaf.memory_space, size))
    return written, in_place


def _source(i: Instruction) -> Instruction:
    """Returns the instruction whose result a chain of bitcasts renames."""
    while i.opcode == "bitcast" and i.operands:
        i = i.inputs[0]
    return i


def _leaves(shape: Shape) -> list[tuple[int, int]]:
    return [(leaf.memory_space, leaf.bytes) for _, leaf in shape.leaves()]
