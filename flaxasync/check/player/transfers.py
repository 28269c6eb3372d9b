"""DMA operations -> transfers: what moves from where to where, which semaphores it raises, and whether it may.

| operation | operands |
|---|---|
| dma.A_to_B | source, granules, destination, destination semaphore [, source stride, destination stride, step] |
| dma.general | source, granules, destination, destination semaphore, source semaphore, strides, override, semaphore |

The override of dma.general names the chip of the destination; its comment names the memory spaces. A transfer raises
its semaphores by its granules, or by one where a bit of the source semaphore's number says so: libtpu 0.0.52 sets it in
XLA's permutes, and waits for one, where 0.0.51 waited for the granules.

Two checks stand here because the program cannot make them itself: a transfer may not leave its buffer, and while it is
under way nobody else may move bytes into its destination or source. They see transfers, not the loads and stores of the
vector unit.
"""

import dataclasses
import re

from flaxasync.check.player.addresses import FIRST_HBM_GRANULE, Addresses
from flaxasync.check.player.bundle_text import Operation
from flaxasync.check.player.errors import OutOfBoundsError, RaceError, UnknownOperationError

REMOTE = 0x4000
FLAG_MASK = 0x1FFF
CHIP_SHIFT = 17
CORE_OF_TRANSFER, CORE_OF_SIGNAL = 13, 14  # bits of the semaphore number that name the core of a chip
COUNTED_ONCE = 0x10000  # of the source semaphore's number: both ends are raised by one
CHIP_MASK = 0x3FFF
_PAIR = re.compile(r"(hbm|vmem|smem)[-_]to[-_](hbm|vmem|smem)")


@dataclasses.dataclass(slots=True)
class Transfer:
    """One DMA. Addresses and sizes are in granules, addresses of scalar memory in words."""

    source: str
    target: str
    source_address: int
    target_address: int
    granules: int
    received: int  # semaphore raised at the destination
    sent: int  # semaphore raised at the source, or -1
    chip: int  # of the destination, or -1 for the same chip
    core: int  # of that chip
    strided: bool
    raised: int  # what each semaphore is raised by
    name: str
    place: str


def read_transfer(operation: Operation, values: tuple, place: str, kernel: str) -> Transfer | None:
    """Decodes a DMA; None for one to the host, which no program waits for.

    Raises:
      UnknownOperationError: a form that the player does not know.
    """
    if "host" in operation.name:
        return None
    general = operation.name == "dma.general"
    match = _PAIR.search(operation.comment if general else operation.name)
    if match:
        source, target = match[1], match[2]
    elif general and None not in values[:3]:
        source, target = _space(values[0]), _space(values[2])
    else:
        raise UnknownOperationError(f"{kernel}: transfer {operation.name!r} is unknown to the player; at {place}")
    if None in values[:4] or (general and None in values[4:7]):
        raise UnknownOperationError(
            f"{kernel}: the operands of {operation.name} cannot be read: {operation.operands}; at {place}"
        )
    granules, received = values[1], values[3]
    addresses = values[0], values[2]
    if not general:
        strided = len(values) > 4
        flags = received & FLAG_MASK, -1, -1, 0
        return Transfer(source, target, *addresses, granules, *flags, strided, granules, operation.name, place)
    override = values[6]
    chip = override & CHIP_MASK if override & REMOTE else -1
    sent = values[4] & FLAG_MASK if chip >= 0 else -1
    core = received >> CORE_OF_TRANSFER & 1
    # The descriptor's declaration tells a plain transfer (it is null) from a strided one.
    return Transfer(
        source,
        target,
        *addresses,
        granules,
        received & FLAG_MASK,
        sent,
        chip,
        core,
        values[5] > 0,
        1 if values[4] & COUNTED_ONCE else granules,
        operation.name,
        place,
    )


def _space(address: int) -> str:
    return "hbm" if address >= FIRST_HBM_GRANULE else "vmem"


@dataclasses.dataclass(slots=True)
class Span:
    """Bytes of one device that a transfer under way uses."""

    device: int
    space: str
    first: int  # in granules
    last: int
    writes: bool
    transfer: Transfer
    phase: str


class Spans:
    """The memory that transfers use at this moment."""

    def __init__(self, addresses: Addresses):
        self._addresses = addresses
        self._active: dict[tuple[int, str], list[Span]] = {}

    def claim(self, transfer: Transfer, source: int, target: int, phase: str) -> list[Span]:
        """Enters a transfer from device `source` to device `target`.

        Raises:
          OutOfBoundsError: it leaves its buffer.
          RaceError: it meets bytes that another transfer still moves.
        """
        spans = []
        for device, space, address, writes in (
            (source, transfer.source, transfer.source_address, False),
            (target, transfer.target, transfer.target_address, True),
        ):
            if space == "smem" or transfer.granules <= 0:
                continue
            buffer = self._addresses.at_granule(space, address)
            limit = self._addresses.granules(buffer)[1] if buffer else 0
            over = address + transfer.granules - limit
            if buffer is None or (not transfer.strided and over > 0):
                what = "outside every buffer" if buffer is None else f"{over * 32} bytes past the end of {buffer.label}"
                raise OutOfBoundsError(
                    f"{phase}: {transfer.name} of {transfer.granules * 32} bytes on device {device} "
                    f"{'writes' if writes else 'reads'} {what}; at {transfer.place}"
                )
            if not transfer.strided:
                spans.append(Span(device, space, address, address + transfer.granules, writes, transfer, phase))
        for span in spans:
            self._check(span)
        for span in spans:
            self._active.setdefault((span.device, span.space), []).append(span)
        return spans

    def release(self, spans: list[Span]) -> None:
        for span in spans:
            self._active[span.device, span.space].remove(span)

    def _check(self, span: Span) -> None:
        for other in self._active.get((span.device, span.space), ()):
            if (span.writes or other.writes) and span.first < other.last and other.first < span.last:
                buffer = self._addresses.at_granule(span.space, span.first)
                raise RaceError(
                    f"device {span.device}: {span.transfer.name} in {span.phase} ({span.transfer.place}) "
                    f"{'writes' if span.writes else 'reads'} {buffer.label if buffer else span.space} while "
                    f"{other.transfer.name} of {other.phase} ({other.transfer.place}) still "
                    f"{'writes' if other.writes else 'reads'} it"
                )
