"""A child of `flaxasync.verify` with faults: one op is wrong, one hangs, one kills the process and
one raises.

The backend "none" of each has no fault.
"""

import os
import sys
import time

import jax.numpy as jnp

from flaxasync.verify import child, programs
from flaxasync.verify.verdict import CaseResult, Verdict


def crash(y):
    print("the last words of a process", file=sys.stderr, flush=True)
    os.abort()


def raise_an_error(y):
    raise NotImplementedError("a planted error, such as the compiler of kernels raises")


def plant(op, fault):
    original = getattr(programs.fa, op)

    def faulty(*arguments, **options):
        y = original(*arguments, **options)
        return y if options["backend"] == "none" else fault(y)

    setattr(programs.fa, op, faulty)


def serve(*arguments):
    """Serves with the faults."""
    plant("all_gather_matmul", lambda y: jnp.roll(y, 1, axis=-2))
    plant("matmul_reduce_scatter", lambda y: time.sleep(600))
    plant("matmul_all_reduce", crash)
    plant("ring_attention", raise_an_error)
    child.serve(*arguments)


def open_once(opened, works_at, messages, setup, cases, log):
    """Hangs in its first case; after that, the chips cannot be opened before the attempt
    `works_at`.
    """
    child.begin(messages, log)
    with opened.open("a") as file:
        file.write("x")
    attempts = opened.stat().st_size
    if 1 < attempts < works_at:
        sys.exit("the chips are in use")
    messages.send({})
    if attempts == 1:
        time.sleep(600)
    messages.send(CaseResult(cases[0], Verdict.UNSUPPORTED))


def be_of_two_hosts(messages, setup, cases, log):
    messages.send({"processes": 2})


def sleep(messages, setup, cases, log):
    child.begin(messages, log)
    time.sleep(600)


def live_on(pipe, messages, setup, cases, log):
    """Opens a named pipe and lives longer than its parent, if it can."""
    child.begin(messages, log)
    with open(pipe, "w") as file:
        time.sleep(60)
        file.write("it lives on")
