"""Does a call hold the host? Dispatch / total of jitted and compiled functions, on the first platform that JAX finds.

    python benchmarks/dispatch.py [--rounds N] [--write docs/dispatch.md]

The functions are those of tests/check/dispatch/functions.py. On a CPU, two more experiments call functions on paths
that JAX would not choose, and the training step of configs/tiny.py. All figures are medians.
"""

import contextlib
import io
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jaxlib
from jax.sharding import PartitionSpec as P

import flaxasync as fa
from benchmarks.table import command_line, print_table, write_between_markers
from configs.tiny import tiny
from tests.check.dispatch.functions import TABLE, printing, pure_callback, work
from train.step.mesh import make_mesh
from train.step.trainer import Trainer

SIZES = {"cpu": 1024, "gpu": 8192}  # about 100 ms on two cores; about 100 ms of float32 on a data-centre GPU
TRAINING_STEPS = 30
EXPECTED = {True: "no", False: "yes", None: "cannot tell"}  # does it hold the host, by DispatchInfo.compatible


def function_rows(x: jax.Array, rounds: int) -> list[list[str]]:
    """Measures every function jitted and compiled, beside what is expected of it."""
    rows = []
    for fn in (row.fn for row in TABLE):
        compiled = jax.jit(fn).lower(x).compile()
        expected = EXPECTED[fa.check.check_async_compatible(compiled).compatible]
        jitted, ahead = (fa.check.measure_dispatch(f, x, repeats=rounds) for f in (jax.jit(fn), compiled))
        name = fn.__name__.replace("_", " ")
        rows.append([name, expected, f"{ahead.total * 1e3:.0f}", f"{jitted.ratio:.1%}", f"{ahead.ratio:.1%}"])
    return rows


def experiment_rows(x: jax.Array, rounds: int) -> list[list[str]]:
    """Calls functions on paths that JAX would not choose for them, and a print on several devices."""
    compiled, forced = (jax.jit(fn).lower(x).compile() for fn in (work, pure_callback))
    executable: Any = compiled._executable
    python = executable.unsafe_call  # this path and what it consists of are private to JAX

    def around(x: jax.Array) -> Any:
        results = python.xla_executable.execute_sharded(python.in_handler([x]))
        return results.consume_with_handlers(python.out_handler.handlers)

    executable = forced._executable
    executable.unsafe_call.has_host_callbacks = False
    experiments: dict[str, tuple[Callable, jax.Array]] = {
        "work, as JAX calls it (C++)": (compiled, x),
        "work, by JAX's Python path": (python, x),
        "work, by the study's way around that path": (around, x),
        "pure_callback, as JAX calls it (Python)": (jax.jit(pure_callback).lower(x).compile(), x),
        "pure_callback, forced onto the C++ path": (forced, x),
    }
    for devices in (1, 2, 8):
        mesh = fa.make_mesh((devices,), ("data",), devices=jax.devices()[:devices])
        split = jax.device_put(jnp.ones((devices, 512, 512)), jax.NamedSharding(mesh, P("data")))
        name = f"jax.debug.print, on {devices} CPU device{'s' * (devices > 1)}"
        experiments[name] = jax.jit(jax.vmap(printing)), split
    rows = []
    for name, (fn, argument) in experiments.items():
        timing = fa.check.measure_dispatch(fn, argument, repeats=rounds)
        rows.append([name, f"{timing.dispatch * 1e3:.2f}", f"{timing.total * 1e3:.0f}", f"{timing.ratio:.1%}"])
    return rows


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
    """Measures and prints; writes the tables if asked to."""
    parser = command_line(__doc__)
    parser.add_argument("--rounds", type=int, default=7, help="calls of each function that are timed (default: 7)")
    chosen = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", 8)
    device = jax.devices()[0]
    x = jax.block_until_ready(jnp.ones((SIZES[device.platform],) * 2))
    with contextlib.redirect_stdout(io.StringIO()):  # what the functions print
        functions = function_rows(x, chosen.rounds)
        experiments = experiment_rows(x, chosen.rounds) if device.platform == "cpu" else []
    where = f"{os.cpu_count()} CPU cores" if device.platform == "cpu" else device.device_kind
    parts = [f"Measured with jax {jax.__version__} and jaxlib {jaxlib.__version__} on {where}."]
    parts.append(print_table(["function", "expected to hold the host", "ms a call", "jit", "compiled"], functions))
    if experiments:
        parts.append(print_table(["experiment, on the CPU", "dispatch, ms", "total, ms", "ratio"], experiments))
        parts.append(training_step())
    write_between_markers(chosen.write, "dispatch", "\n\n".join(parts))


if __name__ == "__main__":
    main()
