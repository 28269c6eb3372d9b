"""A process that imports train/run.py once and forks for every start of it.

Imports take half of the time of a short run. A forked run is still a separate process with its own pipes, environment
and signals; it runs the script as its main module and exits as Python exits. It shares the imported modules and the
hash seed with the other runs. JAX must not be asked for a device before the fork, because its devices have threads,
which a fork does not copy.
"""

import gc
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "train" / "run.py"


def lines_of(workdir: Path) -> list[dict]:
    """Returns the lines of metrics.jsonl, or none if there is no such file yet."""
    path = workdir / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def events_of(workdir: Path) -> list[dict]:
    return [json.loads(line) for line in (workdir / "events.jsonl").read_text().splitlines()]


def checkpoints_of(workdir: Path) -> set[str]:
    """Returns the names of all checkpoints, finished or still being written."""
    folder = workdir / "checkpoints"
    return set(os.listdir(folder)) if folder.exists() else set()


def contents(folder: Path) -> dict[Path, bytes]:
    """Returns every file of a workdir but its lock."""
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != ".lock"}


class Launcher:
    """The forking process. `close` ends it but none of the runs."""

    def __init__(self, environment: Mapping[str, str]):
        self._requests, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno())],
                env=dict(environment),
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C must reach only the tests, which then end this process
            )

    def start(self, options: list[str], *, environment: Mapping[str, str]) -> "Run":
        """Starts `python train/run.py OPTIONS` in an environment."""
        news, write_news = os.pipe()
        out, write_out = os.pipe()
        err = tempfile.TemporaryFile("w+")  # noqa: SIM115 (the run closes it)
        request = json.dumps([options, dict(environment)]).encode() + b"\n"
        socket.send_fds(self._requests, [request[:1]], [write_news, write_out, err.fileno()])
        self._requests.sendall(request[1:])
        os.close(write_news)
        os.close(write_out)
        return Run(open(news), open(out), err)

    def close(self) -> None:
        self._requests.close()
        self._process.wait()


class Run:
    """A started run, with the methods of subprocess.Popen that the tests use."""

    def __init__(self, news, stdout, stderr):
        self.stdout = stdout
        self.pid = int(news.readline())
        self.returncode: int | None = None
        self._news, self._stderr = news, stderr  # the second line of `news` is the exit code
        self._printed: tuple[str, str] | None = None

    def poll(self) -> int | None:
        ended = self.returncode is None and select.select([self._news], [], [], 0)[0]
        return self.wait() if ended else self.returncode

    def wait(self) -> int:
        if self.returncode is None:
            self.returncode = int(self._news.readline())
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def communicate(self, timeout: float = 300) -> tuple[str, str]:
        """Waits for the run to end, and kills it after `timeout` seconds.

        Returns:
          What it printed to stdout and has not been read yet, and what it printed to stderr.
        """
        if self._printed is None:
            killer = threading.Timer(timeout, os.kill, [self.pid, signal.SIGKILL])
            killer.start()
            try:
                out = self.stdout.read() if self.stdout else ""
                self.wait()
            finally:
                killer.cancel()
            self._stderr.seek(0)
            self._printed = out, self._stderr.read()
            for file in filter(None, (self._news, self.stdout, self._stderr)):
                file.close()
        return self._printed


def serve(requests: socket.socket) -> None:
    """Forks a process for each request; returns in the forked process, once its streams and arguments are set."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no one waits for the intermediate processes below
    while True:
        request, streams, _, _ = socket.recv_fds(requests, 2**16, 3)
        if not request:
            sys.exit()
        while not request.endswith(b"\n"):
            request += requests.recv(2**16)
        if not os.fork():
            break
        for stream in streams:
            os.close(stream)
    requests.close()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    news, out, err = streams
    if run := os.fork():
        os.close(out)  # the reader of a pipe sees its end only when every writer has closed it
        os.write(news, f"{run}\n".encode())
        os.write(news, f"{os.waitstatus_to_exitcode(os.waitpid(run, 0)[1])}\n".encode())
        os._exit(0)
    os.close(news)
    for number, stream in ((1, out), (2, err)):
        os.dup2(stream, number)
        os.close(stream)
    sys.stdout.reconfigure(line_buffering=sys.stdout.isatty())
    options, environment = json.loads(request)
    sys.argv = [str(SCRIPT), *options]
    read_settings(environment)
    os.environ.clear()
    os.environ.update(environment)


def read_settings(environment: Mapping[str, str]) -> None:
    """Applies the settings that JAX would have read from the environment when it was imported."""
    for name, value in environment.items():
        setting = name.lower()
        if setting in jax.config.values and os.environ.get(name) != value:
            kinds = {bool: lambda text: text.lower() in ("1", "true"), int: int, float: float}
            jax.config.update(setting, kinds.get(type(jax.config.values[setting]), str)(value))


if __name__ == "__main__":
    import jax
    import matplotlib.backends.backend_agg  # noqa: F401 (a run imports this module and the next one late)
    import tensorboardX  # noqa: F401

    import train.dry_run.command
    import train.lifecycle.training  # noqa: F401

    gc.freeze()  # otherwise garbage collection in each run would copy the memory pages of all these objects
    serve(socket.socket(fileno=int(sys.argv[1])))
    sys.path[0] = str(SCRIPT.parent)
    runpy.run_path(str(SCRIPT), run_name="__main__")
