"""Reads one program: its `*-final_bundles.txt`, and the declarations in the `*-original.txt` beside it.

A bundle is what the core issues in one cycle. In the text it is a list of operations between braces, separated by
` ;; `. Its address is printed before it, and the regions that begin at it are printed after it. Nothing is interpreted
here: operands stay text.
"""

import dataclasses
import pathlib
import re
import sys
from typing import NamedTuple

from flaxasync.check.player.errors import DumpError

HEADER = "= control target key start"

_BUNDLE = re.compile(r"^ *(0x[0-9a-f]+|0) +([A-Z]{2})? *: *(?:> *)*\{", re.M)
_REGION = re.compile(r"Start(?:/End empty)? region (\d+)")
_COMMENT = re.compile(r"/\*(.*?)\*/", re.S)
_PLACEHOLDER = re.compile(r"\x01(\d+)\x02")  # stands for a comment while operations are split apart
_LABEL = re.compile(r"/\*\w+=\*/")
_OPERATION = re.compile(r"(?:%(\S+) = )?([a-z_][\w.\-\[\]]*)\s*(.*)", re.S)
_BRACKET = re.compile(r"[\[\](),]")
_THREAD = re.compile(r"\[(?:thread|resolvable):\$?\w+\]\s*")
_TARGET = re.compile(r"target = \$region(\d+)")
_PREDICATE = re.compile(r"\((!?(?:%p\w+|[01]))(?:,\s*(%\w+))?\)\s*,?\s*")
_SMEM_STORE = re.compile(r"^(\[smem:\[.*?\]\])\s*,?\s*")
_ALLOCATION = re.compile(
    r"#(allocation\w+) \[shape = '([^']*)', space=(\w+), size = (0x[0-9a-f]+|\d+)"
    r"(?:, offset = (0x[0-9a-f]+|\d+))?[^\n]*?tag = '([^']*)'"
)
_HLO_REGION = re.compile(r"^ *\$region\d+: #\{([^}]+)\}|vtrace (\d{10})\b", re.M)
# Trace marks: the number of an instruction plus MARK_START where it begins, and plus MARK_END where it ends.
MARK_START, MARK_END, MARK_LIMIT = 0x80000000, 0x90000000, 0xA0000000
MARK_RUN = 0x0FFFFFFF  # the number of the mark around the whole program
_UNKNOWN_SIZE = 1 << 40  # a declared size above this means that the compiler does not know the size


class Operation(NamedTuple):
    """One operation of a bundle.

    Attributes:
      name: The name, like "sadd.s32".
      unit: The name up to the first dot, like "sadd".
      result: The register that it writes; "" if it writes none.
      operands: The operands, as text.
      predicate: "" or the condition under which it is executed: "%p3_p1", "!%p3_p1", "1" or "!1".
      target: The region that a branch goes to; -1 for every other operation.
      comment: The compiler's comment.
    """

    name: str
    unit: str
    result: str
    operands: tuple[str, ...]
    predicate: str
    target: int
    comment: str


