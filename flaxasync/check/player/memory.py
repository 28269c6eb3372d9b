"""The memory of a device: the address of every buffer, scalar and semaphore of a dump, and what
constants leave there.

The dump leaves most addresses to the linker. A simulation can choose any addresses, as long as
three things hold: they are distinct; they are the same on every device, because the devices run one
program; and buffers have their true size, so that the program's own bounds checks work.

No two values share memory here, even if they do on a chip, so a program needs more of each memory
space than on a chip: half a GiB of vmem for two layers. The address of a transfer whose text does
not name its memory spaces must show the space. Each space therefore has its own range of addresses,
and a program that needs a larger range is refused.

| space | unit of an address |
|---|---|
| smem, sflag | one word, which is 4 bytes |
| vmem | one row of 128 words, which is 512 bytes |
| hbm | such a row on v5e, and a granule of 32 bytes on later chips |

The operands of transfers count granules in both vmem and hbm. Of the contents of arrays only those
of integer constants are known; kernels read tables from such constants, for example which tiles
they visit.
"""

import bisect
import dataclasses
import math
import re
from collections.abc import Mapping, Sequence

from flaxasync.check.hlo.module import Instruction
from flaxasync.check.hlo.shapes import HBM, SMEM, VMEM, Shape, element_bits, read_shape
from flaxasync.check.player.bundle_text import Declaration, Program
from flaxasync.check.player.errors import DumpError, UnsimulatedError

GRANULE = 32  # bytes
SPACES = {HBM: "hbm", VMEM: "vmem", SMEM: "smem"}  # by their numbers in HLO
# The first byte of each space, and the byte after its last. Operands have 13 bits for a semaphore
# and 32 for a granule.
_FIRST = {"smem": 0x1000, "sflag": 0x400, "vmem": 0x200000, "hbm": 8 << 30}
_END = {"smem": 0x600000, "sflag": 4 << 13, "vmem": _FIRST["hbm"], "hbm": GRANULE << 32}
FIRST_HBM_GRANULE = _FIRST["hbm"] // GRANULE
# Bytes between buffers, so that an address just past the end of one is in no buffer.
_GAP = {"smem": 0, "sflag": 0, "vmem": 4096, "hbm": 32768}
# the beginning of the labels of scalars that the compiler added after the declarations
LATE = "late scalar"
_TILE = re.compile(r"\(([\d,]+)\)")
_TILES = re.compile(r"T\(((?:\d+,)?\d+)\)(?:\(128\))?(?:\(([24]),1\))?")
_LANES = 128
# The elements of the result are those of the operand, in the same order; those of a broadcast are
# repeated.
_SAME = frozenset({"bitcast", "copy", "copy-done", "copy-start", "reshape", "broadcast"})


@dataclasses.dataclass(frozen=True, slots=True)
class Buffer:
    """A range of addresses. `address` is the first one; it and `size` are in units of the memory
    space.
    """

    space: str
    address: int
    size: int
    label: str


