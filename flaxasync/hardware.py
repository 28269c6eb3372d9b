"""The chips that the package knows: what one device of each can do, by its data sheet.

A device is what JAX shows as one device: a whole v5e, v6e or v5p chip, one of the two cores of a
tpu7x chip, and a whole GPU.

Sources for TPUs. Peak rates, HBM bandwidths and ICI bandwidths are those of Google Cloud's pages on
TPU v5e, v5p, v6e and TPU7x; the figures of a tpu7x chip are halved for one core. A link carries one
direction of one port. The bidirectional ICI bandwidth of a chip, divided by its ports and by two
directions, gives 50 GB/s (v5e) and 100 GB/s (others). Nine tenths of that arrive: 45 and 90 GB/s in
the table of Austin et al., "How to Scale Your Model" (2025, chapter 2). The v5e study in
docs/player.md agrees with 45 GB/s. Clocks are the `cycles_per_microsecond` that libtpu 0.0.51
writes into its schedules, and HBM sizes are those that it leaves to programs. The sizes of vector
memory are those of `jax.experimental.pallas.tpu.get_tpu_info`. Peak rates of 8-bit products are
those of the same pages of Google Cloud: of int8 on v5e, v5p and v6e, and of fp8 on TPU7x. The pages
name none of the other type, and none is assumed.

Sources for GPUs. Peak rates (dense), memory, its bandwidth and NVLink are those of NVIDIA's data
sheets of A100 80GB SXM, H100 SXM, H200 SXM and HGX B200; caches, multiprocessors and clocks those
of its architecture white papers. A network card of 200 Gb/s (A100) or 400 Gb/s (others) belongs to
each GPU of a DGX. The share of the peak that large bfloat16 products reach was measured by Bekman,
"Machine Learning Engineering" (2025, table of achievable matmul FLOPS). An all-gather over eight
H100 was measured at 370 GB/s of the 450 of NVLink (Austin et al., chapter 12).
"""

import dataclasses
import re
from collections.abc import Sequence

