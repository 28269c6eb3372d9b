"""Simulates the bundle dumps of a TPU program and shows where the time goes: python -m flaxasync.check.player DIR."""

import argparse
import pathlib
import sys

from flaxasync.check.player.errors import PlayerError
from flaxasync.check.player.play import play_dump
from flaxasync.check.render import save_picture, save_trace


def main(argv: list[str] | None = None) -> int:
    """Runs the command. Returns 0, or 1 if the program breaks a rule of the machine or cannot be simulated."""
    parser = argparse.ArgumentParser(prog="python -m flaxasync.check.player", description=__doc__)
    parser.add_argument("folder", help="the folder that --xla_jf_dump_to named")
    parser.add_argument("--topology", help="topology of the program, like v5e:2x2 (default: as in player.json)")
    parser.add_argument(
        "--coords",
        help="the chip of each partition, like 0,0,0:1,0,0:1,1,0:0,1,0 (default: as in player.json)",
    )
    parser.add_argument("--measured-ms", type=float, help="time of the same program on a TPU: prints the error")
    parser.add_argument(
        "--json", metavar="FILE", help="write the result without its stretches of time as JSON ('-': to the terminal)"
    )
    parser.add_argument("--trace", metavar="FILE", help="write a Chrome trace, for Perfetto")
    parser.add_argument("--picture", metavar="FILE", help="write a PNG of the timeline")
    parser.add_argument(
        "--accept", action="append", default=[], metavar="OPERATION", help="let an unknown operation cost its slot"
    )
    parser.add_argument("--any-version", action="store_true", help="read dumps of an untested libtpu")
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
            pathlib.Path(options.json).write_text(result.to_json() + "\n")
    if options.trace:
        save_trace(result, options.trace)
    if options.picture:
        save_picture(result, options.picture)
    return 0


if __name__ == "__main__":
    sys.exit(main())
