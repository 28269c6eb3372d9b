"""Single tokens through a decoder layer of eight billion parameters: how the sums over eight devices are done.

    python benchmarks/few_rows.py                          prints both tables; twenty minutes on two cores, no TPU
    python benchmarks/few_rows.py --write docs/kernels.md  also puts them between the markers there

The first table is a row-parallel product [rows, 4096] @ [4096, 4096] in bf16 with each backend. The second one is a
layer with width 4096, 32 heads, 8 key-value heads, an MLP of 14336 and a cache of 1024 tokens, to which each sequence
of the batch adds one token. The layer sums twice: after the output projection and after the MLP.

In the player a transfer to another chip takes 1 us however many links it crosses. XLA's all-reduce sends to neighbours
only, but the exchange over up to four links. So the last columns add a latency for each link after the first.

Nothing here ran on a TPU: every time is a simulated one, and v6e is not calibrated (docs/player.md).
"""

import argparse
import concurrent.futures
import dataclasses
import functools
import multiprocessing
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import flaxasync as fa
from benchmarks.table import print_table, write_between_markers
from flaxasync.check import compile_for, topology_mesh
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
BATCHES = (1, 2, 4, 8, 16, 32, 64)
ROWS = (1, 4, 16, 64, 256)
BACKENDS = ("none", "exchange", "xla", "fused")
LINK_LATENCIES = (0.0, 0.25e-6, 0.5e-6)  # seconds
WORKERS = 2


def play_seconds(topology: str, fn: Callable, arguments: Sequence[Any], latencies: Sequence[float]) -> list[float]:
    """Compiles a jitted function once, and returns its simulated seconds with each latency of further links."""
    with tempfile.TemporaryDirectory(prefix="flaxasync-") as folder:
        program = compile_for(topology, fn, *arguments, keep_dumps=folder)
        chip = played_chip(topology)
        return [
            play_dump(
                folder, topology=topology, coords=program.coords, chip=dataclasses.replace(chip, link_latency=latency)
            ).seconds
            for latency in latencies
        ]


def planned(topology: str, batch: int) -> tuple[str, ...]:
    """Returns what `fa.plan` chooses for the two sums of the layer: of the attention and of the MLP."""
    widths = CONFIG.width // DEVICES, CONFIG.mlp_width // DEVICES
    shapes = [((batch, 1, k), (k, CONFIG.width)) for k in widths]
    return tuple(fa.plan("matmul_all_reduce", *pair, chip=topology, ring=DEVICES).backend for pair in shapes)


def play_layer(topology: str, batch: int, backend: str | None) -> list[float]:
    """Returns the simulated seconds of one token of each sequence in a decoder layer, with each of LINK_LATENCIES."""
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
        return play_seconds(topology, jax.jit(decode), (state, x), LINK_LATENCIES)


def play_product(topology: str, rows: int, k: int, backend: str | None) -> float:
    """Returns the simulated seconds of a row-parallel product [rows, k] @ [k, width]."""
    mesh = topology_mesh(topology, (DEVICES,), ("model",))
    specs = P(None, "model"), P("model", None)
    op = functools.partial(fa.matmul_all_reduce, axis_name="model", backend=backend)
    fn = jax.jit(jax.shard_map(op, mesh=mesh, in_specs=specs, out_specs=P()))
    arguments = [
        jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))
        for shape, spec in zip(((rows, k), (k, CONFIG.width)), specs, strict=True)
    ]
    return play_seconds(topology, fn, arguments, (0.0,))[0]


def main() -> None:
    """Prints the tables; writes them if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", metavar="FILE", help="put the tables between the markers of this file")
    chosen = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(WORKERS, mp_context=context) as pool:
        layers = {}
        for batch in BATCHES:
            for topology in TOPOLOGIES:
                layers[topology, batch, "none"] = pool.submit(play_layer, topology, batch, "none")
                if set(planned(topology, batch)) != {"none"}:  # otherwise the program is the same
                    layers[topology, batch, "plan"] = pool.submit(play_layer, topology, batch, None)
        products = {
            (topology, rows, backend): pool.submit(play_product, topology, rows, CONFIG.width, backend)
            for topology in TOPOLOGIES
            for rows in ROWS
            for backend in BACKENDS
        }
        table = []
        for topology in TOPOLOGIES:
            for batch in BATCHES:
                serial = layers[topology, batch, "none"].result()
                taken = layers.get((topology, batch, "plan"), layers[topology, batch, "none"]).result()
                names = " and ".join(dict.fromkeys(planned(topology, batch)))
                times = [f"{one * 1e6:.1f} / {other * 1e6:.1f}" for one, other in zip(taken, serial, strict=True)]
                table.append((topology, str(batch), names, *times))
        header = ("topology", "batch", "planned", "planned / all-reduce, us",
                  *(f"with {seconds * 1e6:g} us a link" for seconds in LINK_LATENCIES[1:]))  # fmt: skip
        layer_table = print_table(header, table)
        print()
        table = []
        for topology in TOPOLOGIES:
            for rows in ROWS:
                shapes = (rows, CONFIG.width // DEVICES), (CONFIG.width // DEVICES, CONFIG.width)
                plan = fa.plan("matmul_all_reduce", *shapes, chip=topology, ring=DEVICES, backward=False)
                times = [  # the exchange is planned only where it is predicted to gain
                    f"{products[topology, rows, backend].result() * 1e6:.1f}"
                    + (f" ({plan.seconds[backend] * 1e6:.1f})" if backend in plan.seconds else "")
                    for backend in BACKENDS
                ]
                table.append((topology, str(rows), *times, plan.backend))
        header = ("topology", "rows", *(f"{backend}: played (planned) us" for backend in BACKENDS), "planned")
        product_table = print_table(header, table)
    if chosen.write:
        write_between_markers(chosen.write, "few rows", product_table)
        write_between_markers(chosen.write, "few rows layer", layer_table)


if __name__ == "__main__":
    main()
