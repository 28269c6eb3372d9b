"""The monitor of one process of a run of several: a small parent process that trains nothing and never hangs.

Each process of such a run is a monitor and its child. The child trains. The monitor watches the child and, through
`train.lifecycle.peers`, the monitors of the other processes. JAX alone notices a dead process late or not at all, and
then aborts the others with many lines of native stack traces. The monitors notice it at once, end all children, and
leave one paragraph and an exit code that a supervisor understands.

The native output of a child goes to a temporary file, and is printed only if the child itself crashes.
"""

import contextlib
import ctypes
import json
import os
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from types import FrameType
from typing import IO, Any, NoReturn

from train.lifecycle.errors import INTERRUPTED, RESTART, RunError
from train.lifecycle.peers import Ending, Member, Peers, death

CRASHED = 1
GRACE_SECONDS = 3.0  # a child that fails because another process died fails before that is known
TAIL_LINES = 30  # of native output
_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
_SET_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of Linux


class Link:
    """What the child uses to talk to its monitor.

    Attributes:
      port: Port that the monitor listens on.
    """

    def __init__(self, port: int, to_monitor: IO[str]):
        self.port = port
        self._to_monitor = to_monitor

    def joined(self, members: list[Member], rank: int) -> None:
        """Tells the monitor which processes the run has, so that it watches them from now on."""
        self._send({"members": [vars(member) for member in members], "rank": rank})

    def finished(self, code: int) -> None:
        """Tells the monitor that the child ends as it should, with this exit code."""
        self._send({"finished": code})

    def failed(self, code: int, text: str) -> None:
        """Tells the monitor why the child ends."""
        self._send({"code": code, "text": text})

    def _send(self, message: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):
            print(json.dumps(message), file=self._to_monitor, flush=True)


def supervise(train: Callable[[Link], int], heartbeat_seconds: float) -> int:
    """Runs `train` in a child process and watches it and the other processes of the run.

    Args:
      train: Trains, and returns an exit code or raises a RunError.
      heartbeat_seconds: Silence after which another process counts as dead.

    Returns:
      The exit code of this process. The child does not return: it exits.
    """
    listener = socket.create_server(("", 0))
    reading, writing = os.pipe()
    native = tempfile.TemporaryFile()  # noqa: SIM115 (closed when the process ends)
    monitor = os.getpid()
    # A signal waits until the monitor can forward it, and until the child can end as it does later.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _FORWARDED)
    child = os.fork()
    if child == 0:
        os.close(reading)
        port = listener.getsockname()[1]
        listener.close()
        _become_child(monitor, native)
        _run_child(train, Link(port, open(writing, "w")), mask)  # noqa: SIM115 (used until the process ends)
    os.close(writing)
    with open(reading, "rb", buffering=0) as from_child:
        watching = _Monitor(child, from_child, listener, native, heartbeat_seconds)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        return watching.watch()


