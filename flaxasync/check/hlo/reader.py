"""`parse`, which reads HLO text.

It reads what compilers print: for TPU, GPU and CPU, scheduled or not, with or without percent signs, operand shapes
and comments. It also reads fragments as documentation shows them, which are computations or bare instructions without
a HloModule line. Any other text raises HloError with line and column, and no text raises anything else. What an opcode
means is not checked here.
"""

import dataclasses
import re

from flaxasync.check.hlo.cursor import Cursor
from flaxasync.check.hlo.error import HloError
from flaxasync.check.hlo.module import Computation, HloModule, Instruction
from flaxasync.check.hlo.participants import check_participants
from flaxasync.check.hlo.shape_reader import ARRAY, read_shape, split_at_commas
from flaxasync.check.hlo.shapes import Shape

_BLANK_IN_LINE = re.compile(r"(?:[ \t\r]+|/\*.*?\*/)*", re.DOTALL)
_TABLE = re.compile(r"(FileNames|FunctionNames|FileLocations|StackFrames)\s*\n(?:\d+ [^\n]*\n?)*")
_HEADER = re.compile(r"HloModule\s+%?([\w.\-]+)")
_COMPUTATION = re.compile(r"(ENTRY\s+)?%?([\w.\-]+)\s*(?=[({])")
_INSTRUCTION = re.compile(r"(ROOT\s+)?%?([\w.\-]+)\s*=\s*")
_OPCODE = re.compile(r"\s*([a-z][\w\-]*)\(")
_ATTRIBUTE = re.compile(r"([A-Za-z_][\w\-]*)\s*=\s*")
_OPERAND = re.compile(r"%([\w.\-]+)")
_BARE_OPERAND = re.compile(r"(?:^|[\s}\])])%?([A-Za-z_][\w.\-]*)\s*$")
_COMMENT = re.compile(r"/\*.*?\*/", re.DOTALL)
# Most values and operand lists hold no bracket, string or comment. These find their end without matching brackets.
_SIMPLE_VALUE = re.compile(r'[^{}()\[\],"\n/]*(?=[,\n}])')
_SIMPLE_OPERANDS = re.compile(r'[^()"/{}\[\]]*\)')


