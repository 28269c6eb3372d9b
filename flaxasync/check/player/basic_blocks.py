"""Basic blocks: sequences of bundles without a branch in them, each compiled to one Python
function.

A block ends where control flow can change (at the last delay slot of a branch, and at the bundle
before the target of a branch) and at an external operation. An external operation is one that
affects more than the registers of its core: a transfer, a semaphore operation, a call or a trace
mark.

The function of a block computes the scalar registers and the predicates. It returns the branch that
was taken, and the external operations with the values of their operands. Within a bundle every
operation reads before any of them writes. A block is compiled when it is first entered.
"""

import bisect
import dataclasses
from collections import Counter
from collections.abc import Callable
from typing import Any

from flaxasync.check.player import matrix_unit
from flaxasync.check.player import scalar_operations as scalar
from flaxasync.check.player.bundle_text import MARK_LIMIT, MARK_START, Operation, Program
from flaxasync.check.player.chips import PlayedChip
from flaxasync.check.player.errors import UnknownOperationError
from flaxasync.check.player.memory import Addresses

_EXTERNAL_UNITS = (
    "dma",
    "vwait",
    "vsyncadd",
    "vsyncset",
    "vsyncpa",
    "vsyncmov",
    "shalt",
    "inlined_call",
)
_OFF_THE_SPARSE_CORE = {
    f"xla_tpu_enable_sparse_core_collective_offload_{kind}": "false"
    for kind in ("all_gather", "reduce_scatter", "all_reduce")
}


@dataclasses.dataclass(slots=True)
class ExternalOperation:
    """An operation that affects more than the registers of its core, and the index of its
    bundle.
    """

    operation: Operation
    index: int


@dataclasses.dataclass(slots=True)
class BasicBlock:
    """A sequence of bundles without a branch in it.

    `run` takes the registers, the predicates and the machine. It returns the branch that was taken,
    or None, and a list of (index in `external`, values of the operands), or None.
    """

    run: Callable[..., Any]
    end: int  # the index of the last bundle
    bundles: int  # their number
    work: list  # of the matrix units, as `matrix_unit.cost` takes it
    external: list[ExternalOperation]  # those of the last bundle
    # by the state of the matrix units
    costs: dict[tuple, matrix_unit.Cost] = dataclasses.field(default_factory=dict)

    def time(self, units: tuple, latency: int) -> matrix_unit.Cost:
        cost = self.costs[units] = matrix_unit.cost(self.bundles, self.work, units, latency)
        return cost


