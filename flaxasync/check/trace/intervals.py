"""Arithmetic of time intervals, so that time in which several things happen at once is counted once."""

from collections.abc import Iterable

type Interval = tuple[float, float]  # begin and end, in seconds


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Returns disjoint intervals, in order, that cover what the given ones cover."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        elif end > start:
            merged.append((start, end))
    return merged


def subtract(intervals: Iterable[Interval], removed: Iterable[Interval]) -> list[Interval]:
    """Returns the parts of the intervals that no removed interval covers, disjoint and in order."""
    rest, holes = [], union(removed)
    for start, end in union(intervals):
        for low, high in holes:
            if high <= start or low >= end:
                continue
            if low > start:
                rest.append((start, low))
            start = max(start, high)
        if start < end:
            rest.append((start, end))
    return rest


def clip(intervals: Iterable[Interval], window: Interval) -> list[Interval]:
    """Returns the parts of the intervals within a window."""
    low, high = window
    return [(max(a, low), min(b, high)) for a, b in intervals if a < high and b > low]


def seconds(intervals: Iterable[Interval]) -> float:
    """Returns the time that the intervals cover together."""
    return sum(end - start for start, end in union(intervals))
