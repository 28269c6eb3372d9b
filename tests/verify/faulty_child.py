"""A child of `flaxasync.verify` with faults: one op is wrong, one hangs, one kills the process and one raises.

The backend "none" of each has no fault, and the platform has one of the known defects. Of several processes, the one
that FAULTY_RANK names has the faults.
"""

import dataclasses
import os
import sys
import time

import jax.numpy as jnp

from flaxasync.verify import child, platform, programs


def hang(y):
    time.sleep(600)


def crash(y):
    print("the last words of a process", file=sys.stderr, flush=True)
    os.abort()


def swap_rows(y):
    return jnp.roll(y, 1, axis=-2)


def raise_an_error(y):
    raise NotImplementedError("a planted error, such as the compiler of kernels raises")


def plant(op, fault):
    original = getattr(programs.fa, op)

    def faulty(*arguments, **options):
        y = original(*arguments, **options)
        return y if options["backend"] == "none" else fault(y)

    setattr(programs.fa, op, faulty)


if os.environ.get("FAULTY_RANK") == os.environ.get("OMPI_COMM_WORLD_RANK"):
    plant("all_gather_matmul", swap_rows)
    plant("matmul_reduce_scatter", hang)
    plant("matmul_all_reduce", crash)
    plant("ring_attention", raise_an_error)
    unused = platform.DEFECTS["unused"]
    platform.DEFECTS["unused"] = dataclasses.replace(unused, program=lambda x: jnp.zeros_like(x[:1]))

if __name__ == "__main__":
    child.main()
