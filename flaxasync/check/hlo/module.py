"""A compiled program as frozen data: a module of computations, which are lists of instructions.

`parse` in reader.py makes these from HLO text, and `format_module` in writer.py writes the text.
Names, operands and attributes are kept as they were printed, and properties decode them on access.
`parse` has checked that every operand is defined before its use, and that every computation that is
called is there and does not call itself.
"""

import dataclasses
import functools
import itertools
import json
import re
from collections.abc import Iterator, Mapping

from flaxasync.check.hlo.shapes import Shape
from flaxasync.check.hlo.source_location import read_stack_frames, source_line

_ALIAS = re.compile(r"\{([\d, ]*)\}\s*:\s*\(\s*(\d+)\s*,\s*\{([\d, ]*)\}")
_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
_REFERENCE = re.compile(r"%?([\w.\-]+)")
_KERNEL_FLOPS = re.compile(r'"cost_estimate":\{"flops":"(\d{1,18})"')

MATMULS = ("convolution", "dot")  # opcodes

# The attributes that name computations.
_CALLS = (
    "calls",
    "to_apply",
    "body",
    "condition",
    "true_computation",
    "false_computation",
    "select",
    "scatter",
    "called_computations",
    "branch_computations",
)
_CALLING = frozenset(_CALLS)
# The attributes that name something, or say where it comes from.
_NAMING = frozenset((*_CALLS, "control-predecessors", "metadata"))


@dataclasses.dataclass(frozen=True, slots=True)
class Alias:
    """One entry of output_to_operand_aliasing: an output that shares its buffer with an operand."""

    output: tuple[int, ...]  # the index path in the result
    operand: int  # the number of the operand
    operand_index: tuple[int, ...]  # the index path in the operand


@dataclasses.dataclass(frozen=True, slots=True)
class Instruction:
    """One line of a program."""

    name: str  # without the percent sign
    shape: Shape  # of the result
    opcode: str  # "fusion", "collective-permute-start", ...
    operands: tuple[str, ...] = ()  # their names
    # other key=value, as text
    attributes: Mapping[str, str] = dataclasses.field(default_factory=dict, hash=False)
    is_root: bool = False  # whether the computation returns this instruction's result
    literal: str = ""  # the text in the parentheses of a constant or a parameter
    # of the text that the instruction was read from
    line: int = dataclasses.field(default=0, compare=False)

    @property
    def control_predecessors(self) -> tuple[str, ...]:
        return tuple(_REFERENCE.findall(self.attributes.get("control-predecessors", "")))

    @property
    def backend_config(self) -> dict:
        """The backend's notes on the instruction. Empty if there are none, or if they are not a
        JSON object.
        """
        text = self.attributes.get("backend_config", "")
        try:
            if text.startswith("{"):
                return json.loads(text)
            return {}
        except (ValueError, RecursionError):
            return {}

    @property
    def called_computations(self) -> tuple[str, ...]:
        """The names of the computations that this instruction calls: of a loop the body, then the
        condition.
        """
        if _CALLING.isdisjoint(self.attributes):
            return ()
        texts = [self.attributes[key] for key in _CALLS if key in self.attributes]
        return tuple(name for text in texts for name in _REFERENCE.findall(text))

    @property
    def loop_body(self) -> str:
        """The name of the body of a while loop; "" for every other instruction."""
        return self.attributes.get("body", "").lstrip("%")

    @property
    def aliases(self) -> tuple[Alias, ...]:
        return _read_aliases(self.attributes.get("output_to_operand_aliasing", ""))

    @property
    def tuple_index(self) -> int | None:
        """The index that a get-tuple-element reads."""
        return _small_int(self.attributes.get("index", ""))

    @property
    def parameter_number(self) -> int | None:
        if self.opcode == "parameter":
            return _small_int(self.literal)
        return None

    @property
    def custom_call_target(self) -> str:
        return self.attributes.get("custom_call_target", "").strip('"')

    @property
    def op_name(self) -> str:
        """The path that JAX gave the operation, like "jit(step)/shard_map/mul"; "" if there is
        none.
        """
        match = _OP_NAME.search(self.attributes.get("metadata", ""))
        if match:
            return match[1]
        return ""

    @property
    def estimated_cycles(self) -> int | None:
        """The compiler's own estimate, for fusions, copies and reductions on TPU; None if it made
        none.
        """
        window = self.backend_config.get("window_config")
        if isinstance(window, dict):
            return _small_int(str(window.get("estimated_cycles", "")))
        return None

    @property
    def is_communicating_kernel(self) -> bool:
        """Whether the instruction is a Pallas kernel that moves data between devices, as the
        backend notes.
        """
        return self.opcode == "custom-call" and '"has_communication":true' in self.attributes.get(
            "backend_config", ""
        )

    @property
    def kernel_flops(self) -> int | None:
        """The FLOPs in the `cost_estimate` of a Pallas kernel; None if it was written without one,
        or for no kernel.
        """
        found = _KERNEL_FLOPS.search(self.attributes.get("backend_config", ""))
        if found and self.custom_call_target == "tpu_custom_call":
            return int(found[1])
        return None


