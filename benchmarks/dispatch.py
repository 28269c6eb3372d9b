"""Does a call hold the host? Dispatch / total of jitted and compiled functions, on the first
platform that JAX finds.

    python benchmarks/dispatch.py [--write docs/dispatch.md] [--command-buffers default|none|loops] [--calls 8]

The functions are those of tests/check/dispatch/functions.py. On a CPU the command also prints on
several devices. A pipeline is calls of which each takes what the one before returned; its dispatch
ends when the last call has returned.

`--command-buffers` says what a GPU runs as CUDA graphs: XLA's default set of commands; nothing; or
while loops and branches, too, by the flags of `flaxasync.check.command_buffer_flags`. They change
nothing on other devices.

All figures of the table are medians.
"""

import argparse
import contextlib
import io
import os
from collections.abc import Callable

import jax
import jax.numpy as jnp
import jaxlib
from jax.sharding import PartitionSpec as P

import flaxasync as fa
from benchmarks.table import command_line, print_table, write_between_markers
from tests.check.dispatch.functions import TABLE, lbfgs, printing, step, work

# about 100 ms on two cores; about 100 ms of float32 on a data-centre GPU
SIZES = {"cpu": 1024, "gpu": 8192}
SMALL = {"cpu": 512, "gpu": 2048}  # of the functions that are called often
CALLS = 7  # of each function that are timed
QUEUE = 128  # calls of a long queue
# does it hold the host, by DispatchInfo.compatible
EXPECTED = {True: "no", False: "yes", None: "cannot tell"}
MODES = ("default", "none", "loops")
NO_COMMANDS = "--xla_gpu_enable_command_buffer="


def pipeline(fn: Callable, calls: int) -> Callable:
    """Makes the function of so many calls, each of the result of the one before."""

    def run(x: jax.Array) -> jax.Array:
        for _ in range(calls):
            x = fn(x)
        return x

    return run


def row(
    name: str, fn: Callable, x: jax.Array, calls: int = 1, expected: str | None = None
) -> list[str]:
    """Measures a function jitted and compiled, or a pipeline of it, beside what is expected. The
    time is that of one call.
    """
    compiled = jax.jit(fn).lower(x).compile()
    jitted, ahead = (
        fa.check.measure_dispatch(pipeline(f, calls), x, repeats=CALLS)
        for f in (jax.jit(fn), compiled)
    )
    return [
        name,
        expected or EXPECTED[fa.check.check_async_compatible(compiled).compatible],
        f"{ahead.total / calls * 1e3:.0f}",
        f"{jitted.ratio:.1%}",
        f"{ahead.ratio:.1%}",
    ]


def on_devices(devices: int) -> list[str]:
    """Measures the function that prints, once for each of several CPU devices in one program."""
    mesh = fa.make_mesh((devices,), ("data",), devices=jax.devices()[:devices])
    x = jax.device_put(jnp.ones((devices, 512, 512)), jax.NamedSharding(mesh, P("data")))
    return row(f"printing, on {devices} CPU devices", jax.vmap(printing), x)


def flags_of(mode: str) -> str:
    """Returns the flags of XLA that a mode of command buffers adds to those of the user."""
    if mode == "none":
        return NO_COMMANDS
    return fa.check.command_buffer_flags() if mode == "loops" else ""


def parser() -> argparse.ArgumentParser:
    found = command_line(__doc__)
    found.add_argument(
        "--command-buffers", choices=MODES, default="default", help="what a GPU runs as CUDA graphs"
    )
    found.add_argument(
        "--calls", type=int, default=8, metavar="N", help="the calls of a pipeline (8)"
    )
    return found


def main() -> None:
    chosen = parser().parse_args()
    # XLA reads its flags when JAX first asks for devices, which is below.
    os.environ["XLA_FLAGS"] = (
        f"{os.environ.get('XLA_FLAGS', '')} {flags_of(chosen.command_buffers)}".strip()
    )
    jax.config.update("jax_num_cpu_devices", 8)
    device = jax.devices()[0]
    x = jax.block_until_ready(jnp.ones((SIZES[device.platform],) * 2))
    small = jax.block_until_ready(jnp.ones((SMALL[device.platform],) * 2))
    on_cpu = device.platform == "cpu"
    with contextlib.redirect_stdout(io.StringIO()):  # what the functions print
        rows = [row(each.fn.__name__.replace("_", " "), each.fn, x) for each in TABLE]
        rows.append(row("L-BFGS", lbfgs, small))
        rows += [on_devices(count) for count in (2, 8) if on_cpu]
        rows.append(row(f"work, {chosen.calls} calls", work, x, chosen.calls))
        queue = f"one step of it, {QUEUE} calls"
        rows.append(row(queue, step, small, QUEUE, "after a long queue"))
    where = f"{os.cpu_count()} CPU cores" if on_cpu else device.device_kind
    mode = (
        ""
        if chosen.command_buffers == "default"
        else f", with command buffers: {chosen.command_buffers}"
    )
    versions = (
        f"Measured with jax {jax.__version__} and jaxlib {jaxlib.__version__} on {where}{mode}."
    )
    table = print_table(
        ["function", "expected to hold the host", "ms a call", "jit", "compiled"], rows
    )
    write_between_markers(chosen.write, "dispatch", f"{versions}\n\n{table}")


if __name__ == "__main__":
    main()
