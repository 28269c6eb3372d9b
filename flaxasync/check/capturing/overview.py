"""What a run communicates: its programs, and the worst transfers over all of them.

The transfers are ordered by the seconds in which a device waits for them in one run of their
program, as estimated. How often a program runs is not known from its text.
"""

import dataclasses
from collections.abc import Sequence

from flaxasync.check.auditing.findings import size_text, time_text
from flaxasync.check.capturing.recorder import CapturedProgram
from flaxasync.check.gate.summary import Summary, summarize

SHOWN = 10  # transfers in their table, and programs in theirs


@dataclasses.dataclass(frozen=True)
class Transfer:
    """One row of transfers of one program."""

    program: str  # its name
    text: str  # what is transferred, as `Row.text` says it
    exposed: float  # the seconds in which a device waits for it in one run of the program
    share: float  # of the run
    sources: tuple[str, ...]  # its source lines

    def __str__(self) -> str:
        where = f", from {', '.join(self.sources[:2])}" if self.sources else ""
        return (
            f"{time_text(self.exposed):>9} ({self.share:.1%} of {self.program}) {self.text}{where}"
        )


@dataclasses.dataclass(frozen=True)
class Overview:
    """What the programs of a run communicate. `print` shows it."""

    programs: tuple[CapturedProgram, ...]
    summaries: tuple[Summary, ...]  # of each program
    transfers: tuple[Transfer, ...]  # all for which a device waits, the worst first

    def __str__(self) -> str:
        seconds = sum(program.seconds for program in self.programs)
        both = sorted(
            zip(self.programs, self.summaries, strict=True), key=lambda two: -two[1].seconds
        )
        lines = [
            f"{len(self.programs)} programs, compiled in {seconds:.1f} s",
            "",
            f"{'program':40} {'devices':>7} {'compile':>9} {'temporary':>10} {'estimate':>9} "
            f"{'exposed':>8}",
        ]
        for p, s in both[:SHOWN]:
            temporary = "unknown" if s.temporaries is None else size_text(s.temporaries)
            times = f"{p.seconds:7.2f} s {temporary:>10} {time_text(s.seconds):>9} {s.exposed:8.1%}"
            lines.append(f"{p.name[:40]:40} {p.devices:7} {times}")
        lines += [f"and {len(both) - SHOWN} shorter programs"] if len(both) > SHOWN else []
        shown = self.transfers[:SHOWN]
        head = f"the {len(shown)} worst of {len(self.transfers)} exposed transfers"
        lines += ["", head if shown else "no transfer is exposed", *map(str, shown), ""]
        others = sum(p.chip != s.chip for p, s in both)
        assumed = (
            f", for which {others} of them {'was' if others == 1 else 'were'} not compiled"
            if others
            else ""
        )
        chips = " or ".join(sorted({s.chip for s in self.summaries})) + assumed
        lines.append(
            f"times are estimates of one run of each program on {chips}; nothing was measured but "
            "the compilation"
        )
        return "\n".join(lines)


def overview(programs: Sequence[CapturedProgram], *, chip: str | None = None) -> Overview:
    """Summarises the programs of a run.

    Args:
      programs: What `capture` or `read_folder` returned.
      chip: The chip whose times are estimated. By default that of each program, or v5e.

    Raises:
      ValueError: There is no program, or the text of one cannot be read. The message names its
        file.
    """
    if not programs:
        raise ValueError("there are no programs: nothing was compiled while they were captured")
    known: dict[str, Summary] = {}
    transfers = []
    for program in programs:
        if program.text in known:
            continue
        try:
            summary = known[program.text] = summarize(program, chip=chip)
        except ValueError as error:
            raise ValueError(f"{program.file or program.name}: {error}") from error
        for row, count in summary.transfers.items():
            share = count.exposed / summary.seconds
            transfers.append(
                Transfer(
                    program.name, row.text(count.count), count.exposed, share, tuple(count.sources)
                )
            )
    transfers = sorted((t for t in transfers if t.exposed > 0), key=lambda t: -t.exposed)
    return Overview(tuple(programs), tuple(known[p.text] for p in programs), tuple(transfers))
