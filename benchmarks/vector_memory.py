"""How much vector memory libtpu gives one kernel, by chip: by default, and at most. No TPU is
needed.

    python benchmarks/vector_memory.py [--write docs/tpu.md]

A kernel with one buffer of whole MiB is compiled again and again, until the largest that libtpu
accepts is found. It does not check `vmem_limit_bytes` itself, only what the kernel uses.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import PartitionSpec as P

from benchmarks.async_starts import versions
from benchmarks.programs import array
from benchmarks.table import command_line, print_table, write_between_markers
from flaxasync import check
from flaxasync.hardware import CHIPS, MIB

TOPOLOGIES = {"v5e": "v5e:1x1", "v6e": "v6e:1x1", "v5p": "v5p:1x1x1", "tpu7x": "tpu7x:1x1x1"}
MOST = 256  # MiB; more than any of these chips has
FLAG = {"xla_tpu_scoped_vmem_limit_kib": str(MOST * 1024)}


def accepts(
    chip: str, buffer: int, limit: int | None = None, flags: Mapping[str, str] | None = None
) -> bool:
    """Says whether libtpu compiles a kernel with a buffer of so many MiB, under a
    `vmem_limit_bytes` of `limit` MiB.
    """

    def kernel(x_ref: jax.Array, y_ref: jax.Array, buffer_ref: jax.Array) -> None:
        pltpu.sync_copy(x_ref, buffer_ref.at[pl.ds(0, x_ref.shape[0])])
        pltpu.sync_copy(buffer_ref.at[pl.ds(0, x_ref.shape[0])], y_ref)

    def through(x: jax.Array) -> jax.Array:
        return pl.pallas_call(
            kernel,
            out_shape=x,
            in_specs=[pl.BlockSpec(memory_space=pltpu.HBM)],
            out_specs=pl.BlockSpec(memory_space=pltpu.HBM),
            scratch_shapes=[pltpu.VMEM((buffer * MIB // (128 * 4), 128), jnp.float32)],
            compiler_params=pltpu.CompilerParams(
                vmem_limit_bytes=None if limit is None else limit * MIB
            ),
        )(x)

    mesh = check.topology_mesh(TOPOLOGIES[chip], (check.topology_size(TOPOLOGIES[chip]),), ("x",))
    fn = jax.jit(jax.shard_map(through, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False))
    try:
        check.compile_for(
            TOPOLOGIES[chip],
            fn,
            array((8, 128), mesh, P(), jnp.float32),
            compiler_options=dict(flags or {}),
        )
    except RuntimeError as error:
        if "RESOURCE_EXHAUSTED" in str(error):
            return False
        raise
    return True


def largest(chip: str, limit: int | None = None, flags: Mapping[str, str] | None = None) -> int:
    """Returns the MiB of the largest buffer that libtpu accepts."""
    fits = 0
    too_large = MOST
    while too_large - fits > 1:
        middle = (fits + too_large) // 2
        fits, too_large = (
            (middle, too_large) if accepts(chip, middle, limit, flags) else (fits, middle)
        )
    return fits


def row(chip: str) -> list[str]:
    found = (
        CHIPS[chip].vmem_bytes // MIB,
        largest(chip),
        largest(chip, flags=FLAG),
        largest(chip, limit=MOST),
    )
    return [chip, *map(str, found)]


def main() -> None:
    chosen = command_line(__doc__).parse_args()
    header = [
        "chip",
        "`pltpu.get_tpu_info`, MiB",
        "by default",
        "with the flag",
        "with `vmem_limit_bytes`",
    ]
    table = print_table(header, [row(chip) for chip in TOPOLOGIES])
    write_between_markers(chosen.write, "vector memory", f"Made with {versions()}.\n\n{table}")


if __name__ == "__main__":
    main()
