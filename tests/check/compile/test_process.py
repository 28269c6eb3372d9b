"""The child process that compiles: a crash is an error that names the signal, and the next call works."""

import contextlib
import os
import signal

import pytest

from flaxasync.check import compile_for
from flaxasync.check.compile.compile_for import CompilerProcess, shared_process


def test_after_a_compiler_died_the_next_call_works(matmul):
    compile_for("v5e:2x2", *matmul)
    os.kill(shared_process().process.pid, signal.SIGSEGV)
    shared_process().process.wait()
    assert compile_for("v5e:2x2", *matmul).text


@pytest.mark.parametrize(
    ("sent", "seconds", "message"),
    [(signal.SIGSTOP, 0.1, r"did not finish in 0\.1 s"), (signal.SIGSEGV, 60, "died of SIGSEGV")],
)
def test_a_hang_or_a_death_while_compiling_is_named(sent, seconds, message):
    with contextlib.closing(CompilerProcess()) as process:
        os.kill(process.process.pid, sent)
        with pytest.raises(RuntimeError, match=message):
            process.compile({}, seconds)
