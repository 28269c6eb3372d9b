"""Processes that run train/run.py without importing its packages again.

Half of a minuscule run is the import of JAX, Flax and orbax. A server of
`multiprocessing` imports them once, in one thread and without opening devices, and each run is a
fork of it: a process of its own, with its own pipes, signals and exit code, that executes the
script from its first line.
"""

import atexit
import concurrent.futures
import io
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection

import jax

from tests.train.runs import SCRIPT

CACHE_VARIABLE = "JAX_COMPILATION_CACHE_DIR"
PACKAGES = ["train.run", "train.lifecycle.training", "train.dry_run.command", "train.step.verify"]


class Run:
    """A run of the script; what it offers is a part of `subprocess.Popen`."""

    def __init__(
        self,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        variables: Mapping[str, str] = {},
    ):
        """Starts a run; `variables` are those of its environment that only this run has."""
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PACKAGES)
        out, their_out = context.Pipe(duplex=False)
        err, their_err = context.Pipe(duplex=False)
        given = (list(arguments), {**environment, **variables}, their_out, their_err)
        self._process = context.Process(target=_run_script, args=given)
        with _Environment(environment):  # of the server, which the first run starts
            self._process.start()
        their_out.close()
        their_err.close()
        # a test that closes one sets None, as with `Popen`
        self.stdout: io.TextIOWrapper | None = _text_of(out)
        self.stderr: io.TextIOWrapper | None = _text_of(err)
        assert self._process.pid is not None
        self.pid: int = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        code = self.returncode
        if code is None:
            raise subprocess.TimeoutExpired(str(SCRIPT), timeout or 0.0)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Returns what is left of both outputs when the run has ended; "" of one that is closed."""
        readers = concurrent.futures.ThreadPoolExecutor()
        out = readers.submit(_rest_of, self.stdout)
        err = readers.submit(_rest_of, self.stderr)
        try:
            self.wait(timeout)
        finally:
            readers.shutdown(wait=False)  # they end with the run, which may be later
        return out.result(), err.result()


class _Environment:
    """The variables of this process while a context lasts."""

    def __init__(self, variables: Mapping[str, str]):
        self._variables = dict(variables)
        self._before = dict(os.environ)

    def __enter__(self) -> None:
        os.environ.clear()
        os.environ.update(self._variables)

    def __exit__(self, *error: object) -> None:
        os.environ.clear()
        os.environ.update(self._before)


def _rest_of(stream: io.TextIOWrapper | None) -> str:
    if stream is None or stream.closed:
        return ""
    with stream:
        return stream.read()


def _text_of(pipe: Connection) -> io.TextIOWrapper:
    descriptor = os.dup(pipe.fileno())
    pipe.close()
    return open(descriptor)


def _run_script(
    arguments: list[str], environment: dict[str, str], out: Connection, err: Connection
) -> None:
    os.dup2(out.fileno(), 1)
    os.dup2(err.fileno(), 2)
    # those of the server remember what kind of file they had
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115, for all of the run
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    os.environ.clear()
    os.environ.update(environment)
    # the variable that JAX has read and that tests give to single runs
    jax.config.update("jax_compilation_cache_dir", environment[CACHE_VARIABLE])
    sys.argv = [str(SCRIPT), *arguments]
    try:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    finally:
        # `multiprocessing` ends a process without the functions that were registered for its end
        atexit._run_exitfuncs()
