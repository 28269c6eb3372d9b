"""Reads one program: its `*-final_bundles.txt`, and the declarations in the `*-original.txt` beside
it.

A bundle is what the core issues in one cycle. In the text it is a list of operations between
braces, separated by ` ;; `. Its address is printed before it, and the regions that begin at it are
printed after it. Nothing is interpreted here: operands stay text.
"""

import dataclasses
import functools
import pathlib
import re
import sys
from typing import NamedTuple

from flaxasync.check.hlo.shapes import split_at_commas
from flaxasync.check.player.errors import DumpError

HEADER = "= control target key start"

# "0x12 LB: > {": its address, and two letters where branches go to it, which the text explains at
# its beginning
_BUNDLE = re.compile(r"^ *(?P<address>0x[0-9a-f]+|0) +(?P<target>[A-Z]{2})? *: *(?:> *)*\{", re.M)
_REGION = re.compile(r"Start(?:/End empty)? region (\d+)")
_COMMENT = re.compile(r"/\*(.*?)\*/", re.S)
_PLACEHOLDER = re.compile(r"\x01(\d+)\x02")  # stands for a comment while operations are split apart
_LABEL = re.compile(r"/\*\w+=\*/")
_OPERATION = re.compile(r"(?:%(\S+) = )?([a-z_][\w.\-\[\]]*)\s*(.*)", re.S)
_THREAD = re.compile(r"\[(?:thread|resolvable):\$?\w+\]\s*")
_TARGET = re.compile(r"target = \$region(\d+)")
_PREDICATE = re.compile(r"\((!?(?:%p\w+|[01]))(?:,\s*(%\w+))?\)\s*,?\s*")
_SMEM_STORE = re.compile(r"^(\[smem:\[.*?\]\])\s*,?\s*")
_ALLOCATION = re.compile(
    r"#(allocation\w+) \[shape = '([^']*)', space=(\w+), size = (0x[0-9a-f]+|\d+)"
    r"(?:, offset = (0x[0-9a-f]+|\d+))?[^\n]*?tag = '([^']*)'"
)
_MEETING = "BarrierMegacore"  # the compiler's word for a meeting of the cores of a device
_HLO_REGION = re.compile(r"^ *\$region\d+: #\{([^}]+)\}|vtrace (\d{10})\b", re.M)
# Trace marks: the number of an instruction plus MARK_START where it begins, and plus MARK_END where
# it ends.
MARK_START = 0x80000000
MARK_END = 0x90000000
MARK_LIMIT = 0xA0000000
MARK_RUN = 0x0FFFFFFF  # the number of the mark around the whole program
_UNKNOWN_SIZE = 1 << 40  # a declared size above this means that the compiler does not know the size


class Operation(NamedTuple):
    """One operation of a bundle."""

    name: str  # like "sadd.s32"
    unit: str  # the name up to the first dot
    result: str  # the register that it writes; "" if it writes none
    operands: tuple[str, ...]
    # the condition under which it is executed: "%p3_p1", "!%p3_p1", "1", "!1", or "" for always
    predicate: str
    target: int  # the region that a branch goes to; -1 for every other operation
    comment: str  # the compiler's


class Declaration(NamedTuple):
    """A buffer, scalar or semaphore, as the compiler declared it."""

    name: str  # like "allocation3"
    shape: str  # the HLO shape
    space: str  # "hbm", "vmem", "smem", "sflag", ...
    size: int  # in bytes; -1 if the text does not say
    offset: int  # the address in bytes if the compiler fixed it; -1 otherwise
    tag: str  # what it is for, in the compiler's words


@dataclasses.dataclass
class Program:
    """The bundles of one fusion, of one kernel, or of the top level program. The index of a bundle
    is its address.
    """

    name: str  # of the HLO instruction that it implements
    path: pathlib.Path
    bundles: list[tuple[Operation, ...]]  # the operations of each, in printed order
    lines: list[int]  # that of each bundle in the file
    regions: dict[int, int]  # the index of the first bundle of each region
    declarations: dict[str, Declaration]  # the buffers, scalars and semaphores, by name
    # the HLO instruction of each trace mark; only the top level program has any
    marks: dict[int, str]

    @functools.cached_property
    def cores_meet(self) -> bool:
        """Whether the cores of a device wait for each other in this program. A kernel that runs on
        all of them begins so, and one that core 0 runs alone does not.
        """
        return any(
            operation.unit == "shalt" and _MEETING in operation.comment
            for bundle in self.bundles
            for operation in bundle
        )

    def location(self, index: int) -> str:
        """Returns the file, line and address of a bundle, for messages."""
        index = min(index, len(self.bundles) - 1)
        return f"{self.path.name}:{self.lines[index]} (bundle {index:#x})"


