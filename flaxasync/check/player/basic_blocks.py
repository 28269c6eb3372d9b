"""Program -> blocks: straight runs of bundles, each compiled to one Python function when it is first entered.

A block ends where the flow of control can change (the last delay slot of a branch, the bundle before a branch target)
and where the outside world is touched (a transfer, a semaphore, a call, a trace mark). Its function computes the
scalar registers and predicates, and returns the branch it took and what it asks of the world, with all operands read
as of their bundle: within a bundle every operation reads before any writes.
"""

import bisect
import dataclasses
from collections import Counter
from collections.abc import Callable
from typing import Any

from flaxasync.check.player import matrix_unit
from flaxasync.check.player import scalar_operations as scalar
from flaxasync.check.player.addresses import Addresses
from flaxasync.check.player.bundle_text import MARK_LIMIT, MARK_START, Operation, Program
from flaxasync.check.player.chips import PlayedChip
from flaxasync.check.player.errors import UnknownOperationError

_WORLD_UNITS = ("dma", "vwait", "vsyncadd", "vsyncset", "vsyncpa", "vsyncmov", "shalt", "inlined_call")
_SPARSE_CORE = "sparse_core"


@dataclasses.dataclass(slots=True)
class Action:
    """An operation on the world outside the core, and where it stands."""

    operation: Operation
    index: int  # of its bundle


@dataclasses.dataclass(slots=True)
class Block:
    run: Callable[..., Any]  # (s, p, machine) -> (branch or None, [(number of the action, operand values)] or None)
    end: int  # index of the last bundle
    bundles: int
    work: list
    actions: list[Action]
    costs: dict  # state of the matrix units -> Cost