KIB = 2**10
MIB = 2**20
GIB = 2**30
CUBE = 4  # the side of the cubes of chips that optical switches join on v5p and tpu7x
DEVICES_PER_CHIP = {"tpu7x": 2}  # one for every other chip
# the flag with which XLA for GPUs puts work beside transfers; see `Gpu.schedules`
SCHEDULER = "xla_gpu_enable_latency_hiding_scheduler"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Accelerator:
    """One device of a kind: what a TPU and a GPU have in common.

    Attributes:
      name: The short name, such as "v5e" or "h100".
      flops: The peak rate of bfloat16 products, in FLOP per second.
      hbm_bytes: The HBM that programs can use, in bytes.
      hbm_bandwidth: The peak bandwidth of HBM, in bytes per second.
      hbm_efficiency: The share of `hbm_bandwidth` that a copy reaches.
      link_bandwidth: The bandwidth in one direction, in bytes per second: of one ICI link, or of
        all NVLinks of a GPU.
      hop_latency: The latency of one hop, in seconds. It matters only to small transfers.
      host_bandwidth: The rate of PCIe for one device in each direction, in bytes per second; None
        where none is known.
      int8: The peak rate of int8 products, in operations per second; None where none is known.
      fp8: The peak rate of products of 8-bit floats, in FLOP per second; None where none is known.
      link_share: The share of `link_bandwidth`, and of a GPU's `network_bandwidth`, that large
        transfers reach.
    """

    name: str
    flops: float
    hbm_bytes: float
    hbm_bandwidth: float
    hbm_efficiency: float
    link_bandwidth: float
    hop_latency: float
    host_bandwidth: float | None = None
    int8: float | None = None
    fp8: float | None = None
    link_share: float = 1.0

    def rate(self, kind: str | None) -> float | None:
        """Returns the peak rate of products of a type, "int8" or "fp8"; of bfloat16 products for
        None.
        """
        rates = {None: self.flops, "int8": self.int8, "fp8": self.fp8}
        return rates[kind]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chip(Accelerator):
    """One device of a kind of TPU.

    On v5e a copy of 128 MiB, which reads and writes them, was measured at 0.41 ms in the study of
    docs/player.md: its `hbm_efficiency`, which the other chips are assumed to reach. The latency of
    a hop is from the same table as the link bandwidth, as is the rate of PCIe, except that of v6e,
    which is 16 lanes of PCIe Gen5: with the 32 GB/s of the table a published step that offloads
    (docs/scaling.md) would take 21 % longer than was measured.

    Attributes:
      clock: The clock of the compiler's estimates, in cycles per second.
      wraps_at: A dimension of the chip network closes into a ring if its chips are a multiple of
        this number; where it is `CUBE`, only if those of every dimension are.
      vmem_bytes: The vector memory of one core, in bytes.
      memory_latency: The seconds from the last byte of a transfer within the device until its
        semaphore rises, from the 128-row blocks of JAX's matmul tutorial on v5e; assumed for the
        other chips.
      vmem_bytes_per_cycle: The rate of a copy within vector memory, in bytes per cycle, counted in
        the final bundles of such a copy on v5e.
      vmem_relayout_bytes_per_cycle: The same for a copy that changes the layout, as simulated
        copies of 4 MiB of bfloat16 take on v5e (241) and v6e (235).
      cores: The cores of a device. Its rates are those of all of them together; the vector memory
        is that of one. XLA divides its products among them, but a Pallas kernel runs on one of them
        unless a dimension of its grid is parallel: on v5p the simulated bundles of core 0 hold half
        of XLA's product, and all of a kernel's without such a grid.
      matrix_unit: The side of a matrix unit, in elements.
    """

    hbm_efficiency: float = 0.801
    hop_latency: float = 1e-6
    clock: float
    wraps_at: int
    vmem_bytes: int
    memory_latency: float = 0.45e-6
    vmem_bytes_per_cycle: float = 2500
    vmem_relayout_bytes_per_cycle: float = 240
    cores: int = 1
    matrix_unit: int = 128

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
            name="v5e",
            clock=1.5e9,
            flops=197e12,
            int8=394e12,
            hbm_bytes=15.75 * GIB,
            hbm_bandwidth=819e9,
            link_bandwidth=45e9,
            host_bandwidth=15e9,
            wraps_at=16,
            vmem_bytes=128 * MIB,
        ),
        Chip(
            name="v6e",
            clock=1.75e9,
            flops=918e12,
            int8=1836e12,
            hbm_bytes=31.24 * GIB,
            hbm_bandwidth=1638e9,
            link_bandwidth=90e9,
            host_bandwidth=63e9,
            wraps_at=16,
            vmem_bytes=128 * MIB,
            matrix_unit=256,
        ),
        Chip(
            name="v5p",
            clock=1.75e9,
            flops=459e12,
            int8=918e12,
            hbm_bytes=95.73 * GIB,
            hbm_bandwidth=2765e9,
            link_bandwidth=90e9,
            host_bandwidth=15e9,
            wraps_at=CUBE,
            vmem_bytes=64 * MIB,
            cores=2,
        ),
        Chip(
            name="tpu7x",
            clock=1.9e9,
            flops=1153.5e12,
            fp8=2307e12,
            hbm_bytes=94.74 * GIB,
            hbm_bandwidth=3690e9,
            link_bandwidth=90e9,
            wraps_at=CUBE,
            vmem_bytes=64 * MIB,
            matrix_unit=256,
        ),
    )
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gpu(Accelerator):
    """One GPU of a host whose GPUs are all connected with each other by NVLink.

    Its memory is what CUDA reports. JAX takes three quarters of it, unless
    XLA_PYTHON_CLIENT_MEM_FRACTION says otherwise. Four figures are assumed: `hbm_efficiency`,
    `attention_share`, `hop_latency`, in which NCCL starts a transfer and both sides meet, and `kernel_latency`.

    Attributes:
      kernel_latency: The seconds from the end of one kernel until the next one has begun.
      kind: What JAX calls the device.
      float32: The peak rate of float32 products that are not rounded to TF32, in FLOP per second.
      float64: The peak rate of float64 products, in FLOP per second.
      product_share: The share of `flops` that large products reach.
      attention_share: Of the rate that products reach, the share that attention by cuDNN reaches.
      network_bandwidth: The bandwidth to other hosts, in bytes per second and direction.
      multiprocessors: How many there are.
      clock: The highest clock of a multiprocessor, in cycles per second.
      l2_bytes: The cache that all multiprocessors share, in bytes.
      shared_bytes: The shared memory of a multiprocessor, in bytes.
      shared_bytes_of_block: The most of it that a block of threads can ask for, in bytes.
      compute_capability: The version of what the multiprocessors can do: (9, 0) for H100.
      schedules: Whether XLA puts work beside transfers by default: its latency hiding scheduler.
    """

    hbm_efficiency: float = 0.9
    hop_latency: float = 10e-6
    link_share: float = 0.82
    kernel_latency: float = 2e-6
    attention_share: float = 0.75
    kind: str
    float32: float
    float64: float
    product_share: float
    network_bandwidth: float
    multiprocessors: int
    clock: float
    l2_bytes: int
    shared_bytes: int
    shared_bytes_of_block: int
    compute_capability: tuple[int, int]
    schedules: bool = True


