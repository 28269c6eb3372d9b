"""The routing table of a device: how programs name chips on slices where a chip's own number does
not fit into an address.

On v5e, an address of a semaphore or of a buffer on another chip has four bits for the chip. They
are its number on slices of up to 16 chips. On larger ones they are an *index* of the sender's
routing table, which has 16 entries. A program looks up the index of a chip, and the chip of an
index to check it, in one table of words that the runtime fills:

| word | bits 24 to 31 | bits 0 to 23 |
|---|---|---|
| c | the index of chip c in the table of the device that reads it | |
| 16 p + i | | the chip at index i of the table of chip p; negative where there is none |

The two overlap: each word is read for one or the other. The form was inferred from the code that
reads the words ("RTI table lookup", "Inverse and Forward table mismatch"). The contents are not in
the dump, and which index a chip has does not matter for time. So a chip gets an index when the
program first looks it up. A word that can be meant for its chip or for its index gives an index to
its chip, too, which another chip may take as long as nothing was sent to it.
"""

import dataclasses

from flaxasync.check.player.errors import UnsimulatedError
from flaxasync.check.player.memory import Buffer

ENTRIES = 16
TAG = "Routing table index mapping tables"  # the compiler's words for the table
_INDEX_SHIFT = 24
_NO_CHIP = 0xFFFFFFFF


@dataclasses.dataclass
class RoutingTable:
    """The chips that one device addresses, by index."""

    buffer: Buffer  # where the table is in scalar memory
    chip_id: int  # of the device
    chip_count: int  # of the slice
    chips: dict[int, int] = dataclasses.field(default_factory=dict)  # by index
    # indices of chips that the program may not have looked up
    uncertain: set[int] = dataclasses.field(default_factory=set)

    def holds(self, address: int) -> bool:
        return 0 <= address - self.buffer.address < self.buffer.size

    def word(self, address: int) -> int:
        """Returns the word at an address of the table."""
        place = address - self.buffer.address
        index = place - ENTRIES * self.chip_id
        if index not in self.chips:
            if place >= self.chip_count:
                return _NO_CHIP
            return self._index_of(place, certain=True) << _INDEX_SHIFT
        named = self.chips[index]
        if place >= self.chip_count:
            return named
        return self._index_of(place, certain=place == named) << _INDEX_SHIFT | named

    def chip(self, index: int) -> int:
        """Returns the number of the chip at an index, to which the program sends something."""
        if index not in self.chips:
            raise UnsimulatedError(
                f"the simulator lacks entry {index} of the routing table of the device on chip "
                f"{self.chip_id}, which its program did not look up"
            )
        self.uncertain.discard(index)
        return self.chips[index]

    def _index_of(self, chip: int, *, certain: bool) -> int:
        for index, known in self.chips.items():
            if known == chip:
                if certain:
                    self.uncertain.discard(index)
                return index
        index = self._free_index()
        self.chips[index] = chip
        if not certain:
            self.uncertain.add(index)
        return index

    def _free_index(self) -> int:
        for index in range(ENTRIES):
            if index not in self.chips:
                return index
        if self.uncertain:
            return self.uncertain.pop()
        raise UnsimulatedError(
            f"the simulator lacks a routing table for the device on chip {self.chip_id}, whose "
            f"program looks up more than {ENTRIES} other chips"
        )
