"""The child process that compiles: a crash is an error that names the signal, and the next call works."""

import contextlib
import os
import signal

import pytest

from flaxasync.check import compile_for, topology_mesh
from flaxasync.check.compile.process import CompilerProcess, shared_process
from tests.check.compile.matmul_program import matmul


@pytest.fixture
def mesh():
    return topology_mesh("v5e:2x2", (2, 2), ("x", "y"))


def test_a_compiler_that_dies_is_an_error_and_the_next_call_works(mesh):
    compile_for("v5e:2x2", *matmul(mesh))
    os.kill(shared_process().process.pid, signal.SIGSEGV)
    shared_process().process.wait()
    assert compile_for("v5e:2x2", *matmul(mesh)).text


def test_a_death_while_compiling_names_the_signal():
    with contextlib.closing(CompilerProcess()) as process:
        os.kill(process.process.pid, signal.SIGSTOP)
        with pytest.raises(RuntimeError, match=r"did not finish in 0\.1 s"):
            process.compile({}, 0.1)
    with contextlib.closing(CompilerProcess()) as process:
        os.kill(process.process.pid, signal.SIGSEGV)
        with pytest.raises(RuntimeError, match="died of SIGSEGV"):
            process.compile({}, 60)