class Code:
    """A program, ready to be run on a chip."""

    def __init__(
        self, program: Program, addresses: Addresses, chip: PlayedChip, *, accept: frozenset[str] = frozenset()
    ):
        self.program, self.chip = program, chip
        self.length = len(program.bundles)
        self._addresses, self._accept = addresses, accept
        self._blocks: dict[int, Block] = {}
        self._pops = Counter(
            o.operands[0].lstrip("%")
            for b in program.bundles
            for o in b.operations
            if o.name == "spop.drf" and o.operands
        )
        self._ends = self._block_ends()

    def block(self, start: int) -> Block:
        """Returns the block that begins at a bundle."""
        found = self._blocks.get(start)
        if found is None:
            found = self._blocks[start] = self._compile(start)
        return found

    def resolve(self, name: str) -> int:
        return self._addresses.of(self.program, name).address

    def _block_ends(self) -> list[int]:
        ends = {self.length - 1}
        for index, bundle in enumerate(self.program.bundles):
            for operation in bundle.operations:
                if operation.unit == "sbr":
                    ends.add(min(index + self.chip.branch_delay, self.length - 1))
                    ends.add(max(0, self.program.regions[operation.target] - 1))
                elif is_world(operation):
                    ends.add(index)
        return sorted(ends)

    def _compile(self, start: int) -> Block:
        end = self._ends[bisect.bisect_left(self._ends, start)]
        lines = ["def block(s, p, d):", " branch = events = None"]
        work: list = []
        actions: list[Action] = []
        for index in range(start, end + 1):
            operations = self.program.bundles[index].operations
            if not operations:
                continue
            reads: list[str] = []
            writes: list[str] = []
            for number, operation in enumerate(operations):
                try:
                    self._emit(operation, index, number, reads, writes, actions)
                except (scalar.NoScalarError, IndexError, KeyError) as error:
                    raise UnknownOperationError(self._unknown(operation, index, error)) from error
            lines += [f" {line}" for line in reads + writes]
            matrix = tuple(m for o in operations if (m := matrix_unit.matrix_operation(o, self.chip)))
            if matrix:
                work.append((index - start, matrix))
        lines.append(" return branch, events")
        scope: dict[str, Any] = dict(scalar.RUNTIME)
        exec(compile("\n".join(lines), f"<{self.program.name} from bundle {start:#x}>", "exec"), scope)
        return Block(scope["block"], end, end - start + 1, work, actions, {})

    def _emit(
        self, operation: Operation, index: int, number: int, reads: list[str], writes: list[str], actions: list[Action]
    ) -> None:
        """Adds the Python of one operation: `reads` run before the `writes` of any operation of the bundle."""
        guard = ""
        if operation.predicate and not (
            operation.unit[0] == "v" and not is_world(operation) and operation.unit != "vpush"
        ):
            reads.append(f"g{number} = {scalar.predicate_value(operation.predicate, self.resolve)}")
            guard = f"if g{number}: "
        if operation.unit == "sbr":
            target = self.program.regions[operation.target]
            writes.append(f"{guard}branch = d.branch(branch, {target}, {index + self.chip.branch_delay})")
        elif is_world(operation):
            values = "".join(f"{self._value(text)}, " for text in operation.operands)
            reads.append(f"e{number} = ({len(actions)}, ({values}))")
            actions.append(Action(operation, index))
            writes.append(f"{guard}events = (events or []) + [e{number}]")
        elif operation.unit == "sst":
            address, value = (scalar.operand_value(text, self.resolve) for text in operation.operands)
            reads.append(f"a{number} = {address}; t{number} = {value}")
            writes.append(f"{guard}d.smem[a{number}] = t{number}")
        elif operation.unit == "sdivrem":
            dividend, divisor = (scalar.operand_value(text, self.resolve) for text in operation.operands)
            reads.append(f"t{number} = divmod({dividend}, max({divisor}, 1))")
            both = self._pops[operation.result] == 2
            part = "" if both else "[1:]" if "Rem" in operation.comment else "[:1]"
            writes.append(f"{guard}d.divided.extend(t{number}{part})")
        elif operation.name == "spush.sccf":  # to the other core of the chip, which is taken to send the same
            reads.append(f"t{number} = {scalar.operand_value(operation.operands[0], self.resolve)}")
            writes.append(f"{guard}d.core_values.append(t{number})")
        elif operation.unit in scalar.NO_EFFECT or operation.name in scalar.NO_EFFECT:
            return
        elif operation.unit[0] == "v" or operation.name == "compiler-scheduling-barrier":
            if not matrix_unit.is_vector(operation) and operation.name not in self._accept:
                raise scalar.NoScalarError(f"vector operation {operation.name!r}")
        else:
            result = scalar.result_value(operation, self.resolve)
            if result is None:
                return
            register = scalar.result_register(operation)
            if register is None:
                raise scalar.NoScalarError(f"operation {operation.name!r} without a result")
            reads.append(f"t{number} = {result}" if not guard else f"t{number} = ({result}) if g{number} else 0")
            writes.append(f"{guard}{register[0]}[{register[1]}] = t{number}")

    def _value(self, text: str) -> str:
        """Returns Python for an operand of an action; those that no action uses may be of any kind."""
        try:
            return scalar.operand_value(text, self.resolve)
        except scalar.NoScalarError:
            return "None"

    def _unknown(self, operation: Operation, index: int, error: Exception) -> str:
        if _SPARSE_CORE in operation.name:
            what = f"{operation.name} drives a SparseCore, which the player does not model"
            remedy = "compile with collectives kept off the SparseCore"
        else:
            what = f"{error} is unknown to the player ({operation.name}, {self.chip.name})"
            remedy = (
                f"if it costs no more than its slot, accept it: accept=[{operation.name!r}], --accept {operation.name}"
            )
        return f"{self.program.name}: {what}; at {self.program.place(index)}; {remedy}"


def is_world(operation: Operation) -> bool:
    """Says whether an operation touches more than the registers of its core."""
    if operation.unit == "vtrace":
        operand = operation.operands[0] if operation.operands else ""
        return operand.isdigit() and MARK_START <= int(operand) < MARK_LIMIT
    return operation.unit in _WORLD_UNITS
