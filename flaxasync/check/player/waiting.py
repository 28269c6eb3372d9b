"""What a device waits for: a semaphore, and how it has to compare with a number."""

import dataclasses

from flaxasync.check.player.basic_blocks import Action

_COMPARE = {
    "ge": (int.__ge__, "at least"),
    "gt": (int.__gt__, "more than"),
    "eq": (int.__eq__, "equal to"),
    "ne": (int.__ne__, "other than"),
    "le": (int.__le__, "at most"),
    "lt": (int.__lt__, "less than"),
}


@dataclasses.dataclass(slots=True)
class Waiting:
    """A wait of one device."""

    flag: int
    order: str  # a key of the comparisons
    needed: int
    action: Action

    def over(self, value: int) -> bool:
        """Says whether the semaphore's value ends the wait."""
        return _COMPARE[self.order][0](value, self.needed)

    @property
    def needed_words(self) -> str:
        return f"to be {_COMPARE[self.order][1]} {self.needed}"
