"""The programs of a folder that XLA dumped: `python -m flaxasync.check FOLDER`.

`XLA_FLAGS=--xla_dump_to=FOLDER` makes XLA write several texts of every module that it compiles.
The program that runs, optimized and scheduled, is the one whose name ends in
"after_optimizations.txt". The others are earlier stages, and reports about memory.
"""

import os
import pathlib
from collections.abc import Sequence
from typing import NamedTuple

from flaxasync.check.auditing.audit import audit
from flaxasync.check.auditing.findings import Audit, Severity
from flaxasync.check.estimate.timeline import Timeline
from flaxasync.check.hlo.load import read_module
from flaxasync.check.timeline_of import timeline
from flaxasync.check.units import time_text

FINAL = "after_optimizations.txt"
COMMAND = "XLA_FLAGS='--xla_dump_to={} --xla_dump_hlo_as_text' python your_program.py"


class DumpedProgram(NamedTuple):
    """One program of a folder."""

    file: pathlib.Path
    devices: int
    report: Audit
    time: Timeline

    def __str__(self) -> str:
        share = 0.0
        if self.time.seconds:
            share = self.time.exposed / self.time.seconds
        errors = sum(found.severity == Severity.ERROR for found in self.report.findings)
        return (
            f"{self.devices:7} {time_text(self.time.seconds):>9} {share:8.1%} {errors:7}  "
            f"{self.file.name}"
        )


def read_dump(path: str | os.PathLike, *, chip: str | None = None) -> list[DumpedProgram]:
    """Reads and audits the final programs of a folder that XLA dumped, and returns the longest
    first.

    Args:
      path: The folder.
      chip: The chip whose times are estimated; by default v5e, or h100 for a program that was
        compiled for GPUs.

    Raises:
      ValueError: There is no final program, or one cannot be read. The message names its file.
    """
    folder = pathlib.Path(path)
    files = sorted(folder.glob(f"*{FINAL}"))
    if not files:
        raise ValueError(
            f"there is no *{FINAL} in it, the text of a compiled program: {COMMAND.format(folder)} "
            "writes one for each program that it compiles"
        )
    programs = []
    for file in files:
        try:
            module = read_module(file)
            report = audit(module, chip=chip)
            time = timeline(module, report.chip)
        except ValueError as error:
            raise ValueError(f"{file.name}: {error}") from error
        programs.append(DumpedProgram(file, module.num_devices, report, time))
    return sorted(programs, key=lambda program: -program.time.seconds)


def table(programs: Sequence[DumpedProgram]) -> str:
    """Returns one row of each program, and the audit of the longest."""
    longest = programs[0]
    lines = [f"read {len(programs)} files *{FINAL} (estimated on {longest.report.chip}):"]
    lines.append(f"{'devices':>7} {'estimate':>9} {'exposed':>8} {'errors':>7}  file")
    lines += map(str, programs)
    lines += ["", f"{longest.file.name}, the longest:", str(longest.report)]
    return "\n".join(lines)
