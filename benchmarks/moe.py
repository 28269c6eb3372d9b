"""A mixture of experts, forward and backward, on eight chips, predicted without a TPU.

"xla" is the ring, "none" the gathered form with the same kernels, "exchange" rows that travel to
where they are needed, in blocks for 1.25 times the mean. "einsum" is what plain JAX is written as:
a capacity of 1.25 times the mean, rows moved by one-hot products and two `all_to_all`, and nothing
computed again. "ragged" sorts rows by expert, moves them with two `ragged_all_to_all` and
multiplies them with our kernels, which compute as much again as in the other forms.

    python benchmarks/moe.py --programs DIR --write docs/moe.md       a ring takes minutes to compile
    python benchmarks/moe.py --programs DIR --only v5e                rows of some chips, models or backends

Each device has 4096 rows, which are spread evenly over the experts: as many rows for each as its
capacity. Group sizes are constants of these programs, and the kernels that read them are simulated
with these. "peak" is the time of the nine products of each row's experts at the chip's rate; the
backward pass computes two of them again. DIR keeps what was compiled.
"""

import collections
import contextlib
import dataclasses
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import PartitionSpec as P

import flaxasync as fa
from benchmarks.programs import array, compile_once
from benchmarks.table import write_rows
from flaxasync import check
from flaxasync.kernels import grouped_weight_gradient
from flaxasync.kernels.grouped_blocks import Blocks
from flaxasync.ops.experts.assignments import Tiles, TilesOf
from flaxasync.ops.trust import trusting

DEVICES = 8
ROWS = 4096
HEADER = ("model", "chips", "backend", "ms", "exposed", "of peak", "temporaries, GiB")
# by the shape of a table, all tables that kernels read
type Tables = dict[tuple[int, ...], list[list[int]]]


@dataclasses.dataclass(frozen=True)
class Layer:
    """The experts of a layer."""

    name: str
    features: int
    experts: int
    per_row: int
    hidden: int


LAYERS = Layer("Mixtral 8x7B", 4096, 8, 2, 14_336), Layer("Qwen3-30B-A3B", 2048, 128, 8, 768)
CASES = [
    (layer, topology, backend)
    for layer in LAYERS
    for topology in ("v5e:2x4", "v6e:2x4", "v5p:2x2x2")
    for backend in ("einsum", "ragged", "none", "xla", "exchange")
]


def einsum(x: Array, ids: Array, weights: Array, gate: Array, up: Array, down: Array) -> Array:
    """Applies the experts within a capacity, as GShard does."""
    e = up.shape[0] * DEVICES
    capacity = 5 * ids.size // (4 * up.shape[0] * DEVICES)
    chosen = jax.nn.one_hot(ids, e, dtype=jnp.int32)  # [n, k, E]
    place = (jnp.cumsum(chosen.reshape(-1, e), axis=0) - 1).reshape(chosen.shape)
    # [n, k, E, C]
    slots = jax.nn.one_hot(jnp.where(chosen == 1, place, capacity), capacity, dtype=x.dtype)
    dispatch = jnp.sum(slots, axis=1)
    combine = jnp.einsum("nkec,nk->nec", slots, weights.astype(x.dtype))
    # [e, R * C, D]
    rows = jax.lax.all_to_all(jnp.einsum("nec,nd->ecd", dispatch, x), "model", 0, 1, tiled=True)
    h = jax.nn.silu(jnp.einsum("ecd,edf->ecf", rows, gate)) * jnp.einsum("ecd,edf->ecf", rows, up)
    out = jax.lax.all_to_all(jnp.einsum("ecf,efd->ecd", h, down), "model", 1, 0, tiled=True)
    return jnp.einsum("nec,ecd->nd", combine, out)


