"""What an audit can find, which docs/check.md lists; and `Audit`, the result of an audit."""

import dataclasses
import enum
import json
from collections.abc import Sequence
from typing import Any

from flaxasync.check.hlo.module import Computation, Instruction
from flaxasync.check.units import size_text, time_text

# bytes; a smaller transfer is limited by its latency, so it is reported as information only
LARGE = 1 << 20
EMPTY = 0.01  # a window with less work than this share of the transfer counts as empty
# A ring has lost its overlap if more than this share of its transfers has nothing inside.
LOST = 0.3
LISTED = 4  # the most findings of one code that the table shows in full


class Severity(enum.IntEnum):
    """INFO is worth knowing; WARNING costs time; ERROR can give wrong results, or breaks the rules
    of the format.
    """

    INFO = 0
    WARNING = 1
    ERROR = 2

    def __str__(self) -> str:
        return self.name.lower()


@dataclasses.dataclass(frozen=True)
class Code:
    """One kind of finding: what is wrong, how bad that is if a finding does not say, and what to do
    about it.
    """

    severity: Severity
    meaning: str
    remedy: str


_WARNING = Severity.WARNING
_ERROR = Severity.ERROR

CODES = {
    # Hazards of kernel pairs: the compiler does not know that the buffer is in use.
    "in-flight-copied": Code(
        _ERROR,
        "the compiler copies a buffer that a transfer is reading or writing, and waits on the copy",
        "tie what reads the block between start and done (flaxasync.while_travelling, tie_refs); "
        "unroll a staggered loop by two (fori_loop(..., unroll=2)) or use the two slots of one Ref "
        "(flaxasync.ppermute_start_slots)",
    ),
    "in-flight-read": Code(
        _ERROR,
        "an instruction reads the destination before the done",
        "read what the done returns, never the future's buffer",
    ),
    "in-flight-written": Code(
        _ERROR,
        "an instruction writes a buffer that a transfer is reading or writing",
        "write after the done, or into another buffer",
    ),
    "in-flight-vmem": Code(
        _ERROR,
        "a buffer in flight lies in vector memory, S(1)",
        "give the kernel outputs pltpu.HBM(shape, dtype) and its operand "
        "with_memory_space_constraint(x, pltpu.HBM)",
    ),
    "in-flight-freed": Code(
        _ERROR,
        "nothing keeps a buffer of the transfer alive until the done, so its memory can be given "
        "away",
        "alias the source through the start (input_output_aliases) and hand every buffer of the "
        "future to the done",
    ),
    "deleted": Code(
        _ERROR,
        "fewer asynchronous operations than expected: the compiler removed what nothing depends on",
        "thread the semaphores, or a scalar that the done returns, through what follows",
    ),
    # Missing overlap.
    "empty-window": Code(
        _WARNING,
        "nothing runs between start and done, though independent work was there",
        "make the work depend on the start and the done on the work: jax.lax.optimization_barrier, "
        "or a staggered loop",
    ),
    "serialised": Code(
        _WARNING,
        "nothing runs between start and done, and nothing could: all work feeds the start or needs "
        "the done",
        "stagger: start the next block's transfer before using this one, or cut the transfer into "
        "ring steps",
    ),
    "exposed": Code(
        _WARNING,
        "the work between start and done is shorter than the transfer",
        "more work per step: larger blocks, both directions of the ring, or a longer window",
    ),
    "synchronous-collective": Code(
        _WARNING,
        "the chip waits for a collective that has no start and done",
        "cut it into ring steps: all_gather_matmul, matmul_reduce_scatter or ring_attention of "
        "flaxasync; where one of them made it, backend='none' was named, or flaxasync.plan "
        "predicts that it is faster: backend='xla' is a ring",
    ),
    "loop-copies": Code(
        _WARNING,
        "a loop copies a buffer that it carries, on every iteration",
        "unroll the loop by two, so that the carried buffers can swap places",
    ),
    "wide-transfer": Code(
        _WARNING,
        "a transfer carries a wider type than the program keeps of what arrives",
        "round before the transfer: preferred_element_type=jnp.bfloat16 in the einsum whose "
        "product is summed over the devices, or .astype before the sharding constraint; a sum over "
        "devices is then rounded in each step",
    ),
    "merged-products": Code(
        _WARNING,
        "on a GPU, one product multiplies the blocks of two steps of a ring, and waits for both",
        "put the operands of each product behind jax.lax.optimization_barrier, or set the XLA flag "
        "xla_gpu_dot_merger_threshold_mb=0",
    ),
    "accumulates-arrival": Code(
        _WARNING,
        "on a GPU, a product is added to what arrives as it computes, and so waits for it",
        "put jax.lax.optimization_barrier between the product and the addition, or send each "
        "product to its owner and add there",
    ),
    "not-scheduled": Code(
        _WARNING,
        "the module is not scheduled: the text has no order, so windows and stalls cannot be told",
        "audit the compiled program (jitted.lower(...).compile(), or compile_for), not the lowered "
        "one",
    ),
    # The rules of the "Async HLO Instructions" proposal.
    "async-one-user": Code(
        _ERROR,
        "a start or an update has more than one user, or a user that is no update and no done",
        "route every reader through the done",
    ),
    "async-unfinished": Code(_ERROR, "a start is never finished", "add its done"),
    "async-no-start": Code(
        _ERROR, "an update or a done continues no start", "give it the result of one"
    ),
    "async-operand-alias": Code(
        _ERROR,
        "the first part of a start's tuple is not the tuple of its operands",
        "write ((operands...), results, context), with the shapes of the operands",
    ),
    "async-result-alias": Code(
        _ERROR,
        "the second part of a start's tuple has not the shape that the done returns",
        "write ((operands...), results, context), with the shape of the done; () if an update "
        "binds the results",
    ),
    "async-no-calls": Code(
        _ERROR,
        "an async-start does not name the one computation that it runs",
        "add calls=%computation, or write the short form",
    ),
    "async-wrapped-one": Code(
        _ERROR,
        "the computation of an async-start has more or less than one instruction beside its "
        "parameters",
        "wrap one instruction; several of them as a call: call-start(...), to_apply=%computation",
    ),
    "async-wrapped-first-class": Code(
        _ERROR,
        "an async-start wraps an opcode that has a start and a done of its own",
        "use those, as collective-permute-start and collective-permute-done",
    ),
    "async-shape": Code(
        _ERROR,
        "the computation of an async-start takes other operands, or makes another result",
        "give its parameters the shapes of the operands, and its root that of the done",
    ),
}