def parse(text: str) -> HloModule:
    """Reads HLO text.

    Args:
      text: What `compiled.as_text()` returns, or an HLO dump, or a fragment of one.

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
        self._shapes: dict[str, Shape] = {}  # shapes by their text, because a program repeats few of them

    def module(self) -> HloModule:
        self.skip_blank()
        start = self.at
        header = _HEADER.match(self.text, self.at)
        name, attributes, tables = "", {}, ""
        if header:
            name, self.at = header[1], header.end()
            attributes = self.attributes()
            tables = self.tables()
        elif not self.text[self.at :].strip():
            raise self.error("the text is empty; expected a HloModule line")
        computations: dict[str, Computation] = {}
        bare: list[Instruction] = []  # the instructions that stand outside of any computation
        bare_names: set[str] = set()
        while True:
            self.skip_blank()
            if self.at >= len(self.text):
                break
            if _HEADER.match(self.text, self.at):
                raise self.error("a second HloModule: read one module at a time")
            if match := _COMPUTATION.match(self.text, self.at):
                computation = self.computation(match, is_complete=bool(header))
                if computation.name in computations:
                    raise self.error(f"computation '{computation.name}' is defined twice")
                computations[computation.name] = computation
            elif not header and (match := _INSTRUCTION.match(self.text, self.at)):
                begin = self.at
                bare.append(self.instruction(match))
                if bare[-1].name in bare_names:
                    raise self.error(f"instruction '{bare[-1].name}' is defined twice", begin)
                bare_names.add(bare[-1].name)
            else:
                raise self.error(f"expected {'a computation' if header else 'HLO text'}: got {self.excerpt()}")
        if bare:
            _mark_root(bare)
            entry = _free_name("entry", computations)
            computations[entry] = Computation(entry, tuple(bare), is_entry=True)
        if not computations:
            raise self.error("the module has no computation: the text is cut short", start)
        module = HloModule(name, computations, attributes, tables, is_fragment=not header)
        if header:
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

    def computation(self, match: re.Match, *, is_complete: bool) -> Computation:
        """Reads one computation. In a complete module every operand must be defined before its use."""
        begin, is_entry, name = self.at, bool(match[1]), match[2]
        self.at = match.end()
        if self.text[self.at] == "(":
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
            for operand in instruction.operands if is_complete else ():
                if operand not in names:
                    raise self.error(f"operand '{operand}' of '{instruction.name}' is not defined before it", start)
            names.add(instruction.name)
            instructions.append(instruction)
        if not instructions:
            raise self.error(f"computation '{name}' is empty", begin)
        _mark_root(instructions)
        thread = self.attributes().get("execution_thread", '"main"')
        if not re.fullmatch(r'"[^"\\]*"', thread):
            raise self.error(f"execution_thread must be a string: got {thread[:40]!r}")
        return Computation(name, tuple(instructions), is_entry, thread[1:-1])

    def instruction(self, match: re.Match) -> Instruction:
        line, name = self.line_here(), match[2]
        self.at = match.end()
        shape = self.shape()
        opcode = _OPCODE.match(self.text, self.at)
        if not opcode:
            self.skip_blank()
            raise self.error(f"expected an opcode and '(' in instruction '{name}': got {self.excerpt()}")
        inside = opcode.end()
        simple = _SIMPLE_OPERANDS.match(self.text, inside)
        self.at = simple.end() if simple else self.after_bracket(inside - 1)
        operands_text = self.text[inside : self.at - 1]
        operands: tuple[str, ...] = ()
        literal = ""
        if opcode[1] in ("constant", "parameter"):
            literal = operands_text.strip()
            if opcode[1] == "parameter" and not re.fullmatch(r"\d{1,9}", literal, re.ASCII):
                raise self.error(f"parameter '{name}' needs a number: got {literal[:40]!r}", inside)
        else:
            operands = self.operands(operands_text, inside)
        attributes = self.attributes()
        instruction = Instruction(name, shape, opcode[1], operands, attributes, bool(match[1]), literal, line)
        check_participants(instruction)
        return instruction

    def operands(self, text: str, at: int) -> tuple[str, ...]:
        """Reads `%a, f32[2]{0} %b, /*index=2*/c`. The shapes repeat what the definitions say, so they are dropped."""
        if "/*" in text:
            text = _COMMENT.sub("", text)
        if not text.strip():
            return ()
        names = _OPERAND.findall(text)
        if text.count(",") + 1 == len(names) and "(" not in text:
            return tuple(names)
        names = []
        for operand in split_at_commas(text):
            match = _BARE_OPERAND.search(operand)
            if not match and (match := _OPERAND.search(operand)) is None:
                raise self.error(f"expected the name of an operand: got {operand.strip()[:40]!r}", at)
            names.append(match[1])
        return tuple(names)

    def attributes(self) -> dict[str, str]:
        """Reads `, key=value, key=value`. It ends at the end of a line that no comma continues."""
        found: dict[str, str] = {}
        while True:
            ahead = _BLANK_IN_LINE.match(self.text, self.at).end()  # type: ignore[union-attr]
            if not self.text.startswith(",", ahead):
                self.at = ahead
                return found
            self.at = ahead + 1
            self.skip_blank()
            match = _ATTRIBUTE.match(self.text, self.at)
            if not match:
                raise self.error(f"expected an attribute 'name=value' after ',': got {self.excerpt()}")
            start = match.end()
            simple = _SIMPLE_VALUE.match(self.text, start)
            self.at = simple.end() if simple else self.end_of_value(start)
            value = self.text[start : self.at].strip()
            if match[1] == "device_ids" and found.get("replica_groups", "").startswith("mesh["):
                found["replica_groups"] += f", device_ids={value}"  # the one value that has a comma of its own
            else:
                found[match[1]] = value

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
    """Makes the last instruction the root, where none is marked as the root."""
    if not any(i.is_root for i in instructions):
        instructions[-1] = dataclasses.replace(instructions[-1], is_root=True)


def _free_name(name: str, taken: dict[str, Computation]) -> str:
    while name in taken:
        name += ".1"
    return name
