"""What a run communicates: its programs, and the worst transfers over all of them.

The transfers are ordered by the seconds in which a device waits for them in one run of their program, as estimated. How
often a program runs is not known from its text.
"""

import dataclasses
from collections.abc import Sequence

from flaxasync.check.auditing.report import size_text, time_text
from flaxasync.check.capturing.programs import CapturedProgram
from flaxasync.check.gate.comparison import named
from flaxasync.check.gate.summary import Summary, summarize

WORST = 10  # transfers in the table
LONGEST = 10  # programs in the table


@dataclasses.dataclass(frozen=True)
class Transfer:
    """One row of transfers of one program."""

    program: str
    text: str
    exposed: float
    share: float
    sources: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Overview:
    """What the programs of a run communicate. `print` shows it.

    Attributes:
      programs: The programs.
      summaries: What matters of each; the same text is summarized once.
      transfers: All transfers for which a device waits, the worst first.
    """

    programs: tuple[CapturedProgram, ...]
    summaries: tuple[Summary, ...]
    transfers: tuple[Transfer, ...]

    def __str__(self) -> str:
        seconds = sum(program.seconds for program in self.programs)
        lines = [f"{len(self.programs)} programs, compiled in {seconds:.1f} s", ""]
        lines.append(f"{'program':40} {'devices':>7} {'compile':>9} {'temporary':>10} {'estimate':>9} {'exposed':>8}")
        both = sorted(zip(self.programs, self.summaries, strict=True), key=lambda two: -two[1].seconds)
        for p, s in both[:LONGEST]:
            temporary = "unknown" if s.temporaries is None else size_text(s.temporaries)
            lines.append(
                f"{p.name[:40]:40} {p.devices:7} {p.seconds:7.2f} s {temporary:>10} {time_text(s.seconds):>9} "
                f"{s.exposed:8.1%}"
            )
        if len(both) > LONGEST:
            lines.append(f"and {len(both) - LONGEST} shorter programs")
        shown = min(WORST, len(self.transfers))
        head = f"the {shown} worst of {len(self.transfers)} exposed transfers" if shown else "no transfer is exposed"
        lines += ["", head]
        for t in self.transfers[:WORST]:
            where = f", from {', '.join(t.sources[:2])}" if t.sources else ""
            lines.append(f"{time_text(t.exposed):>9} ({t.share:.1%} of {t.program}) {t.text}{where}")
        chips = " or ".join(sorted({s.chip for s in self.summaries}))
        others = sum(p.chip != s.chip for p, s in both)
        assumed = f", for which {others} of them {'was' if others == 1 else 'were'} not compiled" if others else ""
        lines += [
            "",
            f"times are estimates of one run of each program on {chips}{assumed}; "
            "nothing was measured but the compilation",
        ]
        return "\n".join(lines)


def overview(programs: Sequence[CapturedProgram], *, chip: str | None = None) -> Overview:
    """Summarises the programs of a run.

    Args:
      programs: What `capture` or `read_folder` returned.
      chip: The chip whose times are estimated. By default that of each program, or v5e.

    Raises:
      ValueError: There is no program, or the text of one cannot be read. The message names its file.
    """
    if not programs:
        raise ValueError("there are no programs: nothing was compiled while they were captured")
    known: dict[str, Summary] = {}
    summaries, transfers = [], []
    for program in programs:
        text = program.as_text()
        try:
            if text not in known:
                known[text] = dataclasses.replace(
                    summarize(text, chip=chip or program.chip, axes=dict(program.axes) or None),
                    temporaries=program.memory.get("temp_size_in_bytes"),
                )
                transfers += _transfers(program, known[text])
        except ValueError as error:
            raise ValueError(f"{program.file or program.name}: {error}") from error
        summaries.append(known[text])
    transfers.sort(key=lambda t: -t.exposed)
    return Overview(tuple(programs), tuple(summaries), tuple(transfers))


def _transfers(program: CapturedProgram, summary: Summary) -> list[Transfer]:
    return [
        Transfer(
            program.name, named(count.count, row), count.exposed, count.exposed / summary.seconds, tuple(count.sources)
        )
        for row, count in summary.transfers.items()
        if count.exposed > 0
    ]
