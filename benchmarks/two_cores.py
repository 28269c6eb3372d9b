"""What the second core of a v5p is worth to the fused kernels, in the layers of an 8B decoder.

    python benchmarks/two_cores.py --programs DIR [--write docs/kernels.md]     half an hour, no TPU

A program is one layer, forward and with all gradients, in bfloat16 on v5p:2x2x2, with four sequences
of 4096 tokens: the MLP, or the whole decoder layer. Every op has the backend "fused", with its
kernels on one core or on both, or "xla", the ring of XLA's permutes. Nothing here ran on a TPU: every
time is a prediction. XLA sums gradients over the data axis by a collective that nothing hides, and
that is the same in all programs. "Sums beside" is the decoder layer under
`fa.nn.scan_with_prefetch`, which sends these sums beside the backward pass. DIR keeps each play, so
that no program is played twice.
"""

import contextlib
import dataclasses
import itertools
import pathlib
from collections.abc import Callable, Iterator
from unittest import mock

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AxisType

import flaxasync as fa
from benchmarks.programs import kept, lowered, play_program
from benchmarks.step import BATCH, SEQUENCE, architecture, layer_program
from benchmarks.table import write_rows
from flaxasync.check import topology_mesh
from flaxasync.kernels import flash_attention
from flaxasync.kernels.engine import cores
from flaxasync.kernels.engine.vector_memory import chip_in_use
from models.layer import DecoderLayer

TOPOLOGY = "v5p:2x2x2"
MLP = "MLP"
BESIDE = "decoder layer, sums beside"
MESHES = ((2, 4), (1, 8))  # data x model
CASES = [*itertools.product((MLP, "decoder layer"), MESHES), (BESIDE, (2, 4))]
HEADER = (
    "layer",
    "data x model",
    "one core ms",
    "both cores ms",
    "times as fast",
    "XLA's ring ms",
    "of each: all-reduces ms",
)


@contextlib.contextmanager
def one_core() -> Iterator[None]:
    """The collective kernels are traced for core 0 alone, and attention shares out no
    heads.
    """

    def one(chip: fa.check.Chip, length: int, tile: int = 1) -> int:
        return 1

    def chip_of_one_core() -> fa.check.Chip:
        return dataclasses.replace(chip_in_use(), cores=1)

    with (
        mock.patch.object(cores, "best_cores", one),
        mock.patch.object(flash_attention, "chip_in_use", chip_of_one_core),
    ):
        yield


class SummedBeside(nnx.Module):
    """A stack of one layer, whose gradients are summed over data beside its backward pass."""

    def __init__(self, make: Callable[[nnx.Rngs], nnx.Module], rngs: nnx.Rngs):
        stack = nnx.vmap(make, in_axes=0, out_axes=0, transform_metadata={nnx.PARTITION_NAME: None})
        self.layers = nnx.split_rngs(splits=1)(stack)(rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return fa.nn.scan_with_prefetch(
            lambda layer, x: layer(x),
            self.layers,
            x,
            fsdp_axis=None,
            dtype=jnp.bfloat16,
            policy=fa.save_costly,
        )


def make_layer(layer: str, backend: str) -> nnx.Module:
    config = architecture("llama_8b", "flaxasync")

    def decoder_layer(rngs: nnx.Rngs) -> nnx.Module:
        return DecoderLayer(config, backend=backend, rngs=rngs)

    if layer == BESIDE:
        return SummedBeside(decoder_layer, nnx.Rngs(0))
    if layer != MLP:
        return decoder_layer(nnx.Rngs(0))
    return fa.nn.ParallelMLP(
        config.width,
        config.mlp_width,
        backend=backend,
        dtype=jnp.bfloat16,
        param_dtype=jnp.bfloat16,
        rngs=nnx.Rngs(0),
    )


def played(
    layer: str, mesh_shape: tuple[int, int], backend: str, folder: pathlib.Path
) -> tuple[float, float]:
    """Returns the milliseconds of a program, and those of its all-reduces, which nothing hides."""
    kinds = (AxisType.Explicit,) * 2
    mesh = topology_mesh(TOPOLOGY, mesh_shape, ("data", "model"), axis_types=kinds)
    shape = jax.ShapeDtypeStruct((BATCH, SEQUENCE, 4096), jnp.bfloat16)
    with jax.set_mesh(mesh):
        fn, arguments = layer_program(lambda: make_layer(layer, backend), shape, mesh)

        def simulate() -> list[float]:
            result, _ = play_program(TOPOLOGY, fn, *arguments)
            sums = [p.seconds for p in result.slowest.phases if p.name.startswith("all-reduce")]
            return [1e3 * result.seconds, 1e3 * sum(sums)]

        facts = str(mesh.devices.tolist()), lowered(fn, *arguments)
        total, sums = kept(folder, facts, simulate)
    return total, sums


def row(case: tuple[str, tuple[int, int]], folder: pathlib.Path) -> tuple[str, ...]:
    layer, mesh = case
    with one_core():
        alone, _ = played(layer, mesh, "fused", folder)
    jax.clear_caches()  # the traces of kernels, too
    both, sums = played(layer, mesh, "fused", folder)
    ring, _ = played(layer, mesh, "xla", folder)
    times = (f"{alone:.2f}", f"{both:.2f}", f"{alone / both:.2f}", f"{ring:.2f}", f"{sums:.2f}")
    return (layer, f"{mesh[0]} x {mesh[1]}", *times)


if __name__ == "__main__":
    write_rows(__doc__, "two cores", HEADER, CASES, row)
