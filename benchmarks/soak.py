"""A soak of train/run.py: the tiny preset under random faults for a long time, compared with a run
without any.

    python benchmarks/soak.py [--minutes 60] [--every 120] [--write docs/operations.md]

docs/operations.md says what is done. The exit code is 1 if a loss differs by a bit, or if the
memory of the process grew by more than 2 % in the longest start after its first third, which is its
warm-up; a step that does not have exactly one line fails an assertion. The full disk is a small
tmpfs, which only root can mount; without it that fault is left out.
"""

import contextlib
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from benchmarks.table import command_line, print_table, write_between_markers

SCRIPT = Path(__file__).resolve().parents[1] / "train" / "run.py"
START_AGAIN = (74, 75, -signal.SIGKILL)
DISK = "64m"
FULL_DISK = "full disk"
FULL_SECONDS = (3.0, 30.0)  # how long the disk stays full
MOST_GROWTH = 0.02  # of the memory of one start after its warm-up
# more than any soak reaches, so that the learning rate of a step does not depend on its length
STEPS = 1_000_000


class Soak:
    def __init__(self, disk: Path, can_fill: bool, seed: int, every: float):
        self.work, self._disk, self._dice, self._every = (
            disk / "run",
            disk,
            random.Random(seed),
            every,
        )
        self._kinds = ["SIGKILL", "SIGTERM", "SIGHUP", *([FULL_DISK] if can_fill else [])]
        self._bag: list[str] = []
        self.injected, self.codes = Counter[str](), Counter[int]()
        # of each start: seconds since it began and resident bytes
        self.memory: list[list[tuple[float, int]]] = []

    def run(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        process = self._start()
        fault_at = self._next_fault()
        while time.monotonic() < until:
            time.sleep(1)
            if process.poll() is not None:
                self._note_end(process)
                process = self._start()
            elif time.monotonic() >= fault_at:
                self._disturb(process, self.draw())
                fault_at = self._next_fault()
            else:
                with contextlib.suppress(OSError):
                    pages = int(Path(f"/proc/{process.pid}/statm").read_text().split()[1])
                    self.memory[-1].append(
                        (time.monotonic() - self._began, pages * os.sysconf("SC_PAGE_SIZE"))
                    )
        process.send_signal(signal.SIGTERM)
        process.wait()
        self._note_end(process)

    def draw(self) -> str:
        """Draws the next fault from a bag that is filled with one of each kind whenever it is
        empty.
        """
        if not self._bag:
            self._bag = self._dice.sample(self._kinds, len(self._kinds))
        return self._bag.pop()

    def _next_fault(self) -> float:
        return time.monotonic() + self._dice.uniform(0.5, 1.5) * self._every

    def _start(self) -> subprocess.Popen:
        self._began = time.monotonic()
        self.memory.append([])
        return start(self.work)

    def _note_end(self, process: subprocess.Popen) -> None:
        self.codes[process.returncode] += 1
        if process.returncode not in START_AGAIN:
            sys.exit(
                f"the run ended with exit code {process.returncode}, after which nobody starts it "
                "again"
            )

    def _disturb(self, process: subprocess.Popen, kind: str) -> None:
        self.injected[kind] += 1
        if kind != FULL_DISK:
            process.send_signal(signal.Signals[kind])
            return
        filler = self._disk / "filler"
        with open(filler, "wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(b"\0" * 4096)
        time.sleep(self._dice.uniform(*FULL_SECONDS))
        filler.unlink()


def start(work: Path, *options: str) -> subprocess.Popen:
    command = [
        sys.executable,
        str(SCRIPT),
        "configs/tiny.py",
        "--workdir",
        str(work),
        "--steps",
        str(STEPS),
        *options,
    ]
    quiet = ("--eval.every", "0", "--checkpoint.every", "25")
    return subprocess.Popen([*command, *quiet], cwd=SCRIPT.parents[1], stdout=subprocess.DEVNULL)


def undisturbed(work: Path, last: int) -> list[float]:
    """Trains without a fault until the metrics have step `last`, and returns the losses up to
    it.
    """
    process = start(work, "--checkpoint.keep", "1")
    while len(found := losses(work)) < last:
        assert process.poll() is None, process.returncode
        time.sleep(2)
    process.kill()
    process.wait()
    return found[:last]


def losses(work: Path) -> list[float]:
    """Returns the loss of each step; every step must have exactly one line."""
    path = work / "metrics.jsonl"
    text = path.read_text() if path.exists() else ""
    lines = [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    return [line["loss"] for line in lines]


def settled_memory(samples: list[tuple[float, int]]) -> tuple[float, float]:
    """Returns the median memory in MiB of the second and of the last third of a start, from its
    samples.
    """
    settled = [size for at, size in samples if at > samples[-1][0] / 3]
    half = len(settled) // 2
    if not half:
        sys.exit(
            "no start lasted long enough to measure its memory: give a larger --every or --minutes"
        )
    return statistics.median(settled[:half]) / 2**20, statistics.median(settled[half:]) / 2**20


@contextlib.contextmanager
def small_disk() -> Iterator[tuple[Path, bool]]:
    """Makes a folder, if possible on a small disk of its own; yields it and whether it is one."""
    with tempfile.TemporaryDirectory() as folder:
        mounted = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", folder], capture_output=True
        )
        try:
            yield Path(folder), mounted.returncode == 0
        finally:
            if mounted.returncode == 0:
                subprocess.run(["umount", folder], check=True)


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--every", type=float, default=120, help="mean seconds between faults")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--keep", type=Path, help="a folder for the metrics and events of both runs"
    )
    chosen = parser.parse_args()
    with small_disk() as (disk, can_fill), tempfile.TemporaryDirectory() as folder:
        soak = Soak(disk, can_fill, chosen.seed, chosen.every)
        soak.run(60 * chosen.minutes)
        works = {"disturbed": soak.work, "undisturbed": Path(folder) / "run"}
        disturbed = losses(soak.work)
        expected = undisturbed(works["undisturbed"], len(disturbed))
        for name, work in works.items() if chosen.keep else ():
            shutil.copytree(work, chosen.keep / name, ignore=shutil.ignore_patterns("checkpoints"))
    equal = sum(a == b for a, b in zip(disturbed, expected, strict=True))
    longest = max(soak.memory, key=len)
    early, late = settled_memory(longest)
    rows = [
        ["duration", f"{chosen.minutes:g} min, a fault every {chosen.every:g} s on average"],
        ["faults", ", ".join(f"{count} x {name}" for name, count in sorted(soak.injected.items()))],
        [
            "exit codes",
            ", ".join(f"{count} x {code}" for code, count in sorted(soak.codes.items())),
        ],
        ["steps", f"{len(disturbed):,}, each with one line"],
        [
            "losses that equal those of an undisturbed run, bit by bit",
            f"{equal:,} of {len(disturbed):,}",
        ],
        [
            f"memory of the longest start ({longest[-1][0]:.0f} s), median of its second and of "
            "its last third",
            f"{early:,.0f} MiB and {late:,.0f} MiB",
        ],
    ]
    write_between_markers(chosen.write, "soak", print_table(["", "measured"], rows))
    if equal < len(disturbed):
        sys.exit(f"{len(disturbed) - equal} losses differ from those of the undisturbed run")
    if late > early * (1 + MOST_GROWTH):
        sys.exit(
            f"the memory grew by {late / early - 1:.1%} in the longest start, more than "
            f"{MOST_GROWTH:.0%}"
        )


if __name__ == "__main__":
    main()
