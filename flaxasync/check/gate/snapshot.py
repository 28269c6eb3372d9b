"""`summarize`: what the gate compares of a compiled program, and its JSON file.

docs/gate.md has a table of the rows. The names and the order of a program do not change them, and
not how XLA combines and splits collectives: a row is a total over all instructions of its kind.
Seconds are estimates (`timeline`): they say what is hidden, and they are no measurement.
"""

import dataclasses
import json
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from flaxasync.check.auditing.audit import audit, default_chip
from flaxasync.check.auditing.findings import CODES, Severity
from flaxasync.check.auditing.overlap import collectives_that_hold_the_chip
from flaxasync.check.estimate.costs import Costs
from flaxasync.check.estimate.costs_of import costs_of
from flaxasync.check.estimate.estimator import timeline
from flaxasync.check.hlo.async_operations import COLLECTIVES, async_operations, largest_array
from flaxasync.check.hlo.load import axes_of, chip_of, module_of
from flaxasync.check.hlo.module import Instruction, without_number
from flaxasync.check.hlo.origins import callback_name, is_host_callback, origin
from flaxasync.check.hlo.participants import AxisNames
from flaxasync.hardware import accelerator, is_gpu

SMALL = 1 << 10  # bytes; a smaller transfer, such as the sum of a loss, has no row
FORMAT = 3  # of the file; a file of another format is refused
# The kinds of rows; the code of a finding of the audit is one, too.
TRANSFERS = "transfers"
WAITS = "seconds of waiting"
COPIES = "loop-copies"  # the code of a finding that is no error
CALLBACKS = "host callbacks"
MEMORY = "bytes of temporary memory"


@dataclasses.dataclass
class Total:
    """What a program has of a row in one step, over all iterations of its loops."""

    amount: float = 0  # bytes, seconds or, of callbacks and findings, runs
    dtypes: list[str] = dataclasses.field(default_factory=list)  # of what is moved, sorted
    # the instructions of each source line
    sources: dict[str, int] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Summary:
    """What matters of one program."""

    module: str  # the name of the program
    chip: str  # the chip whose times were estimated
    devices: int  # the number of devices of the program
    axes: dict[str, int]  # the sizes of the mesh axes; empty if they are not known
    seconds: float  # the estimated time of one run
    # by their kind and name, such as "transfers: all-gather over model (backward loop)"
    rows: dict[str, Total]


def summarize(
    compiled: Any, *, chip: str | None = None, axes: Mapping[str, int] | None = None
) -> Summary:
    """Summarizes a compiled program for a comparison with another one.

    Args:
      compiled: What `jitted.lower(...).compile()` or `compile_for` returned, or HLO text, or a
        parsed module.
      chip: The chip whose times are estimated. By default the program's own chip. If the program
        does not say, v5e, or h100 for a program that was compiled for GPUs.
      axes: The sizes of the mesh axes, by name, in the order of the mesh. By default those of the
        program, or those that its text names.

    Raises:
      HloError: The text cannot be read.
      ValueError: The program is not scheduled, or its chip is unknown, or the axes do not multiply
        to its devices.
    """
    module = module_of(compiled)
    named = chip or chip_of(compiled) or default_chip(module)
    names = AxisNames(module, axes or axes_of(compiled))
    if axes and not names.axes:
        given = ", ".join(f"{name}={size}" for name, size in axes.items())
        raise ValueError(
            f"axes must multiply to the {module.num_devices} devices of {module.name}: got {given}"
        )
    # A program for GPUs says on which host each of them is; a module does not.
    source = module
    if hasattr(compiled, "coords") and is_gpu(compiled.chip):
        source = compiled
    time = timeline(source, named)
    costs = costs_of(module, named, program=compiled)
    rows = {f"{WAITS}: all transfers": Total(time.exposed)}
    _add_transfers(rows, names, costs, time.slowest.causes)
    for i in costs.executed:
        if is_host_callback(i):
            _add(rows, CALLBACKS, callback_name(i), costs.runs[i.computation.name], [i])
    for found in audit(source, chip=named).findings:
        if found.severity == Severity.ERROR or found.code == COPIES:
            computation = module.computations[found.computation]
            i = computation.by_name.get(found.instruction, computation.root)
            _add(rows, found.code, CODES[found.code].meaning, found.count, [i])
    if hasattr(compiled, "memory_analysis"):  # a text does not say it, and some backends do not
        temporaries = getattr(compiled.memory_analysis(), "temp_size_in_bytes", None)
        if temporaries is not None:
            rows[f"{MEMORY}: the program"] = Total(temporaries)
    return Summary(
        module=module.name,
        chip=accelerator(named).name,
        devices=module.num_devices,
        axes=dict(names.axes),
        seconds=time.seconds,
        rows=rows,
    )


