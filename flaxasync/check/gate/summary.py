"""`summarize`: what matters of a compiled program, in rows that its names and its order do not
change.

docs/gate.md has a table of the rows. A collective of several arrays has a row for each array,
because XLA combines and splits collectives as it likes. Each row lists its source lines, so that a
difference can name them. Seconds are estimates (`timeline`): they say what is hidden, and they are
no measurement.
"""

import collections
import dataclasses
import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any

from flaxasync.check.auditing.audit import DEFAULT_CHIP, audit
from flaxasync.check.auditing.findings import CODES, Severity, size_text
from flaxasync.check.auditing.overlap import COPIED, collectives_that_hold_the_chip
from flaxasync.check.estimate.costs import Costs
from flaxasync.check.estimate.estimator import timeline
from flaxasync.check.hlo.async_operations import COLLECTIVES, async_operations, largest_array
from flaxasync.check.hlo.load import axes_of, chip_of, module_of
from flaxasync.check.hlo.module import Computation, HloModule, Instruction, without_number
from flaxasync.check.hlo.origins import callback_name, is_host_callback, loops_around, origin
from flaxasync.check.hlo.participants import AxisNames, groups_in
from flaxasync.check.hlo.shapes import Shape
from flaxasync.hardware import chip as chip_named

SMALL = 1 << 10  # bytes; a smaller transfer, such as the sum of a loss, has no row
FORMAT = 1  # of the file; a file of another format is refused
_ROWS = ("transfers", "copies", "callbacks", "hazards")


@dataclasses.dataclass(frozen=True, order=True)
class Row:
    """What one row counts."""

    # the kind of collective, "copy", the name of a Python callback, or the code of a hazard
    what: str
    place: str = ""  # "forward", "backward loop", ...; "" if the text does not say
    axes: str = ""  # the mesh axes of a collective, as `AxisNames` names them
    dtype: str = ""  # the element type of the array
    # of the array: for a reduce-scatter of its operand, for an all-gather of its result
    bytes: int = 0

    def text(self, number: int, word: str = "") -> str:
        """Returns "2 more all-gathers of 64 MiB over model in the backward loop"; `word` is "more"
        here.
        """
        what = f"{self.what}: {CODES[self.what].meaning}" if self.what in CODES else self.what
        if self.bytes:
            plural = "" if number == 1 else "s"
            what = f"{what}{plural} of {size_text(self.bytes)}".replace("copys", "copies")
        over = f"over {self.axes}" if self.axes else ""
        where = (
            f"in the {self.place}{' pass' * (self.place in ('forward', 'backward'))}"
            if self.place
            else ""
        )
        return " ".join(filter(None, (str(number), word, what, over, where)))


@dataclasses.dataclass(frozen=True)
class Count:
    """How often a program has a row."""

    count: int = 0  # the instructions of the text
    runs: int = 0  # how often they run, over all iterations of the loops around them
    exposed: float = 0.0  # seconds, over all runs, in which the device waits for them, as estimated
    # the instructions of each source line
    sources: Mapping[str, int] = dataclasses.field(default_factory=dict)


type Rows = dict[Row, Count]


@dataclasses.dataclass(frozen=True)
class Summary:
    """What matters of one program."""

    module: str  # the name of the program
    chip: str  # the chip whose times were estimated
    devices: int  # the number of devices of the program
    axes: Mapping[str, int]  # the sizes of the mesh axes; empty if they are not known
    seconds: float  # the estimated time of one run
    exposed: float  # the share of that time in which the slowest device waits for others
    # the bytes of temporary memory; None if only a text was given, which does not say
    temporaries: int | None
    transfers: Rows
    copies: Rows
    callbacks: Rows
    hazards: Rows


def summarize(
    compiled: Any, *, chip: str | None = None, axes: Mapping[str, int] | None = None
) -> Summary:
    """Summarizes a compiled program for a comparison with another one.

    Args:
      compiled: What `jitted.lower(...).compile()` or `compile_for` returned, or HLO text, or a
        parsed module.
      chip: The chip whose times are estimated. By default the program's own chip, or v5e if the
        program does not say.
      axes: The sizes of the mesh axes, by name, in the order of the mesh. By default those of the
        program, or those that its text names.

    Raises:
      HloError: The text cannot be read.
      ValueError: The program is not scheduled, or its chip is unknown, or the axes do not multiply
        to its devices.
    """
    module = module_of(compiled)
    named = chip or chip_of(compiled) or DEFAULT_CHIP
    names = AxisNames(module, axes or axes_of(compiled))
    if axes and not names.axes:
        raise ValueError(
            f"axes must multiply to the {module.num_devices} devices of {module.name}: got "
            + ", ".join(f"{name}={size}" for name, size in axes.items())
        )
    time = timeline(module, named)
    reader = _RowReader(module, Costs(module, chip_named(named)), names, time.slowest.causes)
    hazards: Rows = {}
    for finding in audit(module, chip=named).findings:
        if finding.severity == Severity.ERROR:
            _add(hazards, Row(finding.code), finding.count, finding.source)
    memory = compiled.memory_analysis() if hasattr(compiled, "memory_analysis") else None
    return Summary(
        module=module.name,
        chip=chip_named(named).name,
        devices=module.num_devices,
        axes=names.axes,
        seconds=time.seconds,
        exposed=time.exposed / time.seconds if time.seconds else 0.0,
        temporaries=getattr(memory, "temp_size_in_bytes", None),
        transfers=reader.transfers(),
        copies=reader.copies(),
        callbacks=reader.callbacks(),
        hazards=hazards,
    )


