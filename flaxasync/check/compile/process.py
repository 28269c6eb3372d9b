"""The parent's side of `compile_worker.py`: starts it, sends it programs, and says how it died when it dies."""

import atexit
import contextlib
import os
import pathlib
import select
import shutil
import signal
import subprocess
import sys
import tempfile

from flaxasync.check.compile import worker
from flaxasync.check.compile.hbm_error import hbm_error

# What lets libtpu load where there is no TPU, and beside another process that has it loaded.
ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
_DUMP_PASSES = "(final_bundles|original)"  # a kernel in all passes is ten times as much text, and seconds


class CompilerProcess:
    """A child process that compiles; see compile_worker.py. libtpu learns only once, at its start, where dumps go."""

    def __init__(self, *, dumps: bool = False):
        environment = ENVIRONMENT | os.environ | {"JAX_PLATFORMS": "cpu"}
        self.dumps = tempfile.TemporaryDirectory(prefix="flaxasync-") if dumps else None
        if self.dumps is not None:
            place = self.dumps.name
            flags = f"--xla_jf_dump_to={place} --xla_jf_dump_llo_text=true --xla_jf_dump_hlo_text=true"
            flags += f" --xla_jf_dump_llo_pass_label_regex={_DUMP_PASSES}"
            environment["LIBTPU_INIT_ARGS"] = f"{environment.get('LIBTPU_INIT_ARGS', '')} {flags}".strip()
        self.log = tempfile.TemporaryFile()  # noqa: SIM115, closed with the process
        self.process = subprocess.Popen(
            [sys.executable, worker.__file__],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log, env=environment,
        )  # fmt: skip

    def compile(self, request: dict, timeout: float, folder: pathlib.Path | None = None) -> dict:
        """Compiles one program; what it dumped, if this process dumps, goes to the folder."""
        try:
            return self._compile(request, timeout)
        finally:
            if self.dumps is not None and folder is not None:
                folder.mkdir(parents=True, exist_ok=True)
                for file in pathlib.Path(self.dumps.name).iterdir():
                    shutil.move(file, folder / file.name)  # over one that is there, as libtpu would

    def _compile(self, request: dict, timeout: float) -> dict:
        stdin, stdout = self.process.stdin, self.process.stdout
        assert stdin is not None
        assert stdout is not None
        try:
            worker.send(stdin, request)
            if not select.select([stdout], [], [], timeout)[0]:
                self.end()
                raise RuntimeError(
                    f"the TPU compiler did not finish in {timeout} s and was ended; pass a longer timeout"
                )
            answer = worker.receive(stdout)
        except (EOFError, BrokenPipeError):
            death = f"the TPU compiler {_death(self.process.wait())}; its last lines:\n{self.last_lines()}"
            self.end()
            raise RuntimeError(death) from None
        if "error" in answer:
            message = answer["error"]
            raise hbm_error(message) or RuntimeError(
                busy_message(message) if "already in use" in message else f"the TPU compiler refused: {message}"
            )
        return answer["ok"]

    def last_lines(self) -> str:
        self.log.seek(0)
        lines = self.log.read().decode(errors="replace").strip().splitlines()
        return "\n".join(line for line in lines if not line.startswith("http"))[-2000:]

    def close(self) -> None:
        self.end()
        if self.dumps is not None:
            self.dumps.cleanup()

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout, self.log):
            with contextlib.suppress(BrokenPipeError):
                stream.close()  # type: ignore[union-attr]


def _death(code: int) -> str:
    if code < 0:
        return f"died of {signal.Signals(-code).name}"
    return f"ended with code {code}"


_shared: dict[bool, CompilerProcess] = {}


def shared_process(*, dumps: bool = False) -> CompilerProcess:
    """Returns the one process that dumps, or the one that does not; starts it where there is none."""
    if dumps in _shared and _shared[dumps].process.poll() is not None:
        _shared.pop(dumps).close()
    if dumps not in _shared:
        _shared[dumps] = CompilerProcess(dumps=dumps)
        atexit.register(_shared[dumps].close)
    return _shared[dumps]


def busy_message(error: object) -> str:
    """Says what to do when another process holds libtpu."""
    return f"libtpu is in use: {error}. Start the other process with ALLOW_MULTIPLE_LIBTPU_LOAD=1, or wait for it"
