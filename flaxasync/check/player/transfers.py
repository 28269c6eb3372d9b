"""Decodes DMA operations: the source and the destination of a transfer, and the semaphores that it raises.

| operation | operands |
|---|---|
| dma.A_to_B | source, granules, destination, destination semaphore [, source stride, destination stride, step] |
| dma.general | source, granules, destination, destination semaphore, source semaphore, strides, override, semaphore |

The override of a dma.general names the chip of the destination, and its comment names the memory spaces. A transfer
raises its semaphores by its number of granules, or by one if a bit in the number of the source semaphore says so.
libtpu 0.0.52 sets this bit in XLA's permutes and waits for one, where libtpu 0.0.51 waits for the granules.
"""

import dataclasses
import re

from flaxasync.check.player.addresses import FIRST_HBM_GRANULE
from flaxasync.check.player.bundle_text import Operation
from flaxasync.check.player.errors import UnknownOperationError

SEMAPHORE_MASK = 0x1FFF  # the bits of an operand that hold the number of a semaphore
CHIP_SHIFT, CHIP_MASK = 17, 0x3FFF  # the bits of a chip's number in the operand of a remote signal
CORE_BIT_OF_SIGNAL = 14  # the bit of the semaphore operand that names the core of the chip

_CORE_BIT_OF_TRANSFER = 13
_REMOTE = 0x4000  # the bit of the override that is set if the destination is on another chip
_COUNTED_ONCE = 0x10000  # the bit of the source semaphore that is set if both ends are raised by one
_SPACES = re.compile(r"(hbm|vmem|smem)[-_]to[-_](hbm|vmem|smem)")


@dataclasses.dataclass(slots=True)
class Transfer:
    """One DMA. Addresses and sizes are in granules; addresses in scalar memory are in words."""

    source: str  # the memory space that is read
    target: str  # the memory space that is written
    source_address: int
    target_address: int
    granules: int
    received: int  # the semaphore that is raised at the destination
    name: str
    location: str  # in the dump
    phase: str  # the instruction of the program that started it
    strided: bool  # whether it skips addresses
    raised: int  # by how much each semaphore is raised
    sent: int = -1  # the semaphore that is raised at the source, if any is
    chip: int = -1  # the number of the destination's chip, unless it is the same one
    core: int = 0  # the core on that chip


def read_transfer(operation: Operation, values: tuple, location: str, phase: str) -> Transfer | None:
    """Decodes a DMA. Returns None for a transfer to the host, for which no program waits."""
    if "host" in operation.name:
        return None
    general = operation.name == "dma.general"
    match = _SPACES.search(operation.comment if general else operation.name)
    if match:
        source, target = match[1], match[2]
    elif general and None not in values[:3]:
        source, target = _space(values[0]), _space(values[2])
    else:
        raise UnknownOperationError(f"{phase}: transfer {operation.name!r} is unknown to the player; at {location}")
    if None in values[:4] or (general and None in values[4:7]):
        raise UnknownOperationError(
            f"{phase}: the operands of {operation.name} cannot be read: {operation.operands}; at {location}"
        )
    transfer = Transfer(
        source=source,
        target=target,
        source_address=values[0],
        target_address=values[2],
        granules=values[1],
        received=values[3] & SEMAPHORE_MASK,
        name=operation.name,
        location=location,
        phase=phase,
        strided=len(values) > 4,
        raised=values[1],
    )
    if general:
        sent, strides, override = values[4:7]
        transfer.core = values[3] >> _CORE_BIT_OF_TRANSFER & 1
        transfer.strided = strides > 0  # the address of their descriptor, which is null for a plain transfer
        if override & _REMOTE:
            transfer.chip, transfer.sent = override & CHIP_MASK, sent & SEMAPHORE_MASK
        if sent & _COUNTED_ONCE:
            transfer.raised = 1
    return transfer


def _space(address: int) -> str:
    """Infers the memory space of an address, which the text does not name."""
    return "hbm" if address >= FIRST_HBM_GRANULE else "vmem"
