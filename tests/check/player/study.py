"""The programs of the 2x2 study at a small size, each compiled and simulated once in a process."""

import atexit
import functools
import shutil
import tempfile

import pytest

from benchmarks.player_kernels import Tiles, program
from flaxasync.check import topology_mesh
from flaxasync.check.player import Result, play

SHAPE, TILES = (2048, 2048, 1024), Tiles(256, 256, 256, 256)


@functools.cache
def simulated(variant: str) -> tuple[str, Result]:
    """Returns a folder with the dumps of a variant, and its result."""
    folder = tempfile.mkdtemp(prefix="flaxasync-test-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    fn, *arguments = program(variant, topology_mesh("v5e:2x2", (2, 2), ("x", "y")), SHAPE, TILES)
    return folder, play(fn, *arguments, topology="v5e:2x2", keep_dumps=folder)


def assert_times_add_up(result: Result) -> None:
    """Asserts that the times of each device are its total, and that no part is longer than the whole."""
    for device in result.devices:
        added = device.issue + device.matrix_stall + sum(device.waits.values())
        assert device.seconds == pytest.approx(added, rel=1e-6)
        for times in (device, *device.phases):
            assert times.matrix_busy <= times.issue + times.matrix_stall + 1e-9
            assert all(wait >= 0 for wait in times.waits.values())


def sent_bytes(result: Result) -> list[int]:
    """Returns the bytes that leave each device over links."""
    return [sum(size for kind, size in d.bytes.items() if "remote" in kind) for d in result.devices]
