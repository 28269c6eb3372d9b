"""Checks the memory that transfers under way are using. There are two rules, which the program itself cannot check.

A transfer may not leave the buffer in which it begins. While it is under way, no other transfer may write what it
reads, or read or write what it writes. Loads and stores of the vector unit are not checked, and neither are the
addresses of strided transfers.
"""

import dataclasses

from flaxasync.check.player.addresses import GRANULE, Addresses
from flaxasync.check.player.errors import OutOfBoundsError, RaceError
from flaxasync.check.player.transfers import Transfer


@dataclasses.dataclass(slots=True)
class Claim:
    """A range of one device's memory that a transfer under way is using.

    Attributes:
      device: The device.
      space: The memory space.
      first: The first granule.
      stop: The granule after the last.
      writes: Whether the transfer writes it.
      transfer: The transfer.
      phase: The instruction of the program that started it.
    """

    device: int
    space: str
    first: int
    stop: int
    writes: bool
    transfer: Transfer
    phase: str


class MemoryClaims:
    """All memory that transfers are using at the current time."""

    def __init__(self, addresses: Addresses):
        self._addresses = addresses
        self._active: dict[tuple[int, str], list[Claim]] = {}

    def claim(self, transfer: Transfer, source: int, target: int, phase: str) -> list[Claim]:
        """Claims the memory of a transfer from device `source` to device `target`.

        Raises:
          OutOfBoundsError: The transfer leaves its buffer.
          RaceError: Another transfer is still using the memory.
        """
        claims = []
        for device, space, address, writes in (
            (source, transfer.source, transfer.source_address, False),
            (target, transfer.target, transfer.target_address, True),
        ):
            if space == "smem" or transfer.granules <= 0:
                continue
            self._check_bounds(transfer, device, space, address, writes, phase)
            if not transfer.strided:
                claims.append(Claim(device, space, address, address + transfer.granules, writes, transfer, phase))
        for claim in claims:
            self._check_races(claim)
        for claim in claims:
            self._active.setdefault((claim.device, claim.space), []).append(claim)
        return claims

    def release(self, claims: list[Claim]) -> None:
        """Removes the claims of a transfer that has ended."""
        for claim in claims:
            self._active[claim.device, claim.space].remove(claim)

    def _check_bounds(
        self, transfer: Transfer, device: int, space: str, address: int, writes: bool, phase: str
    ) -> None:
        buffer = self._addresses.at_granule(space, address)
        limit = self._addresses.granules(buffer)[1] if buffer else 0
        over = address + transfer.granules - limit
        if buffer is None or (not transfer.strided and over > 0):
            past = f"{over * GRANULE} bytes past the end of {buffer.label}" if buffer else "outside every buffer"
            raise OutOfBoundsError(
                f"{phase}: {transfer.name} of {transfer.granules * GRANULE} bytes on device {device} "
                f"{'writes' if writes else 'reads'} {past}; at {transfer.location}"
            )

    def _check_races(self, claim: Claim) -> None:
        for other in self._active.get((claim.device, claim.space), ()):
            if (claim.writes or other.writes) and claim.first < other.stop and other.first < claim.stop:
                buffer = self._addresses.at_granule(claim.space, claim.first)
                raise RaceError(
                    f"device {claim.device}: {claim.transfer.name} in {claim.phase} ({claim.transfer.location}) "
                    f"{'writes' if claim.writes else 'reads'} {buffer.label if buffer else claim.space} while "
                    f"{other.transfer.name} of {other.phase} ({other.transfer.location}) still "
                    f"{'writes' if other.writes else 'reads'} it"
                )