@dataclasses.dataclass(frozen=True)
class Finding:
    """One thing that is wrong, and what to do about it. `print` shows all of it."""

    code: str  # a key of CODES
    message: str  # what is wrong, with names and figures
    computation: str  # its name
    instruction: str  # its name; "" if the finding is about the whole computation
    # "file:line" of the Python that made the instruction; "" if the text does not say
    source: str = ""
    severity: Severity = Severity.INFO
    count: int = 1  # how often it happens in a run, over all iterations of the loops around it
    advice: str = ""  # what to do about this one; "" where the remedy of its code says it
    # seconds that a run is predicted to gain if it is mended; 0 if nothing is predicted
    gain: float = 0.0

    @property
    def remedy(self) -> str:
        return self.advice or CODES[self.code].remedy

    def __str__(self) -> str:
        if self.instruction:
            place = f"{self.computation}/{self.instruction}"
        else:
            place = self.computation
        if self.source:
            where = f" ({self.source})"
        else:
            where = ""
        if self.gain >= 1e-6:
            gain = f"\n    gain {time_text(self.gain)} in a run, predicted"
        else:
            gain = ""
        return (
            f"{self.severity}: {self.code}: {self.message}\n    at {place}{where}\n    do "
            f"{self.remedy}{gain}"
        )

    def to_json(self) -> dict:
        fields = dataclasses.asdict(self)
        return fields | {"severity": str(self.severity), "remedy": self.remedy}


def finding(
    code: str,
    message: str,
    at: Instruction | Computation,
    *,
    severity: Severity | None = None,
    advice: str = "",
    gain: float = 0.0,
    count: int = 1,
) -> Finding:
    """Makes a finding about an instruction, or about a whole computation. Its severity is that of
    its code unless another one is given, and its line that of the instruction.
    """
    chosen = severity
    if chosen is None:
        chosen = CODES[code].severity
    if isinstance(at, Computation):
        return Finding(code, message, at.name, "", "", chosen, count, advice, gain)
    where = at.computation.name
    return Finding(code, message, where, at.name, at.source, chosen, count, advice, gain)


def of_size(moved: int) -> Severity | None:
    """Returns the severity of a finding about a transfer of so many bytes: INFO for a small one,
    and None, which is that of its code, for any other.
    """
    if moved < LARGE:
        return Severity.INFO
    return None


@dataclasses.dataclass(frozen=True)
class Work:
    """One instruction that runs inside a window, and its time in seconds."""

    computation: str
    instruction: str
    seconds: float


@dataclasses.dataclass(frozen=True)
class Pair:
    """One asynchronous operation as it was scheduled."""

    name: str  # of the start
    kind: str  # the opcode of what runs; "custom-call" for a kernel
    spelling: str  # as in `AsyncOperation`
    computation: str  # of the start
    dones: tuple[str, ...]  # the names of the instructions that wait for it
    bytes: int  # that it moves or makes
    runs: int  # how often it starts, over all iterations of the loops around it
    communicates: bool  # whether it moves data between devices
    work: tuple[Work, ...]  # what runs inside the window
    inside: float  # seconds of that work
    transfer: float  # seconds that the transfer takes alone on its link
    crosses: str  # how the future crosses a loop; "" if it crosses none
    source: str  # "file:line" of the Python that made the start; "" if the text does not say
    # the function of flaxasync whose ring it belongs to, like "all_gather_matmul"; "" for none
    ring: str = ""

    @property
    def exposed(self) -> float:
        """Seconds of one run of the transfer that no work hides."""
        return max(0.0, self.transfer - self.inside)

    @property
    def overlapped(self) -> bool:
        """Whether work runs while the transfer is under way."""
        return self.inside > EMPTY * self.transfer and bool(self.work)