@dataclasses.dataclass(frozen=True)
class Computation:
    """A list of instructions with a name. In a scheduled module the list is in the order of
    execution.
    """

    name: str
    instructions: tuple[Instruction, ...]
    is_entry: bool = False
    execution_thread: str = "main"

    def operands(self, instruction: Instruction) -> list[Instruction]:
        """Returns the instructions whose results an instruction of this computation reads."""
        return [self.by_name[name] for name in instruction.operands]

    @functools.cached_property
    def by_name(self) -> dict[str, Instruction]:
        return {i.name: i for i in self.instructions}

    @functools.cached_property
    def position(self) -> dict[str, int]:
        """The index of each instruction in the list."""
        return {i.name: n for n, i in enumerate(self.instructions)}

    @functools.cached_property
    def opcodes(self) -> frozenset[str]:
        """The opcodes of all instructions."""
        return frozenset(i.opcode for i in self.instructions)

    @functools.cached_property
    def users(self) -> dict[str, list[Instruction]]:
        """The instructions that read each instruction's result. Each is listed once, in order."""
        users: dict[str, list[Instruction]] = {}
        for i in self.instructions:
            for operand in dict.fromkeys(i.operands):
                users.setdefault(operand, []).append(i)
        return users

    @property
    def root(self) -> Instruction:
        return next(i for i in reversed(self.instructions) if i.is_root)

    @functools.cached_property
    def parameters(self) -> dict[int, Instruction]:
        numbered = [
            (_small_int(i.literal), i) for i in self.instructions if i.opcode == "parameter"
        ]
        return {number: i for number, i in numbered if number is not None}