_H100 = Gpu(
    name="h100",
    kind="NVIDIA H100 80GB HBM3",
    flops=989.4e12,
    float32=67e12,
    float64=67e12,
    int8=1979e12,
    fp8=1979e12,
    product_share=0.803,
    hbm_bytes=81008 * MIB,
    hbm_bandwidth=3352e9,
    link_bandwidth=450e9,
    network_bandwidth=50e9,
    host_bandwidth=63e9,
    multiprocessors=132,
    clock=1.98e9,
    l2_bytes=50 * MIB,
    shared_bytes=228 * KIB,
    shared_bytes_of_block=227 * KIB,
    compute_capability=(9, 0),
)
GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu(
            name="a100",
            kind="NVIDIA A100-SXM4-80GB",
            flops=312e12,
            float32=19.5e12,
            float64=19.5e12,
            int8=624e12,
            product_share=0.869,
            hbm_bytes=81050 * MIB,
            hbm_bandwidth=2039e9,
            link_bandwidth=300e9,
            network_bandwidth=25e9,
            host_bandwidth=31.5e9,
            multiprocessors=108,
            clock=1.41e9,
            l2_bytes=40 * MIB,
            shared_bytes=164 * KIB,
            shared_bytes_of_block=163 * KIB,
            compute_capability=(8, 0),
            schedules=False,
        ),
        _H100,
        dataclasses.replace(
            _H100,
            name="h200",
            kind="NVIDIA H200",
            hbm_bytes=143167 * MIB,
            hbm_bandwidth=4800e9,
        ),
        Gpu(
            name="b200",
            kind="NVIDIA B200",
            flops=2250e12,
            float32=80e12,
            float64=40e12,
            int8=4500e12,
            fp8=4500e12,
            product_share=0.776,
            hbm_bytes=182642 * MIB,
            hbm_bandwidth=8000e9,
            link_bandwidth=900e9,
            network_bandwidth=50e9,
            host_bandwidth=63e9,
            multiprocessors=148,
            clock=1.965e9,
            l2_bytes=126 * MIB,
            shared_bytes=228 * KIB,
            shared_bytes_of_block=227 * KIB,
            compute_capability=(10, 0),
        ),
    )
}

_GPU_TOPOLOGY = re.compile(r"[a-z0-9]+:(?:([1-9]\d{0,3})x)?([1-9]\d{0,3})")

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


def accelerator(name: str) -> Chip | Gpu:
    """Returns the chip or the GPU of a name such as "v5e" or "h100", or of a topology such as
    "h100:8".

    Raises:
      ValueError: Neither table has it. The message lists those that they have.
    """
    short = str(name).partition(":")[0]
    found = CHIPS.get(short) or GPUS.get(short)
    if found is None:
        raise ValueError(f"chip must be one of {', '.join((*CHIPS, *GPUS))}: got {name!r}")
    return found


def chip_of_device(kind: str | None) -> Chip | None:
    """Returns the chip of a JAX device kind such as "TPU v5 lite", or None if the table has no such
    chip.
    """
    return CHIPS.get(_KINDS.get(kind or "", ""))


def is_gpu(name: str | None) -> bool:
    """Says whether a name such as "h100", or a topology such as "h100:8", is that of a GPU."""
    return str(name).partition(":")[0] in GPUS


def shape_of_gpus(topology: str) -> tuple[int, int] | None:
    """Returns the hosts of a topology and the GPUs of each, (2, 8) for "h100:2x8" and (1, 8) for
    "h100:8"; None for a name of another form, or of no GPU.
    """
    match = _GPU_TOPOLOGY.fullmatch(topology)
    if match is None or not is_gpu(topology):
        return None
    return int(match[1] or 1), int(match[2])


def describe_unknown(kind: str) -> str:
    """Says which figures of a TPU that the table lacks are unknown, and what works nevertheless."""
    return (
        f"{kind!r} is not in the table of chips, which has {', '.join(CHIPS)}: its peak rate, the "
        "sizes and bandwidths of its memories, the bandwidth of its links and where they wrap are "
        "unknown. Nothing is predicted for it, calls without a backend take plain XLA, kernels "
        "take tiles that fit into the vector memory of a known chip, and make_mesh takes its "
        "network for a grid that does not wrap"
    )


def gpu_of_device(kind: str | None) -> Gpu | None:
    """Returns the GPU of a JAX device kind such as "NVIDIA H100 80GB HBM3", or None if the table has
    no such GPU.

    Variants of a GPU have other kinds, "NVIDIA H100 NVL" for example, and are not in the table.
    """
    for gpu in GPUS.values():
        if gpu.kind == kind:
            return gpu
    return None