def read_program(name: str, bundles: pathlib.Path, original: pathlib.Path) -> Program:
    """Reads one program. DumpError says that its text has another form, or ends too early."""
    text = bundles.read_text(errors="replace")
    if not text.startswith(HEADER):
        raise DumpError(
            f"{bundles.name} does not begin like a bundle dump ({HEADER!r}): it comes from another "
            "version of libtpu, or is no bundle dump"
        )
    declared = original.read_text(errors="replace")
    return Program(
        name, bundles, *_bundles(text, bundles), _declarations(declared), _marks(declared)
    )


def parse_operation(text: str, comment: str = "") -> Operation | None:
    """Parses `%s4_s2 = sadd.s32 (%p1_p0), %s1_s0, 4`. Returns None for a text that is not an
    operation.
    """
    match = _OPERATION.match(text)
    if not match:
        return None
    result, name, rest = match.groups("")
    if "[" in rest:
        rest = _THREAD.sub("", rest)
    rest = rest.strip()
    target = -1
    if "$region" in rest and (found := _TARGET.search(rest)):
        target = int(found[1])
        rest = rest[: found.start()].strip()
    predicate = ""
    if "(" in rest and (found := _PREDICATE.search(rest)):
        predicate = found[1]
        rest = rest[: found.start()].rstrip(", ") + ", " + rest[found.end() :]
    if name == "sst":
        rest = _SMEM_STORE.sub(r"\1, ", rest.strip(", "))
    name = sys.intern(name)  # a million operations share a few hundred names
    return Operation(
        name,
        sys.intern(name.partition(".")[0]),
        result,
        _split(rest.strip(", ")),
        predicate,
        target,
        comment,
    )


def _bundles(
    text: str, path: pathlib.Path
) -> tuple[list[tuple[Operation, ...]], list[int], dict[int, int]]:
    """Returns the bundles of a text, the line of each, and the index of the first bundle of each
    region.
    """
    starts = list(_BUNDLE.finditer(text))
    if not starts:
        raise DumpError(f"{path.name} holds no bundle: the dump was cut short; compile again")
    bundles: list[tuple[Operation, ...]] = []
    lines = [text.count("\n", 0, starts[0].start()) + 1]
    regions: dict[int, int] = {}
    for index, match in enumerate(starts):
        if index + 1 < len(starts):
            end = starts[index + 1].start()
        else:
            end = len(text)
        where = f"{path.name}:{lines[-1]}: bundle {index:#x}"
        if int(match["address"], 0) != index:
            raise DumpError(
                f"{where} is missing (found {match['address']}): the dump was cut; compile again"
            )
        comments: list[str] = []
        inside, brace, after = _set_aside(text[match.end() : end], comments).partition("}")
        if not brace or "/*" in inside:
            raise DumpError(f"{where} does not end: the dump was cut short; compile again")
        for number in _PLACEHOLDER.findall(after):
            for region in _REGION.findall(comments[int(number)]):
                regions.setdefault(int(region), index)
        bundles.append(_operations(inside, comments))
        lines.append(lines[-1] + text.count("\n", match.start(), end))
    if starts[-1]["target"]:  # the exit bundle, whose comment does not name its regions
        targets = {o.target for bundle in bundles for o in bundle if o.target >= 0}
        regions |= dict.fromkeys(targets - regions.keys(), len(bundles) - 1)
    return bundles, lines, regions


def _set_aside(text: str, comments: list[str]) -> str:
    """Replaces each comment of a text, which may hold braces and semicolons, by its number in
    `comments`.
    """
    if "/*" not in text:
        return text

    def placeholder(match: re.Match) -> str:
        comments.append(match[1].strip())
        return f"\x01{len(comments) - 1}\x02"

    return _COMMENT.sub(placeholder, _LABEL.sub("", text))


def _operations(text: str, comments: list[str]) -> tuple[Operation, ...]:
    operations = []
    for one in text.split(" ;; "):
        text = one
        comment = ""
        if "\x01" in one:
            text = _PLACEHOLDER.sub("", one)
            comment = comments[int(_PLACEHOLDER.findall(one)[0])]
        operation = parse_operation(text.strip(), comment)
        if operation is not None:
            operations.append(operation)
    return tuple(operations)


def _split(text: str) -> tuple[str, ...]:
    if "[" in text or "(" in text:
        parts = split_at_commas(text)
    else:
        parts = text.split(",")
    return tuple(part.strip() for part in parts if part.strip())


def _declarations(text: str) -> dict[str, Declaration]:
    found = {}
    for name, shape, space, size, offset, tag in _ALLOCATION.findall(text):
        bytes_ = int(size, 0)
        if offset:
            fixed = int(offset, 0)
        else:
            fixed = -1
        found[name] = Declaration(
            name, shape, space, -1 if bytes_ > _UNKNOWN_SIZE else bytes_, fixed, tag
        )
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
