"""Does a call hold the host? Dispatch / total of jitted and compiled functions.

    python benchmarks/dispatch.py [--rounds N] [--write docs/dispatch.md]

Each platform is measured in a process of its own: the CPU, and a CUDA GPU if JAX finds one, with XLA's default command
buffers and with `command_buffer_flags()`. All figures are medians.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

import jax
import jax.numpy as jnp
import jaxlib
from dispatch_functions import FUNCTIONS, pure, pure_callback
from jax.sharding import PartitionSpec as P
from table import print_table, write_between_markers

import flaxasync.check
from configs.tiny import tiny
from train.step.mesh import make_mesh
from train.step.trainer import Trainer

SIZES = {"cpu": 1024, "cuda": 8192}  # about 100 ms on two cores; about 100 ms of float32 on a data-centre GPU
TRAINING_STEPS = 30
NO_PLATFORM = 3  # the exit status of a process that does not find its platform
EXPECTED = {True: "no", False: "yes", None: "cannot tell"}  # does it hold the host, by DispatchInfo.compatible


def percent(ratio: float) -> str:
    return f"{ratio:.1%}"


def dispatch_ratios(x: jax.Array, rounds: int) -> dict[str, dict]:
    """Returns for every function what is expected, its ratios (jitted, and compiled), and the seconds of a call."""
    rows = {}
    for name, fn in FUNCTIONS.items():
        compiled = jax.jit(fn).lower(x).compile()
        info = flaxasync.check.check_async_compatible(compiled)
        jitted, ahead = (flaxasync.check.measure_dispatch(f, x, repeats=rounds) for f in (jax.jit(fn), compiled))
        rows[name] = {"compatible": info.compatible, "jit": jitted.ratio, "aot": ahead.ratio, "seconds": ahead.total}
    return rows


def paths(x: jax.Array, rounds: int) -> list[list[str]]:
    """Calls functions on the path that JAX would not choose for them. All of it is private to JAX."""
    compiled = jax.jit(pure).lower(x).compile()
    python = compiled._executable.unsafe_call

    def around(x: jax.Array) -> Any:
        results = python.xla_executable.execute_sharded(python.in_handler([x]))
        return results.consume_with_handlers(python.out_handler.handlers)

    forced = jax.jit(pure_callback).lower(x).compile()
    forced._executable.unsafe_call.has_host_callbacks = False
    experiments = {
        "pure, as JAX calls it (C++)": compiled,
        "pure, by JAX's Python path": python,
        "pure, by the study's way around that path": around,
        "pure_callback, as JAX calls it (Python)": jax.jit(pure_callback).lower(x).compile(),
        "pure_callback, forced onto the C++ path": forced,
    }
    rows = []
    for name, fn in experiments.items():
        timing = flaxasync.check.measure_dispatch(fn, x, repeats=rounds)
        rows.append([name, f"{timing.dispatch * 1e3:.2f}", f"{timing.total * 1e3:.0f}", percent(timing.ratio)])
    return rows + on_devices(rounds)


def on_devices(rounds: int) -> list[list[str]]:
    """Measures a print in a program of one, two and eight CPU devices."""
    rows = []
    for devices in (1, 2, 8):
        mesh = flaxasync.make_mesh((devices,), ("data",))
        with jax.set_mesh(mesh):
            x = jax.device_put(jnp.ones((SIZES["cpu"],) * 2), P("data", None))
            w = jax.device_put(jnp.full((SIZES["cpu"],) * 2, 1e-3), P(None, None))

            def printing(x: jax.Array, w: jax.Array) -> jax.Array:
                jax.debug.print("{}", jnp.sum(x))
                for _ in range(8):
                    x = jnp.tanh(x @ w)
                return x

            timing = flaxasync.check.measure_dispatch(jax.jit(printing), x, w, repeats=rounds)
        times = [f"{timing.dispatch * 1e3:.2f}", f"{timing.total * 1e3:.0f}", percent(timing.ratio)]
        rows.append([f"jax.debug.print, on {devices} CPU device{'s' * (devices > 1)}", *times])
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


def measure(platform: str, rounds: int) -> dict[str, Any]:
    """Returns all that is measured on a platform, for JSON."""
    if platform == "cpu":
        jax.config.update("jax_num_cpu_devices", 8)
    device = jax.devices()[0]
    if device.platform != ("cpu" if platform == "cpu" else "gpu"):
        sys.exit(NO_PLATFORM)
    x = jax.block_until_ready(jnp.ones((SIZES[platform],) * 2))
    where = f"{os.cpu_count()} CPU cores" if platform == "cpu" else device.device_kind
    result: dict[str, Any] = {"versions": f"jax {jax.__version__}, jaxlib {jaxlib.__version__}, {where}"}
    result["ratios"] = dispatch_ratios(x, rounds)
    if platform == "cpu":
        result |= {"paths": paths(x, rounds), "training": training_step()}
    return result


def measured_apart(platform: str, rounds: int, flags: str = "") -> dict[str, Any] | None:
    """Measures in a process of its own. Returns None if there is no such platform."""
    environment = os.environ | {"JAX_PLATFORMS": "cpu" if platform == "cpu" else f"{platform},cpu"}
    environment["XLA_FLAGS"] = f"{environment.get('XLA_FLAGS', '')} {flags}".strip()
    with tempfile.NamedTemporaryFile("r") as answer:
        command = [sys.executable, __file__, "--measure", platform, "--rounds", str(rounds), "--answer", answer.name]
        done = subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, check=False)
        if done.returncode == NO_PLATFORM:
            return None
        done.check_returncode()
        return json.load(answer)


def tables(rounds: int) -> str:
    """Measures everything and returns the tables; a platform that JAX does not find has no column and no row."""
    gpu, cpu = measured_apart("cuda", rounds), measured_apart("cpu", rounds)
    captured = measured_apart("cuda", rounds, flaxasync.check.command_buffer_flags()) if gpu else None
    assert cpu is not None
    on_gpu = {place: run for place, run in {"GPU": gpu, "GPU, +WHILE": captured}.items() if run}
    rows = []
    for name, row in cpu["ratios"].items():
        times = [f"{row['seconds'] * 1e3:.0f}", percent(row["jit"]), percent(row["aot"])]
        gpu_shares = [percent(run["ratios"][name]["aot"]) for run in on_gpu.values()]
        rows.append([name, EXPECTED[row["compatible"]], *times, *gpu_shares])
    header = ["function", "expected to hold the host (CPU)", "CPU, ms a call", "CPU, jit", "CPU, compiled"]
    ratios = print_table([*header, *on_gpu], rows)
    experiments = print_table(["experiment, on the CPU", "dispatch, ms", "total, ms", "ratio"], cpu["paths"])
    versions = "; ".join(f"{place}: {run['versions']}" for place, run in {"CPU": cpu, **on_gpu}.items())
    return "\n\n".join([f"{versions}.", ratios, experiments, cpu["training"]])


def main() -> None:
    """Measures and prints; writes the tables if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7, help="calls of each function that are timed (default: 7)")
    parser.add_argument("--write", metavar="FILE", help="replace the tables between FILE's markers")
    parser.add_argument("--measure", choices=SIZES, help=argparse.SUPPRESS)
    parser.add_argument("--answer", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        result = measure(args.measure, args.rounds)
        with open(args.answer, "w") as file:
            json.dump(result, file)
        return
    text = tables(args.rounds)
    if args.write:
        write_between_markers(args.write, "dispatch", text)


if __name__ == "__main__":
    main()