def write_baseline(summary: Summary, path: str | os.PathLike) -> None:
    """Writes a summary to a JSON file, and makes the folder of the file if there is none.

    Rows are sorted and seconds are rounded, so that a file changes only where the program does.
    """
    facts = {
        field.name: _rounded(getattr(summary, field.name)) for field in dataclasses.fields(summary)
    }
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


class _RowReader:
    """Reads the rows of one program. `exposed` has the seconds of a device's waits, by the name of
    the start.
    """

    def __init__(
        self, module: HloModule, costs: Costs, names: AxisNames, exposed: Mapping[str, float]
    ):
        self.module = module
        self.costs = costs
        self.names = names
        self.exposed = exposed
        self.runs = costs.executions()
        running = (module.computations[name] for name in self.runs)
        self.instructions = [
            (computation, i) for computation in running for i in computation.instructions
        ]

    def transfers(self) -> Rows:
        rows: Rows = {}
        for op in async_operations(self.module):
            if (
                op.computation in self.runs
                and op.kind in COLLECTIVES
                and not is_host_callback(op.start)
            ):
                result = op.inner or (op.windows[0].done if op.windows else op.start)
                computation = self.module.computations[op.computation]
                self._transfer(
                    rows, computation, op.start, op.inner or op.start, op.kind, self._arrays(result)
                )
        for computation, i, collective in collectives_that_hold_the_chip(self.module, self.runs):
            kind = self.costs.collective_kind(computation, i, collective)
            self._transfer(rows, computation, i, collective, kind, self._arrays(collective))
        for computation, i in self.instructions:
            if i.is_communicating_kernel:
                self._transfer(
                    rows, computation, i, i, f"kernel {without_number(i.name)}", [largest_array(i)]
                )
        return rows

    def copies(self) -> Rows:
        """Counts copies in loops that change no memory space: not those that fetch an operand into
        vector memory.
        """
        rows: Rows = {}
        for computation, i in self.instructions:
            if i.opcode in ("copy", "copy-start"):
                copy = i.shape.at((0,)) or i.shape  # the first element of a copy-start is the copy
                is_fetch = any(
                    made.shape.memory_space != copy.memory_space for made in computation.operands(i)
                )
                if copy.bytes >= COPIED and not is_fetch and loops_around(self.module, computation):
                    place, source = origin(self.module, computation, i)
                    row = Row("copy", place, "", copy.element_type, copy.bytes)
                    _add(rows, row, self.runs[computation.name], source)
        return rows

    def callbacks(self) -> Rows:
        """Counts calls into Python. The sends and receives of one source line are one call."""
        rows: Rows = {}
        seen = set()
        for computation, i in self.instructions:
            if is_host_callback(i):
                place, source = origin(self.module, computation, i)
                row = Row(callback_name(i), place)
                if i.opcode == "custom-call" or (computation.name, row, source) not in seen:
                    seen.add((computation.name, row, source))
                    _add(rows, row, self.runs[computation.name], source)
        return rows

    def _transfer(
        self,
        rows: Rows,
        computation: Computation,
        i: Instruction,
        collective: Instruction,
        kind: str,
        arrays: list[Shape],
    ) -> None:
        """Adds a row for each array of a collective that `i` performs. Each has its share of the
        exposed time.
        """
        place, source = origin(self.module, computation, i, collective)
        arrays = [a for a in arrays if a.bytes >= SMALL]
        total = sum(a.bytes for a in arrays)
        for array in arrays:
            row = Row(kind, place, self.names.of(collective), array.element_type, array.bytes)
            exposed = self.exposed.get(i.name, 0.0) * array.bytes / total
            _add(rows, row, self.runs[computation.name], source, exposed)

    def _arrays(self, result: Instruction) -> list[Shape]:
        """Returns the whole arrays of a collective. A reduce-scatter's result is one part of
        them.
        """
        arrays = [leaf for _, leaf in result.shape.leaves()]
        if result.opcode != "reduce-scatter":
            return arrays
        parts = max(map(len, groups_in(self.module, result)))
        return [Shape(a.element_type, (parts, *a.dimensions)) for a in arrays]


def _add(rows: Rows, row: Row, runs: int, source: str, exposed: float = 0.0) -> None:
    """Counts one more instruction in its row, and in its source line if the text names one."""
    before = rows.get(row, Count())
    sources = collections.Counter(before.sources) + collections.Counter([source] if source else [])
    rows[row] = Count(before.count + 1, before.runs + runs, before.exposed + exposed, dict(sources))
