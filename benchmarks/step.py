"""One decoder layer of a preset, forward and with all gradients, on eight TPUs: predicted without a
TPU.

    python benchmarks/step.py --cache DIR                           all layers on all topologies (hours)
    python benchmarks/step.py --cache DIR --write docs/kernels/layers.md   also writes the table of that file
    python benchmarks/step.py --presets llama_8b --topologies v6e:2x4 --variants flaxasync

docs/kernels/layers.md says what is computed. "flaxasync" is the layer of models/transformer.py,
whose ops choose their backends. "automatic" is the same layer of nnx.Linear, whose collective
operations XLA chooses. All of them use the attention kernel of `flaxasync.attention`.
benchmarks/whole_step.py has the whole step of llama_8b.

A * marks a program that had to be compiled with synchronous collectives. "Of peak" compares with
all matmuls at the peak of the data sheet: the causal half of attention alone, and gradients as
twice the forward pass. A play takes minutes; with --cache none is repeated.
"""

import dataclasses
import itertools
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

import flaxasync as fa
from benchmarks.plain_transformer import Layout, PlainLayer
from benchmarks.programs import array, kept, play_or_synchronize, split_layer
from benchmarks.table import command_line, print_table, write_between_markers
from configs.llama_8b import llama_8b
from configs.llama_70b import llama_70b
from flaxasync import check, hardware
from flaxasync.check import topology_devices, topology_size
from models.config import TransformerConfig
from models.layer import DecoderLayer
from train.config import Config

TOPOLOGIES = ("v5e:2x4", "v6e:2x4", "v5p:2x2x2")
PRESETS: dict[str, Callable[[], Config]] = {"llama_8b": llama_8b, "llama_70b": llama_70b}
# sequences, and tokens of each
BATCH = 4
SEQUENCE = 4096
KEPT = "flaxasync, gathered x kept"
OURS = ("flaxasync", KEPT)
VARIANTS = (*OURS, "automatic")
HEADER = (
    "layer",
    "topology",
    "program",
    "predicted ms",
    "estimate",
    "of peak",
    "matrix units busy ms",
    "exposed ms",
    "temporaries MiB",
)


@dataclasses.dataclass(frozen=True)
class Played:
    """What one variant of the layer is predicted to take on a topology, on its slowest device;
    times are in seconds.
    """

    preset: str
    topology: str
    variant: str
    seconds: float
    estimated: float  # the estimate of `fa.check.timeline` with kernels="play"
    matrix_busy: float  # time in which the matrix units multiply
    exposed: float  # time of waiting for other devices
    temporaries: int  # bytes of a device beside arguments and results
    mark: str  # "*" if the program had to be compiled with synchronous collectives


def architecture(preset: str, variant: str) -> TransformerConfig:
    """Returns the architecture of a preset, with everything in bfloat16 and without
    rematerialization.
    """
    model = PRESETS[preset]().model
    mib = 128 if variant == KEPT else 0
    return dataclasses.replace(
        model, dtype="bfloat16", param_dtype="bfloat16", remat="none", gathered_mib=mib
    )


def peak_seconds(config: TransformerConfig, batch: int, sequence: int, topology: str) -> float:
    """Returns the time of all matmuls of a layer at the peak of the data sheet, with the causal
    half of attention.
    """
    rows = batch * sequence
    heads = config.heads
    dim = config.head_features
    kernels = (
        config.width * dim * (2 * heads + 2 * config.kv_heads) + 3 * config.width * config.mlp_width
    )
    forward = 2 * rows * kernels + 2 * 2 * batch * heads * dim * sequence**2 / 2
    return 3 * forward / topology_size(topology) / hardware.chip(topology).flops


def make_layer(variant: str, config: TransformerConfig, rngs: nnx.Rngs) -> nnx.Module:
    if variant in OURS:
        return DecoderLayer(config, rngs=rngs)
    return PlainLayer(config, layout=Layout(flash=True), rngs=rngs)


