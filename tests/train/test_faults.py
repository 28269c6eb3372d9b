"""The fault table of docs/operations.md: each fault is injected into a real run, which is then started again.

After each fault the run says in one paragraph what is wrong and ends with the documented code, or it goes on. Started
again, with the cause removed where it was refused, it completes with the losses of a run that was never disturbed, and
no step, line or complete checkpoint is lost. The rows about several processes are the tests in test_distributed.py.
"""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.train import test_distributed

STEPS = 40
DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "operations.md"
# The preset delays every batch, so that a fault hits a run that is under way.
SLOW_DATA = """
import itertools as _itertools
import time as _time
from train import data as _data
_count = _itertools.count()
_next = _data.TrainingBatches.__next__
def _slowly(self):
    _time.sleep(_delay(next(_count)))
    return _next(self)
def _delay(batch):
    return 0.03
_data.TrainingBatches.__next__ = _slowly
"""
ROWS: dict[str, Callable] = {}


def fault(name: str) -> Callable:
    """Registers a test as the row of the fault table that has this name."""

    def register(test: Callable) -> Callable:
        assert name not in ROWS
        ROWS[name] = test
        return pytest.mark.slow(test)

    return register


class Workplace:
    """Starts the same run again and again in one workdir, with or without a fault in its process."""

    def __init__(self, launcher, preset: Path, environment: dict[str, str], work: Path):
        self._launcher, self._preset, self._environment, self.work = launcher, preset, environment, work
        self._runs = []

    def start(self, *options: object, code: str = ""):
        """Starts the run; `code` is Python that its process runs first."""
        path = self._preset.with_name("with_fault.py")
        path.write_text(self._preset.read_text() + SLOW_DATA + code)
        command = [str(path), "--steps", STEPS, "--workdir", self.work, "--checkpoint.every", 5, *QUIET, *options]
        run = self._launcher.start(list(map(str, command)), environment=self._environment)
        self._runs.append(run)
        return run

    def run(self, *options: object, code: str = "") -> tuple[int, str, str]:
        """Runs to the end; returns the exit code and what was printed."""
        process = self.start(*options, code=code)
        out, err = process.communicate(timeout=120)
        return process.returncode, out, err

    def completes(self, *options: object) -> str:
        """Runs to the end, checks that it completes, and returns what it printed to standard error."""
        code, out, err = self.run(*options)
        assert code == 0, out + err
        return err

    def kill(self) -> None:
        for run in self._runs:
            run.kill()
            run.communicate()

    def lines(self) -> list[dict]:
        return [json.loads(line) for line in (self.work / "metrics.jsonl").read_text().splitlines()]

    def losses(self) -> list[float]:
        lines = self.lines()
        assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
        return [line["loss"] for line in lines]

    def steps_saved(self) -> list[int]:
        return sorted(int(path.name) for path in (self.work / "checkpoints").iterdir() if path.name.isdigit())


QUIET = ("--eval.every", 0, "--eval.sample_tokens", 4)


@pytest.fixture
def place(launcher, preset, compile_little, tmp_path) -> Iterator[Workplace]:
    place = Workplace(launcher, preset(), dict(os.environ) | compile_little, tmp_path / "run")
    yield place
    place.kill()


@pytest.fixture(scope="module")
def undisturbed() -> dict[str, list[float]]:
    return {}


@pytest.fixture
def expected(undisturbed, place, tmp_path) -> list[float]:
    """The losses of the run that nothing disturbs."""
    if not undisturbed:
        elsewhere = Workplace(place._launcher, place._preset, place._environment, tmp_path / "undisturbed")
        assert elsewhere.completes() == ""
        undisturbed["losses"] = elsewhere.losses()
    return undisturbed["losses"]


@pytest.fixture
def stopped(place) -> Workplace:
    """A workplace whose run was stopped after some checkpoints."""
    process = place.start()
    after_step(process, 16)
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=60)[1] == ""
    assert process.returncode == 75
    return place


