"""Transfers of arrays in a wider type than the program keeps of them, and what a narrower type
would gain.

A product that is asked for in float32 and cast to bfloat16 after its sum over the devices travels
in twice the bytes. What arrives is followed through everything that only moves, rearranges or adds
it. A transfer is wide if each copy of its values is converted to a narrower type in the end. If a
value is used in any other way, or leaves the computation through a loop or as a result, nothing is
claimed.

The transfers of one line of Python are one finding, because one change of that line mends them all,
and those for which the text names no line are one together. The gain is the part of the exposed
time that fewer bytes save, and of the memory traffic of the instruction that makes what is sent and
of the one that reads what arrives. What the compiler would then schedule in another way is not
predicted.
"""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from flaxasync.check.auditing.findings import Finding, Pair, finding, of_size
from flaxasync.check.estimate.costs import Costs
from flaxasync.check.hlo.async_operations import COLLECTIVES, step_of
from flaxasync.check.hlo.module import Computation, Instruction
from flaxasync.check.hlo.shapes import element_bits
from flaxasync.check.units import size_text

_SPELLINGS = ("first-class", "generic")  # of the starts that are followed
_WIDE = frozenset({"f64", "f32"})
_FLOATS = _WIDE | {"f16", "bf16"}
_MOVES = frozenset(
    {
        "add",
        "bitcast",
        "concatenate",
        "copy",
        "dynamic-slice",
        "dynamic-update-slice",
        "reshape",
        "slice",
        "transpose",
        *COLLECTIVES,
    }
) - {"send", "recv"}
_JOINS = "ConcatBitcast"  # the custom call by which XLA puts slices together again

# the index path of the array in a result; None for all of a future
type Element = tuple[int, ...] | None
type Holder = tuple[Instruction, Element]  # what holds the values of a transfer
type Place = tuple[str, str, Element]  # the same, by the names of the computation and instruction


class _Wide(NamedTuple):
    """A transfer that carries a wider type than is kept, its largest array, and what the kept type
    saves in one run.
    """

    instruction: Instruction
    rounding: str
    bytes: int
    gain: float


def wide_transfers(
    costs: Costs, pairs: Iterable[Pair], holding: Iterable[tuple[Instruction, Instruction]]
) -> list[Finding]:
    """Returns a finding for each line of Python whose transfers carry a wider type than is kept.
    Its gain is of a run.

    The program is scheduled. `holding` are its synchronous collectives, as (instruction,
    collective).
    """
    by_line: dict[str, list[_Wide]] = {}
    kept = {wide: _Kept(wide) for wide in _WIDE}

    def look(i: Instruction, arrived: int, seconds: float, inside: float) -> None:
        """Notes a transfer if it is a wide one. So many bytes arrive; it takes so many seconds
        alone, and so many of work run beside it.
        """
        wide = next((leaf.element_type for _, leaf in i.shape.leaves()), "")
        narrow = None
        if wide in _WIDE and seconds > 0 and not _promoted(i):
            narrow = kept[wide].type_of(i)
        if narrow is None:
            return
        share = element_bits(narrow) / element_bits(wide)  # of the bytes that would remain
        sent = i.inputs
        # what is made by its bytes alone would be made sooner
        written = sum(one.shape.bytes for one in sent if costs.explained(one).source == "bytes")
        exposed = max(0.0, seconds - inside)
        exposed_if_narrow = max(0.0, share * seconds - inside)
        saved_traffic = (1 - share) * costs.memory_seconds(written + arrived)
        gain = exposed - exposed_if_narrow + saved_traffic
        largest = max(leaf.bytes for one in (i, *sent) for _, leaf in one.shape.leaves())
        rounding = f"{wide} that is rounded to {narrow}"
        by_line.setdefault(i.source, []).append(_Wide(i, rounding, largest, gain))

    for pair in pairs:
        if pair.communicates and pair.spelling in _SPELLINGS and pair.dones:
            start = costs.module.computations[pair.computation].by_name[pair.name]
            look(start, pair.bytes, pair.transfer, pair.inside)
    for i, _ in holding:
        look(i, i.shape.bytes, costs.seconds(i), 0.0)
    return [_finding(line, transfers, costs.runs) for line, transfers in by_line.items()]


