"""`HbmError`: the TPU compiler refused a program because it does not fit, and by how much."""

import re

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40, "P": 1 << 50}
_SIZE = r"([\d.]+)([KMGTP]?)i?B?"
# The first is said before memory is laid out, the second after.
_MESSAGES = (
    re.compile(rf"memory required for HLO temporaries \({_SIZE}\) exceeds available HBM \({_SIZE}\)"),
    re.compile(rf"[Uu]sed {_SIZE} of {_SIZE} hbm"),
)


class HbmError(RuntimeError):
    """The program needs more HBM than a device has. Both sizes are the compiler's, to three or four digits.

    Attributes:
      needed: bytes on a device, with arguments and outputs.
      available: bytes that programs can have on that device.
    """

    def __init__(self, message: str, needed: int, available: int):
        super().__init__(message)
        self.needed = needed
        self.available = available


def hbm_error(message: str) -> HbmError | None:
    """Reads a refusal of the compiler; None when it is about something else."""
    for pattern in _MESSAGES:
        if match := pattern.search(message):
            needed, available = (round(float(match[n]) * _UNITS[match[n + 1]]) for n in (1, 3))
            return HbmError(f"the TPU compiler refused: {message}", needed, available)
    return None