@pytest.fixture
def disk(place, tmp_path) -> Iterator[Path]:
    """A small disk of its own, on which the run has its workdir."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=12m", "tmpfs", folder], capture_output=True)
    if mounted.returncode:
        pytest.skip("this machine does not let the tests mount a file system")
    place.work = folder / "run"
    yield folder
    place.kill()
    subprocess.run(["umount", "-l", folder], check=True)


def after_step(process, step: int) -> None:
    """Waits until a run has reported a step."""
    for line in process.stdout:
        found = re.match(r"step (\d+)/", line)
        if found and int(found[1]) >= step:
            return
    raise AssertionError(f"the run ended: {process.communicate()}")


def one_paragraph(err: str) -> bool:
    return err.startswith("error: ") and err.count("\n") == 1


def fill(folder: Path) -> Path:
    """Fills a disk to its last byte."""
    path = folder / "filler"
    with open(path, "ab", buffering=0) as file:
        for size in (1 << 16, 512, 1):
            with contextlib.suppress(OSError):
                while True:
                    file.write(b"\0" * size)
    return path


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != ".lock"}


def test_the_table_in_the_document_has_these_rows():
    text = DOCUMENT.read_text().partition("## The fault table")[2].partition("\n## ")[0]
    documented = {line.split("|")[1].strip() for line in text.splitlines() if line.startswith("| ")} - {"Fault"}
    assert documented == set(ROWS) | set(test_distributed.FAULTS)
    assert len(documented) >= 30


# Processes and signals.


@fault("kill -9 while it starts")
def test_kill_at_start(place, expected):
    for seconds in (0.05, 0.5, 1.0):
        process = place.start()
        time.sleep(seconds)
        process.kill()
        process.communicate()
    assert place.completes() == ""
    assert place.losses() == expected


@fault("kill -9 between two checkpoints")
def test_kill_between_steps(place, expected):
    process = place.start()
    after_step(process, 13)
    process.kill()
    process.communicate()
    assert place.steps_saved()
    assert place.completes() == ""
    assert place.losses() == expected


@fault("kill -9 during the write of a checkpoint")
def test_kill_while_saving(place, expected):
    process = place.start()
    while not any("tmp" in path.name for path in (place.work / "checkpoints").glob("*")):
        assert process.poll() is None
        time.sleep(0.0005)
    process.kill()
    process.communicate()
    assert place.completes() == ""
    assert place.losses() == expected
    assert not [path for path in (place.work / "checkpoints").iterdir() if not path.name.isdigit()]


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 75), (signal.SIGHUP, 75), (signal.SIGUSR1, 75), (signal.SIGINT, 130)]
)
@fault("SIGTERM, SIGHUP, SIGUSR1 or Ctrl-C")
def test_signal(number, code, place, expected):
    process = place.start()
    after_step(process, 8)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (code, "")
    step = int(re.search(rf"stopped by {number.name} after step (\d+), saved in", out)[1])
    assert max(place.steps_saved()) == step
    assert place.completes() == ""
    assert place.losses() == expected


@fault("a second Ctrl-C")
def test_second_interrupt(place, expected):
    process = place.start(code="def _delay(batch): return 0.3\n")
    after_step(process, 6)
    process.send_signal(signal.SIGINT)
    time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in err, out + err
    assert place.completes() == ""
    assert place.losses() == expected


@fault("SIGTERM while it compiles")
def test_signal_at_start(place, expected):
    process = place.start()
    process.stdout.readline()
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=60)[1] == ""
    assert process.returncode == 75
    assert place.completes() == ""
    assert place.losses() == expected


@fault("SIGSTOP, or a machine that sleeps, then SIGCONT")
def test_sleep(place, expected):
    process = place.start("--report.hang_seconds", 4)
    after_step(process, 6)
    process.send_signal(signal.SIGSTOP)
    time.sleep(6)
    process.send_signal(signal.SIGCONT)
    assert process.communicate(timeout=60)[1] == ""
    assert process.returncode == 0
    assert place.losses() == expected


@fault("a read that never returns")
def test_hang(place, expected):
    hang = "def _delay(batch): return 0.03 if batch < 12 else 1e6\n"
    code, _, err = place.run("--report.hang_seconds", 3, code=hang)
    assert code == 75
    assert one_paragraph(err), err
    assert "the run made no progress for 3 s after step 12" in err
    assert "_slowly" in (place.work / "stacks.txt").read_text()
    assert place.completes() == ""
    assert place.losses() == expected


@fault("the reader of its output ends")
def test_closed_output(place, expected):
    process = place.start()
    after_step(process, 3)
    process.stdout.close()
    process.stdout = None
    assert process.wait() == 0
    assert place.losses() == expected


@fault("too little memory")
def test_memory(place, expected):
    allocate = """
