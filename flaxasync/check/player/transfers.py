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
    """One DMA. Addresses and sizes are in granules; addresses in scalar memory are in words.

    Attributes:
      source: The memory space that is read.
      target: The memory space that is written.
      source_address: The first address that is read.
      target_address: The first address that is written.
      granules: The size.
      received: The semaphore that is raised at the destination.
      sent: The semaphore that is raised at the source; -1 if none is.
      chip: The number of the destination's chip; -1 if it is the same chip.
      core: The core on that chip.
      strided: Whether the transfer skips addresses.
      raised: By how much each semaphore is raised.
      name: The name of the operation.
      location: The file and line of the dump.
    """

    source: str
    target: str
    source_address: int
    target_address: int
    granules: int
    received: int
    sent: int
    chip: int
    core: int
    strided: bool
    raised: int
    name: str
    location: str


def read_transfer(operation: Operation, values: tuple, location: str, kernel: str) -> Transfer | None:
    """Decodes a DMA. Returns None for a transfer to the host, for which no program waits.

    Raises:
      UnknownOperationError: The player does not know this form.
    """
    if "host" in operation.name:
        return None
    general = operation.name == "dma.general"
    match = _SPACES.search(operation.comment if general else operation.name)
    if match:
        source, target = match[1], match[2]
    elif general and None not in values[:3]:
        source, target = _space(values[0]), _space(values[2])
    else:
        raise UnknownOperationError(f"{kernel}: transfer {operation.name!r} is unknown to the player; at {location}")
    if None in values[:4] or (general and None in values[4:7]):
        raise UnknownOperationError(
            f"{kernel}: the operands of {operation.name} cannot be read: {operation.operands}; at {location}"
        )
    granules, received = values[1], values[3]
    sent, chip, core, strided, raised = -1, -1, 0, len(values) > 4, granules
    if general:
        override = values[6]
        core = received >> _CORE_BIT_OF_TRANSFER & 1
        if override & _REMOTE:
            chip, sent = override & CHIP_MASK, values[4] & SEMAPHORE_MASK
        strided = values[5] > 0  # the address of the descriptor of the strides, which is null for a plain transfer
        raised = 1 if values[4] & _COUNTED_ONCE else granules
    return Transfer(
        source=source,
        target=target,
        source_address=values[0],
        target_address=values[2],
        granules=granules,
        received=received & SEMAPHORE_MASK,
        sent=sent,
        chip=chip,
        core=core,
        strided=strided,
        raised=raised,
        name=operation.name,
        location=location,
    )


def _space(address: int) -> str:
    """Infers the memory space of an address, which the text does not name."""
    return "hbm" if address >= FIRST_HBM_GRANULE else "vmem"