class BlockCode:
    """A program that is ready to be executed on a chip."""

    def __init__(
        self, program: Program, addresses: Addresses, chip: PlayedChip, accept: frozenset[str]
    ):
        self.program = program
        self.chip = chip
        self.length = len(program.bundles)
        self._addresses = addresses
        self._accept = accept
        self._blocks: dict[int, BasicBlock] = {}
        # How many results of each division the program reads: the quotient, the remainder, or both.
        pops = [
            o for bundle in program.bundles for o in bundle if o.name == "spop.drf" and o.operands
        ]
        self._pops = Counter(o.operands[0].lstrip("%") for o in pops)
        self._ends = self._block_ends()
        self._refuse_sparse_core()

    def block(self, start: int) -> BasicBlock:
        if start not in self._blocks:
            self._blocks[start] = self._compile(start)
        return self._blocks[start]

    def _address_of(self, name: str) -> int:
        return self._addresses.of(self.program, name).address

    def _block_ends(self) -> list[int]:
        ends = {self.length - 1}
        for index, bundle in enumerate(self.program.bundles):
            for operation in bundle:
                if operation.unit == "sbr":
                    ends.add(min(index + self.chip.branch_delay, self.length - 1))
                    ends.add(max(0, self.program.regions[operation.target] - 1))
                elif is_external(operation):
                    ends.add(index)
        return sorted(ends)

    def _refuse_sparse_core(self) -> None:
        """Raises UnknownOperationError for a program that drives a SparseCore, before anything of
        it is simulated.

        What the SparseCore leaves in memory is not known, and the program may halt on it before it
        reaches an operation whose name says that it is for a SparseCore.
        """
        for index, bundle in enumerate(self.program.bundles):
            for operation in bundle:
                if "sparse_core" in operation.name:
                    raise UnknownOperationError(
                        f"{self.program.name}: {operation.name} drives a SparseCore, which the "
                        f"player does not model; at {self.program.location(index)}; to keep "
                        f"collectives off it, compile with compiler_options={_OFF_THE_SPARSE_CORE}"
                    )

    def _compile(self, start: int) -> BasicBlock:
        end = self._ends[bisect.bisect_left(self._ends, start)]
        source = ["def block(s, p, d):", " branch = external = None"]
        work: list = []
        external: list[ExternalOperation] = []
        for index in range(start, end + 1):
            operations = self.program.bundles[index]
            reads: list[str] = []
            writes: list[str] = []
            for number, operation in enumerate(operations):
                try:
                    before, after = self._emit(operation, index, number, external)
                except (scalar.NoScalarError, IndexError, KeyError) as error:
                    raise UnknownOperationError(self._unknown(operation, index, error)) from error
                reads += before
                writes += after
            source += [f" {line}" for line in reads + writes]
            matrix = tuple(
                m for o in operations for m in matrix_unit.matrix_operations(o, self.chip)
            )
            if matrix:
                work.append((index - start, matrix))
        source.append(" return branch, external")
        scope: dict[str, Any] = dict(scalar.RUNTIME)
        exec(
            compile("\n".join(source), f"<{self.program.name} from bundle {start:#x}>", "exec"),
            scope,
        )
        return BasicBlock(scope["block"], end, end - start + 1, work, external)

    def _emit(
        self, operation: Operation, index: int, number: int, external: list[ExternalOperation]
    ) -> tuple[list[str], list[str]]:
        """Returns Python code of one operation: lines that run before the writes of its bundle, and
        those writes. Adds the operation to `external` if it is one.

        In the code, g is the value of the predicate, e an external operation, a an address and t
        any other value; `number` is that of the operation in its bundle.
        """
        before: list[str] = []  # lines
        after: list[str] = []
        guard = ""
        # A predicate of a vector operation is not evaluated, because it changes no value that is
        # computed.
        if operation.predicate and (scalar.is_computed(operation) or is_external(operation)):
            constant = scalar.CONSTANT_PREDICATES.get(operation.predicate)
            before.append(f"g{number} = {constant or self._scalar(operation.predicate)}")
            guard = f"if g{number}: "
        if operation.unit == "sbr":
            target = self.program.regions[operation.target]
            after.append(
                f"{guard}branch = d.branch(branch, {target}, {index + self.chip.branch_delay})"
            )
        elif is_external(operation):
            values = "".join(f"{self._value(text)}, " for text in operation.operands)
            before.append(f"e{number} = ({len(external)}, ({values}))")
            external.append(ExternalOperation(operation, index))
            after.append(f"{guard}external = (external or []) + [e{number}]")
        elif operation.unit == "sst":
            address, value = map(self._scalar, operation.operands)
            before.append(f"a{number} = {address}; t{number} = {value}")
            after.append(f"{guard}d.smem[a{number}] = t{number}")
        elif operation.unit == "sdivrem":
            dividend, divisor = map(self._scalar, operation.operands)
            before.append(f"t{number} = divmod({dividend}, max({divisor}, 1))")
            after.append(f"{guard}d.divided.extend(t{number}{self._wanted_of_division(operation)})")
        elif operation.name == "spush.sccf":
            # to the other core of the chip, which is assumed to send the same value
            before.append(f"t{number} = {self._scalar(operation.operands[0])}")
            after.append(f"{guard}d.core_values.append(t{number})")
        elif not scalar.is_computed(operation):
            # takes time (matrix_unit.py), and has no code
            is_known = operation.unit in matrix_unit.VECTOR_FAMILIES
            if not is_known and operation.name not in self._accept:
                raise scalar.NoScalarError(f"vector operation {operation.name!r}")
        elif (result := scalar.result_value(operation, self._address_of)) is not None:
            register = scalar.result_register(operation)
            if register is None:
                raise scalar.NoScalarError(f"operation {operation.name!r} without a result")
            if guard:  # what is not executed takes nothing from a queue, and notes no unknown word
                result = f"({result}) if g{number} else 0"
            before.append(f"t{number} = {result}")
            after.append(f"{guard}{register[0]}[{register[1]}] = t{number}")
        return before, after

    def _wanted_of_division(self, operation: Operation) -> str:
        """Returns the index of what a program reads of (quotient, remainder): of both, or of the
        one that is named.

        Some versions of libtpu leave the name out. The other one is no guess: a slot that is a
        quotient in place of a remainder lets a kernel wait for a transfer that never began.
        """
        if self._pops[operation.result] == 2 or "DivAndRem" in operation.comment:
            return ""
        if "Rem" in operation.comment:
            return "[1:]"
        if "Div" in operation.comment:
            return "[:1]"
        raise scalar.NoScalarError(
            f"{operation.name!r} that does not say whether the quotient or the remainder is meant, "
            "as this version of libtpu prints it,"
        )

    def _scalar(self, text: str) -> str:
        return scalar.operand_value(text, self._address_of)

    def _value(self, text: str) -> str:
        """Returns a Python expression for an operand of an external operation; "None" for one that
        is no scalar.
        """
        try:
            return self._scalar(text)
        except scalar.NoScalarError:
            return "None"

    def _unknown(self, operation: Operation, index: int, error: Exception) -> str:
        what = f"{error} is unknown to the player ({operation.name}, {self.chip.name})"
        name = operation.name
        remedy = f"if it costs no more than its slot, accept it: accept=[{name!r}], --accept {name}"
        return f"{self.program.name}: {what}; at {self.program.location(index)}; {remedy}"


def is_external(operation: Operation) -> bool:
    if operation.unit == "vtrace":
        if operation.operands:
            operand = operation.operands[0]
        else:
            operand = ""
        return operand.isdigit() and MARK_START <= int(operand) < MARK_LIMIT
    return operation.unit in _EXTERNAL_UNITS
