"""Runs cases in child processes with a time limit for each, so that a hang or a crash is a verdict and not the end.

A TPU belongs to one process at a time. This process therefore never opens one, and runs one child after the other. A
child runs as many cases as it can; the case that hangs or crashes ends it, and the next child goes on with the rest.
A hang can leave the chips occupied. Opening them is then tried again after pauses, and if it keeps failing, the cases
that are left are reported as not run, which says nothing about them.

On a pod every host has such a process, and the child that is the third, say, on one host joins those that are the third
on the others. They run each case together, and what they report is the same on every host: see pod.py. When a child
dies, those of the other hosts wait for it until the time limit of the case ends them. Then the next ones meet.
"""

import contextlib
import dataclasses
import itertools
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from flaxasync.verify.cases import Case
from flaxasync.verify.child import MARK

COMMAND = (sys.executable, "-m", "flaxasync.verify.child")
START_LIMIT = 300
"""Seconds for a child to open the devices, or to calibrate them."""
END_LIMIT = 60
"""Seconds for a child that has sent everything, or was killed, to end and to release the devices."""
ON_EVERY_HOST = (
    "start the same command with --distributed on every host, or set TPU_PROCESS_BOUNDS=1,1,1 and "
    "TPU_CHIPS_PER_PROCESS_BOUNDS to this host's chips"
)
LAST_WORDS = 1500  # characters of what a child printed that a message quotes


class MachineError(RuntimeError):
    """The devices could not be opened, calibrated or released. The message says what the process did that tried."""


@dataclasses.dataclass(frozen=True)
class Setup:
    """How children are started.

    Attributes:
      platform: What JAX runs on, such as "tpu"; None leaves the choice to JAX.
      cpu_devices: The number of devices that a CPU is divided into.
      repeats: On how many random inputs each case runs.
      limit: Seconds after which a case is ended.
      command: The command of a child.
      pauses: The seconds to wait before each further attempt to open the devices.
      distributed: Whether a child joins those of the other hosts of a pod.
      numbers: The numbers of the children. They are the same on every host, where they tell which children join.
      rehearse: A topology, such as "v5e:2x4", for which cases are compiled and simulated instead of run.
    """

    platform: str | None = None
    cpu_devices: int = 8
    repeats: int = 3
    limit: float = 300
    command: Sequence[str] = COMMAND
    pauses: Sequence[float] = (5, 30, 60)
    rehearse: str | None = None
    distributed: bool = False
    numbers: Iterator[int] = dataclasses.field(default_factory=itertools.count)

    @property
    def start_limit(self) -> float:
        """Seconds for a child to open the devices; those of other hosts may first have to reach their time limit."""
        return START_LIMIT + (self.limit if self.distributed else 0)


def describe(setup: Setup, *, calibrate: bool = True) -> tuple[dict[str, Any], dict[str, float]]:
    """Returns what the devices of this machine are, and the rates of their memory and links.

    Raises:
      MachineError: The child that opened the devices failed or hung, or other hosts have a part of the devices.
    """
    with _Child(setup, [], calibrate=calibrate) as child:
        machine = child.receive(setup.start_limit)
        if machine is None:
            hint = f"; on a pod, {ON_EVERY_HOST}" if child.running else ""
            raise MachineError(f"the devices could not be opened: {child.end()}{hint}")
        processes = machine["machine"].get("processes", 1)
        if processes > 1 and not setup.distributed:
            raise MachineError(f"these are the chips of {processes} hosts: {ON_EVERY_HOST}")
        rates = child.receive(START_LIMIT) if calibrate else {"calibration": {}}
        if rates is None:
            raise MachineError(f"the devices could not be calibrated: {child.end()}")
        child.finish()
    return machine["machine"], rates["calibration"]


