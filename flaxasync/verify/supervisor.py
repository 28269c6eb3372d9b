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

from flaxasync.verify.cases import Case, Facts
from flaxasync.verify.child import START_LIMIT, Request, Setup

# seconds for a child that has sent everything, or was killed, to end and to release the devices
END_LIMIT = 60
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
            why = child.end()
            if child.running:
                why += f"; on a pod, {ONE_HOST}"
            raise MachineError(f"the devices could not be opened: {why}")
        child.finish()
    if machine.get("processes", 1) > 1:
        raise MachineError(f"these are the chips of {machine['processes']} hosts: {ONE_HOST}")
    return machine


def run_cases(cases: Sequence[Case], setup: Setup) -> Iterator[Facts]:
    """Runs cases, and yields the outcome of each as soon as it is known: what its child sent, or
    why there is nothing.

    "hung", "crashed" and "not_run" are outcomes of this process.
    """
    done = 0
    pauses = list(setup.pauses)
    while done < len(cases):
        why: str | None = None  # the devices could not be opened, or not be released
        try:
            with _Child(setup, cases[done:]) as child:
                answers = child.receive(START_LIMIT) is not None  # it describes the machine
                if not answers:
                    why = child.end()
                while answers and done < len(cases):
                    outcome = child.receive(setup.limit)
                    answers = outcome is not None
                    if outcome is not None:
                        yield outcome
                    elif child.running:
                        yield {"hung": f"did not end within {setup.limit:g} s and was ended"}
                    else:
                        yield {"crashed": child.end()}
                    done += 1
                if answers:
                    child.finish()
        except MachineError as error:
            # a child that cannot be ended keeps the devices: there is no use in waiting
            why = str(error)
            pauses = []
        if why is None:
            pauses = list(setup.pauses)
        elif pauses:
            time.sleep(pauses.pop(0))
        else:
            last = "after they were described"
            if done:
                last = f"after {cases[done - 1].label}"
            message = (
                f"the chips could not be opened again {last}; end the process that holds them and "
                f"run again ({why})"
            )
            yield from [{"not_run": message}] * (len(cases) - done)
            return


class _Child:
    """One child process; a context manager that ends it."""

    def __init__(self, setup: Setup, cases: Sequence[Case]):
        self._log = tempfile.NamedTemporaryFile()  # noqa: SIM115, it is closed with the process
        request = Request(setup, tuple(cases), self._log.name)
        context = multiprocessing.get_context("spawn")
        self._messages, theirs = context.Pipe()
        self._process = context.Process(target=setup.serve, args=(theirs, request))
        self._process.start()
        theirs.close()

    def __enter__(self) -> "_Child":
        return self

    def __exit__(self, *error: object) -> None:
        """Ends the child with all processes that it started; raises MachineError if it does not
        end.
        """
        pid = self._process.pid
        assert pid is not None
        if self.running:
            self._process.kill()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
        self.finish()
        self._messages.close()
        self._log.close()
        if self.running:
            raise MachineError(
                f"process {pid} was killed and did not end within {END_LIMIT} s: it still holds "
                "the chips"
            )

    def finish(self) -> None:
        """Gives a child that has sent everything the time to release the devices and end."""
        self._process.join(END_LIMIT)

    @property
    def running(self) -> bool:
        return self._process.is_alive()

    def receive(self, limit: float) -> Facts | None:
        """Returns the next message, or None if the child ends, or does not say anything within the
        limit in seconds.
        """
        if not self._messages.poll(limit):
            return None
        try:
            return self._messages.recv()
        except EOFError:
            self.finish()
            return None

    def end(self) -> str:
        """Says how the child ended, with the end of what it printed."""
        code = self._process.exitcode
        if code is None:
            how = "it did not answer in time"
        else:
            how = f"ended with code {code}"
            if code < 0:
                how = f"died of {signal.Signals(-code).name}"
        self._log.seek(0)
        words = self._log.read().decode(errors="replace").strip()[-LAST_WORDS:]
        if not words:
            return how
        return f"{how}; its last words: {words}"
