"""`summarize`: what matters of a compiled program, in rows that its names and its order do not change.

| rows | one row for each |
|---|---|
| transfers | kind of collective, element type, bytes of one array, mesh axes, and place |
| copies | element type, bytes and loop of a copy that a loop makes in every iteration |
| callbacks | Python function that the program calls, and place |
| hazards | code of an audit's finding that is an error |

The place is the pass of the training step, "forward" or "backward", and the depth of the loop. Both are read from the
names that JAX gives to operations, and from the loops themselves. A collective of several arrays has a row for each
array, because XLA combines and splits collectives as it likes. Names of instructions, the order of the text and the
lines of the source are not part of a row. Each row lists its source lines, so that a difference can name them.

Seconds are estimates (`timeline`). They say what is hidden, and they are no measurement.
"""

import collections
import dataclasses
from collections.abc import Mapping
from typing import Any

from flaxasync.check.auditing.audit import DEFAULT_CHIP, audit
from flaxasync.check.auditing.findings import Severity
from flaxasync.check.estimate.estimator import timeline
from flaxasync.check.gate.axes import AxisNames
from flaxasync.check.gate.sources import Origins
from flaxasync.check.hlo.async_operations import COLLECTIVES, async_operations, collective_in_fusion
from flaxasync.check.hlo.from_compiled import axes_of, chip_of, module_of
from flaxasync.check.hlo.host_callbacks import callback_name, is_host_callback
from flaxasync.check.hlo.module import Computation, HloModule, Instruction
from flaxasync.check.hlo.participants import replica_groups
from flaxasync.check.hlo.shapes import SEMAPHORE, Shape
from flaxasync.hardware import chip as chip_named

SMALL = 1 << 10  # bytes; a smaller transfer, such as the sum of a loss, has no row
COPIED = 1 << 16  # bytes; a smaller copy in a loop has no row


@dataclasses.dataclass(frozen=True, order=True)
class Row:
    """What one row counts.

    Attributes:
      what: The kind of collective, "copy", the name of a Python callback, or the code of a hazard.
      place: "forward", "backward loop", ...; "" if the text does not say.
      axes: The mesh axes of a collective, as `AxisNames` names them.
      dtype: The element type of the array.
      bytes: The bytes of the array. For a reduce-scatter those of its operand, for an all-gather those of its result.
    """

    what: str
    place: str = ""
    axes: str = ""
    dtype: str = ""
    bytes: int = 0


@dataclasses.dataclass(frozen=True)
class Count:
    """How often a program has a row.

    Attributes:
      count: The instructions of the text.
      runs: How often they run, over all iterations of the loops around them.
      exposed: Seconds, over all runs, in which the device waits for them, as estimated.
      sources: The source lines, each with the number of its instructions. Those without a line are not listed.
    """

    count: int = 0
    runs: int = 0
    exposed: float = 0.0
    sources: Mapping[str, int] = dataclasses.field(default_factory=dict)

    def plus(self, runs: int, exposed: float, source: str) -> "Count":
        sources = collections.Counter(self.sources) + collections.Counter([source] if source else [])
        return Count(self.count + 1, self.runs + runs, self.exposed + exposed, dict(sources))


type Rows = dict[Row, Count]


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
      transfers: The rows of collectives.
      copies: The rows of copies in loops.
      callbacks: The rows of calls into Python.
      hazards: The rows of errors that the audit found.
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
    known = dict(axes or axes_of(compiled))
    names = AxisNames(module, known)
    if axes and not names.axes:
        raise ValueError(
            f"axes must multiply to the {module.num_partitions} devices of {module.name}: got "
            + ", ".join(f"{name}={size}" for name, size in axes.items())
        )
    time = timeline(module, named)
    reader = _Rows(module, names, time.slowest.causes)
    report = audit(module, chip=named)
    hazards: Rows = {}
    for finding in report.findings:
        if finding.severity == Severity.ERROR:
            row = Row(finding.code)
            hazards[row] = hazards.get(row, Count()).plus(finding.count, 0.0, finding.source)
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


