"""Runs a Python program and captures every program that JAX compiles in it, without a change to its
code.

    python -m flaxasync.check capture FOLDER -- script.py arguments
    python -m flaxasync.check capture FOLDER -- -m module arguments

The processes that it starts are captured, too, if they import flaxasync: they inherit
FLAXASYNC_CAPTURE=FOLDER. The exit status is that of the program; 2 if there is no such program.
"""

import argparse
import os
import pathlib
import runpy
import sys

from flaxasync.check.capturing.recorder import VARIABLE, capture


def main(arguments: list[str] | None = None) -> int:
    description, usage = (__doc__ or "").split("\n\n", 1)
    parser = argparse.ArgumentParser(
        prog="python -m flaxasync.check capture",
        description=description,
        epilog=usage,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "folder", help="the folder for the programs; it is made if it does not exist"
    )
    parser.add_argument(
        "program",
        nargs=argparse.REMAINDER,
        help="-- script.py arguments, or -- -m module arguments",
    )
    chosen = parser.parse_args(arguments)
    program = chosen.program[1:] if chosen.program[:1] == ["--"] else chosen.program
    if not program or program == ["-m"]:
        parser.error("which program? put -- script.py, or -- -m module, after the folder")
    if VARIABLE in os.environ:
        parser.error(f"{VARIABLE} is set, so everything is captured already: unset it")
    is_module = program[0] == "-m"
    if not is_module and not pathlib.Path(program[0]).exists():
        print(f"there is no file {program[0]}", file=sys.stderr)
        return 2
    os.environ[VARIABLE] = str(pathlib.Path(chosen.folder).absolute())
    sys.argv = program[1:] if is_module else program
    sys.path[0] = os.getcwd() if is_module else str(pathlib.Path(program[0]).absolute().parent)
    with capture(chosen.folder) as programs:
        try:
            if is_module:
                runpy.run_module(program[1], run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(program[0], run_name="__main__")
        finally:
            command = f"python -m flaxasync.check {chosen.folder}"
            print(f"captured {len(programs)} programs: {command}", file=sys.stderr)
    return 0
