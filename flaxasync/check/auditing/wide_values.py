"""Which instructions hold an array in a wider type than the program keeps of it.

A product that is asked for in float32 and then cast to bfloat16 is a float32 array until the cast. If its sum over the
devices comes before the cast, twice the bytes travel. `follow` starts at such an array and goes on through everything
that only moves, rearranges or adds it, until each copy of its values is converted to a narrower type. If a value is
used in any other way, or leaves the computation through a loop or as a result, nothing is claimed.
"""

import dataclasses
import functools

from flaxasync.check.hlo.async_operations import COLLECTIVES
from flaxasync.check.hlo.module import Computation, HloModule, Instruction
from flaxasync.check.hlo.shapes import Shape, element_bits

WIDE = frozenset({"f64", "f32"})
_FLOATS = WIDE | {"f16", "bf16"}
_MOVES = frozenset({
    "add", "bitcast", "concatenate", "copy", "dynamic-slice", "dynamic-update-slice", "reshape", "slice", "transpose",
    *COLLECTIVES,
}) - {"send", "recv"}  # fmt: skip
_STAYS = frozenset({"call", "conditional", "constant", "custom-call", "parameter", "tuple", "while"})
_JOINS = "ConcatBitcast"  # the custom call by which XLA puts slices together again

type Place = tuple[str, str]  # a computation and an instruction of it
type Element = tuple[int, ...] | None  # the index path of the array in a result; None for all of a future


@dataclasses.dataclass(frozen=True)
class WideValues:
    """Arrays in a wider type than is kept of them.

    Attributes:
      wide: The type that they have.
      narrow: The widest type that is kept.
      holders: The instructions that hold them, each with the index path of the array in its result.
    """

    wide: str
    narrow: str
    holders: frozenset[tuple[Place, Element]]


def follow(module: HloModule, computation: Computation, i: Instruction) -> WideValues | None:
    """Returns the arrays that hold the values of a collective; None unless all of them are converted afterwards.

    The sums and products that the values come from are among them.

    Args:
      module: The program.
      computation: The computation of the collective.
      i: The collective, the start of one, or a fusion that contains one.
    """
    wide = next((leaf.element_type for _, leaf in i.shape.leaves()), "")
    if wide not in WIDE or _promoted(module, i):
        return None
    walk = _Walk(module, wide)
    if not walk.forward(computation, i) or not walk.kept:
        return None
    walk.backward(computation, i)
    return WideValues(wide, max(walk.kept, key=element_bits), frozenset(walk.holders))


def narrowed(module: HloModule, values: list[WideValues]) -> HloModule:
    """Returns a program whose arrays have the narrow types. Nothing else is changed, so it is good for times only."""
    types: dict[Place, list[tuple[Element, str, str]]] = {}
    for value in values:
        for place, element in value.holders:
            types.setdefault(place, []).append((element, value.wide, value.narrow))
    computations = dict(module.computations)
    for name in {place[0] for place in types}:
        changed = []
        for i in computations[name].instructions:
            shape = i.shape
            for element, wide, narrow in types.get((name, i.name), ()):
                shape = _with_type(shape, element, wide, narrow)
            changed.append(i if shape is i.shape else dataclasses.replace(i, shape=shape))
        computations[name] = dataclasses.replace(computations[name], instructions=tuple(changed))
    return dataclasses.replace(module, computations=computations)