class _Rows:
    """Reads the rows of one program.

    Args:
      module: The program.
      names: The names of its mesh axes.
      exposed: The seconds in which the device waits for each operation, by the name of its start.
    """

    def __init__(self, module: HloModule, names: AxisNames, exposed: Mapping[str, float]):
        self.module, self.names, self.exposed = module, names, exposed
        self.origins = Origins(module)
        self.runs = self.origins.runs

    def transfers(self) -> Rows:
        rows: Rows = {}
        started = {(op.computation, op.name): op for op in async_operations(self.module) if op.computation in self.runs}
        for name in self.runs:
            computation = self.module.computations[name]
            for i in computation.instructions:
                if (op := started.get((name, i.name))) is not None:
                    if not op.communicates or is_host_callback(i):
                        continue
                    if op.spelling == "kernel":
                        arrays = [Shape("u8", (op.bytes,))]
                        self._add(rows, computation, i, i, f"kernel {_without_number(i.name)}", arrays)
                    else:
                        result = op.inner or (op.windows[0].done if op.windows else i)
                        self._add(rows, computation, i, op.inner or i, op.kind, self._arrays(op.kind, result, op.inner))
                elif is_fused_kernel(i):
                    self._add(rows, computation, i, i, f"kernel {_without_number(i.name)}", _leaves(i.shape))
                else:
                    collective = collective_in_fusion(self.module, i) if i.opcode == "fusion" else i
                    if collective is not None and collective.opcode in COLLECTIVES and not is_host_callback(i):
                        kind = self._kind(computation, i, collective)
                        inner = collective if kind == collective.opcode else None
                        self._add(rows, computation, i, collective, kind, self._arrays(kind, collective, inner))
        return rows

    def copies(self) -> Rows:
        """Counts copies in loops that change no memory space: not those that fetch an operand into vector memory."""
        rows: Rows = {}
        for name in self.runs:
            computation = self.module.computations[name]
            for i in computation.instructions if self.origins.depth(name) else ():
                if i.opcode not in ("copy", "copy-start") or not i.operands:
                    continue
                made = computation.by_name.get(i.operands[0])
                shape = i.shape.elements[0] if i.opcode == "copy-start" and i.shape.elements else i.shape
                if (
                    made is None
                    or shape.is_tuple
                    or shape.bytes < COPIED
                    or made.shape.memory_space != shape.memory_space
                ):
                    continue
                row = Row("copy", self.origins.place(computation, i), "", shape.element_type, shape.bytes)
                source = self.origins.source(computation, i)
                rows[row] = rows.get(row, Count()).plus(self.runs[name], 0.0, source)
        return rows

    def callbacks(self) -> Rows:
        """Counts calls into Python. The sends and receives of one source line are one call."""
        rows: Rows = {}
        seen = set()
        for name in self.runs:
            computation = self.module.computations[name]
            for i in computation.instructions:
                if not is_host_callback(i):
                    continue
                source = self.origins.source(computation, i)
                row = Row(callback_name(i), self.origins.place(computation, i))
                if i.opcode == "custom-call" or (name, row, source) not in seen:
                    seen.add((name, row, source))
                    rows[row] = rows.get(row, Count()).plus(self.runs[name], 0.0, source)
        return rows

    def _add(
        self, rows: Rows, computation: Computation, i: Instruction, origin: Instruction, kind: str, arrays: list[Shape]
    ) -> None:
        """Adds a collective to the rows.

        Args:
          rows: The rows.
          computation: The computation that runs it.
          i: The instruction in that computation: the collective, or its start, or a fusion around it.
          origin: The collective, which has the groups and the metadata.
          kind: What it does.
          arrays: The arrays that it makes, or that it reduces.
        """
        axes, place = self.names.of(origin), self.origins.place(computation, i, origin)
        source = self.origins.source(computation, i, origin)
        arrays = [a for a in arrays if a.bytes >= SMALL]
        total = sum(a.bytes for a in arrays)
        for array in arrays:
            row = Row(kind, place, axes, array.element_type, array.bytes)
            share = self.exposed.get(i.name, 0.0) * array.bytes / total
            rows[row] = rows.get(row, Count()).plus(self.runs[computation.name], share, source)

    def _kind(self, computation: Computation, i: Instruction, collective: Instruction) -> str:
        """Returns the kind of a collective; XLA writes a reduce-scatter as a fusion of an all-reduce and a slice."""
        sent = sum(m.shape.bytes for o in i.operands if (m := computation.by_name.get(o)) is not None)
        if i.opcode == "fusion" and collective.opcode == "all-reduce" and i.shape.bytes < sent:
            return "reduce-scatter"
        return collective.opcode

    def _arrays(self, kind: str, result: Instruction, scattered: Instruction | None) -> list[Shape]:
        """Returns the whole arrays of a collective. A reduce-scatter's result is one part of them."""
        arrays = _leaves(result.shape)
        if kind != "reduce-scatter" or scattered is None:
            return arrays
        parts = max(map(len, replica_groups(scattered, self.module.num_partitions)))
        return [Shape(a.element_type, (parts, *a.dimensions)) for a in arrays]


def is_fused_kernel(i: Instruction) -> bool:
    """Says whether an instruction is a Pallas kernel that communicates, and ends only when its transfers have ended."""
    return i.opcode == "custom-call" and '"has_communication":true' in i.attributes.get("backend_config", "")


def _leaves(shape: Shape) -> list[Shape]:
    return [leaf for _, leaf in shape.leaves() if leaf.memory_space != SEMAPHORE]


def _without_number(name: str) -> str:
    head, _, tail = name.rpartition(".")
    return head if tail.isdigit() and head else name
