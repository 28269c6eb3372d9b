"""The file metrics.jsonl, which has one line per step whatever happened to the processes of the run.

A step that is repeated after a restart replaces its line, so that the file has each step exactly once. A line that is
not valid is moved to another file, and never takes other lines with it.
"""

import json
import math
from collections.abc import Callable
from pathlib import Path

from train.lifecycle.files import LineFile, read_lines, write_atomically
from train.metrics.recorder import Line, Sink


class MetricsFile(Sink):
    """The sink that writes metrics.jsonl. Opening it drops the lines after step `start`, which are repeated."""

    def __init__(self, path: Path, *, start: int, say: Callable[[str], None] = print):
        kept = repair(path, start=start, say=say)
        self.seconds = math.fsum(line.get("step_seconds") or 0.0 for line in kept)
        """Time that earlier processes spent on the steps of the file, in seconds."""
        self._file = LineFile(path, say)

    def write(self, lines: list[Line]) -> None:
        self._file.append(lines)

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def read_metrics(path: Path) -> list[Line]:
    """Reads the valid lines of a metrics.jsonl in the order of their steps; the last one of a step counts."""
    lines = {line["step"]: line for line in read_lines(path)[0] if isinstance(line.get("step"), int)}
    return [lines[step] for step in sorted(lines)]


def repair(path: Path, *, start: int, say: Callable[[str], None]) -> list[Line]:
    """Drops the lines of steps later than `start`, moves invalid lines aside, and returns the lines that were kept."""
    lines, bad = read_lines(path)
    bad += [json.dumps(line).encode() + b"\n" for line in lines if not isinstance(line.get("step"), int)]
    if bad:
        aside = path.with_name(f"{path.stem}.invalid{path.suffix}")
        with open(aside, "ab") as file:
            file.writelines(bad)
        say(f"{path} had {len(bad)} invalid lines, which were moved to {aside}; all others were kept")
    kept = [line for line in read_metrics(path) if line["step"] <= start]
    if path.exists():
        write_atomically(path, "".join(json.dumps(line) + "\n" for line in kept))
    if len(kept) < start:
        missing = start - len(kept)
        say(f"{path} lacks {missing} of the {start} steps that were done before; they may still be in tensorboard/")
    return kept
