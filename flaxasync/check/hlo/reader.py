"""`parse`, which reads HLO text.

It reads what compilers print: for TPU, GPU and CPU, scheduled or not, with or without percent
signs, operand shapes and comments. Any other text raises HloError with line and column, and no text
raises another exception. The reader does not check what an opcode means.
"""

import dataclasses
import graphlib
import itertools
import json
import re
import sys
from collections.abc import Iterator

from flaxasync.check.hlo.async_forms import to_generic
from flaxasync.check.hlo.module import Computation, HloModule, Instruction
from flaxasync.check.hlo.participants import MAX_DEVICES, check_participants
from flaxasync.check.hlo.shapes import ARRAY, HloError, Shape, read_shape, split_at_commas

# Blanks, line ends and comments. What was matched is not given back: to try each way to divide a
# long gap would take exponential time.
_GAP = r"(?:\s++|//[^\n]*+|/\*(?s:.*?)\*/)*+"
_BLANK = re.compile(_GAP)
_TABLE = re.compile(r"(FileNames|FunctionNames|FileLocations|StackFrames)\s*\n(?:\d+ [^\n]*\n?)*")
_HEADER = re.compile(r"HloModule\s+%?([\w.\-]+)")
_HEADER_LINE = re.compile(r"^HloModule\s+%?([\w.\-]+)", re.MULTILINE)
_LOWERED = re.compile(r'(?:#\S* ?=[^\n]*\n\s*)*(?:module(?= [@{a])|"builtin\.module")')
# text without brackets, strings and comments
_PLAIN = r'[^(){}\[\]"/]*+'
# The name of a computation, and then its signature and the brace that opens it, if the signature is
# plain: an array without layouts. It repeats the parameters. A brace that touches the array begins a
# layout.
_COMPUTATION = re.compile(
    r"(?P<entry>ENTRY\s+)?%?(?P<name>[\w.\-]+)\s*(?=[({])"
    rf"(?:\({_PLAIN}(?:\[{_PLAIN}\]{_PLAIN})*+\)\s*->\s*"
    rf"(?P<result>[a-z][a-z0-9]*\[{_PLAIN}\])\s+\{{)?"
)
# an opcode, with its operands unless they have brackets
_OPERATION = rf"\s*(?P<opcode>[a-z][\w\-]*)\((?:(?P<operands>{_PLAIN})\))?"
_OPERATION_ALONE = re.compile(_OPERATION)
# a name, and then the shape and the operation if the shape is an array
_INSTRUCTION = re.compile(
    _GAP
    + r"(?P<head>(?P<root>ROOT\s+)?%?(?P<name>[\w.\-]+))\s*=\s*"
    + rf"(?:(?P<shape>{ARRAY.pattern}){_OPERATION})?"
)
# an attribute, with its value if that is without brackets, strings and comments, or with one pair of
# braces around strings, as most are
_ATTRIBUTE = re.compile(
    _GAP
    + ","
    + _GAP
    + r"""(?P<key>[A-Za-z_][\w\-]*)\s*=\s*
        (?: (?P<value> [^(){}\[\]"/,\n]*+
                     | \{ [^(){}\[\]"/]* (?: "[^"\\]*" [^(){}\[\]"/]* )* \}
            ) (?=[,\n])
        )?""",
    re.VERBOSE,
)
_OPERAND = re.compile(r"%([\w.\-]+)")
_BARE_OPERAND = re.compile(r"(?:^|[\s}\])])%?([A-Za-z_][\w.\-]*)\s*$")
_NUMBER = re.compile(r"\d{1,9}", re.ASCII)
_COMMENT = re.compile(r"/\*(?s:.*?)\*/|//[^\n]*")
_MAIN = '"main"'
_CONTINUED = re.compile(_GAP + ",")
# a string, a comment, a pair of brackets without any of these or other brackets, or one character
_TOKEN = re.compile(
    r""" "[^"\\]*(?:\\.[^"\\]*)*"
      | /\*.*?\*/ | //[^\n]*
      | \[[^{}()\[\]"/]*\] | \{[^{}()\[\]"/]*\} | \([^{}()\[\]"/]*\)
      | [{}()\[\],\n"] | /\*""",
    re.DOTALL | re.VERBOSE,
)
_JSON = json.JSONDecoder()
_CLOSER = {"{": "}", "(": ")", "[": "]"}
_CLOSING = frozenset(_CLOSER.values())
# The greatest depth of calls within calls that is read. Real programs stay below thirty.
MAX_CALLS = 100


