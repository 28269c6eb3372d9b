"""Sizes and times as text, in the unit of their size.

A unit is taken if the number, rounded, is at least one of it: 0.9996 ms is "1 ms" and not
"1e+03 us".
"""

import math
from collections.abc import Iterable

# Each unit, and how many of it are one of the next.
_SIZES = (("B", 1024), ("KiB", 1024), ("MiB", 1024), ("GiB", 1024), ("TiB", math.inf))
_TIMES = (("us", 1000), ("ms", 1000), ("s", 60), ("min", 60), ("h", math.inf))


def size_text(count: float) -> str:
    """Returns a number of bytes with a unit: "512 B", "1.5 KiB", "2 GiB"."""
    return _in_a_unit(count, _SIZES, digits=4)


def time_text(seconds: float, digits: int = 3) -> str:
    """Returns a time with a unit: "93.2 us", "2.98 ms", "17.8 s", "1.5 min"."""
    return _in_a_unit(seconds * 1e6, _TIMES, digits)


def _in_a_unit(number: float, units: Iterable[tuple[str, float]], digits: int) -> str:
    text = ""
    for name, of_next in units:
        text = f"{number:.{digits}g}"
        if of_next == math.inf and number >= 1000:
            text = f"{number:.0f}"
        if float(text) < of_next:
            return f"{text} {name}"
        number = max(number / of_next, 1)  # what is rounded up to the next unit is one of it
    return text  # that of infinity
