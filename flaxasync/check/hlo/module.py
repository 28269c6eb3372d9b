"""A compiled program as data: modules, computations, instructions and shapes of HLO text, frozen.

`parse` in `hlo_reader.py` makes these from text and `format_module` in `hlo_writer.py` makes text from these. Nothing
here decides what a program means; names, operands and attributes are kept as they were printed, and the properties
decode them on demand. Standard library only.
"""

import dataclasses
import functools
import json
import math
import re
from collections.abc import Iterator, Mapping

BITS = {"pred": 8, "token": 0, "opaque": 0, "bf16": 16, "c64": 64, "c128": 128}  # the rest carry theirs in the name
HBM, VMEM, SEMAPHORE, SMEM, HOST = 0, 1, 2, 4, 5  # S(n) in a TPU layout

_ALIAS = re.compile(r"\{([\d, ]*)\}\s*:\s*\(\s*(\d+)\s*,\s*\{([\d, ]*)\}")
_REFERENCE = re.compile(r"%?([\w.\-]+)")
_CALLS = ("calls", "to_apply", "body", "condition", "true_computation", "false_computation", "select", "scatter")
_CALL_LISTS = ("called_computations", "branch_computations")


class HloError(ValueError):
    """HLO text that cannot be read, with the line and the column (both from 1) where reading stopped."""

    def __init__(self, message: str, line: int = 0, column: int = 0):
        super().__init__(f"line {line}, column {column}: {message}" if line else message)
        self.line, self.column = line, column


@dataclasses.dataclass(frozen=True, slots=True)
class Layout:
    """Where an array lies: dimensions from minor to major, the text of its tiling, and its memory space (S(n))."""

    minor_to_major: tuple[int, ...] = ()
    tiling: str = ""
    memory_space: int = 0

    def __str__(self) -> str:
        space = f"S({self.memory_space})" if self.memory_space else ""
        rest = self.tiling + space
        return "{" + ",".join(map(str, self.minor_to_major)) + (":" + rest if rest else "") + "}"


