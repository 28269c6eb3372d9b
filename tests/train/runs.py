"""The script that trains, and what a run leaves in its workdir."""

import json
import os
import re
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "train" / "run.py"


def lines_of(workdir: Path) -> list[dict]:
    """Returns the lines of metrics.jsonl, or none if there is no such file yet."""
    path = workdir / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def events_of(workdir: Path) -> list[dict]:
    return [json.loads(line) for line in (workdir / "events.jsonl").read_text().splitlines()]


def checkpoints_of(workdir: Path) -> set[str]:
    """Returns the names of all checkpoints, finished or still being written."""
    folder = workdir / "checkpoints"
    return set(os.listdir(folder)) if folder.exists() else set()


def without_progress(err: str) -> str:
    """Returns what a command says on standard error, without the lines about what takes long on a
    busy machine.
    """
    return re.sub(r"^flaxasync: .* s so far\n", "", err, flags=re.MULTILINE)


def contents(folder: Path) -> dict[Path, bytes]:
    """Returns every file of a workdir but its lock."""
    return {
        path: path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name != ".lock"
    }
