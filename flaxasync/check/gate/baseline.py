"""A summary as a JSON file, which people read in a review and `compare` reads back.

The rows are sorted and seconds are rounded, so that a file changes only where the program does.
"""

import dataclasses
import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any

from flaxasync.check.gate.summary import Count, Row, Rows, Summary

FORMAT = 1  # of the file; a file of another format is refused
_ROWS = ("transfers", "copies", "callbacks", "hazards")
_TYPES: dict[str, type | tuple[type, ...]] = {
    "module": str, "chip": str, "devices": int, "axes": dict, "seconds": (int, float), "exposed": (int, float),
    "temporaries": (int, type(None)), **dict.fromkeys(_ROWS, list),
}  # fmt: skip
_ROW_TYPES: dict[str, type | tuple[type, ...]] = {
    "what": str, "place": str, "axes": str, "dtype": str, "bytes": int,
    "count": int, "runs": int, "exposed": (int, float), "sources": dict,
}  # fmt: skip


def write_baseline(summary: Summary, path: str | os.PathLike) -> None:
    """Writes a summary to a file, and makes the folder of the file if there is none."""
    file = pathlib.Path(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(to_json(summary), indent=1) + "\n")


def read_baseline(path: str | os.PathLike) -> Summary:
    """Reads a summary from a file.

    Raises:
      ValueError: The file is no baseline, or one of another format. The message says what to do.
      OSError: The file cannot be read.
    """
    try:
        return from_json(json.loads(pathlib.Path(path).read_text("utf-8-sig")))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{path} is not a baseline of format {FORMAT} ({type(error).__name__}: {error}); "
            "write it again with --update"
        ) from error


def to_json(summary: Summary) -> dict[str, Any]:
    """Returns a summary as what `json.dumps` takes."""
    facts: dict[str, Any] = {"format": FORMAT}
    for field in dataclasses.fields(summary):
        value = getattr(summary, field.name)
        facts[field.name] = _rows_to_json(value) if field.name in _ROWS else _rounded(value)
    return facts


def from_json(facts: Mapping[str, Any]) -> Summary:
    """Returns the summary that `to_json` wrote.

    Raises:
      ValueError, KeyError, TypeError, AttributeError: The facts are of another format.
    """
    if facts["format"] != FORMAT:
        raise ValueError(f"its format is {facts['format']}")
    names = [field.name for field in dataclasses.fields(Summary)]
    if unknown := facts.keys() - {"format", *names}:
        raise ValueError(f"it has the unknown entries {', '.join(sorted(unknown))}")
    values = {name: _typed(facts, name, _TYPES) for name in names}
    return Summary(**values | {name: _rows_from_json(values[name]) for name in _ROWS})


def _rows_to_json(rows: Rows) -> list[dict[str, Any]]:
    written = []
    for row, count in sorted(rows.items()):
        facts = {name: value for name, value in dataclasses.asdict(row).items() if value}
        facts |= {"count": count.count, "runs": count.runs, "exposed": _rounded(count.exposed)}
        written.append(facts | ({"sources": dict(sorted(count.sources.items()))} if count.sources else {}))
    return written


def _rows_from_json(rows: list[dict[str, Any]]) -> Rows:
    read: Rows = {}
    keys = [field.name for field in dataclasses.fields(Row)]
    for facts in rows:
        row = Row(**{name: _typed(facts, name, _ROW_TYPES) for name in keys if name in facts})
        counts = {name: _typed(facts, name, _ROW_TYPES) for name in ("count", "runs", "exposed")}
        read[row] = Count(**counts, sources=_typed({"sources": {}} | facts, "sources", _ROW_TYPES))
    return read


def _typed(facts: Mapping[str, Any], name: str, types: Mapping[str, type | tuple[type, ...]]) -> Any:
    """Returns an entry of the file, or raises ValueError if it is of another type."""
    value, kind = facts[name], types[name]
    numbers = value.values() if isinstance(value, dict) else ()  # the sizes of axes, the numbers of source lines
    if not isinstance(value, kind) or not all(isinstance(number, int) for number in numbers):
        raise ValueError(f"its entry {name} is {value!r}")
    return value


def _rounded(value: Any) -> Any:
    return float(f"{value:.4g}") if isinstance(value, float) else value