class Addresses:
    """Assigns addresses, and finds the buffer at an address."""

    def __init__(self, hbm_unit: int) -> None:
        self._unit = {"smem": 4, "sflag": 4, "vmem": 512, "hbm": hbm_unit}
        self._next = {space: first // self._unit[space] for space, first in _FIRST.items()}
        self._by_program: dict[str, dict[str, Buffer]] = {}
        self._ordered: dict[str, list[Buffer]] = {space: [] for space in self._unit}  # by address
        # what is at each (space, address) that the compiler has fixed
        self.fixed: dict[tuple[str, int], str] = {}

    def add(self, program: Program) -> None:
        self._by_program[program.name] = {
            name: self._declared(program, d) for name, d in program.declarations.items()
        }

    def new(self, space: str, size: int, label: str) -> Buffer:
        """Gives addresses to a buffer of `size` bytes. UnsimulatedError says that the space has no
        more of them.
        """
        units = max(1, -(-size // self._unit[space]))
        buffer = Buffer(space, self._next[space], units, label)
        if (end := (buffer.address + units) * self._unit[space]) > _END[space]:
            raise UnsimulatedError(
                f"the program's buffers in {space} need addresses up to {end:#x}, and the player "
                f"has them up to {_END[space]:#x}, as no two buffers share any: simulate its parts "
                f"as programs of their own ({label})"
            )
        self._next[space] += units + _GAP[space] // self._unit[space]
        self._ordered[space].append(buffer)
        return buffer

    def of(self, program: Program, name: str) -> Buffer:
        """Returns the buffer of `#name` in a program.

        Later passes of the compiler add scalars, for spilled registers and for offsets of the
        linker. These are not declared, and get an address when they are first used. Their numbers
        are higher than those of all declarations. DumpError says that any other name is not
        declared.
        """
        placed = self._by_program[program.name]
        if name not in placed:
            last = max((_number(known) for known in program.declarations), default=-1)
            if not name.endswith("_spill") and _number(name) <= last:
                raise DumpError(
                    f"{program.path.name} uses #{name}, which its *-original.txt does not declare: "
                    "the dump was cut"
                )
            placed[name] = self.new("smem", 4, f"{LATE} {name} of {program.name}")
        return placed[name]

    def at(self, space: str, address: int) -> Buffer | None:
        """Returns the buffer that contains an address; None if there is none."""
        buffers = self._ordered[space]
        index = bisect.bisect_right(buffers, address, key=lambda buffer: buffer.address) - 1
        if index < 0 or address >= buffers[index].address + buffers[index].size:
            return None
        return buffers[index]

    def at_granule(self, space: str, granule: int) -> Buffer | None:
        """Returns the buffer that contains a granule of vmem or hbm; None if there is none."""
        return self.at(space, granule * GRANULE // self._unit[space])

    def granules(self, buffer: Buffer) -> tuple[int, int]:
        """Returns the first granule of a buffer, and the granule after its last."""
        scale = self._unit[buffer.space] // GRANULE
        return buffer.address * scale, (buffer.address + buffer.size) * scale

    def _declared(self, program: Program, declaration: Declaration) -> Buffer:
        # The core that is simulated never uses the address of any other space.
        if declaration.space in self._unit:
            space = declaration.space
        else:
            space = "smem"
        size = declaration.size
        label = f"{declaration.tag} ({declaration.name} of {program.name})"
        if declaration.offset < 0:
            if size < 0:
                size = padded_bytes(read_shape(declaration.shape))
            return self.new(space, size, label)
        address = declaration.offset // self._unit[space]
        if size and not declaration.tag.endswith("null"):
            self.fixed[space, address] = declaration.tag
        if space in ("vmem", "hbm"):
            return self.new(space, max(size, 1), label)
        return Buffer(space, address, max(1, size // 4), label)


def padded_bytes(shape: Shape) -> int:
    """Returns the bytes of a shape with the padding of its tiles: 2048 for
    `bf16[3,5]{1,0:T(8,128)(2,1)}`.
    """
    total = 0
    for _, leaf in shape.leaves():
        sizes = list(leaf.dimensions)
        if leaf.layout and len(leaf.layout.minor_to_major) == len(sizes):
            sizes = [sizes[dimension] for dimension in reversed(leaf.layout.minor_to_major)]
        tile = []
        if leaf.layout and (tiling := _TILE.search(leaf.layout.tiling)):
            tile = [int(side) for side in tiling[1].split(",")]
        if tile and not sizes:
            sizes = [1]  # a scalar has a whole tile, too
        for axis in range(1, min(len(tile), len(sizes)) + 1):
            sizes[-axis] = -(-sizes[-axis] // tile[-axis]) * tile[-axis]
        total += -(-math.prod(sizes) * element_bits(leaf.element_type) // 8)
    return total


def integer_elements(instructions: Mapping[str, Instruction], name: str) -> list[int] | None:
    """Returns the elements of a constant, or of one that was copied or repeated; None where the
    text does not say.
    """
    i = instructions.get(name)
    if i is None:
        return None
    if i.opcode in _SAME and i.operands:
        return integer_elements(instructions, i.operands[0])
    if i.opcode != "constant" or "..." in i.literal:
        return None
    return [int(number) for number in re.findall(r"-?\d+", i.literal)]


def words(shape: Shape, elements: Sequence[int]) -> list[int] | None:
    """Returns an array as the words of memory that hold it, tile by tile. Fewer elements than it
    has are repeated.

    s32[1,4,4]{2,1,0:T(4,128)} has one tile, of 512 words. Of narrower elements, as in
    s8[8,128]{1,0:T(8,128)(4,1)} or s8[10]{0:T(512)(128)(4,1)}, those of four rows of 128, or of
    two, make words. Words are unsigned 32-bit integers, 0 beside the array. The result is None if
    the elements are no integers, or lie in another way.
    """
    layout = shape.layout
    bits = element_bits(shape.element_type)
    tiling = _TILES.fullmatch(layout.tiling) if layout else None
    if layout is None or tiling is None or shape.element_type[0] not in "su" or not elements:
        return None
    tile = [int(side) for side in tiling[1].split(",")]
    rows_of_word = int(tiling[2] or 1)
    if bits * rows_of_word != 32:
        return None
    import numpy as np  # only such a table needs it

    # From here on the slowest dimension is first, and the last ones are in tiles.
    array = np.resize(np.array(elements, np.int64), shape.dimensions).transpose(
        layout.minor_to_major[::-1]
    )
    array = array.reshape((1,) * (len(tile) - array.ndim) + array.shape)
    sides = [1] * (array.ndim - len(tile)) + tile
    padded = np.pad(
        array, [(0, -size % side) for size, side in zip(array.shape, sides, strict=True)]
    )
    split = [
        n for size, side in zip(padded.shape, sides, strict=True) for n in (size // side, side)
    ]
    axes = range(len(split))
    # [which tile, in each dimension; where in it, in each dimension]
    tiles = padded.reshape(split).transpose(*axes[::2], *axes[1::2])
    lanes = _LANES if rows_of_word > 1 else 1
    rows = tiles.reshape(-1, rows_of_word, lanes)
    shifts = np.arange(0, 32, bits)[:, np.newaxis]
    return ((rows & (1 << bits) - 1) << shifts).sum(axis=1).reshape(-1).tolist()


def _number(name: str) -> int:
    return int(re.findall(r"\d+", name)[0])
