"""Compares a compiled program with a baseline: fails if it communicates more, or hides less of it.

    python -m flaxasync.check gate BASELINE PROGRAM [--update] [--mesh data=2,model=4] [--exposed 0.02]

The exit status is 0 if nothing is worse than in the baseline, 1 if something is, and 2 if a file
cannot be read or written, or the baseline is of another program.
"""

import argparse
import dataclasses
import json
import pathlib
import sys

from flaxasync.check.gate.comparison import Tolerances, compare
from flaxasync.check.gate.summary import read_baseline, summarize, write_baseline
from flaxasync.check.hlo.load import read_module
from flaxasync.hardware import CHIPS


def main(arguments: list[str] | None = None) -> int:
    description, usage = (__doc__ or "").split("\n\n", 1)
    parser = argparse.ArgumentParser(
        prog="python -m flaxasync.check gate",
        description=description,
        epilog=usage,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("baseline", help="the JSON file; --update makes it")
    parser.add_argument(
        "program",
        help="HLO text (a dump, or what compiled.as_text() returned); - reads standard input",
    )
    parser.add_argument(
        "--update", action="store_true", help="write the baseline, and compare nothing"
    )
    parser.add_argument(
        "--mesh",
        metavar="NAME=SIZE,...",
        help="the mesh axes in order (default: those in the text)",
    )
    parser.add_argument(
        "--chip", choices=sorted(CHIPS), help="the chip whose times are estimated (default: v5e)"
    )
    parser.add_argument("--json", action="store_true", help="print the differences as JSON")
    for name, meaning in (
        ("exposed", "share of the time by which waits may grow"),
        ("bytes", "share by which the size of an array may differ"),
        ("temporaries", "share by which temporary memory may grow"),
    ):
        default = getattr(Tolerances(), name)
        text = f"{meaning} (default: {default:g})"
        parser.add_argument(f"--{name}", type=float, default=default, metavar="SHARE", help=text)
    chosen = parser.parse_args(arguments)
    try:
        axes = {
            name: int(size)
            for name, _, size in (a.partition("=") for a in (chosen.mesh or "").split(",") if a)
        }
    except ValueError:
        parser.error(f"--mesh needs NAME=SIZE,...: got {chosen.mesh}")
    try:
        tolerances = Tolerances(chosen.exposed, chosen.bytes, chosen.temporaries)
    except ValueError as error:
        parser.error(str(error))
    file = chosen.program
    try:
        program = summarize(read_module(chosen.program), chip=chosen.chip, axes=axes)
        file = chosen.baseline
        if chosen.update:
            write_baseline(program, chosen.baseline)
            print(f"wrote {chosen.baseline}", file=sys.stderr)
            return 0
        if not pathlib.Path(chosen.baseline).exists():
            raise ValueError("there is no such baseline: --update makes it")
        comparison = compare(read_baseline(chosen.baseline), program, tolerances)
    except (OSError, ValueError) as error:
        print(f"{file}: {error}", file=sys.stderr)
        return 2
    if chosen.json:
        print(json.dumps([dataclasses.asdict(change) for change in comparison.changes], indent=1))
    else:
        print(comparison)
    if not comparison.ok:
        print("to accept the differences, run this again with --update", file=sys.stderr)
    return 0 if comparison.ok else 1
