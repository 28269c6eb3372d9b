"""TensorBoard event files with the metrics of a run. They are a view: metrics.jsonl is what a run continues from."""

import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from train.metrics.recorder import Line, Sink


class TensorBoard(Sink):
    """A sink that writes event files.

    Each file begins with an event that tells TensorBoard to discard what earlier files have from that step on. If a
    file cannot be written, its lines are kept and written to a new file at the next report.
    """

    def __init__(self, folder: Path, *, start: int, say: Callable[[str], None] = print):
        self._folder, self._say = folder, say
        self._next, self._pending = start + 1, list[Line]()
        self._file: IO[bytes] | None = None
        self._is_failing = False

    def write(self, lines: list[Line]) -> None:
        self._pending += lines
        try:
            self._write()
        except OSError as error:
            self._close_file()  # what was written last may be incomplete
            if not self._is_failing:
                self._say(f"{self._folder} cannot be written: {error.strerror}; its events wait in memory")
            self._is_failing = True

    def close(self) -> None:
        self.write([])
        self._close_file()

    def _close_file(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self) -> None:
        # These imports take a tenth of a second. The writers of tensorboardX are not used: one of them writes in a
        # thread, which a full disk ends with a traceback, and the other one waits for the disk.
        from tensorboardX.proto.event_pb2 import Event, SessionLog
        from tensorboardX.proto.summary_pb2 import Summary

        now, content = time.time(), b""
        if self._file is None:
            self._folder.mkdir(parents=True, exist_ok=True)
            name = f"events.out.tfevents.{now:.0f}.{time.monotonic_ns()}"  # TensorBoard reads them in this order
            self._file = open(self._folder / name, "wb", buffering=0)  # noqa: SIM115 (`close` closes it)
            restart = SessionLog(status=SessionLog.START)
            content += _record(Event(wall_time=now, file_version="brain.Event:2"))
            content += _record(Event(wall_time=now, step=self._next, session_log=restart))
        for line in self._pending:
            values = {name: value for name, value in line.items() if name != "step" and value is not None}
            summary = Summary(value=[Summary.Value(tag=name, simple_value=value) for name, value in values.items()])
            content += _record(Event(wall_time=now, step=line["step"], summary=summary))
        while content:
            content = content[self._file.write(content) :]
        if self._pending:
            self._next = int(self._pending[-1]["step"] or 0) + 1
        self._pending, self._is_failing = [], False


def _record(event: Any) -> bytes:
    """Encodes an event: its length, a checksum of that, the event, and a checksum of it."""
    from tensorboardX.record_writer import masked_crc32c

    data = event.SerializeToString()
    length = struct.pack("Q", len(data))
    return length + struct.pack("I", masked_crc32c(length)) + data + struct.pack("I", masked_crc32c(data))
