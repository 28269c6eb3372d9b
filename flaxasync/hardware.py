"""The chips that estimates are made for: what one device of each can do.

A device is what JAX shows as one: a v5e, v6e or v5p chip, and half a tpu7x chip. Sources: peak rates, HBM and chip
ICI bandwidths are Google Cloud's TPU pages ("TPU v5e", "TPU v5p", "TPU v6e", "TPU7x"; tpu7x halved per core). A link
carries one direction of one port: the chip's bidirectional ICI bandwidth over its ports and both directions gives 50
and 100 GB/s, of which nine tenths arrive: 45 and 90 GB/s in the table of "How to Scale Your Model" (Austin et al.,
2025, chapter 2), and the 2x2 v5e study in docs/check.md agrees for v5e. Clocks are the cycles_per_microsecond that
libtpu 0.0.51 writes into its schedules; HBM sizes are those that it leaves to programs. Sizes of vector memory are
those of `jax.experimental.pallas.tpu.get_tpu_info`.
"""

import dataclasses

MIB, GIB = 2**20, 2**30


@dataclasses.dataclass(frozen=True)
class Chip:
    name: str
    clock: float  # cycles/s of the compiler's estimates
    flops: float  # peak bf16 FLOP/s
    hbm_bytes: float  # that programs can have
    hbm_bandwidth: float  # bytes/s
    link_bandwidth: float  # bytes/s of one ICI link in one direction
    torus_dimensions: int
    vmem_bytes: int  # vector memory of one core
    hop_latency: float = 1e-6  # s, from the same table; it matters to small transfers only
    hbm_efficiency: float = (
        0.81  # share that a copy reaches: 128 MiB in 0.41 ms, measured on v5e, assumed of the others
    )
    vmem_bytes_per_cycle: float = 2500  # of a copy within vector memory, counted in its final bundles on v5e


CHIPS = {
    chip.name: chip
    for chip in (
        Chip("v5e", 1.5e9, 197e12, 15.75 * GIB, 819e9, 45e9, 2, 128 * MIB),
        Chip("v6e", 1.75e9, 918e12, 31.24 * GIB, 1638e9, 90e9, 2, 128 * MIB),
        Chip("v5p", 1.75e9, 459e12, 95.73 * GIB, 2765e9, 90e9, 3, 64 * MIB),
        Chip("tpu7x", 1.9e9, 1153.5e12, 94.74 * GIB, 3690e9, 90e9, 3, 64 * MIB),
    )
}


_KINDS = {
    "TPU v5 lite": "v5e",
    "TPU v5e": "v5e",
    "TPU v5": "v5p",
    "TPU v5p": "v5p",
    "TPU v6 lite": "v6e",
    "TPU v6e": "v6e",
    "TPU7x": "tpu7x",
    "TPU v7x": "tpu7x",
}


def chip(name: str) -> Chip:
    """Returns a chip by name ("v5e") or by the name of one of its topologies ("v5e:2x4")."""
    found = CHIPS.get(str(name).partition(":")[0])
    if found is None:
        raise ValueError(f"chip must be one of {', '.join(CHIPS)}: got {name!r}")
    return found


def chip_of_device(kind: str | None) -> Chip | None:
    """Returns the chip of a JAX device kind ("TPU v5 lite"); None for one that the table lacks."""
    return CHIPS.get(_KINDS.get(kind or "", ""))
