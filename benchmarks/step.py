"""One decoder layer of a preset, forward and with all gradients, on eight TPUs: predicted without a
TPU.

    python benchmarks/step.py --programs DIR --write docs/kernels/layers.md     all layers on all topologies (hours)
    python benchmarks/step.py --programs DIR --only v6e                         the layers on some chips

docs/kernels/layers.md says what is computed. "flaxasync" is the layer of models/transformer.py,
whose ops choose their backends. "automatic" is the same layer of nnx.Linear, whose collective
operations XLA chooses. All of them use the attention kernel of `flaxasync.attention`.
benchmarks/whole_step.py has the whole step of llama_8b.

A * marks a program that had to be compiled with synchronous collectives. "Of peak" compares with
all matmuls at the peak of the data sheet: the causal half of attention alone, and gradients as
twice the forward pass. A play takes minutes; DIR keeps it, so that none is repeated.
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
from benchmarks.programs import (
    array,
    kept,
    lowered,
    play_or_synchronize,
    split_layer,
    with_gradients,
)
from benchmarks.table import write_rows
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
CASES = list(itertools.product(PRESETS, TOPOLOGIES, VARIANTS))
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
    """What a layer is predicted to take on its slowest device; times are in seconds."""

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
    both = with_gradients(lambda state, x: nnx.merge(graph, state)(x))
    state_shardings = jax.tree.map(lambda value: value.sharding, state)
    shardings = (x.sharding, state_shardings, x.sharding)
    return jax.jit(both, out_shardings=shardings), (state, x, x)


def played(preset: str, variant: str, topology: str, folder: pathlib.Path) -> Played:
    """Simulates a layer, or reads from the folder what it took when it was simulated before."""
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

        facts = topology, str(mesh.devices.tolist()), lowered(fn, *arguments)
        return Played(**kept(folder, facts, simulate))


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.{2 if seconds >= 1e-3 else 4}f}"


def row(case: tuple[str, str, str], folder: pathlib.Path) -> tuple[str, ...]:
    preset, topology, variant = case
    found = played(preset, variant, topology, folder)
    peak = peak_seconds(architecture(preset, variant), BATCH, SEQUENCE, topology)
    error = f"{found.estimated / found.seconds - 1:+.1%}"
    share = f"{peak / found.seconds:.1%}"
    times = map(milliseconds, (found.matrix_busy, found.exposed))
    return (
        *case,
        milliseconds(found.seconds) + found.mark,
        error,
        share,
        *times,
        f"{found.temporaries / 2**20:.0f}",
    )


if __name__ == "__main__":
    write_rows(__doc__, "step", HEADER, CASES, row)