def write_baseline(summary: Summary, path: str | os.PathLike) -> None:
    """Writes a summary to a JSON file, and makes the folder of the file if there is none."""
    content = dataclasses.asdict(summary) | {"format": FORMAT}
    file = pathlib.Path(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n")


def read_baseline(path: str | os.PathLike) -> Summary:
    """Reads a summary from a file.

    Raises:
      FileNotFoundError: There is no file.
      OSError: The file cannot be read.
      ValueError: It is no baseline, or one of another format. The message says what to do, and
        does not name the file.
    """
    text = pathlib.Path(path).read_bytes()
    try:
        facts = json.loads(text)
        if facts.pop("format") != FORMAT:
            raise ValueError("it is of another format")
        rows = {row: Total(**total) for row, total in facts.pop("rows").items()}
        return Summary(**facts, rows=rows)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"it is not a baseline of format {FORMAT} ({type(error).__name__}: {error}); write it "
            "again with --update"
        ) from error


def _add_transfers(
    rows: dict[str, Total], names: AxisNames, costs: Costs, exposed: Mapping[str, float]
) -> None:
    """Adds the transfers of a program, and the waits for them. `exposed` has the seconds of a
    device's waits, by the name of the start, or of the synchronous collective or kernel.
    """

    def add(what: str, i: Instruction, collective: Instruction, result: Instruction) -> None:
        """Adds a transfer: what waits for it (`i`), what has its groups, and what has its array."""
        size = result.shape.bytes
        if result.opcode == "reduce-scatter":
            size *= costs.group_size(result)  # its result is one part of the whole array
        if size < SMALL:
            return
        axes = names.of(collective)
        name = f"{what} over {axes}" if axes else what
        moved = size * costs.runs[i.computation.name]
        at = [i, collective]
        _add(rows, TRANSFERS, name, moved, at, dtype=largest_array(result).element_type)
        _add(rows, WAITS, name, exposed.get(i.name, 0.0), at)

    for op in async_operations(costs.module):
        runs = op.computation in costs.runs and not is_host_callback(op.start)
        if runs and op.kind in COLLECTIVES:
            last = op.windows[0].done if op.windows else op.start
            add(op.kind, op.start, op.inner or op.start, op.inner or last)
    for i, collective in collectives_that_hold_the_chip(costs):
        add(costs.collective_kind(i, collective), i, collective, collective)
    for i in costs.executed:
        if i.is_communicating_kernel:
            add(f"kernel {without_number(i.name)}", i, i, i)


def _add(
    rows: dict[str, Total],
    kind: str,
    what: str,
    amount: float,
    at: Sequence[Instruction],
    dtype: str = "",
) -> None:
    """Adds one operation, which these instructions are, to the row of its kind and place. What the
    text of the program does not say of them is left out.
    """
    place, source = origin(*at)
    name = f"{kind}: {what}"
    if place:
        name += f" ({place})"
    total = rows.setdefault(name, Total())
    total.amount += amount
    if source:
        total.sources[source] = total.sources.get(source, 0) + 1
    if dtype:
        total.dtypes = sorted({*total.dtypes, dtype})