class _Monitor:
    def __init__(self, child: int, from_child: IO[bytes], listener: socket.socket, native: IO[bytes], timeout: float):
        self._child, self._from_child, self._native = child, from_child, native
        self._listener, self._timeout = listener, timeout
        self._members: list[Member] = []
        self._rank = 0
        self._peers: Peers | None = None
        self._failure: dict[str, Any] | None = None
        self._finished: int | None = None  # the exit code with which the child said that it would end
        self._interrupted_early = False  # by Ctrl-C, before the other processes were known
        self._received = b""
        os.set_blocking(from_child.fileno(), False)
        for number in _FORWARDED:
            signal.signal(number, self._forward)

    def watch(self) -> int:
        """Watches until the child has ended or another process makes the run end, and returns the exit code."""
        status = None
        while status is None:
            ending = self._poll(0.1)
            if ending:
                return self._finish(ending)
            ended, code = os.waitpid(self._child, os.WNOHANG)
            status = os.waitstatus_to_exitcode(code) if ended else None
        self._read()
        # A child can end so soon after it has joined that its monitor does not know the others yet.
        if unreachable := self._connect():
            return self._finish(unreachable)
        if status == self._finished:
            if self._peers:
                self._peers.goodbye()
            return status
        ending = self._explain(status)
        if self._peers:
            # What looks like a failure of this child may be the consequence of another one, which is known soon.
            until = time.monotonic() + (GRACE_SECONDS if self._may_be_a_consequence(status) else 0)
            while time.monotonic() < until:
                if other := self._poll(0.1):
                    return self._finish(other)
            ending = self._peers.end(ending)
        return self._finish(ending)

    def _poll(self, seconds: float) -> Ending | None:
        self._read()
        if unreachable := self._connect():
            return unreachable
        if self._peers:
            return self._peers.poll(seconds)
        time.sleep(seconds)
        return None

    def _connect(self) -> Ending | None:
        """Connects to the monitors of the other processes, once they are known."""
        if self._members and not self._peers:
            try:
                self._peers = Peers(self._members, self._rank, self._listener, self._timeout)
            except OSError as error:
                return Ending(self._rank, RESTART, RESTART, str(error), for_all=False)
        return None

    def _read(self) -> None:
        """Reads what the child tells."""
        while content := self._from_child.read(1 << 16):
            self._received += content
        *lines, self._received = self._received.split(b"\n")
        for message in map(json.loads, lines):
            if "members" in message:
                self._members, self._rank = [Member(**fields) for fields in message["members"]], message["rank"]
            elif "finished" in message:
                self._finished = message["finished"]
            else:
                self._failure = message

    def _may_be_a_consequence(self, status: int) -> bool:
        """Returns whether the child may have failed because another process died: by an abort or an unknown error."""
        return status not in (-signal.SIGKILL, RESTART) and (self._failure is None or self._failure["code"] == CRASHED)

    def _explain(self, status: int) -> Ending:
        """Makes an ending of the way in which the child ended."""
        if self._failure:
            code = self._failure["code"]
            others = RESTART if code == INTERRUPTED else code
            return Ending(self._rank, code, others, self._failure["text"], for_all=False)
        if status < 0:
            if self._interrupted_early and not self._members:
                text = "interrupted before the processes had joined; nothing was changed"
                return Ending(0, INTERRUPTED, RESTART, text, for_all=False)
            name = signal.Signals(-status).name
            tail = "" if -status in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT) else self._native_tail()
            if self._members:
                return death(self._members[self._rank], f"was killed by {name}{tail}")
            return Ending(
                0, RESTART, RESTART, f"the process was killed by {name} while it started{tail}", for_all=False
            )
        if status == RESTART and self._members:  # its watchdog ended it, and has printed more about it
            return death(self._members[self._rank], "made no progress")
        text = f"the training process ended with exit code {status}{self._native_tail()}"
        return Ending(self._rank, status, status, text, for_all=False)

    def _native_tail(self) -> str:
        self._native.seek(0)
        lines = self._native.read().decode(errors="replace").splitlines()[-TAIL_LINES:]
        return "; its last output was\n" + "\n".join(lines) if lines else ""

    def _finish(self, ending: Ending) -> int:
        """Ends the child, prints why, and returns the exit code."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._child, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self._child, 0)
        if self._peers:
            self._peers.goodbye()
        is_first = ending.rank == self._rank
        if ending.text and (is_first or ending.for_all):
            print(ending.text if ending.code == CRASHED else f"error: {ending.text}", file=sys.stderr, flush=True)
        return ending.code if is_first else ending.others

    def _forward(self, number: int, frame: FrameType | None) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._child, number)
            if number == signal.SIGINT and not self._members:
                # A child that waits for the others in native code runs no handler of Python, but SIGTERM ends it.
                self._interrupted_early = True
                os.kill(self._child, signal.SIGTERM)


def _become_child(monitor: int, native: IO[bytes]) -> None:
    """Makes the child end with its monitor, hides it from Ctrl-C of the terminal, and redirects its native output."""
    os.setsid()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != monitor:  # it died before the call above
        os._exit(RESTART)
    sys.stdout.flush()
    is_terminal = sys.stdout.isatty()
    sys.stdout = open(os.dup(1), "w", buffering=1 if is_terminal else -1)  # noqa: SIM115 (used until the process ends)
    sys.stderr = open(os.dup(2), "w", buffering=1)  # noqa: SIM115
    for stream in (1, 2):
        os.dup2(native.fileno(), stream)


def _run_child(train: Callable[[Link], int], link: Link, mask: set[signal.Signals | int]) -> NoReturn:
    """Trains with this mask of blocked signals, tells the monitor about an error, and exits."""
    try:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        code = train(link)
    except RunError as error:
        link.failed(error.exit_code, str(error))
        os._exit(error.exit_code)
    except KeyboardInterrupt:
        link.failed(INTERRUPTED, "interrupted; starting again continues from the last checkpoint, if there is one")
        os._exit(INTERRUPTED)
    except BaseException:
        link.failed(CRASHED, traceback.format_exc().rstrip())
        os._exit(CRASHED)
    link.finished(code)
    sys.exit(code)
