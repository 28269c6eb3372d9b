"""The chips that the package knows: what one device of each can do, by its data sheet.

A device is what JAX shows as one device: a whole v5e, v6e or v5p chip, and one of the two cores of
a tpu7x chip.

Sources. Peak rates, HBM bandwidths and ICI bandwidths are those of Google Cloud's pages on TPU v5e,
v5p, v6e and TPU7x; the figures of a tpu7x chip are halved for one core. A link carries one
direction of one port. The bidirectional ICI bandwidth of a chip, divided by its ports and by two
directions, gives 50 GB/s (v5e) and 100 GB/s (others). Nine tenths of that arrive: 45 and 90 GB/s in
the table of Austin et al., "How to Scale Your Model" (2025, chapter 2). The v5e study in
docs/player.md agrees with 45 GB/s. Clocks are the `cycles_per_microsecond` that libtpu 0.0.51
writes into its schedules, and HBM sizes are those that it leaves to programs. The sizes of vector
memory are those of `jax.experimental.pallas.tpu.get_tpu_info`. Peak rates of 8-bit products are
those of the same pages of Google Cloud: of int8 on v5e, v5p and v6e, and of fp8 on TPU7x. The pages
name none of the other type, and none is assumed.
"""

import dataclasses
from collections.abc import Sequence

MIB = 2**20
GIB = 2**30
CUBE = 4  # the side of the cubes of chips that optical switches join on v5p and tpu7x


@dataclasses.dataclass(frozen=True)
class Chip:
    """One device of a kind of chip.

    Attributes:
      name: The short name, such as "v5e".
      clock: The clock of the compiler's estimates, in cycles per second.
      flops: The peak rate of bfloat16 products, in FLOP per second.
      hbm_bytes: The HBM that programs can use, in bytes.
      hbm_bandwidth: The peak bandwidth of HBM, in bytes per second.
      link_bandwidth: The bandwidth of one ICI link in one direction, in bytes per second.
      wraps_at: A dimension of the chip network closes into a ring if its chips are a multiple of
        this number; where it is `CUBE`, only if those of every dimension are.
      vmem_bytes: The vector memory of one core, in bytes.
      hop_latency: The latency of one hop, in seconds, from the same table as the link bandwidth. It
        matters only to small transfers.
      hbm_efficiency: The share of `hbm_bandwidth` that a copy reaches. On v5e a copy of 128 MiB,
        which reads and writes them, was measured at 0.41 ms in the study of docs/player.md; the
        other chips are assumed to reach the same share.
      memory_latency: The seconds from the last byte of a transfer within the device until its
        semaphore rises, from the 128-row blocks of JAX's matmul tutorial on v5e; assumed for the
        other chips.
      vmem_bytes_per_cycle: The rate of a copy within vector memory, in bytes per cycle, counted in
        the final bundles of such a copy on v5e.
      vmem_relayout_bytes_per_cycle: The same for a copy that changes the layout, as simulated
        copies of 4 MiB of bfloat16 take on v5e (241) and v6e (235).
      host_bandwidth: The rate of PCIe for one device in each direction, in bytes per second, from
        the same table as the link bandwidth; None where none is known. That of v6e is 16 lanes of
        PCIe Gen5: with the 32 GB/s of the table a published step that offloads (docs/scaling.md)
        would take 21 % longer than was measured.
      int8: The peak rate of int8 products, in operations per second; None where the pages name
        none.
      fp8: The peak rate of products of 8-bit floats, in FLOP per second; None where the pages name
        none.
      cores: The cores of a device. Its rates are those of all of them together; the vector memory
        is that of one. XLA divides its products among them, but a Pallas kernel runs on one of them
        unless a dimension of its grid is parallel: on v5p the simulated bundles of core 0 hold half
        of XLA's product, and all of a fused kernel's.
      matrix_unit: The side of a matrix unit, in elements.
    """

    name: str
    clock: float
    flops: float
    hbm_bytes: float
    hbm_bandwidth: float
    link_bandwidth: float
    wraps_at: int
    vmem_bytes: int
    hop_latency: float = 1e-6
    hbm_efficiency: float = 0.801
    memory_latency: float = 0.45e-6
    vmem_bytes_per_cycle: float = 2500
    vmem_relayout_bytes_per_cycle: float = 240
    host_bandwidth: float | None = None
    int8: float | None = None
    fp8: float | None = None
    cores: int = 1
    matrix_unit: int = 128

    def rate(self, kind: str | None) -> float | None:
        """Returns the peak rate of products of a type, "int8" or "fp8"; of bfloat16 products for
        None.
        """
        rates = {None: self.flops, "int8": self.int8, "fp8": self.fp8}
        return rates[kind]

    def wraps(self, sizes: Sequence[int]) -> tuple[bool, ...]:
        """Says which dimensions of a whole slice close into rings.

        On v5e and v6e only the dimension of a full pod does. On v5p and tpu7x every dimension of a
        slice of whole 4x4x4 cubes does, and none of a smaller slice: the optical switches that
        close the rings join cubes.

        Args:
          sizes: The number of chips along each dimension of the slice.
        """
        by_dimension = tuple(size % self.wraps_at == 0 for size in sizes)
        if self.wraps_at == CUBE:
            return (all(by_dimension),) * len(sizes)
        return by_dimension


CHIPS = {
    chip.name: chip
    for chip in (
        Chip(
            "v5e",
            1.5e9,
            197e12,
            15.75 * GIB,
            819e9,
            45e9,
            16,
            128 * MIB,
            host_bandwidth=15e9,
            int8=394e12,
        ),
        Chip(
            "v6e",
            1.75e9,
            918e12,
            31.24 * GIB,
            1638e9,
            90e9,
            16,
            128 * MIB,
            host_bandwidth=63e9,
            int8=1836e12,
            matrix_unit=256,
        ),
        Chip(
            "v5p",
            1.75e9,
            459e12,
            95.73 * GIB,
            2765e9,
            90e9,
            CUBE,
            64 * MIB,
            host_bandwidth=15e9,
            int8=918e12,
            cores=2,
        ),
        Chip(
            "tpu7x",
            1.9e9,
            1153.5e12,
            94.74 * GIB,
            3690e9,
            90e9,
            CUBE,
            64 * MIB,
            fp8=2307e12,
            matrix_unit=256,
        ),
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
    """Returns the chip of a name such as "v5e", or of a topology such as "v5e:2x4".

    Raises:
      ValueError: The table has no such chip. The message lists those that it has.
    """
    found = CHIPS.get(str(name).partition(":")[0])
    if found is None:
        raise ValueError(f"chip must be one of {', '.join(CHIPS)}: got {name!r}")
    return found


def chip_of_device(kind: str | None) -> Chip | None:
    """Returns the chip of a JAX device kind such as "TPU v5 lite", or None if the table has no such
    chip.
    """
    return CHIPS.get(_KINDS.get(kind or "", ""))


def describe_unknown(kind: str) -> str:
    """Says which figures of a TPU that the table lacks are unknown, and what works nevertheless."""
    return (
        f"{kind!r} is not in the table of chips, which has {', '.join(CHIPS)}: its peak rate, the "
        "sizes and bandwidths of its memories, the bandwidth of its links and where they wrap are "
        "unknown. Nothing is predicted for it, calls without a backend take plain XLA, kernels "
        "take tiles that fit into the vector memory of a known chip, and make_mesh takes its "
        "network for a grid that does not wrap"
    )
