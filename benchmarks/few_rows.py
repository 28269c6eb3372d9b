"""Single tokens through a decoder layer of eight billion parameters: how the sums over eight devices are done.

    python benchmarks/few_rows.py                          prints both tables; no TPU
    python benchmarks/few_rows.py --write docs/kernels/exchange.md  also puts them between the markers there
    python benchmarks/few_rows.py --results FILE           keeps all times in FILE, and simulates what it lacks

The first table is a row-parallel product [rows, 4096] @ [4096, 4096] in bf16 with each backend. The second one is a
layer with width 4096, 32 heads, 8 key-value heads, an MLP of 14336 and a cache of 1024 tokens, to which each sequence
of the batch adds one token. The layer sums twice: after the output projection and after the MLP. Where its compiled
program is that of XLA's all-reduce to the letter, one simulation gives both times. The command fails if the planned
form of a layer takes longer than XLA's.

Every program is compiled and simulated in a process of its own. FILE does not say which version of the code its times
belong to: delete it after a change of the kernels, of the player or of the plan.

In the player a transfer to another chip takes 1 us however many links it crosses. XLA's all-reduce sends to neighbours
only, but the exchange over up to four links. So the last columns add a latency for each link after the first.

Nothing here ran on a TPU: every time is a simulated one, and v6e is not calibrated (docs/player.md).
"""

import argparse
import concurrent.futures
import dataclasses
import functools
import json
import multiprocessing
import pathlib
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import flaxasync as fa
from benchmarks.table import print_table, write_between_markers
from flaxasync.check import CompiledProgram, compile_for, topology_mesh
from flaxasync.check.player import play_dump, played_chip
from models.config import TransformerConfig
from models.transformer import DecoderLayer

TOPOLOGIES = ("v5e:2x4", "v6e:2x4")
DEVICES = 8
CONFIG = TransformerConfig(
    vocab_size=128_256, layers=1, width=4096, heads=32, kv_heads=8, mlp_width=14_336, dtype="bfloat16",
    param_dtype="bfloat16",
)  # fmt: skip
CACHE = 1024
BATCHES = (1, 4, 16, 64)
ROWS = (1, 16, 64)
BACKENDS = ("none", "exchange", "xla", "fused")
LINK_LATENCIES = (0.0, 0.25e-6, 0.5e-6)  # seconds
type Times = dict[str, list[float]]
"""Simulated seconds of a program by the name of its form, with each of LINK_LATENCIES or with the first one alone."""
type Program = tuple[Callable, Sequence[Any]]
"""A jitted function and its abstract arguments."""


def planned(topology: str, batch: int) -> tuple[str, ...]:
    """Returns what `fa.plan` chooses for the two sums of the layer: of the attention and of the MLP."""
    widths = CONFIG.width // DEVICES, CONFIG.mlp_width // DEVICES
    shapes = [((batch, 1, k), (k, CONFIG.width)) for k in widths]
    return tuple(fa.plan("matmul_all_reduce", *pair, chip=topology, ring=DEVICES).backend for pair in shapes)


def layer_program(topology: str, batch: int, backend: str | None) -> Program:
    """Returns the program that adds one token to each sequence of a batch, in one decoder layer."""
    mesh = topology_mesh(topology, (1, DEVICES), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    options: Any = {"axis_name": "model", "fsdp_axis": None, "context_axis": None, "context_layout": "zigzag"}

    def make() -> nnx.Module:
        layer = DecoderLayer(CONFIG, **options, backend=backend, rngs=nnx.Rngs(0))
        layer.attention.init_cache((batch, CACHE, CONFIG.width), jnp.bfloat16)
        return layer

    with jax.set_mesh(mesh):
        graph, state = nnx.split(nnx.eval_shape(make))
        specs = nnx.get_partition_spec(state)
        state = jax.tree.map(
            lambda leaf, spec: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec)),
            state, specs,
        )  # fmt: skip

    def decode(state: nnx.State, x: jax.Array) -> tuple[jax.Array, nnx.State]:
        layer = nnx.merge(graph, state)
        y = layer(x, decode=True)
        return y, nnx.state(layer, nnx.Cache)

    x = jax.ShapeDtypeStruct((batch, 1, CONFIG.width), jnp.bfloat16, sharding=NamedSharding(mesh, P(None)))
    return jax.jit(decode), (state, x)


def product_program(topology: str, rows: int, backend: str) -> Program:
    """Returns a row-parallel product [rows, width] @ [width, width]."""
    mesh = topology_mesh(topology, (DEVICES,), ("model",))
    specs = P(None, "model"), P("model", None)
    op = functools.partial(fa.matmul_all_reduce, axis_name="model", backend=backend)
    arguments = [
        jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))
        for shape, spec in zip(((rows, CONFIG.width), (CONFIG.width, CONFIG.width)), specs, strict=True)
    ]
    return jax.jit(jax.shard_map(op, mesh=mesh, in_specs=specs, out_specs=P())), arguments


def play_layer(topology: str, batch: int) -> Times:
    """Simulates the layer with XLA's all-reduce and as it is planned.

    Raises:
      AssertionError: XLA's all-reduce is planned for both sums, and still the two compiled programs differ.
    """
    times: Times = {}
    texts: list[str] = []
    for name, backend in (("all-reduce", "none"), ("planned", None)):
        fn, (state, x) = layer_program(topology, batch, backend)
        with tempfile.TemporaryDirectory(prefix="flaxasync-") as folder, jax.set_mesh(x.sharding.mesh):
            program = compile_for(topology, fn, state, x, keep_dumps=folder)
            texts.append(program.as_text())
            if name == "all-reduce" or texts[0] != texts[1]:
                times[name] = _play(folder, program, LINK_LATENCIES)
    if "planned" not in times:
        return times | {"planned": times["all-reduce"]}
    assert set(planned(topology, batch)) != {"none"}, f"{topology}, batch {batch}: one plan, but two programs"
    return times


