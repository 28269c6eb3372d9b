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
    add = parser.add_argument
    add("folder", help="the folder that --xla_jf_dump_to named")
    add("--topology", help="topology of the program, like v5e:2x2 (default: as in player.json)")
    add(
        "--coords",
        help="the chip (and core) of each partition, like 0,0,0:1,0,0:1,1,0:0,1,0 (default: as in player.json)",
    )
    add("--measured-ms", type=float, help="time of the same program on a TPU: prints the error")
    add("--json", metavar="FILE", help="write the result without its slices as JSON ('-': to the terminal)")
    add("--trace", metavar="FILE", help="write a Chrome trace, for Perfetto")
    add("--picture", metavar="FILE", help="write a PNG of the timeline")
    add("--accept", action="append", default=[], metavar="OPERATION", help="let an unknown operation cost its slot")
    options = parser.parse_args(argv)
    try:
        coords = None
        if options.coords:
            coords = [tuple(int(n) for n in chip.split(",")) for chip in options.coords.split(":")]
        measured = options.measured_ms / 1e3 if options.measured_ms else None
        result = play_dump(
            options.folder, topology=options.topology, coords=coords, accept=options.accept, measured=measured
        )
    except PlayerError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    print(result.to_json() if options.json == "-" else result)
    if options.json and options.json != "-":
        pathlib.Path(options.json).write_text(result.to_json() + "\n")
    if options.trace:
        save_trace(result, options.trace)
    if options.picture:
        save_picture(result, options.picture)
    return 0


if __name__ == "__main__":
    sys.exit(main())