def mesh_of(devices: Sequence[Any], variant: str, config: TransformerConfig) -> Mesh:
    """Makes a mesh of one ring, or of as many as leave each device a key-value head, with the
    variant's axis types.
    """
    kind = AxisType.Explicit if variant in OURS else AxisType.Auto
    size = min(len(devices), config.kv_heads)
    shape = (len(devices) // size, size)
    return fa.make_mesh(shape, ("data", "model"), devices=devices, axis_types=(kind, kind))


def program(
    variant: str, config: TransformerConfig, batch: int, sequence: int, mesh: Mesh
) -> tuple[Any, tuple]:
    shape = jax.ShapeDtypeStruct((batch, sequence, config.width), jnp.dtype(config.dtype))
    return layer_program(lambda: make_layer(variant, config, nnx.Rngs(0)), shape, mesh)


def layer_program(
    make: Callable[[], nnx.Module], shape: jax.ShapeDtypeStruct, mesh: Mesh
) -> tuple[Any, tuple]:
    """Makes the jitted forward and backward pass of a layer; must be called under
    `jax.set_mesh(mesh)`.

    The mesh has the axes "data" and "model"; x and y have this shape, [batch, rows, features],
    sharded by rows over "model". The function takes the parameters, x and dy, which are returned
    beside it without values. It returns y, the gradients of the parameters, and dx.
    """
    graph, state = split_layer(make, mesh)
    x = array(shape.shape, mesh, P("data", "model", None), shape.dtype)

    def forward_and_backward(
        state: Any, x: jax.Array, dy: jax.Array
    ) -> tuple[jax.Array, Any, jax.Array]:
        y, backward = jax.vjp(lambda state, x: nnx.merge(graph, state)(x), state, x)
        return y, *backward(dy)

    state_shardings = jax.tree.map(lambda value: value.sharding, state)
    return jax.jit(forward_and_backward, out_shardings=(x.sharding, state_shardings, x.sharding)), (
        state,
        x,
        x,
    )


def played(preset: str, variant: str, topology: str, cache: pathlib.Path | None = None) -> Played:
    """Simulates a layer, or reads from the folder `cache` what it took when it was simulated
    before.
    """
    config = architecture(preset, variant)
    mesh = mesh_of(topology_devices(topology), variant, config)
    with jax.set_mesh(mesh):
        fn, arguments = program(variant, config, BATCH, SEQUENCE, mesh)

        def simulate() -> dict[str, Any]:
            result, compiled, mark = play_or_synchronize(topology, fn, *arguments)
            slowest = result.slowest
            return {
                "seconds": result.seconds,
                "estimated": check.timeline(compiled, kernels="play").seconds,
                "matrix_busy": slowest.matrix_busy,
                "exposed": result.exposed,
                "temporaries": compiled.bytes_by_kind["temporaries"],
                "mark": mark,
            }

        facts = topology, str(mesh.devices.tolist()), fn.lower(*arguments).as_text()
        return Played(preset, topology, variant, **kept(cache, facts, simulate))


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.{2 if seconds >= 1e-3 else 4}f}"


def row(found: Played, peak: float) -> tuple[str, ...]:
    error = f"{found.estimated / found.seconds - 1:+.1%}"
    share = f"{peak / found.seconds:.1%}"
    played = milliseconds(found.seconds) + found.mark
    times = map(milliseconds, (found.matrix_busy, found.exposed))
    return (
        found.preset,
        found.topology,
        found.variant,
        played,
        error,
        share,
        *times,
        f"{found.temporaries / 2**20:.0f}",
    )


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--presets", nargs="+", choices=PRESETS, default=list(PRESETS))
    parser.add_argument(
        "--topologies", nargs="+", default=list(TOPOLOGIES), metavar="NAME", help="as v5e:2x4"
    )
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument(
        "--cache", type=pathlib.Path, metavar="DIR", help="folder of programs that were played"
    )
    chosen = parser.parse_args()
    rows = []
    for preset, topology in itertools.product(chosen.presets, chosen.topologies):
        peak = peak_seconds(architecture(preset, "flaxasync"), BATCH, SEQUENCE, topology)
        for variant in chosen.variants:
            found = played(preset, variant, topology, chosen.cache)
            rows.append(row(found, peak))
            print(*rows[-1], flush=True)
    write_between_markers(chosen.write, "step", print_table(HEADER, rows))


if __name__ == "__main__":
    main()
