"""What a compiled program communicates, copies and calls, in rows that its names and its order do not change.

| rows | one row for each |
|---|---|
| transfers | kind of collective, element type, bytes of one array, mesh axes, and place |
| copies | element type, bytes and loop of a copy that a loop makes in every iteration |
| callbacks | Python function that the program calls, and place |

The place is the pass of the training step and the depth of the loop (hlo/origins.py). A collective of several arrays
has a row for each array, because XLA combines and splits collectives as it likes.
"""

import collections
import dataclasses
from collections.abc import Mapping

from flaxasync.check.auditing.findings import CODES
from flaxasync.check.auditing.overlap import collectives_that_hold_the_chip
from flaxasync.check.auditing.report import size_text
from flaxasync.check.estimate.costs import Costs
from flaxasync.check.hlo.async_operations import COLLECTIVES, async_operations, largest_array
from flaxasync.check.hlo.axis_names import AxisNames
from flaxasync.check.hlo.host_callbacks import callback_name, is_host_callback
from flaxasync.check.hlo.module import Computation, HloModule, Instruction, without_number
from flaxasync.check.hlo.origins import loops_around, origin
from flaxasync.check.hlo.participants import replica_groups
from flaxasync.check.hlo.shapes import Shape

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

    def text(self, number: int, word: str = "") -> str:
        """Returns "2 more all-gathers of 64 MiB over model in the backward loop"; `word` is "more" here."""
        what = f"{self.what}: {CODES[self.what].meaning}" if self.what in CODES else self.what
        if self.bytes:
            plural = "" if number == 1 else "s"
            what = f"{what}{plural} of {size_text(self.bytes)}".replace("copys", "copies")
        over = f"over {self.axes}" if self.axes else ""
        where = f"in the {self.place}{' pass' * (self.place in ('forward', 'backward'))}" if self.place else ""
        return " ".join(filter(None, (str(number), word, what, over, where)))


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


type Rows = dict[Row, Count]


def add_to(rows: Rows, row: Row, runs: int, source: str, exposed: float = 0.0) -> None:
    """Counts one more instruction in its row."""
    before = rows.get(row, Count())
    sources = collections.Counter(before.sources) + collections.Counter([source] if source else [])
    rows[row] = Count(before.count + 1, before.runs + runs, before.exposed + exposed, dict(sources))


class RowReader:
    """Reads the rows of one program.

    Args:
      module: The program.
      costs: The times of its instructions, which tell a reduce-scatter that is written as an all-reduce.
      names: The names of its mesh axes.
      exposed: The seconds in which the device waits for each operation, by the name of its start.
    """

    def __init__(self, module: HloModule, costs: Costs, names: AxisNames, exposed: Mapping[str, float]):
        self.module, self.costs, self.names, self.exposed = module, costs, names, exposed
        self.runs = costs.executions()
        running = (module.computations[name] for name in self.runs)
        self.instructions = [(computation, i) for computation in running for i in computation.instructions]

    def transfers(self) -> Rows:
        rows: Rows = {}
        for op in async_operations(self.module):
            if op.computation in self.runs and op.kind in COLLECTIVES and not is_host_callback(op.start):
                result = op.inner or (op.windows[0].done if op.windows else op.start)
                computation = self.module.computations[op.computation]
                self._transfer(rows, computation, op.start, op.inner or op.start, op.kind, self._arrays(result))
        for computation, i, collective in collectives_that_hold_the_chip(self.module, self.runs):
            kind = self.costs.collective_kind(computation, i, collective)
            self._transfer(rows, computation, i, collective, kind, self._arrays(collective))
        for computation, i in self.instructions:
            if i.is_communicating_kernel:
                self._transfer(rows, computation, i, i, f"kernel {without_number(i.name)}", [largest_array(i)])
        return rows

    def copies(self) -> Rows:
        """Counts copies in loops that change no memory space: not those that fetch an operand into vector memory."""
        rows: Rows = {}
        for computation, i in self.instructions:
            made = computation.by_name.get(i.operands[0]) if i.operands else None
            if i.opcode not in ("copy", "copy-start") or made is None:
                continue
            copy = i.shape.at((0,)) or i.shape  # the first element of a copy-start is the copy
            is_fetch = copy.memory_space != made.shape.memory_space
            if copy.bytes >= COPIED and not is_fetch and loops_around(self.module, computation):
                place, source = origin(self.module, computation, i)
                row = Row("copy", place, "", copy.element_type, copy.bytes)
                add_to(rows, row, self.runs[computation.name], source)
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
                    add_to(rows, row, self.runs[computation.name], source)
        return rows

    def _transfer(
        self, rows: Rows, computation: Computation, i: Instruction, collective: Instruction, kind: str,
        arrays: list[Shape],
    ) -> None:  # fmt: skip
        """Adds a row for each array of a collective that `i` performs. Each has its share of the exposed time."""
        place, source = origin(self.module, computation, i, collective)
        arrays = [a for a in arrays if a.bytes >= SMALL]
        total = sum(a.bytes for a in arrays)
        for array in arrays:
            row = Row(kind, place, self.names.of(collective), array.element_type, array.bytes)
            exposed = self.exposed.get(i.name, 0.0) * array.bytes / total
            add_to(rows, row, self.runs[computation.name], source, exposed)

    def _arrays(self, result: Instruction) -> list[Shape]:
        """Returns the whole arrays of a collective. A reduce-scatter's result is one part of them."""
        arrays = [leaf for _, leaf in result.shape.leaves()]
        if result.opcode != "reduce-scatter":
            return arrays
        parts = max(map(len, replica_groups(result, self.module.num_partitions)))
        return [Shape(a.element_type, (parts, *a.dimensions)) for a in arrays]