@dataclasses.dataclass(frozen=True, slots=True)
class Shape:
    """An array's shape, or a tuple of shapes. A dimension is -1 where it is unbounded; `dynamic` marks bounded ones."""

    element_type: str
    dimensions: tuple[int, ...] = ()
    layout: Layout | None = None
    elements: tuple["Shape", ...] = ()
    dynamic: tuple[bool, ...] = ()

    @property
    def is_tuple(self) -> bool:
        return self.element_type == "tuple"

    @property
    def memory_space(self) -> int:
        return self.layout.memory_space if self.layout else HBM

    @property
    def bytes(self) -> int:
        """Bytes of the elements, without padding of tiles; of a tuple, the sum."""
        if self.is_tuple:
            return sum(element.bytes for element in self.elements)
        return -(-math.prod(max(d, 0) for d in self.dimensions) * element_bits(self.element_type) // 8)

    def leaves(self, path: tuple[int, ...] = ()) -> Iterator[tuple[tuple[int, ...], "Shape"]]:
        """Yields (index path, array shape) of every array in it."""
        if not self.is_tuple:
            yield path, self
        for i, element in enumerate(self.elements):
            yield from element.leaves((*path, i))

    def at(self, path: tuple[int, ...]) -> "Shape | None":
        """Returns the part at an index path, or None where there is no such part."""
        shape = self
        for i in path:
            if i >= len(shape.elements):
                return None
            shape = shape.elements[i]
        return shape

    def same_array(self, other: "Shape") -> bool:
        """Says whether element types and dimensions agree, whatever the layouts."""
        if self.is_tuple or other.is_tuple:
            return len(self.elements) == len(other.elements) and all(
                a.same_array(b) for a, b in zip(self.elements, other.elements, strict=True)
            )
        return (self.element_type, self.dimensions) == (other.element_type, other.dimensions)

    def without_layout(self) -> str:
        """Returns the text as a signature prints it: no layouts."""
        if self.is_tuple:
            return "(" + ", ".join(element.without_layout() for element in self.elements) + ")"
        dynamic = self.dynamic or (False,) * len(self.dimensions)
        dims = ("?" if d < 0 else f"<={d}" if b else str(d) for d, b in zip(self.dimensions, dynamic, strict=True))
        return f"{self.element_type}[{','.join(dims)}]"

    def __str__(self) -> str:
        if self.is_tuple:
            return "(" + ", ".join(map(str, self.elements)) + ")"
        return self.without_layout() + (str(self.layout) if self.layout else "")


@dataclasses.dataclass(frozen=True, slots=True)
class Alias:
    """One entry of output_to_operand_aliasing or input_output_alias: this output is this operand (or parameter)."""

    output: tuple[int, ...]
    operand: int
    operand_index: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Instruction:
    """One line of a program. `literal` is what stands in the parentheses of a constant or a parameter."""

    name: str
    shape: Shape
    opcode: str
    operands: tuple[str, ...] = ()
    attributes: Mapping[str, str] = dataclasses.field(default_factory=dict, hash=False)
    is_root: bool = False
    literal: str = ""
    line: int = dataclasses.field(default=0, compare=False)

    @property
    def control_predecessors(self) -> tuple[str, ...]:
        return tuple(_REFERENCE.findall(self.attributes.get("control-predecessors", "")))

    @property
    def backend_config(self) -> dict:
        """The compiler's notes as a dict; {} where there are none, or where they are no JSON object."""
        return _json_object(self.attributes.get("backend_config", ""))

    @property
    def called_computations(self) -> tuple[str, ...]:
        """Names of the computations that it calls, in the order of its attributes."""
        names: list[str] = []
        for key in _CALLS:
            if (value := self.attributes.get(key)) is not None:
                names.append(value.lstrip("%"))
        for key in _CALL_LISTS:
            names += _REFERENCE.findall(self.attributes.get(key, ""))
        return tuple(names)

    @property
    def aliases(self) -> tuple[Alias, ...]:
        """The entries of output_to_operand_aliasing."""
        return read_aliases(self.attributes.get("output_to_operand_aliasing", ""))

    @property
    def tuple_index(self) -> int | None:
        """The index of a get-tuple-element."""
        return _small_int(self.attributes.get("index", ""))

    @property
    def parameter_number(self) -> int | None:
        return _small_int(self.literal) if self.opcode == "parameter" else None

    @property
    def custom_call_target(self) -> str:
        return self.attributes.get("custom_call_target", "").strip('"')

    @property
    def estimated_cycles(self) -> int | None:
        """The compiler's own estimate, where it made one (TPU fusions, copies and reductions)."""
        window = self.backend_config.get("window_config")
        return _small_int(str(window.get("estimated_cycles", ""))) if isinstance(window, dict) else None


@dataclasses.dataclass(frozen=True)
class Computation:
    """A computation: its instructions in printed order, which is the schedule where the module is scheduled."""

    name: str
    instructions: tuple[Instruction, ...]
    is_entry: bool = False
    execution_thread: str = "main"

    @functools.cached_property
    def by_name(self) -> dict[str, Instruction]:
        return {i.name: i for i in self.instructions}

    @functools.cached_property
    def position(self) -> dict[str, int]:
        return {i.name: n for n, i in enumerate(self.instructions)}

    @functools.cached_property
    def users(self) -> dict[str, list[Instruction]]:
        """Who reads each instruction's result, each user once, in order."""
        users: dict[str, list[Instruction]] = {}
        for i in self.instructions:
            for operand in dict.fromkeys(i.operands):
                users.setdefault(operand, []).append(i)
        return users

    @property
    def root(self) -> Instruction | None:
        return next((i for i in reversed(self.instructions) if i.is_root), None)

    @functools.cached_property
    def parameters(self) -> dict[int, Instruction]:
        return {i.parameter_number: i for i in self.instructions if i.parameter_number is not None}


@dataclasses.dataclass(frozen=True)
class HloModule:
    """A program. `tables` keeps the text between header and first computation: files, functions, stack frames."""

    name: str
    computations: dict[str, Computation]
    attributes: Mapping[str, str] = dataclasses.field(default_factory=dict)
    tables: str = ""
    is_fragment: bool = False  # text without a HloModule line: operands may be defined nowhere

    @property
    def is_scheduled(self) -> bool:
        return self.attributes.get("is_scheduled") == "true"

    @property
    def num_partitions(self) -> int:
        return _small_int(self.attributes.get("num_partitions", "")) or 1

    @functools.cached_property
    def entry(self) -> Computation:
        """The entry computation; of a fragment without one, the last computation."""
        entries = [c for c in self.computations.values() if c.is_entry]
        return entries[0] if entries else list(self.computations.values())[-1]

    @property
    def input_output_aliases(self) -> tuple[Alias, ...]:
        return read_aliases(self.attributes.get("input_output_alias", ""))

    @functools.cached_property
    def callers(self) -> dict[str, list[tuple[Computation, Instruction]]]:
        """Who calls each computation."""
        callers: dict[str, list[tuple[Computation, Instruction]]] = {}
        for computation in self.computations.values():
            for instruction in computation.instructions:
                for name in dict.fromkeys(instruction.called_computations):
                    callers.setdefault(name, []).append((computation, instruction))
        return callers

    @property
    def instruction_count(self) -> int:
        return sum(len(c.instructions) for c in self.computations.values())

    def source(self, instruction: Instruction) -> str:
        """Returns "file:line" of the Python line that an instruction came from, or ""."""
        metadata = instruction.attributes.get("metadata", "")
        if match := re.search(r'source_file="([^"]*)" source_line=(\d+)', metadata):
            return f"{match[1]}:{match[2]}"
        match = re.search(r"stack_frame_id=(\d+)", metadata)
        return self._frames.get(match[1], "") if match else ""

    @functools.cached_property
    def _frames(self) -> dict[str, str]:
        sections: dict[str, dict[str, str]] = {}
        entries: dict[str, str] = {}
        for line in self.tables.splitlines():
            number, _, rest = line.strip().partition(" ")
            if number.isdigit():
                entries[number] = rest
            elif number:
                entries = sections.setdefault(number, {})
        files = {n: text.strip('"') for n, text in sections.get("FileNames", {}).items()}
        places = {}
        for n, text in sections.get("FileLocations", {}).items():
            if match := re.search(r"file_name_id=(\d+).*?\bline=(\d+)", text):
                places[n] = f"{files.get(match[1], '?')}:{match[2]}"
        frames = {}
        for n, text in sections.get("StackFrames", {}).items():
            if match := re.search(r"file_location_id=(\d+)", text):
                frames[n] = places.get(match[1], "")
        return frames


def element_bits(element_type: str) -> int:
    """Returns the bits of one element: 16 for bf16, 8 for pred and f8e4m3fn, 4 for s4; 0 for a token."""
    if element_type in BITS:
        return BITS[element_type]
    match = re.match(r"[a-z]+(\d+)", element_type)
    return int(match[1]) if match else 0


def read_aliases(text: str) -> tuple[Alias, ...]:
    """Decodes `{{1}: (0, {}), {2}: (1, {0})}`."""
    return tuple(Alias(_path(out), int(n[:9]), _path(index)) for out, n, index in _ALIAS.findall(text))


def _path(text: str) -> tuple[int, ...]:
    return tuple(int(part[:9]) for part in text.replace(" ", "").split(",") if part)


def _small_int(text: str) -> int | None:
    text = text.strip()
    return int(text) if text.isascii() and text.lstrip("-").isdigit() and len(text) < 19 and text != "-" else None


def _json_object(text: str) -> dict:
    if not text.startswith("{"):
        return {}
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
