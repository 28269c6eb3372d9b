"""Checks the memory that transfers under way are using. There are two rules, which the program itself cannot check.

A transfer may not leave the buffer in which it begins. While it is under way, no other transfer may write what it
reads, or read or write what it writes. Loads and stores of the vector unit are not checked, and neither are the
addresses of strided transfers.
"""

import dataclasses

from flaxasync.check.player.addresses import GRANULE, Addresses
from flaxasync.check.player.errors import OutOfBoundsError, RaceError
from flaxasync.check.player.transfers import Transfer


@dataclasses.dataclass(slots=True, eq=False)
class Claim:
    """A range of one device's memory that a transfer under way is using, from granule `first` up to granule `stop`."""

    device: int
    space: str
    first: int
    stop: int
    writes: bool
    transfer: Transfer

    @property
    def does(self) -> str:
        return "writes" if self.writes else "reads"


class MemoryClaims:
    """All memory that transfers are using at the current time."""

    def __init__(self, addresses: Addresses):
        self._addresses = addresses
        self._active: dict[tuple[int, str], list[Claim]] = {}

    def claim(self, transfer: Transfer, source: int, target: int) -> list[Claim]:
        """Claims the memory of a transfer from device `source` to device `target`, after a check of both rules."""
        size = transfer.granules
        read, write = transfer.source_address, transfer.target_address
        both = (
            Claim(source, transfer.source, read, read + size, False, transfer),
            Claim(target, transfer.target, write, write + size, True, transfer),
        )
        claims = [claim for claim in both if claim.space != "smem" and size > 0]
        for claim in claims:
            self._check_bounds(claim)
        if transfer.strided:
            return []
        for claim in claims:
            self._check_races(claim)
        for claim in claims:
            self._active.setdefault((claim.device, claim.space), []).append(claim)
        return claims

    def release(self, claims: list[Claim]) -> None:
        """Removes the claims of a transfer that has ended."""
        for claim in claims:
            self._active[claim.device, claim.space].remove(claim)

    def _check_bounds(self, claim: Claim) -> None:
        transfer = claim.transfer
        buffer = self._addresses.at_granule(claim.space, claim.first)
        over = claim.stop - self._addresses.granules(buffer)[1] if buffer else 0
        if buffer is None or (over > 0 and not transfer.strided):
            past = f"{over * GRANULE} bytes past the end of {buffer.label}" if buffer else "outside every buffer"
            raise OutOfBoundsError(
                f"{transfer.phase}: {transfer.name} of {transfer.granules * GRANULE} bytes on device {claim.device} "
                f"{claim.does} {past}; at {transfer.location}"
            )

    def _check_races(self, claim: Claim) -> None:
        for other in self._active.get((claim.device, claim.space), ()):
            if (claim.writes or other.writes) and claim.first < other.stop and other.first < claim.stop:
                buffer = self._addresses.at_granule(claim.space, claim.first)
                mine, earlier = claim.transfer, other.transfer
                raise RaceError(
                    f"device {claim.device}: {mine.name} in {mine.phase} ({mine.location}) {claim.does} "
                    f"{buffer.label if buffer else claim.space} while {earlier.name} of {earlier.phase} "
                    f"({earlier.location}) still {other.does} it"
                )
