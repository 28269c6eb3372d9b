"""Does a call hold the host? Dispatch / total of jitted and compiled functions, on the first platform that JAX finds.

    python benchmarks/dispatch.py [--write docs/dispatch.md]

The functions are those of tests/check/dispatch/functions.py. On a CPU the command also prints on several devices.
All figures of the table are medians.
"""

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
from tests.check.dispatch.functions import TABLE, printing

SIZES = {"cpu": 1024, "gpu": 8192}  # about 100 ms on two cores; about 100 ms of float32 on a data-centre GPU
CALLS = 7  # of each function that are timed
EXPECTED = {True: "no", False: "yes", None: "cannot tell"}  # does it hold the host, by DispatchInfo.compatible


def row(name: str, fn: Callable, x: jax.Array) -> list[str]:
    """Measures a function jitted and compiled, beside what is expected of it."""
    compiled = jax.jit(fn).lower(x).compile()
    expected = EXPECTED[fa.check.check_async_compatible(compiled).compatible]
    jitted, ahead = (fa.check.measure_dispatch(f, x, repeats=CALLS) for f in (jax.jit(fn), compiled))
    return [name, expected, f"{ahead.total * 1e3:.0f}", f"{jitted.ratio:.1%}", f"{ahead.ratio:.1%}"]


def on_devices(devices: int) -> list[str]:
    """Measures the function that prints, once for each of several CPU devices in one program."""
    mesh = fa.make_mesh((devices,), ("data",), devices=jax.devices()[:devices])
    x = jax.device_put(jnp.ones((devices, 512, 512)), jax.NamedSharding(mesh, P("data")))
    return row(f"printing, on {devices} CPU devices", jax.vmap(printing), x)


def main() -> None:
    chosen = command_line(__doc__).parse_args()
    jax.config.update("jax_num_cpu_devices", 8)
    device = jax.devices()[0]
    x = jax.block_until_ready(jnp.ones((SIZES[device.platform],) * 2))
    on_cpu = device.platform == "cpu"
    with contextlib.redirect_stdout(io.StringIO()):  # what the functions print
        rows = [row(each.fn.__name__.replace("_", " "), each.fn, x) for each in TABLE]
        rows += [on_devices(count) for count in (2, 8) if on_cpu]
    where = f"{os.cpu_count()} CPU cores" if on_cpu else device.device_kind
    versions = f"Measured with jax {jax.__version__} and jaxlib {jaxlib.__version__} on {where}."
    table = print_table(["function", "expected to hold the host", "ms a call", "jit", "compiled"], rows)
    write_between_markers(chosen.write, "dispatch", f"{versions}\n\n{table}")


if __name__ == "__main__":
    main()
