"""Compares a compiled program with a baseline: fails if it communicates more, or hides less of it.

    python -m flaxasync.check gate BASELINE PROGRAM [--update] [--mesh data=2,model=4]

The exit status is 0 if nothing is worse than in the baseline, 1 if something is, and 2 if a file
cannot be read or written, or the baseline is of another program.
"""

import argparse
import sys

from flaxasync.check.gate.comparison import compare
from flaxasync.check.gate.snapshot import read_baseline, summarize, write_baseline
from flaxasync.check.hlo.load import read_module
from flaxasync.hardware import CHIPS, GPUS


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m flaxasync.check gate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("baseline", help="the JSON file; --update makes it")
    add("program", help="HLO text (a dump, or compiled.as_text()); - reads standard input")
    add("--update", action="store_true", help="write the baseline, and compare nothing")
    add("--mesh", metavar="NAME=SIZE,...", type=_axes, help="the mesh axes in order")
    add(
        "--chip",
        choices=sorted((*CHIPS, *GPUS)),
        help="whose times are estimated (default: v5e, and h100 for a program for GPUs)",
    )
    chosen = parser.parse_args(arguments)
    file = chosen.program
    try:
        program = summarize(read_module(file), chip=chosen.chip, axes=chosen.mesh)
        file = chosen.baseline
        if chosen.update:
            write_baseline(program, file)
            print(f"wrote {file}", file=sys.stderr)
            return 0
        comparison = compare(read_baseline(file), program)
    except OSError as error:
        named = "" if error.filename else f"{file}: "
        advice = ""
        if isinstance(error, FileNotFoundError) and file == chosen.baseline:
            advice = ": --update makes it"
        print(f"{named}{error}{advice}", file=sys.stderr)
        return 2
    except ValueError as error:
        print(f"{file}: {error}", file=sys.stderr)
        return 2
    print(comparison)
    if comparison.ok:
        return 0
    print("to accept the differences, run this again with --update", file=sys.stderr)
    return 1


def _axes(text: str) -> dict[str, int]:
    try:
        return {name: int(size) for name, size in (axis.split("=") for axis in text.split(","))}
    except ValueError:
        raise argparse.ArgumentTypeError(f"needs NAME=SIZE,...: got {text}") from None