def parse(text: str) -> HloModule:
    """Reads HLO text: what `compiled.as_text()` returns, or an HLO dump.

    Returns:
      The module. Asynchronous operations in the short form, like `custom-call-start`, are in it as
      async-start, with the computation that the short form stands for.

    Raises:
      HloError: The text is not HLO, or is cut short, or names an operand or a computation that it
        does not define, or the devices that take part in a collective in an unknown way.
    """
    if not isinstance(text, str):
        raise HloError(
            f"HLO text must be a str: got {type(text).__name__}; use compiled.as_text(), or decode "
            "the bytes"
        )
    return to_generic(_Reader(text).module())


class _Reader:
    """Reads one text from its beginning to its end, with one method for each construct of the
    grammar.

    A program repeats few shapes, names and attributes. Those of equal text are read once and
    shared, which keeps the module of a large dump small.
    """

    def __init__(self, text: str):
        self.text = text
        self.at = 0  # the index of the next character to read
        # the line at an earlier index, so that lines are counted once
        self._line = 1
        self._counted = 0
        self._shapes: dict[str, Shape] = {}
        # by the rest of a line; nobody changes one after it was read
        self._attributes: dict[str, dict[str, str]] = {}

    def module(self) -> HloModule:
        self.skip_blank()
        if not self.text[self.at :].strip():
            raise self.error("the text is empty; expected a HloModule line")
        if _LOWERED.match(self.text, self.at):
            raise self.error(
                "this is a lowered program (StableHLO), not a compiled one: call .compile(), or "
                "compile_for"
            )
        start = self.at
        header = _HEADER.match(self.text, self.at)
        if not header:
            raise self.error(f"expected HLO text: got {self.excerpt()}")
        self.at = header.end()
        attributes = self.attributes()
        tables = self.tables()
        self.check_devices(attributes, start)
        computations: dict[str, Computation] = {}
        while self.at < len(self.text):
            if _HEADER.match(self.text, self.at):
                names = _HEADER_LINE.findall(self.text)
                raise self.error(
                    f"a second HloModule: the text has {len(names)} of them ({', '.join(names[:4])}"
                    f"{', ...' if len(names) > 4 else ''}); split it before each line HloModule, "
                    "and read one at a time"
                )
            computation = self.computation()
            if computation.name in computations:
                raise self.error(f"computation '{computation.name}' is defined twice")
            computations[computation.name] = computation
            self.skip_blank()
        if not computations:
            raise self.error("the module has no computation: the text is cut short", start)
        _check_calls(computations)
        return HloModule(header[1], computations, attributes, tables)

    def check_devices(self, attributes: dict[str, str], header: int) -> None:
        """Refuses a program for more devices than one list of them should have."""
        devices = 1
        for key in ("num_partitions", "replica_count"):
            text = attributes.get(key, "1")
            devices *= int(text) if _NUMBER.fullmatch(text) else 0
            if not 0 < devices <= MAX_DEVICES:
                raise self.error(
                    f"{key} must be between 1 and {MAX_DEVICES} in all: got {text[:40]!r}", header
                )

    def tables(self) -> str:
        """Steps over the tables of file names and stack frames, and returns their text."""
        start = self.at
        self.skip_blank()
        while match := _TABLE.match(self.text, self.at):
            self.at = match.end()
            self.skip_blank()
        return self.text[start : self.at].strip()

    def computation(self) -> Computation:
        """Reads one computation, in which every operand must be defined before its use."""
        begin = self.at
        match = _COMPUTATION.match(self.text, self.at)
        if not match:
            raise self.error(f"expected a computation: got {self.excerpt()}")
        name = match["name"]
        if match["result"] is None:
            self.at = match.end()
            self.signature(name)
        else:  # as most are, which would take a tenth longer in `signature`
            self.at = match.start("result")
            self.shape_in(match["result"])
            self.at = match.end()
        instructions: list[Instruction] = []
        names: set[str] = set()
        while head := _INSTRUCTION.match(self.text, self.at):
            start = head.start("head")
            instruction = self.instruction(head)
            if instruction.name in names:
                raise self.error(
                    f"instruction '{instruction.name}' is defined twice in '{name}'", start
                )
            if not names.issuperset(instruction.operands):
                operand = next(operand for operand in instruction.operands if operand not in names)
                raise self.error(
                    f"operand '{operand}' of '{instruction.name}' is not defined before it", start
                )
            names.add(instruction.name)
            instructions.append(instruction)
        if not self.take("}"):
            if self.at >= len(self.text):
                raise self.error(
                    f"computation '{name}' is not closed: the text is cut short", begin
                )
            raise self.error(
                f"expected an instruction in computation '{name}': got {self.excerpt()}"
            )
        if not instructions:
            raise self.error(f"computation '{name}' is empty", begin)
        if not any(i.is_root for i in instructions):  # where none is marked, the last one is it
            instructions[-1] = dataclasses.replace(instructions[-1], is_root=True)
        thread = self.attributes().get("execution_thread", _MAIN)
        if thread != _MAIN and not re.fullmatch(r'"[^"\\]*"', thread):
            raise self.error(f"execution_thread must be a string: got {thread[:40]!r}")
        return Computation(name, tuple(instructions), match["entry"] is not None, thread[1:-1])

    def signature(self, name: str) -> None:
        """Steps over a signature that `_COMPUTATION` did not match, and the brace that opens the
        computation.
        """
        if self.text.startswith("(", self.at):
            self.at = self.end_of_bracket(self.at)
            if self.take("->"):
                self.skip_blank()
                self.shape()
        if not self.take("{"):
            raise self.error(f"expected '{{' to open computation '{name}': got {self.excerpt()}")

    def instruction(self, begun: re.Match) -> Instruction:
        """Reads one instruction, which begins as `_INSTRUCTION` matched."""
        line = self.line_at(begun.start("head"))
        is_root = begun["root"] is not None
        name = sys.intern(begun["name"])
        if begun["shape"] is None:
            self.at = begun.end()
            shape = self.shape()
            operation = self.operation(name)
        else:
            self.at = begun.start("shape")
            shape = self.shape_in(begun["shape"])
            operation = begun
        opcode = sys.intern(operation["opcode"])
        begin = operation.end("opcode") + 1
        inside = operation["operands"]
        if inside is None:
            self.at = self.end_of_bracket(begin - 1)
            inside = self.text[begin : self.at - 1]
        else:
            self.at = operation.end()
        if opcode in ("constant", "parameter"):
            literal = inside.strip()
        else:
            literal = ""
        if opcode == "parameter" and not _NUMBER.fullmatch(literal):
            raise self.error(f"parameter '{name}' needs a number: got {literal[:40]!r}", begin)
        operands: tuple[str, ...] = ()
        if opcode not in ("constant", "parameter"):
            operands = self.operands(inside, begin)
        attributes = self.attributes_of_line()
        instruction = Instruction(name, shape, opcode, operands, attributes, is_root, literal, line)
        check_participants(instruction)
        return instruction

    def operation(self, name: str) -> re.Match:
        """Matches the opcode and the operands behind a shape that `_INSTRUCTION` did not match. The
        name of the instruction is for a message.
        """
        match = _OPERATION_ALONE.match(self.text, self.at)
        if not match:
            self.skip_blank()
            raise self.error(
                f"expected an opcode and '(' in instruction '{name}': got {self.excerpt()}"
            )
        return match

    def operands(self, text: str, begin: int) -> tuple[str, ...]:
        """Reads `%a, f32[2]{0} %b, /*index=2*/c`. The shapes repeat what the definitions say, so
        they are dropped.
        """
        # each is also the name of an instruction
        names = [sys.intern(name) for name in _OPERAND.findall(text)]
        if text.count(",") + 1 == len(names) and "(" not in text and "/" not in text:
            return tuple(names)
        text = _COMMENT.sub("", text)
        names = []
        for operand in split_at_commas(text) if text.strip() else ():
            match = _BARE_OPERAND.search(operand) or _OPERAND.search(operand)
            if not match:
                raise self.error(
                    f"expected the name of an operand: got {operand.strip()[:40]!r}", begin
                )
            names.append(sys.intern(match[1]))
        return tuple(names)

    def attributes_of_line(self) -> dict[str, str]:
        """Reads the attributes of an instruction. Lines that end alike get the same dict."""
        end = self.text.find("\n", self.at)
        if end < 0:
            return self.attributes()
        rest = self.text[self.at : end]
        if rest in self._attributes and not _CONTINUED.match(self.text, end):
            self.at = end
            return self._attributes[rest]
        found = self.attributes()
        if self.at == end:  # and no comma continues the list on the next line
            self._attributes[rest] = found
        return found

    def attributes(self) -> dict[str, str]:
        """Reads `, key=value, key=value`. The list goes on over a line break that has a comma
        before or after it.
        """
        found: dict[str, str] = {}
        while match := _ATTRIBUTE.match(self.text, self.at):
            key = match["key"]
            value = match["value"]
            begin = match.end()
            if value is None:
                self.at = self.end_of_value(begin)
                value = self.text[begin : self.at]
            else:
                self.at = begin
            value = sys.intern(value.strip())
            if key == "device_ids" and found.get("replica_groups", "").startswith("mesh["):
                # the one value that has a comma of its own
                found["replica_groups"] += f", device_ids={value}"
            else:
                found[key] = value
        if comma := _CONTINUED.match(self.text, self.at):
            self.at = comma.end()
            self.skip_blank()
            raise self.error(f"expected an attribute 'name=value' after ',': got {self.excerpt()}")
        return found

    def end_of_value(self, begin: int) -> int:
        """Returns the index behind the value of an attribute: of the comma, the line end or the
        brace after it.
        """
        # most of a compiled text are the JSON objects of backend_config
        if self.text.startswith('{"', begin):
            try:
                _, end = _JSON.raw_decode(self.text, begin)
            except (ValueError, RecursionError):
                end = begin
            if end > begin and self.text.startswith((",", "\n", "}"), end):
                return end
        for token, _ in self.outside_brackets(begin):
            mark = token[0]
            if mark in (",", "\n", "}") or mark.startswith("//"):
                return token.start()
            if mark in _CLOSING:
                raise self.error(f"unexpected {mark!r}", token.start())
        return len(self.text)

    def shape(self) -> Shape:
        if match := ARRAY.match(self.text, self.at):
            end = match.end()
        elif self.text.startswith("(", self.at):
            end = self.end_of_bracket(self.at)
        elif self.text.startswith("b(", self.at):
            end = self.end_of_bracket(self.at + 1)
        else:
            raise self.error(f"expected a shape: got {self.excerpt()}")
        shape = self.shape_in(self.text[self.at : end])
        self.at = end
        return shape

    def shape_in(self, text: str) -> Shape:
        """Reads the text of a shape. An error is at the current position, where it begins."""
        if text not in self._shapes:
            try:
                self._shapes[text] = read_shape(_COMMENT.sub("", text))
            except HloError as error:
                raise self.error(str(error)) from None
        return self._shapes[text]

    def error(self, message: str, at: int | None = None) -> HloError:
        """Makes an error with the line and column of an index, by default of the current
        position.
        """
        at = min(self.at if at is None else at, len(self.text))
        return HloError(
            message, self.text.count("\n", 0, at) + 1, at - self.text.rfind("\n", 0, at)
        )

    def line_at(self, at: int) -> int:
        """Returns the line of an index, which must not be before that of the last call."""
        self._line += self.text.count("\n", self._counted, at)
        self._counted = at
        return self._line

    def skip_blank(self) -> None:
        """Steps over blanks, line ends and comments."""
        match = _BLANK.match(self.text, self.at)
        self.at = match.end() if match else self.at

    def take(self, mark: str) -> bool:
        """Steps over blanks, and then over a mark if it comes next. Returns whether it does."""
        self.skip_blank()
        is_next = self.text.startswith(mark, self.at)
        self.at += len(mark) if is_next else 0
        return is_next

    def excerpt(self) -> str:
        """Returns the text at the current position, for a message."""
        if self.at >= len(self.text):
            return "the end of the text"
        line, end, _ = self.text[self.at : self.at + 40].partition("\n")
        return repr(line) + (
            ", where the text ends" if not end and self.at + 40 >= len(self.text) else ""
        )

    def end_of_bracket(self, at: int) -> int:
        """Returns the index behind the bracket that opens at an index."""
        _, end = next(self.outside_brackets(at))
        return end

    def outside_brackets(self, at: int) -> Iterator[tuple[re.Match, int]]:
        """Yields the tokens that no bracket encloses, each with the index of its end: of a bracket
        the token that opens it, and the index behind it.

        HloError says which bracket, string or comment is not closed, or closes too early.
        """
        opened: list[re.Match] = []
        for token in _TOKEN.finditer(self.text, at):
            mark = token[0]
            if mark in ('"', "/*"):  # one that is closed is one token with what is in it
                what = "string" if mark == '"' else "comment"
                raise self.error(f"a {what} is not closed: the text is cut short", token.start())
            begun = token
            if mark in _CLOSER:
                opened.append(token)
            elif opened and mark in _CLOSING:
                begun = opened.pop()
                if mark != _CLOSER[begun[0]]:
                    raise self.error(f"unexpected {mark!r}", token.start())
            if not opened:
                yield begun, token.end()
        if opened:
            raise self.error(
                f"{opened[0][0]!r} is not closed: the text is cut short", opened[0].start()
            )


