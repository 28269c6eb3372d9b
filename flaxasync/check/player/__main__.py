"""`python -m flaxasync.check.player DUMPDIR [--topology v5e:2x2]`: plays bundle dumps, says where the time went."""

import argparse
import sys

from flaxasync.check.player.errors import PlayerError
from flaxasync.check.player.play import play_dump


def main(argv: list[str] | None = None) -> int:
    """Runs the command; returns 0, 1 when the program breaks a rule of the machine or cannot be played."""
    parser = argparse.ArgumentParser(prog="python -m flaxasync.check.player", description=__doc__)
    parser.add_argument("folder", help="what --xla_jf_dump_to wrote")
    parser.add_argument("--topology", help="what it was compiled for, like v5e:2x2; from player.json when left out")
    parser.add_argument(
        "--coords", help="the chip of each partition, like 0,0,0:1,0,0:1,1,0:0,1,0; from player.json likewise"
    )
    parser.add_argument("--measured-ms", type=float, help="what the same program took on a TPU: prints the error")
    parser.add_argument(
        "--json", metavar="FILE", help="write everything but single stretches of time ('-': to the terminal)"
    )
    parser.add_argument("--trace", metavar="FILE", help="write a Chrome trace, for Perfetto")
    parser.add_argument("--picture", metavar="FILE", help="write a PNG of the timeline")
    parser.add_argument(
        "--accept", action="append", default=[], metavar="OPERATION", help="let an unknown operation cost its slot"
    )
    parser.add_argument("--any-version", action="store_true", help="play dumps of an untested libtpu")
    options = parser.parse_args(argv)
    try:
        coords = None
        if options.coords:
            coords = [tuple(int(n) for n in chip.split(",")) for chip in options.coords.split(":")]
        result = play_dump(
            options.folder, topology=options.topology, coords=coords, accept=options.accept,
            any_version=options.any_version, measured=options.measured_ms / 1e3 if options.measured_ms else None,
        )  # fmt: skip
    except PlayerError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    if options.json == "-":
        print(result.to_json())
    else:
        print(result)
        if options.json:
            result.save_json(options.json)
    if options.trace:
        result.save_trace(options.trace)
    if options.picture:
        result.save_picture(options.picture)
    return 0


if __name__ == "__main__":
    sys.exit(main())