def _finding(line: str, transfers: list[_Wide], runs: Mapping[str, int]) -> Finding:
    largest = max(transfers, key=lambda t: t.bytes)
    counts = [runs[t.instruction.computation.name] for t in transfers]
    moved = sum(n * t.bytes for n, t in zip(counts, transfers, strict=True))
    which = "without a line of Python"
    if line:
        which = "of its line"
    others = " carries"
    if len(transfers) > 1:
        others = f" and {len(transfers) - 1} more {which} carry"
    message = (
        f"{largest.instruction.name}{others} {largest.rounding} when it has arrived: "
        f"{size_text(moved)} in {sum(counts)} transfers of a run"
    )
    return finding(
        "wide-transfer",
        message,
        largest.instruction,
        severity=of_size(moved),
        count=sum(counts),
        gain=sum(n * t.gain for n, t in zip(counts, transfers, strict=True)),
    )


class _Kept:
    """To which types the values of a wide type are converted in the end, wherever they are in one
    program.

    Each place is looked at once, for all transfers whose values come through it.
    """

    def __init__(self, wide: str):
        self.wide = wide
        # of each place: those that its values become; "" for the wide type
        self._types: dict[Place, set[str]] = {}
        self._before: dict[Place, list[Place]] = {}  # from where the values come

    def type_of(self, transfer: Instruction) -> str | None:
        """Returns the widest type to which a transfer's values are converted; None if they are
        needed as they are.
        """
        first: Holder = (transfer, None if transfer.opcode.endswith("-start") else ())
        pending = [first]
        changed = []
        while pending:
            holder = pending.pop()
            place = _place(holder)
            if place in self._types:
                continue
            onward = self._look(holder, self._types.setdefault(place, set()))
            for after in onward:
                self._before.setdefault(_place(after), []).append(place)
            pending += onward
            changed += [place, *map(_place, onward)]
        while changed:
            place = changed.pop()
            for before in self._before.get(place, ()):
                if not self._types[place] <= self._types[before]:
                    self._types[before] |= self._types[place]
                    changed.append(before)
        kept = self._types[_place(first)]
        if "" in kept:
            return None
        return max(kept, key=element_bits, default=None)

    def _look(self, holder: Holder, types: set[str]) -> list[Holder]:
        """Returns what holds the values next, and adds the types to which users convert them."""
        i, element = holder
        onward: list[Holder] = []
        if i.is_root:
            outside = _fusions(i.computation)
            onward += [(fusion, element) for fusion in outside]
            if not outside:
                types.add("")
        for user in i.users:
            if user.opcode == "convert" and element == ():
                kind = user.shape.element_type
                narrower = kind in _FLOATS and element_bits(kind) < element_bits(self.wide)
                types.add(kind if narrower else "")
                continue
            reached = _through(i, element, user)
            if reached is None:
                types.add("")
            onward += reached or ()
        return onward


def _place(holder: Holder) -> Place:
    return holder[0].computation.name, holder[0].name, holder[1]


def _through(step: Instruction, element: Element, user: Instruction) -> list[Holder] | None:
    """Returns what holds the values after an instruction has used them; None if it needs the wide
    type.
    """
    if element is None:  # the user of a future
        if user.opcode == "async-update":
            return [(user, None)]
        if _step_of_move(user, "done"):
            return [(user, ())]
        return None
    if element:  # a part of a tuple, which only a get-tuple-element takes out
        if user.opcode != "get-tuple-element":
            return None
        if user.tuple_index == element[0]:
            return [(user, ())]
        return []
    if user.opcode in _MOVES or user.custom_call_target == _JOINS:
        return [(user, ())]
    if _step_of_move(user, "start"):
        return [(user, None)]
    numbers = [n for n, operand in enumerate(user.operands) if operand == step.name]
    if user.opcode == "tuple" and user.is_root:
        outside = _fusions(user.computation)
        return [(fusion, (n,)) for fusion in outside for n in numbers] or None
    bodies = []
    if user.opcode == "fusion":
        bodies = user.called[:1]
    return [
        (body.parameters[n], ()) for body in bodies for n in numbers if n in body.parameters
    ] or None


def _fusions(body: Computation) -> list[Instruction]:
    """Returns the fusions that run a computation; none if anything else calls it."""
    if all(call.opcode == "fusion" for call in body.callers):
        return body.callers
    return []


def _step_of_move(i: Instruction, role: str) -> bool:
    """Says whether an instruction is the start or the done of something that only moves or adds its
    operands.
    """
    stem, its_role = step_of(i.opcode)
    if its_role != role:
        return False
    start = i
    while start.opcode in ("async-update", "async-done") and start.operands:
        start = start.inputs[0]
    if start.opcode == "async-start" and start.called:
        stem = start.called[0].root.opcode
    return stem in _MOVES


def _promoted(i: Instruction) -> bool:
    """Says whether the compiler itself widened a reduction, as it does on CPU. The author cannot
    change that.
    """
    inside = [i]
    if i.opcode == "fusion":
        inside += i.inside
    return any(name.endswith("_promoted") for one in inside for name in one.called_computations)
