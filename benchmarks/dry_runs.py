"""Reports of dry runs, which benchmarks keep in a folder."""

import contextlib
import dataclasses
import json
import pathlib
import sys
from collections.abc import Mapping
from typing import Any

from configs.llama_8b import llama_8b
from train.config import replace_options
from train.dry_run.command import dry_run


def kept_report(
    programs: pathlib.Path, name: str, topology: str, options: Mapping[str, object]
) -> dict[str, Any]:
    """Returns the report of the dry run of llama_8b with these options, which is made if it is not
    there.
    """
    folder = programs / f"dry run of {name} on {topology.replace(':', ' ')}"
    report = folder / "dry_run" / "report.json"
    if not report.exists():
        base = dataclasses.replace(llama_8b(), workdir=str(folder))
        with contextlib.redirect_stdout(sys.stderr):
            dry_run(replace_options(base, options), topology)
    return json.loads(report.read_text())
