"""The file metrics.jsonl, which has one line per step whatever happened to the processes of the run.

A step that is repeated after a restart replaces its line, so that the file has each step exactly once. A line that is
not valid is moved to another file, and never takes other lines with it.
"""

import json
import math
from collections.abc import Callable
from pathlib import Path

from train.lifecycle.files import LineFile, read_lines, write_atomically
from train.metrics.recorder import Line, step_of


class MetricsFile:
    """The sink that writes metrics.jsonl. Opening it drops the lines after step `start`, which are repeated."""

    def __init__(self, path: Path, *, start: int, say: Callable[[str], None] = print):
        """Opens the file.

        Args:
          path: The file.
          start: The number of steps that are done.
          say: Prints what is wrong with the file, or with writing it.
        """
        kept = repair(path, start=start, say=say)
        self.seconds = math.fsum(float(line.get("step_seconds") or 0.0) for line in kept)
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
    lines = [line for line in read_lines(path)[0] if _has_step(line)]
    return [line for _, line in sorted({step_of(line): line for line in lines}.items())]


def repair(path: Path, *, start: int, say: Callable[[str], None]) -> list[Line]:
    """Drops the lines of steps later than `start`, moves invalid lines aside, and says which steps have no line.

    Returns:
      The lines that were kept.
    """
    lines, bad = read_lines(path)
    bad += [json.dumps(line).encode() + b"\n" for line in lines if not _has_step(line)]
    if bad:
        aside = path.with_name(f"{path.stem}.invalid{path.suffix}")
        with open(aside, "ab") as file:
            file.writelines(bad)
        say(f"{path} had {len(bad)} invalid lines, which were moved to {aside}; all others were kept")
    kept = [line for line in read_metrics(path) if step_of(line) <= start]
    if path.exists():
        write_atomically(path, "".join(json.dumps(line) + "\n" for line in kept))
    missing = missing_steps([step_of(line) for line in kept], start)
    if missing:
        say(f"{path} has no line for {missing}, which were done before; they may still be in tensorboard/")
    return kept


def missing_steps(steps: list[int], last: int) -> str:
    """Names the steps from 1 to `last` that are not in `steps`, as "steps 3 to 5, 9"; "" if there are none."""
    there, spans = set(steps), list[list[int]]()
    for step in range(1, last + 1):
        if step in there:
            continue
        if spans and spans[-1][1] == step - 1:
            spans[-1][1] = step
        else:
            spans.append([step, step])
    return ("steps " + ", ".join(f"{a} to {b}" if a < b else str(a) for a, b in spans)) if spans else ""


def _has_step(line: Line) -> bool:
    return isinstance(line.get("step"), int)
