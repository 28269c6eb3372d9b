"""Sizes and times as text: each has the unit of its size, also where rounding takes it to the next
one.
"""

import pytest

from flaxasync.check.units import size_text, time_text


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (1536, "1.5 KiB"),
        ((1 << 20) - 1, "1 MiB"),
        (2 << 20, "2 MiB"),
        (1023 << 20, "1023 MiB"),
        ((1 << 30) - 1, "1 GiB"),
        (20 << 30, "20 GiB"),
        (3 << 39, "1.5 TiB"),
        (5000 << 40, "5000 TiB"),
    ],
)
def test_sizes(count, text):
    assert size_text(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 us"),
        (93.2e-6, "93.2 us"),
        (999.4e-6, "999 us"),
        (999.6e-6, "1 ms"),
        (2.98e-3, "2.98 ms"),
        (999.6e-3, "1 s"),
        (3.44, "3.44 s"),
        (59.94, "59.9 s"),
        (59.96, "1 min"),
        (90, "1.5 min"),
    ],
)
def test_times(seconds, text):
    assert time_text(seconds) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(3.495, "3.495 s"), (0.01234, "12.34 ms"), (999.6e-6, "999.6 us")]
)
def test_times_with_more_digits(seconds, text):
    assert time_text(seconds, digits=4) == text
