"""Measures how long `make train` needs for its first step, on a first and on a second start.

    python benchmarks/start.py [--rounds N] [--write docs/train.md]

The two starts of a round follow each other: the first one has an empty cache of compiled programs, and the second one
has the cache that the first one filled. Each runs as `make train` does, in a new workdir, until it prints that its
first step is done. Every start finds the bytecode of Python's modules, which an unmeasured round writes before. The
processor time is that of all threads together, and depends less on what else the machine does than the clock does.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from table import print_table, write_between_markers

ROOT = Path(__file__).resolve().parent.parent
MARK = "started "  # how the line begins that the script prints after its first step


def start(folder: Path, workdir: str) -> tuple[float, float]:
    """Starts the tiny preset and ends it after its first step; returns seconds by the clock and of the processor."""
    options = ["--workdir", str(folder / workdir), "--compile_cache", str(folder / "programs")]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONDONTWRITEBYTECODE": "", "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "train/run.py", "configs/tiny.py", *options]
    began = time.monotonic()
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        if not any(line.startswith(MARK) for line in process.stdout):
            raise SystemExit(f"the run ended with exit code {process.wait()} before its first step")
        seconds = time.monotonic() - began
        fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
        process.kill()
    return seconds, (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")  # user and system time


def main() -> None:
    """Measures, prints the table, and writes it to a file on request."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5, help="number of rounds of two starts (default: 5)")
    parser.add_argument("--write", metavar="FILE", help="file whose table, between markers, is replaced")
    args = parser.parse_args()
    rounds = []
    for number in range(args.rounds + 1):
        with tempfile.TemporaryDirectory() as name:
            first, second = (start(Path(name), workdir) for workdir in ("first", "second"))
        if number:
            rounds.append((first, second))
        print(f"round {number}: {first[0]:.1f} s and {second[0]:.1f} s", file=sys.stderr, flush=True)
    rows = []
    for index, kind in enumerate(("by the clock", "processor time")):
        medians = [statistics.median(round[start][index] for round in rounds) for start in (0, 1)]
        ratio = statistics.median(second[index] / first[index] for first, second in rounds)
        rows.append(
            [
                f"from the start of the process to the end of step 1, {kind}",
                *(f"{m:.1f} s" for m in medians),
                f"{ratio:.2f}",
            ]
        )
    table = print_table(["8 simulated CPU devices", "first start", "second start", "median ratio"], rows)
    if args.write:
        write_between_markers(args.write, "start", table)


if __name__ == "__main__":
    main()
