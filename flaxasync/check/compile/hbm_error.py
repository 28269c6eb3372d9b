"""`HbmError`, for a program that the TPU compiler refused because it does not fit into memory."""

import re

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40, "P": 1 << 50}
_SIZE = r"([\d.]+)([KMGTP]?)i?B?"
# The compiler prints the first message before it lays out the memory, and the second one after that.
_MESSAGES = (
    re.compile(rf"memory required for HLO temporaries \({_SIZE}\) exceeds available HBM \({_SIZE}\)"),
    re.compile(rf"[Uu]sed {_SIZE} of {_SIZE} hbm"),
)


class HbmError(RuntimeError):
    """The program needs more HBM than a device has: `needed` of `available` bytes, as the compiler rounds them.

    `needed` includes arguments and outputs, and `available` is what programs can use.
    """

    def __init__(self, message: str, needed: int, available: int):
        super().__init__(message)
        self.needed = needed
        self.available = available


def hbm_error(message: str) -> HbmError | None:
    """Returns the error for a message of the compiler; None if the message is about something else."""
    for pattern in _MESSAGES:
        if match := pattern.search(message):
            needed, available = (round(float(match[n]) * _UNITS[match[n + 1]]) for n in (1, 3))
            return HbmError(f"the TPU compiler refused: {message}", needed, available)
    return None
