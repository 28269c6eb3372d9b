"""A summary as a JSON file, which people read in a review and `compare` reads back.

The rows are sorted and seconds are rounded, so that a file changes only where the program does.
"""

import dataclasses
import json
import os
import pathlib
from typing import Any

from flaxasync.check.gate.summary import Count, Row, Rows, Summary

FORMAT = 1  # of the file; a file of another format is refused
_ROWS = ("transfers", "copies", "callbacks", "hazards")


def write_baseline(summary: Summary, path: str | os.PathLike) -> None:
    """Writes a summary to a file, and makes the folder of the file if there is none."""
    facts = {field.name: _rounded(getattr(summary, field.name)) for field in dataclasses.fields(summary)}
    facts |= {name: _rows_to_json(facts[name]) for name in _ROWS}
    file = pathlib.Path(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({"format": FORMAT} | facts, indent=1, sort_keys=True) + "\n")


def read_baseline(path: str | os.PathLike) -> Summary:
    """Reads a summary from a file.

    Raises:
      ValueError: The file is no baseline, or one of another format. The message says what to do.
      OSError: The file cannot be read.
    """
    try:
        facts = json.loads(pathlib.Path(path).read_text("utf-8-sig"))
        if facts.pop("format") != FORMAT:
            raise ValueError("it is of another format")
        return Summary(**facts | {name: _rows_from_json(facts[name]) for name in _ROWS})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{path} is not a baseline of format {FORMAT} ({type(error).__name__}: {error}); "
            "write it again with --update"
        ) from error


def _rows_to_json(rows: Rows) -> list[dict[str, Any]]:
    return [
        dataclasses.asdict(row) | dataclasses.asdict(count) | {"exposed": _rounded(count.exposed)}
        for row, count in sorted(rows.items())
    ]


def _rows_from_json(rows: list[dict[str, Any]]) -> Rows:
    names = [field.name for field in dataclasses.fields(Row)]
    read: Rows = {}
    for facts in rows:
        row = Row(**{name: facts.pop(name) for name in names if name in facts})
        read[row] = Count(**facts)
    return read


def _rounded(value: Any) -> Any:
    return float(f"{value:.4g}") if isinstance(value, float) else value
