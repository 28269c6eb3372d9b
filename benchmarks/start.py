"""Measures how long `make train` needs for its first step, on a first and on a second start.

    python benchmarks/start.py [--rounds N] [--write docs/train.md]

The two starts of a round follow each other: the first one has an empty cache of compiled programs, and the second one
has the cache that the first one filled. Each runs as `make train` does, in a new workdir, until it prints that its
first step is done. An unmeasured round writes the bytecode of Python's modules before. The processor time is that of
all threads together, and depends less on what else the machine does than the clock does.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.table import command_line, print_table, write_between_markers

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
    parser = command_line(__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="number of rounds of two starts (default: 5)")
    chosen = parser.parse_args()
    rounds = []
    for _ in range(chosen.rounds + 1):
        with tempfile.TemporaryDirectory() as name:
            rounds.append([start(Path(name), workdir) for workdir in ("first", "second")])
    rows = []
    for index, kind in enumerate(("by the clock", "processor time")):
        first, second = ([starts[n][index] for starts in rounds[1:]] for n in (0, 1))
        ratio = statistics.median(b / a for a, b in zip(first, second, strict=True))
        medians = [f"{statistics.median(seconds):.1f} s" for seconds in (first, second)]
        rows.append([f"from the start of the process to the end of step 1, {kind}", *medians, f"{ratio:.2f}"])
    table = print_table(["8 simulated CPU devices", "first start", "second start", "median ratio"], rows)
    write_between_markers(chosen.write, "start", table)


if __name__ == "__main__":
    main()
