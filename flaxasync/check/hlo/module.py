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

from flaxasync.check.hlo.shapes import HloError, Shape
from flaxasync.check.hlo.source_location import read_stack_frames, source_line

_ALIAS = re.compile(r"\{([\d, ]*)\}\s*:\s*\(\s*(\d+)\s*,\s*\{([\d, ]*)\}")
_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
_REFERENCE = re.compile(r"%?([\w.\-]+)")
_ESTIMATED_CYCLES = re.compile(r'"window_config":\s*\{[^{}]*"estimated_cycles":\s*"?(\d{1,18})\b')
_KERNEL_FLOPS = re.compile(r'"cost_estimate":\{"flops":"(\d{1,18})"')

MATMULS = ("convolution", "dot")  # opcodes
CONTROL_FLOW = ("while", "conditional", "call")  # opcodes that run what they call

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
    # that has the instruction, and sets this when it is made
    computation: "Computation" = dataclasses.field(init=False, repr=False, compare=False)

    @property
    def inputs(self) -> list["Instruction"]:
        """The instructions whose results it reads."""
        return [self.computation.by_name[name] for name in self.operands]

    @property
    def users(self) -> tuple["Instruction", ...]:
        """The instructions that read its result. Each is listed once, in order."""
        return self.computation.users.get(self.name, ())

    @property
    def position(self) -> int:
        """Its index in the computation."""
        return self.computation.position[self.name]

    @property
    def called(self) -> list["Computation"]:
        """The computations that it calls: of a loop the body, then the condition."""
        computations = self.computation.module.computations
        return [computations[name] for name in self.called_computations]

    @property
    def inside(self) -> list["Instruction"]:
        """The instructions of the computations that it calls."""
        return [i for computation in self.called for i in computation.instructions]

    def nested(self) -> Iterator["Instruction"]:
        """Yields it, and the instructions of the computations that it calls at any depth."""
        pending = [self]
        seen = set[str]()
        while pending:
            i = pending.pop()
            yield i
            for computation in i.called:
                if computation.name not in seen:
                    seen.add(computation.name)
                    pending += computation.instructions

    @property
    def contains_matmul(self) -> bool:
        """Whether it is a matmul, or a fusion that contains one at any depth."""
        if self.opcode == "fusion":
            return any(computation.has_matmul for computation in self.called)
        return self.opcode in MATMULS

    @property
    def source(self) -> str:
        """The "file:line" of the Python code that made it; "" if the text does not say."""
        frames = self.computation.module.stack_frames
        return source_line(self.attributes.get("metadata", ""), frames)

    def error(self, message: str) -> HloError:
        """Makes an error at its line."""
        return HloError(message, self.line, 1 if self.line else 0)

    @property
    def control_predecessors(self) -> tuple[str, ...]:
        text = self.attributes.get("control-predecessors")
        if text is None:
            return ()
        return tuple(_REFERENCE.findall(text))

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
        keys = _CALLING.intersection(self.attributes)
        if not keys:
            return ()
        texts = [self.attributes[key] for key in sorted(keys, key=_CALLS.index)]
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
        found = _ESTIMATED_CYCLES.search(self.attributes.get("backend_config", ""))
        if found:
            return int(found[1])
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
    execution. The instructions know the computation that was made of them last.
    """

    name: str
    instructions: tuple[Instruction, ...]
    is_entry: bool = False
    execution_thread: str = "main"
    # that has the computation, and sets this when it is made
    module: "HloModule" = dataclasses.field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for i in self.instructions:
            object.__setattr__(i, "computation", self)

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
        return _shared(frozenset(i.opcode for i in self.instructions))

    @functools.cached_property
    def users(self) -> dict[str, tuple[Instruction, ...]]:
        """The instructions that read each instruction's result. Each is listed once, in order."""
        users: dict[str, list[Instruction]] = {}
        for i in self.instructions:
            for operand in dict.fromkeys(i.operands):
                users.setdefault(operand, []).append(i)
        # a list that has grown has room for more, which a large program would pay for in memory
        return {name: tuple(found) for name, found in users.items()}

    @property
    def callers(self) -> list[Instruction]:
        """The instructions that call it."""
        return self.module.callers.get(self.name, [])

    @functools.cached_property
    def has_matmul(self) -> bool:
        """Whether it has a matmul, itself or in what it calls. It calls no computation that is
        around it, and calls are not nested deep.
        """
        return any(
            i.opcode in MATMULS or any(called.has_matmul for called in i.called)
            for i in self.instructions
        )

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

    def __post_init__(self) -> None:
        for computation in self.computations.values():
            object.__setattr__(computation, "module", self)

    @property
    def instructions(self) -> list[Instruction]:
        """The instructions of all computations."""
        return [i for computation in self.computations.values() for i in computation.instructions]

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
    def callers(self) -> dict[str, list[Instruction]]:
        """The instructions that call each computation. Each is listed once."""
        callers: dict[str, list[Instruction]] = {}
        for computation in self.computations.values():
            for i in computation.instructions:
                for name in dict.fromkeys(i.called_computations):
                    callers.setdefault(name, []).append(i)
        return callers

    @functools.cached_property
    def stack_frames(self) -> dict[str, str]:
        """The "file:line" of each stack frame in the tables."""
        return read_stack_frames(self.tables)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, HloModule):
            return NotImplemented
        return list(self._without_names()) == list(other._without_names())

    __hash__ = None  # type: ignore[assignment]  # a module has dictionaries

    def _without_names(self) -> Iterator[tuple[object, ...]]:
        """Yields what the module says, and what each computation does, in the order in which they
        are called from the entry, then the others.
        """
        yield self.name, self.attributes, self.tables
        numbers: dict[str, int] = {}
        called = [self.entry.name]
        for name in itertools.chain(called, self.computations):  # `called` grows meanwhile
            if name not in numbers:
                numbers[name] = len(numbers)
                for i in self.computations[name].instructions:
                    called += i.called_computations
        for name in numbers:
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


@functools.lru_cache(maxsize=1024)
def _shared(opcodes: frozenset[str]) -> frozenset[str]:
    """Returns the set that other computations have, if it is equal: a large program has few of
    them.
    """
    return opcodes


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
