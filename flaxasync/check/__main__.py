"""Audits HLO text from a file or from standard input, for people and for CI.

    python -m flaxasync.check FILE|- [--json] [--chip v5e] [--expect permute_start=3] [--fail-on error]
    python -m flaxasync.check trace PATH [--program HLO]      read a profile: measured beside estimated communication

The exit status is 0 if no finding is as severe as --fail-on, 1 if a finding is, and 2 if the text cannot be read.
"""

import argparse
import pathlib
import sys

from flaxasync.check.auditing.audit import audit
from flaxasync.check.auditing.findings import Severity
from flaxasync.check.estimate.estimator import timeline
from flaxasync.check.render import save_picture, save_trace
from flaxasync.hardware import CHIPS


def main(arguments: list[str] | None = None) -> int:
    """Runs the command and returns its exit status."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] == ["trace"] and len(arguments) > 1:
        from flaxasync.check.trace.command import main as trace  # here, because it needs JAX, and the audit does not

        return trace(arguments[1:])
    parser = argparse.ArgumentParser(prog="python -m flaxasync.check", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("file", help="HLO text (a dump, or what compiled.as_text() returned); - reads standard input")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--chip", choices=sorted(CHIPS), help="the chip whose times are estimated (default: v5e)")
    parser.add_argument(
        "--expect",
        action="append",
        default=[],
        metavar="NAME=COUNT",
        help="fail unless there are at least that many asynchronous operations of that name or kind",
    )
    severities = [str(s) for s in Severity]
    parser.add_argument(
        "--fail-on", choices=severities, default="error", help="the lowest severity that fails (default: error)"
    )
    parser.add_argument("--timeline", action="store_true", help="also print the estimated timeline")
    parser.add_argument("--trace", metavar="FILE", help="write the timeline as a Chrome trace")
    parser.add_argument("--picture", metavar="FILE", help="draw the timeline as a PNG")
    chosen = parser.parse_args(arguments)
    try:
        expect = {name: int(count) for name, _, count in (entry.rpartition("=") for entry in chosen.expect)}
    except ValueError:
        parser.error(f"--expect needs NAME=COUNT: got {', '.join(chosen.expect)}")
    try:
        text = sys.stdin.read() if chosen.file == "-" else pathlib.Path(chosen.file).read_text()
        report = audit(text, chip=chosen.chip, expect=expect)
        print(report.to_json() if chosen.json else report)
        if chosen.timeline or chosen.trace or chosen.picture:
            t = timeline(text, chosen.chip or report.chip)
            if chosen.timeline:
                print(f"\n{t}", file=sys.stderr if chosen.json else sys.stdout)
            if chosen.trace:
                save_trace(t, chosen.trace)
            if chosen.picture:
                save_picture(t, chosen.picture)
    except (OSError, ValueError) as error:  # HloError and UnicodeDecodeError are ValueErrors
        print(f"{chosen.file}: {error}", file=sys.stderr)
        return 2
    worst = report.worst()
    return 1 if worst is not None and worst >= Severity[chosen.fail_on.upper()] else 0


if __name__ == "__main__":
    sys.exit(main())
