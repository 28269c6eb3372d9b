"""Runs cases in child processes with a time limit for each, so that a hang or a crash is a verdict
and not the end.

A TPU belongs to one process at a time. This process therefore never opens one, and runs one child
after the other. The case that hangs or crashes ends its child, and the next child goes on with the
rest. A hang can leave the chips occupied. Opening them is then tried again after pauses, and if it
keeps failing, the cases that are left are not run.
"""

import contextlib
import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any

from flaxasync.verify.cases import Case, Facts
from flaxasync.verify.child import START_LIMIT, Setup
from flaxasync.verify.verdict import CaseResult, Verdict

# seconds for a child that has sent everything, or was killed, to end and to release the devices
END_LIMIT = 60
PAUSES = (5, 30, 60)  # seconds before each further attempt to open the devices
ONE_HOST = (
    "verify the chips of one host: set TPU_PROCESS_BOUNDS=1,1,1 and TPU_CHIPS_PER_PROCESS_BOUNDS "
    "to its chips"
)
LAST_WORDS = 1500  # characters of what a child printed that a message quotes


class MachineError(RuntimeError):
    """The devices could not be opened or released. The message says what the process did that
    tried.
    """


def describe(setup: Setup) -> Facts:
    """Returns what the devices of this machine are; raises MachineError if other hosts have a part
    of them, too.
    """
    with _Child(setup, []) as child:
        machine = child.receive(START_LIMIT)
        if machine is None:
            why = child.end(START_LIMIT)
            if child.running:
                why += f"; on a pod, {ONE_HOST}"
            raise MachineError(f"the devices could not be opened: {why}")
        child.receive(END_LIMIT)  # nothing, when it has released the devices
    if machine["processes"] > 1:
        raise MachineError(f"these are the chips of {machine['processes']} hosts: {ONE_HOST}")
    return machine


def run_cases(cases: Sequence[Case], setup: Setup) -> Iterator[CaseResult]:
    """Runs cases, and yields the result of each as soon as it is known.

    "HUNG", "CRASHED" without an error, and "NOT RUN" are verdicts of this process.
    """
    left = list(cases)
    failures = 0  # to open the devices
    while left:
        try:
            with _Child(setup, left) as child:
                if child.receive(START_LIMIT) is None:  # it describes the machine
                    raise MachineError(child.end(START_LIMIT))
                failures = 0
                for case in tuple(left):
                    result = child.receive(setup.limit)
                    left.pop(0)
                    if result is None:
                        verdict = Verdict.CRASHED
                        if child.running:
                            verdict = Verdict.HUNG
                        yield CaseResult(case, verdict, child.end(setup.limit))
                        break
                    yield result
                else:  # every case has its result, and the child releases the devices
                    child.receive(END_LIMIT)
        except MachineError as error:
            if failures == len(PAUSES):
                message = (
                    "the chips could not be opened again; end the process that holds them and run "
                    f"again ({error})"
                )
                yield from [CaseResult(case, Verdict.NOT_RUN, message) for case in left]
                return
            time.sleep(PAUSES[failures])
            failures += 1


class _Child:
    """One child process; a context manager that ends it with all processes that it started."""

    def __init__(self, setup: Setup, cases: Sequence[Case]):
        self._log = tempfile.NamedTemporaryFile()  # noqa: SIM115, it is closed with the process
        context = multiprocessing.get_context("spawn")
        self._messages, theirs = context.Pipe()
        arguments = (theirs, setup, tuple(cases), self._log.name)
        self._process = context.Process(target=setup.serve, args=arguments)
        self._process.start()
        theirs.close()

    def __enter__(self) -> "_Child":
        return self

    def __exit__(self, *error: object) -> None:
        """Raises MachineError if the child does not end."""
        pid = self._process.pid
        assert pid is not None
        if self.running:
            self._process.kill()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
            self._process.join(END_LIMIT)
        self._messages.close()
        self._log.close()
        if self.running:
            raise MachineError(
                f"process {pid} was killed and did not end within {END_LIMIT} s: it still holds "
                "the chips"
            )

    @property
    def running(self) -> bool:
        return self._process.is_alive()

    def receive(self, limit: float) -> Any:
        """Returns the next message, or None if the child ends, or does not say anything within the
        limit in seconds.
        """
        if not self._messages.poll(limit):
            return None
        try:
            return self._messages.recv()
        except EOFError:
            self._process.join(END_LIMIT)
            return None

    def end(self, limit: float) -> str:
        """Says how a child ended that sent nothing within the limit, with the end of what it
        printed.
        """
        code = self._process.exitcode
        if code is None:
            how = f"did not answer within {limit:g} s and was ended"
        else:
            how = f"ended with code {code}"
            if code < 0:
                how = f"died of {signal.Signals(-code).name}"
        self._log.seek(0)
        words = self._log.read().decode(errors="replace").strip()[-LAST_WORDS:]
        if not words:
            return how
        return f"{how}; its last words: {words}"