class _Walk:
    """A walk from one array along the flow of its values.

    Attributes:
      holders: The instructions that hold the values, with the index path of the array.
      kept: The narrower types to which they are converted.
    """

    def __init__(self, module: HloModule, wide: str):
        self.module, self.wide = module, wide
        self.holders: set[tuple[Place, Element]] = set()
        self.kept: set[str] = set()

    def forward(self, computation: Computation, i: Instruction) -> bool:
        """Follows the values to where they are used. Returns whether each of them is converted to a narrower type."""
        pending = [(computation, i, _first(i))]
        while pending:
            at, step, element = pending.pop()
            if ((at.name, step.name), element) in self.holders:
                continue
            self.holders.add(((at.name, step.name), element))
            if step.is_root:
                outside = self._fusions(at)
                if not outside:
                    return False
                pending += [(c, fusion, element) for c, fusion in outside]
            for user in at.users.get(step.name, ()):
                reached = self._through(at, step, element, user)
                if reached is None:
                    return False
                pending += reached
        return True

    def backward(self, computation: Computation, i: Instruction) -> None:
        """Follows the values back to the products that make them, as far as they are only moved and added.

        What a transfer takes is always among them, because its bytes are the time of most transfers. It may be an
        argument of the program or the result of a kernel: then it is as if that had the narrow type to begin with.
        """
        pending: list[tuple[Computation, str, tuple[int, ...], bool]] = [(computation, o, (), True) for o in i.operands]
        if i.opcode == "fusion":
            pending = [(computation, i.operands[n], (), True) for n in self._entered_by_collective(i)]
        while pending:
            at, name, element, is_sent = pending.pop()
            step = at.by_name.get(name)
            if step is None or (shape := step.shape.at(element)) is None:
                continue
            if _step_of_move(step, "-start") and ((at.name, name), None) not in self.holders:
                self.holders.add(((at.name, name), None))
                pending += [(at, o, (), _is_transfer(step)) for o in step.operands[:1]]
            if shape.element_type != self.wide or ((at.name, name), element) in self.holders:
                continue
            if is_sent:
                self.holders.add(((at.name, name), element))
            if step.opcode in _MOVES or _step_of_move(step, "-done") or step.custom_call_target == _JOINS:
                self.holders.add(((at.name, name), element))
                pending += [(at, o, (), _is_transfer(step)) for o in step.operands]
            elif step.opcode == "get-tuple-element" and step.tuple_index is not None and step.operands:
                self.holders.add(((at.name, name), element))
                pending.append((at, step.operands[0], (step.tuple_index,), False))
            elif step.opcode == "parameter":
                for c, fusion in self._fusions(at):
                    if (n := step.parameter_number) is not None and n < len(fusion.operands):
                        self.holders.add(((at.name, name), element))
                        pending.append((c, fusion.operands[n], (), is_sent))
            elif step.opcode == "fusion" and (body := self._body(step)) is not None and body.root is not None:
                self.holders.add(((at.name, name), element))
                made = (
                    body.root.operands[element[0] :] if body.root.opcode == "tuple" and element else (body.root.name,)
                )
                pending += [(body, name, (), False) for name in made[:1]]
            elif step.opcode not in _STAYS:  # a product, above all: it can round its result
                self.holders.add(((at.name, name), element))

    def _through(
        self, at: Computation, step: Instruction, element: Element, user: Instruction
    ) -> list[tuple[Computation, Instruction, Element]] | None:
        """Returns what holds the values after an instruction has used them; None if it needs the wide type."""
        if user.opcode == "get-tuple-element" and element:
            return [(at, user, ())] if user.tuple_index == element[0] else []
        if element is None:  # a future
            return [(at, user, ())] if _step_of_move(user, "-done") else None
        if element:
            return None
        if user.opcode == "convert":
            kind = user.shape.element_type
            if kind not in _FLOATS or element_bits(kind) >= element_bits(self.wide):
                return None
            self.kept.add(kind)
            return []
        if user.opcode in _MOVES or user.custom_call_target == _JOINS:
            return [(at, user, ())]
        if _step_of_move(user, "-start"):
            return [(at, user, None)]
        if user.opcode == "tuple" and user.is_root and self._fusions(at):
            places = [n for n, operand in enumerate(user.operands) if operand == step.name]
            return [(c, fusion, (n,)) for c, fusion in self._fusions(at) for n in places]
        if user.opcode == "fusion" and (body := self._body(user)) is not None:
            entered = [body.parameters.get(n) for n, operand in enumerate(user.operands) if operand == step.name]
            return [(body, parameter, ()) for parameter in entered if parameter is not None]
        return None

    def _body(self, fusion: Instruction) -> Computation | None:
        return next((c for n in fusion.called_computations if (c := self.module.computations.get(n))), None)

    def _fusions(self, body: Computation) -> list[tuple[Computation, Instruction]]:
        """Returns the fusions that run a computation; none if anything else calls it."""
        callers = self.module.callers.get(body.name, [])
        return callers if all(call.opcode == "fusion" for _, call in callers) else []

    def _entered_by_collective(self, fusion: Instruction) -> list[int]:
        """Returns the numbers of the operands that the collective in a fusion takes directly."""
        body = self._body(fusion)
        taken = {o for i in body.instructions if i.opcode in COLLECTIVES for o in i.operands} if body else set()
        return [n for n, p in body.parameters.items() if p.name in taken and n < len(fusion.operands)] if body else []


def _first(i: Instruction) -> Element:
    return None if i.opcode.endswith("-start") else ()


def _step_of_move(i: Instruction, suffix: str) -> bool:
    """Says whether an instruction is the start or the done of something that only moves or adds its operands."""
    return i.opcode.endswith(suffix) and i.opcode.removesuffix(suffix) in _MOVES


def _is_transfer(i: Instruction) -> bool:
    return i.opcode.removesuffix("-start") in COLLECTIVES


def _promoted(module: HloModule, i: Instruction) -> bool:
    """Says whether the compiler itself widened a reduction, as it does on CPU. The author cannot change that."""
    inside = (i, *module.instructions_in(i)) if i.opcode == "fusion" else (i,)
    return any(name.endswith("_promoted") for one in inside for name in one.called_computations)


@functools.lru_cache(maxsize=1024)
def _with_type(shape: Shape, element: Element, wide: str, narrow: str) -> Shape:
    """Returns a shape whose arrays of a wide type, all of them or that at an index path, have a narrow one."""
    if shape.is_tuple:
        return dataclasses.replace(
            shape,
            elements=tuple(
                _with_type(part, element[1:] if element else element, wide, narrow)
                if not element or element[0] == n
                else part
                for n, part in enumerate(shape.elements)
            ),
        )
    return dataclasses.replace(shape, element_type=narrow) if shape.element_type == wide else shape