@dataclasses.dataclass(frozen=True, slots=True)
class Bundle:
    """The operations that the core issues in one cycle.

    Attributes:
      address: The address in the program.
      line: The line of the text.
      operations: The operations, in printed order.
    """

    address: int
    line: int
    operations: tuple[Operation, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Declaration:
    """A buffer, scalar or semaphore, as the compiler declared it.

    Attributes:
      name: The name, like "allocation3".
      shape: The HLO shape, as text.
      space: The memory space: "hbm", "vmem", "smem", "sflag", ...
      size: The size in bytes; -1 if the text does not say.
      offset: The address in bytes if the compiler fixed it; -1 otherwise.
      tag: What it is for, in the compiler's words.
    """

    name: str
    shape: str
    space: str
    size: int
    offset: int
    tag: str


@dataclasses.dataclass
class Program:
    """The bundles of one fusion, of one kernel, or of the top level program.

    Attributes:
      name: The HLO instruction that it implements.
      path: The file.
      bundles: The bundles, in the order of their addresses.
      regions: The index of the first bundle of each region.
      declarations: The buffers, scalars and semaphores, by name.
      marks: The HLO instruction of each trace mark. Only the top level program has marks.
    """

    name: str
    path: pathlib.Path
    bundles: list[Bundle]
    regions: dict[int, int]
    declarations: dict[str, Declaration]
    marks: dict[int, str]

    def location(self, index: int) -> str:
        """Returns the file, line and address of a bundle, for messages."""
        bundle = self.bundles[min(index, len(self.bundles) - 1)]
        return f"{self.path.name}:{bundle.line} (bundle {bundle.address:#x})"


def read_program(name: str, bundles: pathlib.Path, original: pathlib.Path) -> Program:
    """Reads one program.

    Raises:
      DumpError: The text has another form, or ends too early.
    """
    text = bundles.read_text(errors="replace")
    if not text.startswith(HEADER):
        raise DumpError(
            f"{bundles.name} does not begin like a bundle dump ({HEADER!r}): it comes from another version of libtpu, "
            "or is no bundle dump"
        )
    declared = original.read_text(errors="replace")
    parsed, regions = _bundles(text, bundles)
    return Program(name, bundles, parsed, regions, _declarations(declared), _marks(declared))


def parse_operation(text: str, comment: str = "") -> Operation | None:
    """Parses `%s4_s2 = sadd.s32 (%p1_p0), %s1_s0, 4`. Returns None for a text that is not an operation."""
    match = _OPERATION.match(text)
    if not match:
        return None
    result, name, rest = match.groups("")
    if "[" in rest:
        rest = _THREAD.sub("", rest)
    rest = rest.strip()
    target = -1
    if "$region" in rest and (found := _TARGET.search(rest)):
        target, rest = int(found[1]), rest[: found.start()].strip()
    predicate = ""
    if "(" in rest and (found := _PREDICATE.search(rest)):
        predicate, rest = found[1], rest[: found.start()].rstrip(", ") + ", " + rest[found.end() :]
    if name == "sst":
        rest = _SMEM_STORE.sub(r"\1, ", rest.strip(", "))
    name = sys.intern(name)  # a million operations share a few hundred names
    return Operation(
        name, sys.intern(name.partition(".")[0]), result, _split(rest.strip(", ")), predicate, target, comment
    )


def _bundles(text: str, path: pathlib.Path) -> tuple[list[Bundle], dict[int, int]]:
    """Returns the bundles of a text, and the index of the first bundle of each region."""
    starts = list(_BUNDLE.finditer(text))
    if not starts:
        raise DumpError(f"{path.name} holds no bundle: the dump was cut short; compile again")
    bundles: list[Bundle] = []
    regions: dict[int, int] = {}
    line = text.count("\n", 0, starts[0].start()) + 1
    for index, match in enumerate(starts):
        end = starts[index + 1].start() if index + 1 < len(starts) else len(text)
        address = int(match[1], 0)
        if address != index:
            raise DumpError(
                f"{path.name}:{line}: bundle {index:#x} is missing (found {address:#x}): the dump was cut; "
                "compile again"
            )
        body = text[match.end() : end]
        if "/*" not in body and body.startswith("}"):
            bundles.append(Bundle(address, line, ()))
        else:
            close = _close(body)
            if close < 0:
                raise DumpError(
                    f"{path.name}:{line}: bundle {address:#x} does not end: the dump was cut short; compile again"
                )
            for region in _REGION.findall(body, close):
                regions.setdefault(int(region), index)
            bundles.append(Bundle(address, line, _operations(body[:close])))
        line += text.count("\n", match.start(), end)
    if starts[-1][2]:
        # The exit bundle is the target of branches, but its comment names the exit instead of its regions.
        targets = {o.target for bundle in bundles for o in bundle.operations if o.target >= 0}
        for region in targets - regions.keys():
            regions[region] = len(bundles) - 1
    return bundles, regions


def _close(body: str) -> int:
    """Returns the position of the brace that ends a bundle, the first one outside of comments; -1 if there is none."""
    position = 0
    while True:
        brace, comment = body.find("}", position), body.find("/*", position)
        if brace < 0 or comment < 0 or brace < comment:
            return brace
        after = body.find("*/", comment)
        if after < 0:
            return -1
        position = after + 2


def _operations(text: str) -> tuple[Operation, ...]:
    comments: list[str] = []

    def set_aside(match: re.Match) -> str:
        comments.append(match[1].strip())
        return f"\x01{len(comments) - 1}\x02"

    if "/*" in text:
        text = _COMMENT.sub(set_aside, _LABEL.sub("", text))
    operations = []
    for one in text.split(" ;; "):
        comment = ""
        if found := _PLACEHOLDER.search(one) if "\x01" in one else None:
            one, comment = _PLACEHOLDER.sub("", one), comments[int(found[1])]
        operation = parse_operation(one.strip(), comment)
        if operation is not None:
            operations.append(operation)
    return tuple(operations)


def _split(text: str) -> tuple[str, ...]:
    """Splits operands at the commas that are outside of brackets."""
    if "[" not in text and "(" not in text:
        return tuple(part.strip() for part in text.split(",") if part.strip())
    parts, depth, start = [], 0, 0
    for match in _BRACKET.finditer(text):
        if match[0] in "[(":
            depth += 1
        elif match[0] in "])":
            depth -= 1
        elif depth == 0:
            parts.append(text[start : match.start()].strip())
            start = match.end()
    parts.append(text[start:].strip())
    return tuple(part for part in parts if part)


def _declarations(text: str) -> dict[str, Declaration]:
    found = {}
    for name, shape, space, size, offset, tag in _ALLOCATION.findall(text):
        bytes_ = int(size, 0)
        fixed = int(offset, 0) if offset else -1
        found[name] = Declaration(name, shape, space, -1 if bytes_ > _UNKNOWN_SIZE else bytes_, fixed, tag)
    return found


def _marks(text: str) -> dict[int, str]:
    """Maps the number of each trace mark to the HLO instruction in whose region it is set."""
    marks: dict[int, str] = {}
    current = ""
    for match in _HLO_REGION.finditer(text):
        if match[1]:
            current = match[1]
        elif MARK_START <= int(match[2]) < MARK_END and current:
            marks.setdefault(int(match[2]) - MARK_START, current)
    return marks
