"""Simulates the bundle dumps of a TPU program and shows where the time goes: python -m
flaxasync.check.player DIR.

The exit status is 0, 1 if the program breaks a rule of the machine, and 2 if it cannot be read or
simulated, or a file cannot be written.
"""

import argparse
import pathlib
import sys

from flaxasync.check.player.errors import PlayerError, ProtocolError, UnsimulatedError
from flaxasync.check.player.play import play_dump
from flaxasync.check.render import save_picture, save_trace


def main(argv: list[str] | None = None) -> int:
    description = (__doc__ or "").splitlines()[0]
    parser = argparse.ArgumentParser(
        prog="python -m flaxasync.check.player", description=description
    )
    add = parser.add_argument
    add("folder", help="the folder that --xla_jf_dump_to named")
    add("--topology", help="topology of the program, like v5e:2x2 (default: as in player.json)")
    add(
        "--coords",
        type=coordinates,
        help="the chip (and core) of each partition, like 0,0,0:1,0,0:1,1,0:0,1,0 (default: as in "
        "player.json)",
    )
    add(
        "--json",
        metavar="FILE",
        help="write the result without its slices as JSON ('-': to the terminal)",
    )
    add("--trace", metavar="FILE", help="write a Chrome trace, for Perfetto")
    add("--picture", metavar="FILE", help="write a PNG of the timeline")
    add(
        "--accept",
        action="append",
        default=[],
        metavar="OPERATION",
        help="let an unknown operation cost its slot",
    )
    options = parser.parse_args(argv)
    try:
        result = play_dump(
            options.folder,
            topology=options.topology,
            coords=options.coords,
            accept=options.accept,
        )
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
    except UnsimulatedError as error:
        print(f"cannot be simulated: {error}", file=sys.stderr)
        return 2
    except (PlayerError, OSError, ValueError, ImportError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        if isinstance(error, ProtocolError):
            return 1
        return 2
    return 0


def coordinates(text: str) -> list[tuple[int, ...]]:
    return [tuple(int(n) for n in chip.split(",")) for chip in text.split(":")]


if __name__ == "__main__":
    sys.exit(main())