from train import step as _step
def _init(self):
    import jax as _jax, jax.numpy as _jnp
    return _jax.block_until_ready(_jnp.zeros(2**44, _jnp.int8))
_step.Trainer.init = _init
"""
    code, _, err = place.run(code=allocate)
    assert code == 4, err
    assert one_paragraph(err), err
    assert "has too little memory" in err
    assert place.completes() == ""
    assert place.losses() == expected


@fault("another run in the same workdir")
def test_two_runs(place, expected):
    first = place.start()
    after_step(first, 3)
    code, _, err = place.run()
    assert code == 2
    assert one_paragraph(err)
    assert "is in use by another run (process " in err
    assert first.communicate(timeout=60)[1] == ""
    assert first.returncode == 0
    assert place.losses() == expected


# Disks and file systems.


@fault("a full disk, with room again before the run gives up")
def test_full_disk_for_a_while(place, disk, expected):
    process = place.start()
    after_step(process, 7)
    filler = fill(disk)
    time.sleep(6)
    filler.unlink()
    _, err = process.communicate(timeout=90)
    assert process.returncode == 0, err
    assert "Traceback" not in err
    assert re.search(r"warning: .* could not be written: .*; step (\d+) is saved instead\n", err), err
    assert re.search(r"warning: step \d+ is saved\n", err), err
    assert place.losses() == expected


@fault("a full disk for longer than checkpoint.retry_seconds")
def test_full_disk(place, disk, expected):
    process = place.start("--checkpoint.retry_seconds", 3)
    after_step(process, 7)
    filler = fill(disk)
    _, err = process.communicate(timeout=90)
    assert process.returncode == 74, err
    assert "Traceback" not in err
    assert re.search(r"error: .* in attempts over 3 s, so the run ends; nothing that was complete is lost", err), err
    assert err.count("\n") < 8
    assert place.steps_saved(), "the newest complete checkpoint was deleted"
    code, _, err = place.run("--checkpoint.retry_seconds", 1)  # the disk is still full
    assert code == 74, err
    assert "Traceback" not in err
    filler.unlink()
    place.completes()
    assert place.losses() == expected


@fault("a disk that becomes read-only")
def test_read_only_disk(place, disk, expected):
    # The operating system refuses to remount a disk on which files are open for writing, so the run itself raises what
    # it would get.
    read_only = f"""
import errno as _e, os as _os
_now, _write, _mkdir = [], _os.write, _os.mkdir
def _delay(batch):
    if batch >= 8: _now.append(batch)
    return 0.03
def _refuse(path):
    if _now and str(path).startswith({str(place.work)!r}):
        raise OSError(_e.EROFS, _os.strerror(_e.EROFS), str(path))
def _refusing_write(number, content):
    _refuse(_os.readlink(f"/proc/self/fd/{{number}}"))
    return _write(number, content)
def _refusing_mkdir(path, *arguments, **more):
    _refuse(path)
    return _mkdir(path, *arguments, **more)