@dataclasses.dataclass(frozen=True)
class Ring:
    """The transfers of all rings that one function of flaxasync made, over all iterations of the
    loops around them.
    """

    function: str  # like "all_gather_matmul", or "all_gather_matmul_dw" of its gradient
    transfers: int
    empty: int  # transfers that have nothing inside, or no start and no done

    @property
    def has_lost_overlap(self) -> bool:
        return self.empty > LOST * self.transfers

    def __str__(self) -> str:
        what = "have nothing inside"
        if self.empty == 1:
            what = "has nothing inside"
        return f"{self.empty:,} of {self.transfers:,} permutes of {self.function} {what}"


@dataclasses.dataclass(frozen=True)
class Audit:
    """What `audit` found. `print` shows it as a table."""

    module: str  # the name of the program
    chip: str  # the name of the chip whose times were estimated
    pairs: tuple[Pair, ...]  # the asynchronous operations
    findings: tuple[Finding, ...]  # what is wrong, the most severe first
    # what a reader should know about the figures, such as a chip that was assumed
    notes: tuple[str, ...]
    # those that flaxasync made, which are meant to have work inside all transfers
    rings: tuple[Ring, ...] = ()

    @property
    def lost_overlap(self) -> str:
        """Which rings of flaxasync have lost their overlap, in one line; "" for none."""
        return "; ".join(str(ring) for ring in self.rings if ring.has_lost_overlap)

    @property
    def ok(self) -> bool:
        """Whether no finding is an error: no buffer in flight is touched, no rule is broken, and
        nothing is missing.
        """
        return not any(f.severity == Severity.ERROR for f in self.findings)

    def codes(self) -> set[str]:
        return {f.code for f in self.findings}

    def worst(self) -> Severity | None:
        """Returns the highest severity of the findings; None if there are none."""
        return max((f.severity for f in self.findings), default=None)

    def to_json(self) -> str:
        pairs = [
            dataclasses.asdict(p) | {"exposed": p.exposed, "overlapped": p.overlapped}
            for p in self.pairs
        ]
        facts: dict[str, Any] = {
            "module": self.module,
            "chip": self.chip,
            "ok": self.ok,
            "notes": self.notes,
        }
        facts["rings"] = [dataclasses.asdict(ring) for ring in self.rings]
        return json.dumps(
            facts | {"pairs": pairs, "findings": [f.to_json() for f in self.findings]}, indent=2
        )

    def __str__(self) -> str:
        verdict = "NOT OK"
        if self.ok:
            verdict = "ok"
        if self.lost_overlap:
            verdict += f"; {self.lost_overlap}"
        lines = [f"audit of {self.module or 'a fragment'} ({self.chip}): {verdict}", ""]
        lines += _table(self.pairs)
        counts = {s: sum(f.severity == s for f in self.findings) for s in reversed(Severity)}
        lines += [
            "",
            ", ".join(
                f"{n} {s}{'s' if n != 1 and s != Severity.INFO else ''}" for s, n in counts.items()
            ),
        ]
        for code in dict.fromkeys(f.code for f in self.findings):
            alike = [f for f in self.findings if f.code == code]
            lines += [str(f) for f in alike[:LISTED]]
            if len(alike) > LISTED:
                lines.append(f"    ... and {len(alike) - LISTED} more {code}")
        lines += [f"note: {note}" for note in self.notes]
        return "\n".join(lines)


def _table(pairs: Sequence[Pair]) -> list[str]:
    if not pairs:
        return ["no asynchronous operations"]
    rows = [
        (
            "operation",
            "kind",
            "where",
            "runs",
            "bytes",
            "transfer",
            "work inside",
            "exposed",
            "what runs inside",
        )
    ]
    for p in pairs:
        inside = ", ".join(w.instruction for w in sorted(p.work, key=lambda w: -w.seconds)[:2])
        if len(p.work) > 2:
            more = f" and {len(p.work) - 2} more"
        else:
            more = ""
        if not p.crosses:
            where = p.computation
        else:
            where = f"{p.computation} ({p.crosses})"
        rows.append(
            (
                p.name[:44],
                p.kind if p.spelling != "kernel" else "kernel pair",
                where[:60],
                f"x{p.runs}",
                size_text(p.bytes),
                time_text(p.transfer),
                time_text(p.inside),
                time_text(p.exposed) if p.communicates else "",
                (inside + more) or "nothing",
            )
        )
    widths = [max(len(row[n]) for row in rows) for n in range(len(rows[0]))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