def _check_calls(computations: dict[str, Computation]) -> None:
    """Refuses calls of what the text does not define, of a computation by itself, and those nested
    too deep.
    """
    calls: dict[str, list[tuple[Instruction, str]]] = {}  # of those that call any
    for computation in computations.values():
        made = [(i, name) for i in computation.instructions for name in i.called_computations]
        if made:
            calls[computation.name] = made
    for i, name in itertools.chain.from_iterable(calls.values()):
        if name not in computations:
            raise i.error(f"'{i.name}' calls '{name}', which the text does not define")
    callees = {
        caller: [name for _, name in made if name in calls] for caller, made in calls.items()
    }
    try:
        callees_first = list(graphlib.TopologicalSorter(callees).static_order())
    except graphlib.CycleError as error:
        called, caller, *_ = error.args[1]
        i = next(i for i, name in calls[caller] if name == called)
        raise i.error(
            f"'{i.name}' calls '{called}', which is around it: no program calls itself"
        ) from None
    depths: dict[str, int] = {}  # of the calls below each computation
    for caller in callees_first:
        depths[caller] = 0
        for i, name in calls[caller]:
            depths[caller] = max(depths[caller], depths.get(name, 0) + 1)
            if depths[caller] >= MAX_CALLS:
                raise i.error(
                    f"'{i.name}' calls '{name}': calls are nested deeper than {MAX_CALLS}"
                )