_os.write, _os.mkdir = _refusing_write, _refusing_mkdir
"""
    code, _, err = place.run("--checkpoint.retry_seconds", 2, code=read_only)
    assert code == 74, err
    assert "Traceback" not in err
    assert re.search(r"error: .* could not be written: .*Read-only file system, in attempts over 2 s", err), err
    assert "deleted" not in err
    assert place.steps_saved() == [5]
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
    code, _, err = place.run()
    assert code == 2, err
    assert one_paragraph(err)
    assert "workdir must be a folder that can be written" in err
    subprocess.run(["mount", "-o", "remount,rw,size=12m", disk], check=True)
    place.completes()
    assert place.losses() == expected


@fault("a limit on the size of files")
def test_file_size_limit(place, expected):
    limit = "import resource as _r\n_r.setrlimit(_r.RLIMIT_FSIZE, (6000, 6000))\n"
    code, _, err = place.run("--checkpoint.retry_seconds", 1, "--compile_cache", "none", code=limit)
    assert code == 74, err
    assert "Traceback" not in err
    place.completes()
    assert place.losses() == expected


@fault("a workdir that is removed during the run")
def test_removed_workdir(place, expected):
    process = place.start()
    after_step(process, 7)
    place.work.rename(place.work.with_name("moved"))
    _, err = process.communicate(timeout=60)
    assert process.returncode == 74, err
    assert "was removed or replaced while the run was going on" in err
    assert "Traceback" not in err
    shutil.rmtree(place.work, ignore_errors=True)
    place.work.with_name("moved").rename(place.work)
    place.completes()
    assert place.losses() == expected


@fault("a file system without locks, as some network file systems are")
def test_no_locks(place):
    broken = (
        "import errno as _e, fcntl as _f\n"
        "def _no_locks(*_): raise OSError(_e.ENOLCK, 'No locks available')\n"
        "_f.flock = _no_locks\n"
    )
    code, _, err = place.run("--compile_cache", "none", code=broken)
    assert code == 2, err
    assert one_paragraph(err)
    assert "is on a file system without locks" in err


# Files of the workdir.


@fault("a damaged array in the newest checkpoint")
def test_damaged_checkpoint(stopped, expected):
    *_, earlier, newest = stopped.steps_saved()
    for file in (stopped.work / "checkpoints" / str(newest) / "state").rglob("d/*"):
        file.write_bytes(file.read_bytes()[:20])
    before = contents(stopped.work)
    code, _, err = stopped.run()
    assert code == 2
    assert one_paragraph(err)
    assert f"run again with --resume {earlier}" in err
    assert contents(stopped.work) == before
    assert stopped.completes("--resume", earlier) == ""
    assert stopped.losses() == expected


@fault("a changed data position in the record of a checkpoint")
def test_damaged_record(stopped, expected):
    *_, earlier, newest = stopped.steps_saved()
    (path,) = (stopped.work / "checkpoints" / str(newest) / "record").rglob("metadata")
    record = json.loads(path.read_text())
    record["data"]["sequences"] += 8
    path.write_text(json.dumps(record))
    code, _, err = stopped.run()
    assert code == 2
    assert one_paragraph(err)
    assert "the record is not what was saved" in err
    assert stopped.completes("--resume", earlier) == ""
    assert stopped.losses() == expected


@fault("an invalid line in metrics.jsonl")
def test_bad_line(stopped, expected):
    path = stopped.work / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:5], b"\xff\0garbage\n", *lines[5:]]))
    err = stopped.completes()
    assert re.fullmatch(r"warning: .* had 1 invalid lines, which were moved to .*metrics.invalid.jsonl; .*\n", err), err
    assert stopped.losses() == expected


@fault("a deleted metrics.jsonl")
def test_deleted_metrics(stopped, expected):
    (stopped.work / "metrics.jsonl").unlink()
    newest = max(stopped.steps_saved())
    err = stopped.completes()
    assert f"has no line for steps 1 to {newest}, which were done before; they may still be in tensorboard/" in err
    assert [line["loss"] for line in stopped.lines()] == expected[newest:]


@fault("an incomplete last line of metrics.jsonl or events.jsonl")
def test_cut_line(stopped, expected):
    for name in ("metrics.jsonl", "events.jsonl"):
        with open(stopped.work / name, "a") as file:
            file.write('{"step": 17, "lo')
    stopped.completes()
    assert stopped.losses() == expected
    events = [json.loads(line)["event"] for line in (stopped.work / "events.jsonl").read_text().splitlines()]
    assert events.count("start") == 2


@fault("a deleted config.json, and another seed")
def test_deleted_config(stopped, expected):
    (stopped.work / "config.json").unlink()
    code, _, err = stopped.run("--seed", 1)
    assert code == 2
    assert one_paragraph(err)
    assert "seed was 0 and is 1" in err
    assert stopped.completes() == ""
    assert stopped.losses() == expected


@fault("an unreadable config.json")
def test_unreadable_config(stopped, expected):
    (stopped.work / "config.json").write_text("{")
    code, _, err = stopped.run()
    assert code == 2
    assert one_paragraph(err)
    (stopped.work / "config.json").unlink()
    assert stopped.completes() == ""
    assert stopped.losses() == expected


@fault("deleted events, plots, event files and program")
def test_deleted_views(stopped, expected):
    shutil.rmtree(stopped.work / "tensorboard")
    names = ("events.jsonl", "loss.png", "program.txt.gz")
    for name in names:
        (stopped.work / name).unlink()
    assert stopped.completes() == ""
    assert stopped.losses() == expected
    assert all((stopped.work / name).stat().st_size for name in names)
    assert list((stopped.work / "tensorboard").glob("events*"))


@fault("a damaged cache of compiled programs")
def test_damaged_cache(place, expected, tmp_path):
    cache = tmp_path / "programs"
    environment = {name: value for name, value in place._environment.items() if "COMPILATION_CACHE" not in name}
    place._environment = environment
    process = place.start("--compile_cache", cache)
    after_step(process, 6)
    process.kill()
    process.communicate()
    entries = [path for path in cache.iterdir() if path.name.endswith("-cache")]
    assert entries
    for path in entries:
        path.write_bytes(b"")
    err = place.completes("--compile_cache", cache)
    assert "Traceback" not in err
    assert place.losses() == expected


# Data.


def other_data(place: Workplace, change: Callable[[bytes], bytes]) -> Path:
    path = place.work.with_name("other.txt")
    text = re.search(r'path="(.*?)"', place._preset.read_text())[1]
    path.write_bytes(change(Path(text).read_bytes()))
    return path


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda data: data[::-1], "it has as many tokens, and other ones"),
        (lambda data: data[: len(data) // 2], "tokens was "),
        (lambda data: data[:9000] + b"X" + data[9001:], "it has as many tokens, and other ones"),
    ],
    ids=["reversed", "halved", "one byte"],
)
@fault("another corpus than that of the checkpoint")
def test_changed_data(change, said, stopped, expected):
    before = contents(stopped.work)
    code, _, err = stopped.run("--data.path", other_data(stopped, change))
    assert code == 2
    assert one_paragraph(err)
    assert said in err
    assert "--data.accept_change True" in err
    assert contents(stopped.work) == before
    assert stopped.completes() == ""
    assert stopped.losses() == expected


@fault("another corpus, accepted")
def test_accepted_data(stopped, expected):
    path = other_data(stopped, lambda data: data[::-1])
    newest = max(stopped.steps_saved())
    stopped.completes("--data.path", path, "--data.accept_change", "True")
    assert stopped.losses()[:newest] == expected[:newest]
    events = [json.loads(line) for line in (stopped.work / "events.jsonl").read_text().splitlines()]
    starts = [event for event in events if event["event"] == "start"]
    assert any("other ones" in change for change in starts[-1]["changes"])


@fault("another tokenizer")
def test_other_tokenizer(stopped, expected):
    code, _, err = stopped.run("--data.tokenizer", "gpt2")
    assert code == 2
    assert "tokenizer was bytes and is gpt2" in err
    assert stopped.completes() == ""
    assert stopped.losses() == expected


@pytest.mark.parametrize(
    ("content", "said"),
    [(None, "there is no"), (b"", "is empty"), (b"\0abc" * 100, "holds a zero byte"), (b"\xff" * 9000, "token ids")],
    ids=["missing", "empty", "binary", "out of the vocabulary"],
)
@fault("missing, empty, binary or foreign data")
def test_bad_data(content, said, stopped, expected):
    path = stopped.work.with_name("bad.txt")
    if content is not None:
        path.write_bytes(content)
    code, _, err = stopped.run("--data.path", path)
    assert code == 2
    assert one_paragraph(err)
    assert said in err
    assert stopped.completes() == ""
    assert stopped.losses() == expected


@fault("data or a workdir that may not be read or written")
def test_permissions(place, expected):
    code, _, err = place.run(code="import os as _os\n_os.setegid(65534), _os.seteuid(65534)\n")
    assert code == 2, err
    assert one_paragraph(err), err
    assert "Permission denied" in err
    assert place.completes() == ""
    assert place.losses() == expected


@fault("a data file that is cut during the run")
def test_cut_data(place, expected):
    path = other_data(place, lambda data: data)
    process = place.start("--data.path", path)
    after_step(process, 7)
    content = path.read_bytes()
    os.truncate(path, 0)
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGBUS
    path.write_bytes(content)
    assert place.completes("--data.path", path) == ""
    assert place.losses() == expected


@fault("a loss that is not finite")
def test_not_finite(stopped, expected):
    newest = max(stopped.steps_saved())
    code, _, err = stopped.run("--optimizer.learning_rate", 1e30)
    assert code == 3
    assert one_paragraph(err)
    saved = max(stopped.steps_saved())
    assert f"of step {saved}" in err
    assert stopped.completes("--resume", newest) == ""
    assert stopped.losses() == expected


@fault("a damaged batch, skipped")
def test_skipped(place):
    spoil = """
