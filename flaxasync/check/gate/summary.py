"""`summarize`: what matters of a compiled program, in rows that its names and its order do not change.

The rows are those of auditing/rows.py, and one for each code of an audit's finding that is an error. Each row lists its
source lines, so that a difference can name them. Seconds are estimates (`timeline`): they say what is hidden, and they
are no measurement.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from flaxasync.check.auditing.audit import DEFAULT_CHIP, audit
from flaxasync.check.auditing.findings import Severity
from flaxasync.check.auditing.rows import Row, RowReader, Rows, add_to
from flaxasync.check.estimate.costs import Costs
from flaxasync.check.estimate.estimator import timeline
from flaxasync.check.hlo.axis_names import AxisNames
from flaxasync.check.hlo.from_compiled import axes_of, chip_of, module_of
from flaxasync.hardware import chip as chip_named


@dataclasses.dataclass(frozen=True)
class Summary:
    """What matters of one program.

    Attributes:
      module: The name of the program.
      chip: The chip whose times were estimated.
      devices: The number of devices of the program.
      axes: The sizes of the mesh axes; empty if they are not known.
      seconds: The estimated time of one run.
      exposed: The share of that time in which the slowest device waits for others.
      temporaries: The bytes of temporary memory; None if only a text was given, which does not say.
      transfers, copies, callbacks, hazards: The rows.
    """

    module: str
    chip: str
    devices: int
    axes: Mapping[str, int]
    seconds: float
    exposed: float
    temporaries: int | None
    transfers: Rows
    copies: Rows
    callbacks: Rows
    hazards: Rows


def summarize(compiled: Any, *, chip: str | None = None, axes: Mapping[str, int] | None = None) -> Summary:
    """Summarizes a compiled program for a comparison with another one.

    Args:
      compiled: What `jitted.lower(...).compile()` or `compile_for` returned, or HLO text, or a parsed module.
      chip: The chip whose times are estimated. By default the program's own chip, or v5e if the program does not say.
      axes: The sizes of the mesh axes, by name, in the order of the mesh. By default those of the program, or those
        that its text names.

    Raises:
      HloError: The text cannot be read.
      ValueError: The program is not scheduled, or its chip is unknown, or the axes do not multiply to its devices.
    """
    module = module_of(compiled)
    named = chip or chip_of(compiled) or DEFAULT_CHIP
    names = AxisNames(module, axes or axes_of(compiled))
    if axes and not names.axes:
        raise ValueError(
            f"axes must multiply to the {module.num_partitions} devices of {module.name}: got "
            + ", ".join(f"{name}={size}" for name, size in axes.items())
        )
    time = timeline(module, named)
    reader = RowReader(module, Costs(module, chip_named(named)), names, time.slowest.causes)
    hazards: Rows = {}
    for finding in audit(module, chip=named).findings:
        if finding.severity == Severity.ERROR:
            add_to(hazards, Row(finding.code), finding.count, finding.source)
    memory = compiled.memory_analysis() if hasattr(compiled, "memory_analysis") else None
    return Summary(
        module=module.name,
        chip=chip_named(named).name,
        devices=module.num_partitions,
        axes=names.axes,
        seconds=time.seconds,
        exposed=time.exposed / time.seconds if time.seconds else 0.0,
        temporaries=getattr(memory, "temp_size_in_bytes", None),
        transfers=reader.transfers(),
        copies=reader.copies(),
        callbacks=reader.callbacks(),
        hazards=hazards,
    )
