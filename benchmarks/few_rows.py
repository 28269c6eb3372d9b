"""Single tokens through a decoder layer of eight billion parameters: how the sums over eight
devices are done.

    python benchmarks/few_rows.py [--cache DIR] [--write docs/kernels/exchange.md]     DIR keeps each simulation

The layer has width 4096, 32 heads, 8 key-value heads, an MLP of 14336 and a cache of 1024 tokens,
to which each sequence of the batch adds one. It sums twice: after the output projection and after
the MLP. The command fails if the planned form takes longer than XLA's all-reduce.

The last columns add a latency for each link after the first, because in the player a transfer takes
1 us however many links it crosses. Nothing here ran on a TPU: every time is a simulated one.
"""

import dataclasses
import pathlib
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import flaxasync as fa
from benchmarks.programs import array, kept, split_layer
from benchmarks.table import command_line, print_table, write_between_markers
from flaxasync.check import compile_for, topology_mesh
from flaxasync.check.player import play_dump, played_chip
from models.config import TransformerConfig
from models.layer import DecoderLayer

TOPOLOGIES = ("v5e:2x4", "v6e:2x4")
DEVICES = 8
CONFIG = TransformerConfig(
    vocab_size=128_256,
    layers=1,
    width=4096,
    heads=32,
    kv_heads=8,
    mlp_width=14_336,
    dtype="bfloat16",
    param_dtype="bfloat16",
)
CACHE = 1024
BATCHES = (1, 4, 16, 64)
LINK_LATENCIES = (0.0, 0.25e-6, 0.5e-6)  # seconds
type Program = tuple[Any, Sequence[Any]]
"""A jitted function and its abstract arguments."""


def planned(topology: str, batch: int) -> tuple[str, ...]:
    """Returns what `fa.plan` chooses for the two sums of the layer: of the attention and of the
    MLP.
    """
    widths = CONFIG.width // DEVICES, CONFIG.mlp_width // DEVICES
    shapes = [((batch, 1, k), (k, CONFIG.width)) for k in widths]
    return tuple(
        fa.plan("matmul_all_reduce", *pair, chip=topology, ring=DEVICES).backend for pair in shapes
    )


def layer_program(topology: str, batch: int, backend: str | None) -> Program:
    """Returns the program that adds one token to each sequence of a batch, in one decoder layer."""
    mesh = topology_mesh(
        topology, (1, DEVICES), ("data", "model"), axis_types=(AxisType.Explicit,) * 2
    )

    def make() -> nnx.Module:
        layer = DecoderLayer(CONFIG, backend=backend, rngs=nnx.Rngs(0))
        layer.attention.init_cache((batch, CACHE, CONFIG.width), jnp.bfloat16)
        return layer

    with jax.set_mesh(mesh):
        graph, state = split_layer(make, mesh)

    def decode(state: nnx.State, x: jax.Array) -> tuple[jax.Array, nnx.State]:
        layer = nnx.merge(graph, state)
        y = layer(x, decode=True)
        return y, nnx.state(layer, nnx.Cache)

    return jax.jit(decode), (state, array((batch, 1, CONFIG.width), mesh, P(None)))


def played(
    topology: str, program: Program, latencies: Sequence[float], cache: pathlib.Path | None
) -> list[float]:
    """Returns the simulated seconds of a program with each latency of a further link."""
    fn, arguments = program
    mesh = arguments[-1].sharding.mesh

    def simulate() -> list[float]:
        chip = played_chip(topology)
        with tempfile.TemporaryDirectory(prefix="flaxasync-") as folder:
            coords = compile_for(topology, fn, *arguments, keep_dumps=folder).coords
            chips = [dataclasses.replace(chip, link_latency=latency) for latency in latencies]
            return [
                play_dump(folder, topology=topology, coords=coords, chip=one).seconds
                for one in chips
            ]

    with jax.set_mesh(mesh):
        facts = topology, str(mesh.devices.tolist()), fn.lower(*arguments).as_text(), latencies
        return kept(cache, facts, simulate)


def layer_times(topology: str, batch: int, cache: pathlib.Path | None) -> dict[str, list[float]]:
    """Simulates the layer with XLA's all-reduce and as it is planned, which may be the same."""
    serial = played(topology, layer_program(topology, batch, "none"), LINK_LATENCIES, cache)
    taken = serial
    if set(planned(topology, batch)) != {"none"}:
        taken = played(topology, layer_program(topology, batch, None), LINK_LATENCIES, cache)
    return {"planned": taken, "all-reduce": serial}


def layer_row(topology: str, batch: int, times: dict[str, list[float]]) -> tuple[str, ...]:
    names = " and ".join(dict.fromkeys(planned(topology, batch)))
    pairs = zip(times["planned"], times["all-reduce"], strict=True)
    return (
        topology,
        str(batch),
        names,
        *(f"{one * 1e6:.1f} / {two * 1e6:.1f}" for one, two in pairs),
    )


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument(
        "--cache", type=pathlib.Path, metavar="DIR", help="folder of programs that were simulated"
    )
    chosen = parser.parse_args()
    rows = []
    slower = []
    for topology in TOPOLOGIES:
        for batch in BATCHES:
            times = layer_times(topology, batch, chosen.cache)
            rows.append(layer_row(topology, batch, times))
            if times["planned"][0] > times["all-reduce"][0]:
                slower.append(" ".join(rows[-1]))
    latencies = [f"with {seconds * 1e6:g} us a link" for seconds in LINK_LATENCIES[1:]]
    header = ("topology", "batch", "planned", "planned / all-reduce, us", *latencies)
    write_between_markers(chosen.write, "few rows layer", print_table(header, rows))
    if slower:
        sys.exit("the planned form is slower than XLA's all-reduce: " + "; ".join(slower))


if __name__ == "__main__":
    main()
