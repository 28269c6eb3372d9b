"""HLO text to data: `parse`.

Reads what compilers print (TPU, GPU, CPU; scheduled or not; with or without `%`, operand shapes and comments) and
also fragments: computations or bare instructions without a HloModule line, as documentation shows them. Text that is
none of these raises HloError with line and column; nothing else is raised, whatever the text. What an opcode means is
not checked here.
"""

import dataclasses
import re

from flaxasync.check.hlo.module import Computation, HloError, HloModule, Instruction, Shape
from flaxasync.check.hlo.shape_reader import ARRAY, read_shape, split_at_commas

_BLANK = re.compile(r"(?:\s+|//[^\n]*|/\*(?s:.*?)\*/)*")
_BLANK_IN_LINE = re.compile(r"(?:[ \t\r]+|/\*.*?\*/)*", re.DOTALL)
_TABLE = re.compile(r"(FileNames|FunctionNames|FileLocations|StackFrames)\s*\n(?:\d+ [^\n]*\n?)*")
_HEADER = re.compile(r"HloModule\s+%?([\w.\-]+)")
_COMPUTATION = re.compile(r"(ENTRY\s+)?%?([\w.\-]+)\s*(?=[({])")
_INSTRUCTION = re.compile(r"(ROOT\s+)?%?([\w.\-]+)\s*=\s*")
_OPCODE = re.compile(r"\s*([a-z][\w\-]*)\(")
_ATTRIBUTE = re.compile(r"([A-Za-z_][\w\-]*)\s*=\s*")
_SIMPLE_VALUE = re.compile(r'[^{}()\[\],"\n/]*(?=[,\n}])')
_SIMPLE_OPERANDS = re.compile(r'[^()"/{}\[\]]*\)')
_OPERAND = re.compile(r"%([\w.\-]+)")
_BARE_OPERAND = re.compile(r"(?:^|[\s}\])])%?([A-Za-z_][\w.\-]*)\s*$")
_COMMENT = re.compile(r"/\*.*?\*/", re.DOTALL)
_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|/\*.*?\*/|[{}()\[\],\n"]', re.DOTALL)
_CLOSER = {"{": "}", "(": ")", "[": "]"}


def parse(text: str) -> HloModule:
    """Reads HLO text.

    Args:
      text: what `compiled.as_text()` returns, or an HLO dump, or a fragment of one.

    Returns:
      The module. Two modules are equal when they print alike.

    Raises:
      HloError: the text is not HLO, or is cut short, or names an operand or a computation that it does not define.
    """
    if not isinstance(text, str):
        raise HloError(
            f"HLO text must be a str: got {type(text).__name__}; use compiled.as_text(), or decode the bytes"
        )
    return _Reader(text).module()


class _Reader:
    """A cursor over one text."""

    def __init__(self, text: str):
        self.text = text
        self.at = 0
        self.shapes: dict[str, Shape] = {}  # a program repeats few shapes
        self.line, self.counted = 1, 0

    def error(self, message: str, at: int | None = None) -> HloError:
        at = min(self.at if at is None else at, len(self.text))
        return HloError(message, self.text.count("\n", 0, at) + 1, at - self.text.rfind("\n", 0, at))

    def module(self) -> HloModule:
        self.skip_blank()
        start = self.at
        header = _HEADER.match(self.text, self.at)
        name, attributes, tables = "", {}, ""
        if header:
            name, self.at = header[1], header.end()
            attributes = self.attributes()
            tables = self.skip_tables()
        elif not self.text[self.at :].strip():
            raise self.error("the text is empty; expected a HloModule line")
        computations: dict[str, Computation] = {}
        loose: list[Instruction] = []
        named: set[str] = set()
        while True:
            self.skip_blank()
            if self.at >= len(self.text):
                break
            if _HEADER.match(self.text, self.at):
                raise self.error("a second HloModule: read one module at a time")
            if match := _COMPUTATION.match(self.text, self.at):
                computation = self.computation(match, whole=bool(header))
                if computation.name in computations:
                    raise self.error(f"computation '{computation.name}' is defined twice")
                computations[computation.name] = computation
            elif not header and (match := _INSTRUCTION.match(self.text, self.at)):
                where = self.at
                loose.append(self.instruction(match))
                if loose[-1].name in named:
                    raise self.error(f"instruction '{loose[-1].name}' is defined twice", where)
                named.add(loose[-1].name)
            else:
                raise self.error(f"expected {'a computation' if header else 'HLO text'}: got {self.excerpt()}")
        if loose:
            _mark_root(loose)
            name_of_loose = _free_name("entry", computations)
            computations[name_of_loose] = Computation(name_of_loose, tuple(loose), is_entry=True)
        if not computations:
            raise self.error("the module has no computation: the text is cut short", start)
        module = HloModule(name, computations, attributes, tables, is_fragment=not header)
        if header:
            self.check_calls(module)
        return module

    def skip_blank(self) -> None:
        match = _BLANK.match(self.text, self.at)
        self.at = match.end() if match else self.at

    def excerpt(self) -> str:
        return (
            repr(self.text[self.at : self.at + 40].split("\n")[0])
            if self.at < len(self.text)
            else "the end of the text"
        )

    def skip_tables(self) -> str:
        """Steps over the tables of file names and stack frames; returns their text."""
        start = self.at
        while self.at < len(self.text):
            self.skip_blank()
            match = _TABLE.match(self.text, self.at)
            if not match:
                break
            self.at = match.end()
        return self.text[start : self.at].strip()

    def computation(self, match: re.Match, *, whole: bool) -> Computation:
        opened, entry, name = self.at, bool(match[1]), match[2]
        self.at = match.end()
        if self.text[self.at] == "(":
            self.at = self.balanced(self.at)  # the signature repeats the parameters
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
                    raise self.error(f"computation '{name}' is not closed: the text is cut short", opened)
                raise self.error(f"expected an instruction in computation '{name}': got {self.excerpt()}")
            where = self.at
            instruction = self.instruction(match)
            if instruction.name in names:
                raise self.error(f"instruction '{instruction.name}' is defined twice in '{name}'", where)
            for operand in instruction.operands if whole else ():
                if operand not in names:
                    raise self.error(f"operand '{operand}' of '{instruction.name}' is not defined before it", where)
            names.add(instruction.name)
            instructions.append(instruction)
        if not instructions:
            raise self.error(f"computation '{name}' is empty", opened)
        _mark_root(instructions)
        thread = self.attributes().get("execution_thread", '"main"')
        if not re.fullmatch(r'"[^"\\]*"', thread):
            raise self.error(f"execution_thread must be a string: got {thread[:40]!r}")
        return Computation(name, tuple(instructions), entry, thread[1:-1])

    def instruction(self, match: re.Match) -> Instruction:
        start = self.at
        self.line += self.text.count("\n", self.counted, start)
        self.counted = start
        line = self.line
        name = match[2]
        self.at = match.end()
        shape = self.shape()
        opcode = _OPCODE.match(self.text, self.at)
        if not opcode:
            self.skip_blank()
            raise self.error(f"expected an opcode and '(' in instruction '{name}': got {self.excerpt()}")
        inside = opcode.end()
        simple = _SIMPLE_OPERANDS.match(self.text, inside)
        self.at = simple.end() if simple else self.balanced(inside - 1)
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
        return Instruction(name, shape, opcode[1], operands, attributes, bool(match[1]), literal, line)

    def operands(self, text: str, at: int) -> tuple[str, ...]:
        """Reads `%a, f32[2]{0} %b, /*index=2*/c`; the shapes repeat what the definitions say and are dropped."""
        if "/*" in text:
            text = _COMMENT.sub("", text)
        if not text.strip():
            return ()
        names = _OPERAND.findall(text)
        if text.count(",") + 1 == len(names) and "(" not in text:
            return tuple(names)
        names = []
        for part in split_at_commas(text):
            match = _BARE_OPERAND.search(part)
            if not match and (match := _OPERAND.search(part)) is None:
                raise self.error(f"expected the name of an operand: got {part.strip()[:40]!r}", at)
            names.append(match[1])
        return tuple(names)

    def attributes(self) -> dict[str, str]:
        """Reads `, key=value, key=value`, which ends at the end of a line that no comma continues."""
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
            self.at = simple.end() if simple else self.value_end(start)
            found[match[1]] = self.text[start : self.at].strip()

    def value_end(self, at: int) -> int:
        """Returns where an attribute's value ends: at a comma, a line's end or a closing brace outside any bracket."""
        while token := _TOKEN.search(self.text, at):
            mark = token[0]
            if mark in "{([":
                at = self.balanced(token.start())
            elif mark in ",\n}":
                return token.start()
            elif mark in ')]"':
                raise self.error(f"unexpected {mark!r}", token.start())
            else:
                at = token.end()
        return len(self.text)

    def balanced(self, at: int) -> int:
        """Returns the place after the bracket that closes the one at `at`; strings and comments hide theirs."""
        closers = [_CLOSER[self.text[at]]]
        for token in _TOKEN.finditer(self.text, at + 1):
            mark = token[0]
            if mark in "{([":
                closers.append(_CLOSER[mark])
            elif mark in "})]":
                if mark != closers.pop():
                    raise self.error(f"unexpected {mark!r}", token.start())
                if not closers:
                    return token.end()
            elif mark == '"':
                raise self.error("a string is not closed: the text is cut short", token.start())
        raise self.error(f"{self.text[at]!r} is not closed: the text is cut short", at)

    def shape(self) -> Shape:
        if self.text.startswith("(", self.at):
            end = self.balanced(self.at)
        elif match := ARRAY.match(self.text, self.at):
            end = match.end()
        else:
            raise self.error(f"expected a shape: got {self.excerpt()}")
        text = self.text[self.at : end]
        shape = self.shapes.get(text)
        if shape is None:
            try:
                shape = self.shapes[text] = read_shape(_COMMENT.sub("", text) if "/*" in text else text)
            except HloError as error:
                raise self.error(str(error)) from None
        self.at = end
        return shape

    def check_calls(self, module: HloModule) -> None:
        for computation in module.computations.values():
            for i in computation.instructions:
                for name in i.called_computations:
                    if name not in module.computations:
                        raise HloError(f"'{i.name}' calls '{name}', which the text does not define", i.line, 1)


def _mark_root(instructions: list[Instruction]) -> None:
    """The last instruction is the root where none is marked."""
    if not any(i.is_root for i in instructions):
        instructions[-1] = dataclasses.replace(instructions[-1], is_root=True)


def _free_name(name: str, taken: dict[str, Computation]) -> str:
    while name in taken:
        name += ".1"
    return name
