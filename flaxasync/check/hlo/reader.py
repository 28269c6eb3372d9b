"""`parse`, which reads HLO text.

It reads what compilers print: for TPU, GPU and CPU, scheduled or not, with or without percent signs, operand shapes
and comments. Any other text raises HloError with line and column, and no text raises another exception. The reader does
not check what an opcode means.
"""

import dataclasses
import re
import sys

from flaxasync.check.hlo.cursor import Cursor
from flaxasync.check.hlo.error import HloError
from flaxasync.check.hlo.module import Computation, HloModule, Instruction
from flaxasync.check.hlo.participants import check_participants
from flaxasync.check.hlo.shape_reader import ARRAY, read_shape, split_at_commas
from flaxasync.check.hlo.shapes import Shape

_BLANK_IN_LINE = re.compile(r"(?:[ \t\r]+|/\*.*?\*/)*", re.DOTALL)
_TABLE = re.compile(r"(FileNames|FunctionNames|FileLocations|StackFrames)\s*\n(?:\d+ [^\n]*\n?)*")
_HEADER = re.compile(r"HloModule\s+%?([\w.\-]+)")
_HEADER_LINE = re.compile(r"^HloModule\s+%?([\w.\-]+)", re.MULTILINE)
_LOWERED = re.compile(r'(?:#\S* ?=[^\n]*\n\s*)*(?:module(?= [@{a])|"builtin\.module")')
_COMPUTATION = re.compile(r"(ENTRY\s+)?%?([\w.\-]+)\s*(?=[({])")
_INSTRUCTION = re.compile(r"(ROOT\s+)?%?([\w.\-]+)\s*=\s*")
_OPCODE = re.compile(r"\s*([a-z][\w\-]*)\(")
_ATTRIBUTE = re.compile(r"([A-Za-z_][\w\-]*)\s*=\s*")
_OPERAND = re.compile(r"%([\w.\-]+)")
_BARE_OPERAND = re.compile(r"(?:^|[\s}\])])%?([A-Za-z_][\w.\-]*)\s*$")
_NUMBER = re.compile(r"\d{1,9}", re.ASCII)
_MAIN = '"main"'
_COMMENT = re.compile(r"/\*.*?\*/", re.DOTALL)
# What XLA prints nearly always: an attribute in one line without comments, whose brackets are nested once at most, and
# the line of an instruction up to the end of its operands. Each is read by one match. Whatever does not match is read
# in steps, which also find the errors.
_PLAIN = r'[^{}()\[\]"/\n]'
_STRING = r'"[^"\\\n]*+(?:\\.[^"\\\n]*+)*+"'
_INNER = rf"\{{{_PLAIN}*+\}}|\[{_PLAIN}*+\]|\({_PLAIN}*+\)"
_VALUE = rf"(?:[^{{}}()\[\],\"\n/]++|{_STRING}|\{{(?:{_PLAIN}++|/(?![*/])|{_STRING}|{_INNER})*+\}}|{_INNER})*+"
_SIMPLE_ATTRIBUTE = re.compile(rf", ([A-Za-z_][\w\-]*)=({_VALUE})(?=[,\n}}])")
_TUPLE = r'\((?:[^()"/\n]++|/\*index=\d+\*/|\([^()"/\n]*+\))*+\)'
_LINE = re.compile(
    rf"[ \n]*+(ROOT )?%([\w.\-]+) = ({ARRAY.pattern}|{_TUPLE}) ([a-z][\w\-]*)\((?:([^()\"/{{}}\[\]]*+)\))?"
)
_FLAT = rf"(?:{_PLAIN}++|\[{_PLAIN}*+\]|/\*index=\d+\*/)*+"
_SIGNATURE = re.compile(rf"\({_FLAT}(?:\({_FLAT}\){_FLAT})*+\) -> ({ARRAY.pattern}|{_TUPLE}) \{{")


def parse(text: str) -> HloModule:
    """Reads HLO text: what `compiled.as_text()` returns, or an HLO dump.

    Returns:
      The module. Two modules are equal when they print alike.

    Raises:
      HloError: The text is not HLO, or is cut short, or names an operand or a computation that it does not define, or
        the devices that take part in a collective in an unknown way.
    """
    if not isinstance(text, str):
        raise HloError(
            f"HLO text must be a str: got {type(text).__name__}; use compiled.as_text(), or decode the bytes"
        )
    return _Reader(text).module()


