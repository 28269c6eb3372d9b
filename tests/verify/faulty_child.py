"""A child of `flaxasync.verify` with faults: one op is wrong, one hangs, one kills the process and one raises."""

import os
import time

import jax.numpy as jnp

from flaxasync.verify import child, programs


def hang(*arguments, **options):
    time.sleep(600)


def crash(*arguments, **options):
    print("the last words of a process", file=__import__("sys").stderr, flush=True)
    os.abort()


def swap_rows(x, w, axis_name, **options):
    y = original(x, w, axis_name, **options)
    return jnp.roll(y, 1, axis=-2) if options["backend"] == "xla" else y


def raise_an_error(*arguments, **options):
    raise AssertionError("a planted error")


original = programs.fa.all_gather_matmul
programs.fa.all_gather_matmul = swap_rows
programs.fa.matmul_reduce_scatter = hang
programs.fa.matmul_all_reduce = crash
programs.fa.ring_attention = raise_an_error

if __name__ == "__main__":
    child.main()