def run_cases(
    cases: Sequence[Case], setup: Setup, *, report: Callable[[Case, dict[str, Any]], None] = lambda case, outcome: None
) -> list[dict[str, Any]]:
    """Runs cases, and returns the last message about each.

    "hung", "crashed" and "not_run" are messages of this process. A case is "not_run" if the devices could not be opened
    again after an earlier one.

    Args:
      cases: The cases, in order.
      setup: How children are started.
      report: Is called with each case as soon as its message is there.
    """
    outcomes: list[dict[str, Any]] = []

    def run_until_one_fails() -> str | None:
        """Runs the cases that are left until one ends the child; returns why the devices could not be opened."""
        rest = cases[len(outcomes) :]
        with _Child(setup, rest) as child:
            if child.receive(setup.start_limit) is None:  # the description of the machine
                return child.end()
            for case in rest:
                outcome = _run_one(child, setup.limit)
                outcomes.append(outcome)
                report(case, outcome)
                if "hung" in outcome or "crashed" in outcome:
                    return None
            child.finish()
        return None

    pauses = list(setup.pauses)
    while len(outcomes) < len(cases):
        try:
            why = run_until_one_fails()
        except MachineError as error:  # a child that cannot be ended keeps the devices: there is no use in waiting
            why, pauses = str(error), []
        if why is None:
            pauses = list(setup.pauses)
        elif pauses:
            time.sleep(pauses.pop(0))
        else:
            last = f"after {cases[len(outcomes) - 1].label}" if outcomes else "after they were described"
            message = (
                f"the chips could not be opened again {last}; end the process that holds them and run again ({why})"
            )
            outcomes += [{"not_run": message}] * (len(cases) - len(outcomes))
    return outcomes


def _run_one(child: "_Child", limit: float) -> dict[str, Any]:
    message = child.receive(limit)
    if message is not None and "begin" in message:
        message = child.receive(limit)
    if message is not None:
        return message
    if child.running:
        return {"hung": f"did not end within {limit:g} s and was ended"}
    return {"crashed": child.end()}


class _Child:
    """One child process; a context manager that ends it."""

    def __init__(self, setup: Setup, cases: Sequence[Case], *, calibrate: bool = False):
        request = {
            "platform": setup.platform,
            "cpu_devices": setup.cpu_devices,
            "rehearse": setup.rehearse,
            "repeats": setup.repeats,
            "calibrate": calibrate,
            "number": next(setup.numbers) if setup.distributed else None,
            "start_limit": setup.start_limit,
            "cases": [case.to_json() for case in cases],
        }
        self._log = tempfile.TemporaryFile()  # noqa: SIM115, it is closed with the process
        environment = os.environ | {"FLAXASYNC_VERIFIED": "all"}  # what is verified must not depend on what was
        self._process = subprocess.Popen(
            list(setup.command), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, env=environment,
            start_new_session=True,
        )  # fmt: skip
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()  # it stays open: its end tells the child that this process has ended
        self._messages: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> "_Child":
        return self

    def __exit__(self, *error: object) -> None:
        """Ends the child with all processes that it started.

        Raises:
          MachineError: The child did not end, so it still holds the devices.
        """
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        try:
            self._process.wait(END_LIMIT)
        except subprocess.TimeoutExpired:
            raise MachineError(
                f"process {self._process.pid} was killed and did not end within {END_LIMIT} s: it still holds the chips"
            ) from None
        self._reader.join(timeout=5)
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            with contextlib.suppress(BrokenPipeError):
                stream.close()
        self._log.close()

    def finish(self) -> None:
        """Gives a child that has sent everything the time to release the devices and end."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_LIMIT)

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def receive(self, limit: float) -> dict[str, Any] | None:
        """Returns the next message, or None if the child ends, or does not say anything within the limit in seconds."""
        try:
            message = self._messages.get(timeout=limit)
        except queue.Empty:
            return None
        if message is None:
            self.finish()
        return message

    def end(self) -> str:
        """Says how the child ended, with the end of what it printed on stderr."""
        code = self._process.poll()
        if code is None:
            how = "it did not answer in time"
        else:
            how = f"died of {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        self._log.seek(0)
        words = self._log.read().decode(errors="replace").strip()[-LAST_WORDS:]
        return f"{how}; its last words: {words}" if words else how

    def _read(self) -> None:
        assert self._process.stdout is not None
        with contextlib.suppress(ValueError):  # the pipe is closed while it is read
            for line in self._process.stdout:
                text = line.decode(errors="replace")
                if text.startswith(MARK):
                    self._messages.put(json.loads(text.removeprefix(MARK)))
        self._messages.put(None)