@dataclasses.dataclass(frozen=True, eq=False)
class HloModule:
    """A program. Two programs are equal if they do the same, whatever their computations and
    instructions are named.

    Metadata do not count either: they say where an instruction comes from.
    """

    name: str
    computations: dict[str, Computation]  # by name, in printed order
    # of the HloModule line, as text
    attributes: Mapping[str, str] = dataclasses.field(default_factory=dict)
    tables: str = ""  # the text before the first computation: files, functions and stack frames

    @property
    def is_scheduled(self) -> bool:
        return self.attributes.get("is_scheduled") == "true"

    @property
    def num_partitions(self) -> int:
        return _small_int(self.attributes.get("num_partitions", "")) or 1

    @property
    def num_replicas(self) -> int:
        return _small_int(self.attributes.get("replica_count", "")) or 1

    @functools.cached_property
    def num_devices(self) -> int:
        """The number of devices that run the program: each replica has one for each partition."""
        return self.num_replicas * self.num_partitions

    @functools.cached_property
    def entry(self) -> Computation:
        """The entry computation; the last computation of a module without one."""
        entries = [c for c in self.computations.values() if c.is_entry]
        if entries:
            return entries[0]
        return list(self.computations.values())[-1]

    @functools.cached_property
    def callers(self) -> dict[str, list[tuple[Computation, Instruction]]]:
        """The instructions that call each computation, each with the computation that contains
        it.
        """
        callers: dict[str, list[tuple[Computation, Instruction]]] = {}
        for computation in self.computations.values():
            for instruction in computation.instructions:
                for name in dict.fromkeys(instruction.called_computations):
                    callers.setdefault(name, []).append((computation, instruction))
        return callers

    def source(self, instruction: Instruction) -> str:
        """Returns "file:line" of the Python code that made an instruction; "" if the text does not
        say.
        """
        return source_line(instruction.attributes.get("metadata", ""), self._stack_frames)

    def called(self, caller: Instruction) -> list[Computation]:
        """Returns the computations that an instruction calls: of a loop the body, then the
        condition.
        """
        return [self.computations[name] for name in caller.called_computations]

    def instructions_in(self, caller: Instruction) -> list[Instruction]:
        """Returns the instructions of the computations that an instruction calls."""
        return [i for computation in self.called(caller) for i in computation.instructions]

    def nested(self, caller: Instruction) -> Iterator[Instruction]:
        """Yields an instruction, and those of the computations that it calls at any depth."""
        pending = [caller]
        seen = set[str]()
        while pending:
            i = pending.pop()
            yield i
            for computation in self.called(i):
                if computation.name not in seen:
                    seen.add(computation.name)
                    pending += computation.instructions

    def contains_matmul(self, instruction: Instruction) -> bool:
        """Says whether an instruction is a matmul, or a fusion that contains one at any depth."""
        if instruction.opcode != "fusion":
            return instruction.opcode in MATMULS
        return any(self._has_matmul(name) for name in instruction.called_computations)

    def _has_matmul(self, name: str) -> bool:
        """Says whether a computation has a matmul, in itself or in what it calls. Calls are not
        nested deep.
        """
        if name not in self._matmuls:
            inside = self.computations[name].instructions
            called = (other for i in inside for other in i.called_computations)
            self._matmuls[name] = any(i.opcode in MATMULS for i in inside) or any(
                map(self._has_matmul, called)
            )
        return self._matmuls[name]

    @functools.cached_property
    def _matmuls(self) -> dict[str, bool]:
        """Which of the computations that were asked about have a matmul, by name."""
        return {}

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, HloModule):
            return NotImplemented
        mine = (self.name, self.attributes, self.tables, len(self.computations))
        return mine == (
            other.name,
            other.attributes,
            other.tables,
            len(other.computations),
        ) and all(
            one == two
            for one, two in zip(self._without_names(), other._without_names(), strict=True)
        )

    __hash__ = None  # type: ignore[assignment]  # a module has dictionaries

    def _without_names(self) -> Iterator[tuple[object, ...]]:
        """Yields what each computation does, in the order in which they are called from the entry,
        then the others.
        """
        order = [self.entry.name]
        numbers = {self.entry.name: 0}
        for name in itertools.chain(order, self.computations):  # `order` grows meanwhile
            if name not in numbers:
                numbers[name] = len(order)
                order.append(name)
            computation = self.computations[name]
            for called in (
                called for i in computation.instructions for called in i.called_computations
            ):
                if called not in numbers:
                    numbers[called] = len(order)
                    order.append(called)
        for name in order:
            computation = self.computations[name]
            yield computation.is_entry, computation.execution_thread, len(computation.instructions)
            for i in computation.instructions:
                operands = [computation.position[operand] for operand in i.operands]
                before = [
                    computation.position.get(other, other) for other in i.control_predecessors
                ]
                calls = [numbers[other] for other in i.called_computations]
                others = {key: value for key, value in i.attributes.items() if key not in _NAMING}
                yield i.opcode, i.shape, i.is_root, i.literal, operands, before, calls, others

    @functools.cached_property
    def _stack_frames(self) -> dict[str, str]:
        return read_stack_frames(self.tables)


@functools.lru_cache(maxsize=1024)  # a program repeats few of them, and asks for each one often
def _read_aliases(text: str) -> tuple[Alias, ...]:
    """Decodes `{{1}: (0, {}), {2}: (1, {0})}`."""
    return tuple(
        Alias(_path(out), int(n[:9]), _path(index)) for out, n, index in _ALIAS.findall(text)
    )


def without_number(name: str) -> str:
    """Returns "gemm" for "gemm.3", the name that the author of an instruction gave it."""
    head, _, tail = name.rpartition(".")
    if tail.isdigit() and head:
        return head
    return name


def _path(text: str) -> tuple[int, ...]:
    return tuple(int(part[:9]) for part in text.replace(" ", "").split(",") if part)


def _small_int(text: str) -> int | None:
    text = text.strip()
    if text.isascii() and text.lstrip("-").isdigit() and len(text) < 19 and text != "-":
        return int(text)
    return None