def ragged(x: Array, ids: Array, weights: Array, gate: Array, up: Array, down: Array) -> Array:
    """Applies the experts to rows that are sorted by expert and travel in one operation, with room
    for 1.25 of them.
    """
    n, k = ids.shape
    local = up.shape[0]
    me = jax.lax.axis_index("model")
    order = jnp.argsort(ids.reshape(-1))
    of_expert = jnp.bincount(ids.reshape(-1), length=local * DEVICES)
    # [R, R, e]: from a device to an expert
    counts = jax.lax.all_gather(of_expert.reshape(DEVICES, local), "model")
    sizes = jnp.sum(counts, axis=2)
    begins = jnp.cumsum(sizes, axis=1) - sizes
    lands = jnp.cumsum(sizes, axis=0) - sizes

    def move(rows: Array, room: int, *where: Array) -> Array:
        zeros = jax.lax.pcast(
            jnp.zeros((room, x.shape[1]), x.dtype), ("model", "one"), to="varying"
        )
        return jax.lax.ragged_all_to_all(rows, zeros, *where, axis_name="model")

    rows = move(x[order // k], 5 * n * k // 4, begins[me], sizes[me], lands[me], sizes[:, me])
    senders = jnp.tile(jnp.arange(local, dtype=ids.dtype), DEVICES)
    expert = jnp.repeat(senders, counts[:, me].reshape(-1), total_repeat_length=rows.shape[0])[
        :, None
    ]
    out = fa.expert_mlp(
        rows,
        expert,
        jnp.ones(expert.shape, jnp.float32),
        gate,
        up,
        down,
        "one",
        backend="none",
        kernel="grouped",
        capacity=n * k // local,
    )
    back = move(out, n * k, lands[:, me], sizes[:, me], begins[:, me], sizes[me])
    return jnp.einsum(
        "nkd,nk->nd", back[jnp.argsort(order)].reshape(n, k, -1), weights.astype(x.dtype)
    )


PLAIN = {"einsum": einsum, "ragged": ragged}


def compiled(
    layer: Layer, topology: str, backend: str, folder: pathlib.Path
) -> check.CompiledProgram:
    """Compiles the layer with its gradients, once."""
    mesh = fa.make_mesh((DEVICES, 1), ("model", "one"), devices=check.topology_devices(topology))
    split = P(("model", "one"))
    capacity = ROWS * layer.per_row // layer.experts

    def both(
        x: Array, ids: Array, weights: Array, gate: Array, up: Array, down: Array, dy: Array
    ) -> Any:
        def apply(x: Array, weights: Array, gate: Array, up: Array, down: Array) -> Array:
            if backend in PLAIN:
                return PLAIN[backend](x, ids, weights, gate, up, down)
            # the buffers that travel are that large
            most = 5 * capacity // 4 if backend == "exchange" else capacity
            options: Any = {"backend": backend, "kernel": "grouped", "capacity": most}
            return fa.expert_mlp(x, ids, weights, gate, up, down, "model", **options)

        y, pull = jax.vjp(apply, x, weights, gate, up, down)
        return y, pull(dy)

    rows = (DEVICES * ROWS, layer.features)
    choices = (DEVICES * ROWS, layer.per_row)
    kernel = layer.experts, layer.features, layer.hidden
    arguments = [
        array(rows, mesh, split),
        array(choices, mesh, split, jnp.int32),
        array(choices, mesh, split, jnp.float32),
        array(kernel, mesh, split),
        array(kernel, mesh, split),
        array((kernel[0], *kernel[:0:-1]), mesh, split),
        array(rows, mesh, split),
    ]
    with jax.set_mesh(mesh), trusting("predicted"):
        fn = jax.jit(jax.shard_map(both, in_specs=split, out_specs=split))
        return compile_once(folder, f"{layer.name} {backend}", topology, fn, *arguments)


@contextlib.contextmanager
def spread_evenly(layer: Layer, backend: str, tables: Tables) -> Iterator[None]:
    """While a layer is traced, each of its experts has equally many rows, and `tables` gets the
    integers that its kernels read.
    """
    local = layer.experts // DEVICES
    take = TilesOf.take

    def balanced_count(tiles: TilesOf) -> int:
        # the rows that a block is of, where it has fewer, or more
        sent = {"exchange": ROWS, "ragged": ROWS * DEVICES}
        of_expert = sent.get(backend, tiles.none // tiles.blocks) * layer.per_row // layer.experts
        return tiles.ends.size * -(-of_expert // tiles.rows.shape[1])

    def balanced_take(tiles: TilesOf, start: int, count: int) -> Tiles:
        of_each = np.arange(count, dtype=np.int32) // (balanced_count(tiles) // local)
        experts: Any = np.minimum(of_each, local - 1)
        return take(tiles, start, count)._replace(experts=experts)

    def noting(make: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*arguments: Any) -> Any:
            found = make(*arguments)
            tables[found.shape].append(found.reshape(-1).tolist())
            return found

        return noted

    with (
        mock.patch.object(TilesOf, "count", property(balanced_count)),
        mock.patch.object(TilesOf, "take", balanced_take),
        mock.patch.object(Blocks, "table", noting(Blocks.table)),
        mock.patch.object(
            grouped_weight_gradient,
            "order_of_tiles",
            noting(grouped_weight_gradient.order_of_tiles),
        ),
    ):
        yield


def row(case: tuple[Layer, str, str], folder: pathlib.Path) -> tuple[str, ...]:
    """Compiles a layer with rows that are spread evenly, and simulates its kernels with these."""
    layer, topology, backend = case
    tables: Tables = collections.defaultdict(list)
    with spread_evenly(layer, backend, tables):
        program = compiled(layer, topology, backend, folder)

    def integers(kernel: str, shape: tuple[int, ...]) -> Sequence[int] | None:
        if shape in tables:
            # of kernels with equally many tiles, the least; the last integer counts tiles
            return min(tables[shape], key=lambda values: values[-1])
        return np.random.default_rng(0).integers(0, ROWS, shape).reshape(-1).tolist()

    timeline = check.timeline(program, kernels="play", integers=integers)
    print(*timeline.notes, sep="\n")
    peak = (
        18 * ROWS * layer.per_row * layer.features * layer.hidden / check.CHIPS[program.chip].flops
    )
    return (
        layer.name,
        topology,
        backend,
        f"{timeline.seconds * 1e3:.2f}",
        f"{timeline.exposed / timeline.seconds:.1%}",
        f"{peak / timeline.seconds:.0%}",
        f"{program.bytes_by_kind['temporaries'] / 2**30:.2f}",
    )


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    write_rows(__doc__, "experts", HEADER, CASES, row)
