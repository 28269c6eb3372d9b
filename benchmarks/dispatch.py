"""Does a call hold the host? Dispatch / total of jitted and compiled functions, on the first platform that JAX finds.

    python benchmarks/dispatch.py [--write docs/dispatch.md]

The functions are those of tests/check/dispatch/functions.py. On a CPU the command also prints on several devices, and
calls the training step of configs/tiny.py. All figures of the table are medians.
"""

import contextlib
import io
import os
import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import jaxlib
from jax.sharding import PartitionSpec as P

import flaxasync as fa
from benchmarks.table import command_line, print_table, write_between_markers
from configs.tiny import tiny
from tests.check.dispatch.functions import TABLE, printing
from train.step.mesh import make_mesh
from train.step.trainer import Trainer

SIZES = {"cpu": 1024, "gpu": 8192}  # about 100 ms on two cores; about 100 ms of float32 on a data-centre GPU
CALLS = 7  # of each function that are timed
TRAINING_STEPS = 30
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


def training_step() -> str:
    """Returns a sentence that says how long the calls of the training step of configs/tiny.py hold the host."""
    config = tiny()
    mesh = make_mesh(config.mesh)
    with jax.set_mesh(mesh):
        trainer = Trainer(config, mesh)
        step, state = trainer.compile_train_step(), trainer.init()
        struct, *_ = trainer.abstract_batch()
        batch = jax.device_put(jnp.zeros(struct.shape, struct.dtype), struct.sharding)
        state, _ = jax.block_until_ready(step(state, batch, batch))
        held, start = [], time.perf_counter()
        for _ in range(TRAINING_STEPS):
            called = time.perf_counter()
            state, _ = step(state, batch, batch)
            held.append(time.perf_counter() - called)
        jax.block_until_ready(state)
        each = (time.perf_counter() - start) / TRAINING_STEPS
    return (
        f"The training step of `configs/tiny.py` on 8 simulated CPU devices, {TRAINING_STEPS} calls in a row: a call "
        f"holds the host for {statistics.mean(held) * 1e3:.1f} ms, a step takes {each * 1e3:.0f} ms: "
        f"{statistics.mean(held) / each:.1%}."
    )


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
    text = f"{versions}\n\n{table}" + (f"\n\n{training_step()}" if on_cpu else "")
    write_between_markers(chosen.write, "dispatch", text)


if __name__ == "__main__":
    main()
