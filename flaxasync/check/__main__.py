"""Audits HLO text from a file or from standard input, for people and for CI.

    python -m flaxasync.check FILE|- [--json] [--chip v5e] [--expect permute_start=3] [--fail-on error]
    python -m flaxasync.check FOLDER [--chip v5e]             all programs that XLA_FLAGS=--xla_dump_to=FOLDER wrote
    python -m flaxasync.check gate BASELINE FILE [--update]   compare with a baseline: is anything worse?
    python -m flaxasync.check trace PATH [--program HLO]      read a profile: measured beside estimated communication

The exit status is 0 if no finding is as severe as --fail-on, 1 if a finding is, and 2 if the text
cannot be read.
"""

import argparse
import gc
import importlib
import os
import sys
from collections.abc import Sequence

from flaxasync import check
from flaxasync.check.auditing.audit import audit
from flaxasync.check.auditing.findings import Severity
from flaxasync.check.dump_folder import read_dump, table
from flaxasync.check.hlo.load import read_module
from flaxasync.hardware import CHIPS, GPUS

# The modules of the other commands. They are imported when they are used, because some need JAX.
_COMMANDS = {
    "gate": "flaxasync.check.gate.command",
    "trace": "flaxasync.check.trace.exposed",
}


def main(arguments: list[str] | None = None) -> int:
    if arguments is None:
        arguments = sys.argv[1:]
    if arguments[:1] and arguments[0] in _COMMANDS:  # a file of such a name is ./trace
        return importlib.import_module(_COMMANDS[arguments[0]]).main(arguments[1:])
    parser = argparse.ArgumentParser(
        prog="python -m flaxasync.check", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument(
        "file",
        help="HLO text (a dump, or what compiled.as_text() returned); - for standard input; or a "
        "folder that XLA dumped",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument(
        "--chip",
        choices=sorted((*CHIPS, *GPUS)),
        help="the chip whose times are estimated (default: v5e, and h100 for a program for GPUs)",
    )
    parser.add_argument(
        "--expect",
        action="append",
        default=[],
        metavar="NAME=COUNT",
        help="fail unless there are at least that many asynchronous operations of that name or "
        "kind",
    )
    severities = [str(s) for s in Severity]
    parser.add_argument(
        "--fail-on",
        choices=severities,
        default="error",
        help="the lowest severity that fails (default: error)",
    )
    parser.add_argument("--timeline", action="store_true", help="also print the estimated timeline")
    parser.add_argument("--trace", metavar="FILE", help="write the timeline as a Chrome trace")
    parser.add_argument("--picture", metavar="FILE", help="draw the timeline as a PNG")
    chosen = parser.parse_args(arguments)
    try:
        expect = {
            name: int(count)
            for name, _, count in (entry.rpartition("=") for entry in chosen.expect)
        }
    except ValueError:
        parser.error(f"--expect needs NAME=COUNT: got {', '.join(chosen.expect)}")
    try:
        if os.path.isdir(chosen.file):
            return _audit_folder(parser, chosen)
        module = read_module(chosen.file)
        report = audit(module, chip=chosen.chip, expect=expect)
        print(report.to_json() if chosen.json else report)
        if chosen.timeline or chosen.trace or chosen.picture:
            t = check.timeline(module, chosen.chip or report.chip)
            if chosen.timeline:
                print(f"\n{t}", file=sys.stderr if chosen.json else sys.stdout)
            if chosen.trace:
                check.save_trace(t, chosen.trace)
            if chosen.picture:
                check.save_picture(t, chosen.picture)
    except OSError as error:
        named = "" if error.filename else f"{chosen.file}: "
        print(f"{named}{error}", file=sys.stderr)
        return 2
    except ValueError as error:
        print(f"{chosen.file}: {error}", file=sys.stderr)
        return 2
    return _status([report.worst()], chosen.fail_on)


def _audit_folder(parser: argparse.ArgumentParser, chosen: argparse.Namespace) -> int:
    given = [
        f"--{name}"
        for name in ("json", "expect", "timeline", "trace", "picture")
        if getattr(chosen, name)
    ]
    if given:
        parser.error(
            f"{chosen.file} is a folder, for which --chip and --fail-on are the only options: got "
            f"{', '.join(given)}; give one of its files to audit a program"
        )
    programs = read_dump(chosen.file, chip=chosen.chip)
    print(table(programs))
    return _status([program.report.worst() for program in programs], chosen.fail_on)


def _status(worst: Sequence[Severity | None], fail_on: str) -> int:
    """Returns the exit status for the worst findings of some programs."""
    least = Severity[fail_on.upper()]
    return int(any(severity is not None and severity >= least for severity in worst))


if __name__ == "__main__":
    # Looking for cycles takes a fifth of the time of reading a module. One module of many is freed.
    if not any(map(os.path.isdir, sys.argv[1:])):
        gc.disable()
    sys.exit(main())
