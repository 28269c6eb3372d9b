"""Simulates the bundle dumps of a TPU program and shows where the time goes: python -m
flaxasync.check.player DIR.

The exit status is 0, 1 if the program breaks a rule of the machine, and 2 if it cannot be
simulated, or not be read.
"""

import argparse
import pathlib
import sys

from flaxasync.check.player.dump import read_note, read_scheduled
from flaxasync.check.player.errors import PlayerError, ProtocolError, UnsimulatedError
from flaxasync.check.player.play import play_dump
from flaxasync.check.render import save_picture, save_trace
from flaxasync.check.timeline_of import timeline


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
        help="the chip (and core) of each partition, like 0,0,0:1,0,0:1,1,0:0,1,0 (default: as in "
        "player.json)",
    )
    add("--measured-ms", type=float, help="time of the same program on a TPU: prints the error")
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
        coords = None
        if options.coords:
            coords = [tuple(int(n) for n in chip.split(",")) for chip in options.coords.split(":")]
        if options.measured_ms:
            measured = options.measured_ms / 1e3
        else:
            measured = None
        result = play_dump(
            options.folder,
            topology=options.topology,
            coords=coords,
            accept=options.accept,
            measured=measured,
        )
    except UnsimulatedError as error:
        print(
            f"cannot be simulated: {error}. "
            f"{_from_text(pathlib.Path(options.folder), options.topology)}",
            file=sys.stderr,
        )
        return 2
    except PlayerError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        if isinstance(error, ProtocolError):
            return 1
        return 2
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


def _from_text(folder: pathlib.Path, topology: str | None) -> str:
    """Returns a sentence about what the text of a program that cannot be simulated says of its
    time.
    """
    t = timeline(read_scheduled(folder), topology or read_note(folder).topology)
    return (
        f"From its text alone, it is estimated at {t.seconds * 1e3:.3f} ms, of which "
        f"{t.exposed * 1e3:.3f} ms are exposed communication (fa.check.timeline)."
    )


if __name__ == "__main__":
    sys.exit(main())
