"""The rows of the fault table about disks and file systems. test_table.py says what a row shows."""

import contextlib
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.train.lifecycle.conftest import after_checkpoint, after_step, error_of, fault


@pytest.fixture
def disk(place, tmp_path) -> Iterator[Path]:
    """A small disk of its own, on which the run has its workdir."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=12m", "tmpfs", folder], capture_output=True
    )
    if mounted.returncode:
        pytest.skip("this machine does not let the tests mount a file system")
    place.work = folder / "run"
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def fill(folder: Path) -> Path:
    """Fills a disk to its last byte."""
    path = folder / "filler"
    with open(path, "ab", buffering=0) as file:
        for size in (1 << 16, 512, 1):
            with contextlib.suppress(OSError):
                while True:
                    file.write(b"\0" * size)
    return path


@fault("a full disk, with room again before the run gives up")
def test_full_disk_for_a_while(place, disk, expected):
    process = place.start()
    after_checkpoint(place, process)
    filler = fill(disk)
    time.sleep(6)
    filler.unlink()
    err = error_of(process, 0)
    assert re.search(r"warning: .* could not be written: .*; step (\d+) is saved instead\n", err), (
        err
    )
    assert re.search(r"warning: step \d+ is saved\n", err), err
    assert place.losses() == expected


@fault("a full disk for longer than checkpoint.retry_seconds")
def test_full_disk(place, disk, expected):
    process = place.start("--checkpoint.retry_seconds", 3)
    after_checkpoint(place, process)
    filler = fill(disk)
    err = error_of(process, 74)
    assert re.search(
        r"error: .* in attempts over 3 s, so the run ends; nothing that was complete is lost", err
    ), err
    assert err.count("\n") < 8
    assert place.steps_saved(), "the newest complete checkpoint was deleted"
    code, _, err = place.run("--checkpoint.retry_seconds", 1)  # the disk is still full
    assert code == 74, err
    filler.unlink()
    place.completes()
    assert place.losses() == expected


@fault("a disk that becomes read-only")
def test_read_only_disk(place, disk, expected):
    # The operating system refuses to remount a disk on which files are open for writing, so the run
    # itself raises what it would get.
    read_only = f"""
import errno as _e, os as _os
_now, _write, _mkdir = [], _os.write, _os.mkdir
def _delay(batch):
    if batch == 8:
        while not _os.path.isdir({str(place.work / "checkpoints" / "5")!r}): _time.sleep(0.01)
        _now.append(batch)
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
    assert re.search(
        r"error: .* could not be written: .*Read-only file system, in attempts over 2 s", err
    ), err
    assert "deleted" not in err
    assert place.steps_saved() == [5]
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
    place.fails(2, "workdir must be a folder that can be written")
    subprocess.run(["mount", "-o", "remount,rw,size=12m", disk], check=True)
    place.completes()
    assert place.losses() == expected


@fault("a limit on the size of files")
def test_file_size_limit(place, expected):
    limit = "import resource as _r\n_r.setrlimit(_r.RLIMIT_FSIZE, (6000, 6000))\n"
    code, _, err = place.run("--checkpoint.retry_seconds", 1, "--compile_cache", "none", code=limit)
    assert code == 74, err
    place.completes()
    assert place.losses() == expected


@fault("a workdir that is removed during the run")
def test_removed_workdir(place, expected):
    process = place.start()
    after_step(process, 7)
    place.work.rename(place.work.with_name("moved"))
    assert "was removed or replaced while the run was going on" in error_of(process, 74)
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
    place.fails(2, "is on a file system without locks", "--compile_cache", "none", code=broken)