class _Reader(Cursor):
    """Reads one text from its beginning to its end, one method per construct of the grammar."""

    def __init__(self, text: str):
        super().__init__(text)
        # Shapes and attributes by their text, because a program repeats few of them.
        self._shapes: dict[str, Shape] = {}
        self._attributes: dict[str, dict[str, str]] = {}  # of whole lines; nobody changes a dict after it was read
        self._values: dict[str, str] = {}  # the values that end a line

    def module(self) -> HloModule:
        self.skip_blank()
        if not self.text[self.at :].strip():
            raise self.error("the text is empty; expected a HloModule line")
        if _LOWERED.match(self.text, self.at):
            raise self.error(
                "this is a lowered program (StableHLO), not a compiled one: call .compile(), or compile_for"
            )
        start, header = self.at, _HEADER.match(self.text, self.at)
        if not header:
            raise self.error(f"expected HLO text: got {self.excerpt()}")
        self.at = header.end()
        attributes, tables = self.attributes(), self.tables()
        computations: dict[str, Computation] = {}
        while self.at < len(self.text):
            if _HEADER.match(self.text, self.at):
                names = _HEADER_LINE.findall(self.text)
                raise self.error(
                    f"a second HloModule: the text has {len(names)} of them ({', '.join(names[:4])}"
                    f"{', ...' if len(names) > 4 else ''}); split it before each line HloModule, and read one at a time"
                )
            match = _COMPUTATION.match(self.text, self.at)
            if not match:
                raise self.error(f"expected a computation: got {self.excerpt()}")
            computation = self.computation(match)
            if computation.name in computations:
                raise self.error(f"computation '{computation.name}' is defined twice")
            computations[computation.name] = computation
            self.skip_blank()
        if not computations:
            raise self.error("the module has no computation: the text is cut short", start)
        module = HloModule(header[1], computations, attributes, tables)
        _check_calls(module)
        return module

    def tables(self) -> str:
        """Steps over the tables of file names and stack frames, and returns their text."""
        start = self.at
        while self.at < len(self.text):
            self.skip_blank()
            match = _TABLE.match(self.text, self.at)
            if not match:
                break
            self.at = match.end()
        return self.text[start : self.at].strip()

    def computation(self, match: re.Match) -> Computation:
        """Reads one computation, in which every operand must be defined before its use."""
        begin, is_entry, name = self.at, bool(match[1]), match[2]
        self.at = match.end()
        if (signature := _SIGNATURE.match(self.text, self.at)) and signature[1] in self._shapes:
            self.at = signature.end() - 1
        elif self.text[self.at] == "(":
            self.at = self.after_bracket(self.at)  # the signature repeats the parameters
            self.skip_blank()
            if self.text.startswith("->", self.at):
                self.at += 2
                self.skip_blank()
                self.shape()
            self.skip_blank()
        if not self.text.startswith("{", self.at):
            raise self.error(f"expected '{{' to open computation '{name}': got {self.excerpt()}")
        self.at += 1
        instructions: list[Instruction] = []
        names: set[str] = set()
        while True:
            if line := _LINE.match(self.text, self.at):
                start = self.at = line.start(2)
                instruction = self.instruction_on_a_line(line)
            else:
                self.skip_blank()
                if self.text.startswith("}", self.at):
                    self.at += 1
                    break
                match = _INSTRUCTION.match(self.text, self.at)  # type: ignore[assignment]
                if not match:
                    if self.at >= len(self.text):
                        raise self.error(f"computation '{name}' is not closed: the text is cut short", begin)
                    raise self.error(f"expected an instruction in computation '{name}': got {self.excerpt()}")
                start = self.at
                instruction = self.instruction(match)
            if instruction.name in names:
                raise self.error(f"instruction '{instruction.name}' is defined twice in '{name}'", start)
            if not names.issuperset(instruction.operands):
                operand = next(operand for operand in instruction.operands if operand not in names)
                raise self.error(f"operand '{operand}' of '{instruction.name}' is not defined before it", start)
            names.add(instruction.name)
            instructions.append(instruction)
        if not instructions:
            raise self.error(f"computation '{name}' is empty", begin)
        _mark_root(instructions)
        thread = self.attributes().get("execution_thread", _MAIN)
        if thread != _MAIN and not re.fullmatch(r'"[^"\\]*"', thread):
            raise self.error(f"execution_thread must be a string: got {thread[:40]!r}")
        return Computation(name, tuple(instructions), is_entry, thread[1:-1])

    def instruction_on_a_line(self, match: re.Match) -> Instruction:
        """Reads an instruction from a match of `_LINE`, which has everything up to its operands."""
        line = self.line_here()
        root, name, shape_text, opcode, operands = match.group(1, 2, 3, 7, 8)
        name = sys.intern(name)
        shape = self._shapes.get(shape_text)
        if shape is None:
            self.at = match.start(3)
            shape = self.shape()
        inside = self.at = match.end()
        if operands is None:  # they have brackets or comments
            self.at = self.after_bracket(inside - 1)
            operands = self.text[inside : self.at - 1]
        return self.rest(name, shape, opcode, operands, bool(root), line)

    def instruction(self, match: re.Match) -> Instruction:
        """Reads an instruction in steps, from a match of its name."""
        line, name = self.line_here(), match[2]
        self.at = match.end()
        shape = self.shape()
        opcode = _OPCODE.match(self.text, self.at)
        if not opcode:
            self.skip_blank()
            raise self.error(f"expected an opcode and '(' in instruction '{name}': got {self.excerpt()}")
        self.at = self.after_bracket(opcode.end() - 1)
        operands = self.text[opcode.end() : self.at - 1]
        return self.rest(name, shape, opcode[1], operands, bool(match[1]), line)

    def rest(self, name: str, shape: Shape, opcode: str, inside: str, is_root: bool, line: int) -> Instruction:
        """Reads what follows the bracket of an instruction. `inside` is the text in the bracket."""
        operands: tuple[str, ...] = ()
        literal = ""
        if opcode in ("constant", "parameter"):
            literal = inside.strip()
            if opcode == "parameter" and not _NUMBER.fullmatch(literal):
                raise self.error(f"parameter '{name}' needs a number: got {literal[:40]!r}", self.at - 1 - len(inside))
        else:
            operands = self.operands(inside)
        attributes = self.attributes_of_line()
        instruction = Instruction(name, shape, opcode, operands, attributes, is_root, literal, line)
        if "replica_groups" in attributes or "source_target_pairs" in attributes:
            check_participants(instruction)
        return instruction

    def operands(self, text: str) -> tuple[str, ...]:
        """Reads the text `%a, f32[2]{0} %b, /*index=2*/c` before the bracket that closes at the current position.

        The shapes repeat what the definitions say, so they are dropped.
        """
        names = [sys.intern(name) for name in _OPERAND.findall(text)]  # each is also the name of an instruction
        if text.count(",") + 1 == len(names) and "(" not in text and "/*" not in text:
            return tuple(names)
        at = self.at - 1 - len(text)
        if "/*" in text:
            text = _COMMENT.sub("", text)
        if not text.strip():
            return ()
        names = []
        for operand in split_at_commas(text):
            match = _BARE_OPERAND.search(operand)
            if not match and (match := _OPERAND.search(operand)) is None:
                raise self.error(f"expected the name of an operand: got {operand.strip()[:40]!r}", at)
            names.append(match[1])
        return tuple(names)

    def attributes_of_line(self) -> dict[str, str]:
        """Reads the attributes of an instruction. Lines that end alike get the same dict."""
        start = self.at
        end = self.text.find("\n", start)
        tail = self.text[start:end] if end >= 0 else None
        if tail is not None and (known := self._attributes.get(tail)) is not None:
            self.at = end
            return known
        found = self.attributes()
        if tail is not None and self.at == end:
            self._attributes[tail] = found
        return found

    def attributes(self) -> dict[str, str]:
        """Reads `, key=value, key=value`. A line break ends the list unless a comma precedes it."""
        found: dict[str, str] = {}
        while True:
            while (simple := _SIMPLE_ATTRIBUTE.match(self.text, self.at)) and simple[1] != "device_ids":
                found[simple[1]] = simple[2].strip()
                self.at = simple.end()
            if self.text.startswith("\n", self.at):
                return found
            ahead = _BLANK_IN_LINE.match(self.text, self.at).end()  # type: ignore[union-attr]
            if not self.text.startswith(",", ahead):
                self.at = ahead
                return found
            self.at = ahead + 1
            self.skip_blank()
            match = _ATTRIBUTE.match(self.text, self.at)
            if not match:
                raise self.error(f"expected an attribute 'name=value' after ',': got {self.excerpt()}")
            self.at = match.end()
            value = self.value()
            if match[1] == "device_ids" and found.get("replica_groups", "").startswith("mesh["):
                found["replica_groups"] += f", device_ids={value}"  # the one value that has a comma of its own
            else:
                found[match[1]] = value

    def value(self) -> str:
        """Reads the value of an attribute. Equal values that end their lines share one str."""
        start, end = self.at, self.text.find("\n", self.at)
        rest = self.text[start:end] if end >= 0 else ""
        if rest in self._values:
            self.at = end
            return self._values[rest]
        self.at = self.end_of_value(start)
        value = self.text[start : self.at].strip()
        if self.at == end and value == rest:
            self._values[rest] = value
        return value

    def shape(self) -> Shape:
        if self.text.startswith("(", self.at):
            end = self.after_bracket(self.at)
        elif match := ARRAY.match(self.text, self.at):
            end = match.end()
        else:
            raise self.error(f"expected a shape: got {self.excerpt()}")
        text = self.text[self.at : end]
        shape = self._shapes.get(text)
        if shape is None:
            try:
                shape = self._shapes[text] = read_shape(_COMMENT.sub("", text) if "/*" in text else text)
            except HloError as error:
                raise self.error(str(error)) from None
        self.at = end
        return shape


def _check_calls(module: HloModule) -> None:
    """Raises HloError if an instruction calls a computation that the text does not define."""
    for computation in module.computations.values():
        for i in computation.instructions:
            for name in i.called_computations:
                if name not in module.computations:
                    raise HloError(f"'{i.name}' calls '{name}', which the text does not define", i.line, 1)


def _mark_root(instructions: list[Instruction]) -> None:
    """Makes the last instruction the root if no instruction is marked as the root."""
    if not instructions[-1].is_root and not any(i.is_root for i in instructions):
        instructions[-1] = dataclasses.replace(instructions[-1], is_root=True)
