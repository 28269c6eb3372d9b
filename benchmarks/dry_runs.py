"""Reports of dry runs, which benchmarks keep in a folder."""

import contextlib
import json
import pathlib
import sys
from collections.abc import Callable
from typing import Any

from train.config import Config
from train.dry_run.command import dry_run


def kept_report(
    programs: pathlib.Path, name: str, topology: str, config_in: Callable[[pathlib.Path], Config]
) -> dict[str, Any]:
    """Returns the report of the dry run of a step, which is made if it is not there.

    `config_in` makes the run for the folder that it is given, its workdir.
    """
    folder = programs / f"dry run of {name} on {topology.replace(':', ' ')}"
    report = folder / "dry_run" / "report.json"
    if not report.exists():
        with contextlib.redirect_stdout(sys.stderr):
            dry_run(config_in(folder), topology)
    return json.loads(report.read_text())