import dataclasses as _d
from train import step as _step
_inner = _step.Trainer._train_step
def _spoiled(self, state, *batch):
    import jax as _jax, jax.numpy as _jnp
    bad = _jnp.where(state.step == 11, _jnp.float32(_jnp.nan), _jnp.float32(1))
    params = _jax.tree.map(lambda leaf: leaf * bad, state.params)
    new, metrics = _inner(self, _d.replace(state, params=params), *batch)
    kept = _jax.tree.map(lambda old, leaf: _jnp.where(state.step == 11, old, leaf), state.params, new.params)
    return _d.replace(new, params=kept), metrics
_step.Trainer._train_step = _spoiled
"""
    code, out, err = place.run("--skip.nonfinite", "True", code=spoil)
    assert (code, err) == (0, ""), out + err
    assert "step 12: the update was skipped" in out
    events = [json.loads(line) for line in (place.work / "events.jsonl").read_text().splitlines()]
    assert [event["step"] for event in events if event["event"] == "skipped"] == [12]
    lines = [json.loads(line) for line in (place.work / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line["skipped"]] == [12]
    assert np.isfinite([line["loss"] for line in lines if line["step"] != 12]).all()


# The clock.


@pytest.mark.parametrize("jump", [-86400, 86400], ids=["back", "forward"])
@fault("a wall clock that jumps by a day")
def test_clock(jump, place, expected):
    code = f"""
_clock, _began = _time.time, _time.monotonic()
_time.time = lambda: _clock() + ({jump} if _time.monotonic() > _began + 1.5 else 0)
"""
    exit_code, _, err = place.run("--checkpoint.minutes", 1, code=code)
    assert (exit_code, err) == (0, "")
    assert place.losses() == expected
    assert all(0 <= line["goodput"] <= 1 for line in place.lines())