def play_product(topology: str, rows: int, backend: str) -> Times:
    """Simulates the product with one backend."""
    with tempfile.TemporaryDirectory(prefix="flaxasync-") as folder:
        fn, arguments = product_program(topology, rows, backend)
        program = compile_for(topology, fn, *arguments, keep_dumps=folder)
        return {backend: _play(folder, program, LINK_LATENCIES[:1])}


def _play(folder: str, program: CompiledProgram, latencies: Sequence[float]) -> list[float]:
    chip = played_chip(program.topology)
    return [
        play_dump(
            folder,
            topology=program.topology,
            coords=program.coords,
            chip=dataclasses.replace(chip, link_latency=latency),
        ).seconds
        for latency in latencies
    ]


def all_jobs() -> dict[str, tuple[Any, ...]]:
    """Returns every simulation, by its name in the file of results: a function and its arguments."""
    layers = {f"layer {t}, batch {n}": (play_layer, t, n) for n in BATCHES for t in TOPOLOGIES}
    products = {
        f"product {t}, {n} rows, {b}": (play_product, t, n, b) for t in TOPOLOGIES for n in ROWS for b in BACKENDS
    }
    return layers | products


def run_jobs(jobs: Mapping[str, tuple[Any, ...]], file: pathlib.Path | None, *, workers: int) -> dict[str, Times]:
    """Runs the jobs that a file of results lacks, each in a new process, and adds them to the file one by one."""
    results: dict[str, Times] = json.loads(file.read_text()) if file and file.is_file() else {}
    missing = {name: job for name, job in jobs.items() if name not in results}
    start = time.monotonic()
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(workers, mp_context=context, max_tasks_per_child=1) as pool:
        futures = {pool.submit(*job): name for name, job in missing.items()}
        try:
            for count, future in enumerate(concurrent.futures.as_completed(futures), start=1):
                name = futures[future]
                results[name] = future.result()
                if file:
                    temporary = file.with_name(f"{file.name}.new")
                    temporary.write_text(json.dumps(results, indent=1))
                    temporary.replace(file)
                print(f"{count} of {len(missing)} after {time.monotonic() - start:.0f} s: {name}", file=sys.stderr)
        except BaseException:
            for future in futures:
                future.cancel()
            raise
    return results


def layer_table(results: Mapping[str, Times]) -> tuple[Sequence[str], list[Sequence[str]], list[str]]:
    """Returns the header and the rows of the table of layers, and the rows in which the planned form is slower."""
    rows: list[Sequence[str]] = []
    slower = []
    for topology in TOPOLOGIES:
        for batch in BATCHES:
            times = results[f"layer {topology}, batch {batch}"]
            pairs = list(zip(times["planned"], times["all-reduce"], strict=True))
            names = " and ".join(dict.fromkeys(planned(topology, batch)))
            rows.append((topology, str(batch), names, *(f"{one * 1e6:.1f} / {two * 1e6:.1f}" for one, two in pairs)))
            if pairs[0][0] > pairs[0][1]:
                slower.append(" ".join(rows[-1]))
    header = ("topology", "batch", "planned", "planned / all-reduce, us",
              *(f"with {seconds * 1e6:g} us a link" for seconds in LINK_LATENCIES[1:]))  # fmt: skip
    return header, rows, slower


def product_table(results: Mapping[str, Times]) -> tuple[Sequence[str], list[Sequence[str]]]:
    """Returns the header and the rows of the table of products."""
    rows: list[Sequence[str]] = []
    for topology in TOPOLOGIES:
        for count in ROWS:
            shapes = (count, CONFIG.width // DEVICES), (CONFIG.width // DEVICES, CONFIG.width)
            plan = fa.plan("matmul_all_reduce", *shapes, chip=topology, ring=DEVICES, backward=False)
            played = {b: results[f"product {topology}, {count} rows, {b}"][b][0] for b in BACKENDS}
            times = [  # the exchange is planned only where it is predicted to gain
                f"{seconds * 1e6:.1f}" + (f" ({plan.seconds[b] * 1e6:.1f})" if b in plan.seconds else "")
                for b, seconds in played.items()
            ]
            rows.append((topology, str(count), *times, plan.backend))
    return ("topology", "rows", *(f"{b}: played (planned) us" for b in BACKENDS), "planned"), rows


def main() -> None:
    """Prints the tables; writes them if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", metavar="FILE", help="put the tables between the markers of this file")
    parser.add_argument(
        "--results", metavar="FILE", type=pathlib.Path, help="keep the times in this JSON file, and use those in it"
    )
    parser.add_argument("--workers", metavar="N", type=int, default=2, help="simulations at the same time (default: 2)")
    arguments = parser.parse_args()
    results = run_jobs(all_jobs(), arguments.results, workers=arguments.workers)
    *layers, slower = layer_table(results)
    tables = {"few rows layer": print_table(*layers)}
    print()
    tables["few rows"] = print_table(*product_table(results))
    if arguments.write:
        for name, table in tables.items():
            write_between_markers(arguments.write, name, table)
    if slower:
        sys.exit("the planned form is slower than XLA's all-reduce: " + "; ".join(slower))


if __name__ == "__main__":
    main()
