"""The parent's side of worker.py: it starts the child, sends programs to it, and reports how it died if it died."""

import atexit
import contextlib
import os
import pathlib
import pickle
import select
import shutil
import signal
import subprocess
import sys
import tempfile

from flaxasync.check.compile import worker
from flaxasync.check.compile.program import hbm_error

# With these settings libtpu loads on a machine without a TPU, and beside another process that has loaded it.
ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
# The compiler passes whose bundles are dumped. All passes would be ten times as much text, and take seconds a kernel.
_DUMP_PASSES = "(final_bundles|original)"


class CompilerProcess:
    """A child process that compiles.

    libtpu reads only once, when it is loaded, whether and where it writes dumps. A process therefore dumps all of its
    programs or none. It dumps into one folder, and the dumps of each program are then moved to the caller's folder.
    """

    def __init__(self, *, dumps: bool = False):
        environment = ENVIRONMENT | os.environ | {"JAX_PLATFORMS": "cpu"}
        self._dumps = tempfile.TemporaryDirectory(prefix="flaxasync-") if dumps else None
        if self._dumps is not None:
            flags = f"--xla_jf_dump_to={self._dumps.name} --xla_jf_dump_llo_text=true --xla_jf_dump_hlo_text=true"
            flags += f" --xla_jf_dump_llo_pass_label_regex={_DUMP_PASSES}"
            environment["LIBTPU_INIT_ARGS"] = f"{environment.get('LIBTPU_INIT_ARGS', '')} {flags}".strip()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115, it is closed with the process
        self.process = subprocess.Popen(
            [sys.executable, worker.__file__],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, env=environment,
        )  # fmt: skip

    def compile(self, request: dict, timeout: float, folder: pathlib.Path | None = None) -> dict:
        """Compiles one program, within `timeout` seconds. Its dumps go into `folder`.

        Request and answer are those of `compile_request` of worker.py.

        Raises:
          HbmError: The program does not fit into memory.
          RuntimeError: The compiler refused the program, died, or did not finish.
        """
        try:
            answer = self._answer(request, timeout)
        except (EOFError, BrokenPipeError, pickle.UnpicklingError):
            code = self.process.wait()
            death = f"died of {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
            last_lines = self._last_lines()
            self.end()
            raise RuntimeError(f"the TPU compiler {death}; its last lines:\n{last_lines}") from None
        finally:
            if self._dumps is not None and folder is not None:
                folder.mkdir(parents=True, exist_ok=True)
                for file in pathlib.Path(self._dumps.name).iterdir():
                    shutil.move(file, folder / file.name)  # replaces a file of that name, as libtpu would
        if (message := answer.get("error")) is not None:
            refused = busy_message(message) if "already in use" in message else f"the TPU compiler refused: {message}"
            raise hbm_error(message) or RuntimeError(refused)
        return answer["ok"]

    def _answer(self, request: dict, timeout: float) -> dict:
        stdin, stdout = self.process.stdin, self.process.stdout
        assert stdin is not None
        assert stdout is not None
        pickle.dump(request, stdin)
        stdin.flush()
        if not select.select([stdout], [], [], timeout)[0]:
            self.end()
            raise RuntimeError(f"the TPU compiler did not finish in {timeout} s and was ended; pass a longer timeout")
        return pickle.load(stdout)

    def _last_lines(self) -> str:
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        return "\n".join(line for line in lines if not line.startswith("http"))[-2000:]

    def close(self) -> None:
        self.end()
        if self._dumps is not None:
            self._dumps.cleanup()

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout, self._log):
            with contextlib.suppress(BrokenPipeError):
                stream.close()  # type: ignore[union-attr]


_shared: dict[bool, CompilerProcess] = {}  # by whether it dumps


def shared_process(*, dumps: bool = False) -> CompilerProcess:
    """Returns the process that dumps, or the one that does not. Starts it if there is none."""
    if dumps in _shared and _shared[dumps].process.poll() is not None:
        _shared.pop(dumps).close()
    if dumps not in _shared:
        _shared[dumps] = CompilerProcess(dumps=dumps)
        atexit.register(_shared[dumps].close)
    return _shared[dumps]


def busy_message(error: object) -> str:
    return f"libtpu is in use: {error}. Start the other process with ALLOW_MULTIPLE_LIBTPU_LOAD=1, or wait for it"
