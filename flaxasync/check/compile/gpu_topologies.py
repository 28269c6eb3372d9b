"""The GPU topologies for which XLA's own compiler for NVIDIA GPUs compiles without a GPU.

Two wheels of JAX are enough, `jax-cuda13-pjrt` and `jax-cuda13-plugin`: neither a driver nor
NVIDIA's libraries are loaded. The compiler takes a description of the GPU, a `GpuTargetConfigProto`
of XLA, which is written here from the data sheets of `flaxasync.hardware`.
"""

import contextlib
import dataclasses
import importlib
import importlib.metadata
import importlib.util
import os
import re
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
from jax.experimental import topologies

from flaxasync.hardware import GPUS, Gpu, shape_of_gpus

MAX_GPUS_OF_HOST = 8
MAX_HOSTS = 512
# Without a GPU nothing can be timed, so the compiler may not choose its kernels by times. Then the
# tiles of Triton's products mean nothing: every product is a call of cuBLAS.
GPU_OPTIONS = types.MappingProxyType(
    {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False}
)
VARIABLE = "XLA_FLAGS"
_FLAG = re.compile(r"--(xla_gpu_\w+)(=?)(\S*)")
_BOOLEANS = {"true": True, "false": False}  # of flags; options are spelt otherwise
INSTALL = "pip install 'flaxasync[gpu-compile]'"
_WHEEL = "jax-cuda13-pjrt"
_PLUGIN = "jax_plugins.xla_cuda13"
# Without a driver the plugin refuses to load, unless JAX_PLATFORMS is "cpu", or this variable says not
# to look for one.
_DRIVER = "/dev/nvidiactl"
_NO_DRIVER = "JAX_SKIP_CUDA_CONSTRAINTS_CHECK"
# The same for each GPU of the table.
_THREADS_OF_BLOCK = 1024
_THREADS_OF_WARP = 32
_THREADS = 2048
_UNITS = 128  # of float32, in each multiprocessor
_UNITS_OF_A100 = 64
_REGISTERS = 65536
_SHARED_WITHOUT_ASKING = 49152
_BLOCKS = (2147483647, 65535, 65535)  # along x, y and z
_CUDA = (13, 0)
_CUDNN = (9, 10)


@dataclasses.dataclass(frozen=True)
class GpuTopology:
    """Hosts of GPUs. The GPUs of a host are connected by NVLink, and hosts by a network."""

    gpu: Gpu
    hosts: int
    gpus_of_host: int

    @classmethod
    def of(cls, topology: str) -> "GpuTopology | None":
        """Returns the topology of "h100:8", or of "h100:2x8" for two hosts; None for a name of
        another form or family.

        Raises:
          ValueError: A host has no such number of GPUs, or there are too many hosts.
        """
        shape = shape_of_gpus(topology)
        if shape is None:
            return None
        hosts, gpus = shape
        name = topology.partition(":")[0]
        if gpus > MAX_GPUS_OF_HOST or hosts > MAX_HOSTS:
            raise ValueError(
                f"topology must have at most {MAX_GPUS_OF_HOST} GPUs a host and {MAX_HOSTS} hosts, "
                f"like '{name}:8', or '{name}:2x8' for two hosts: got {topology!r}"
            )
        return cls(GPUS[name], hosts, gpus)

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of `jax.experimental.topologies.get_topology_desc`."""
        return {
            "topology_name": self.gpu.name,
            "platform": "cuda",
            "topology": f"1x{self.hosts}x{self.gpus_of_host}",
            "target_config": target_description(self.gpu),
        }


def gpu_devices(topology: GpuTopology) -> list:
    """Returns the devices of a topology, host by host.

    Raises:
      ImportError: JAX's wheels for NVIDIA GPUs are not installed, or are of another version.
    """
    _check_wheels()
    if not os.path.exists(_DRIVER):
        os.environ.setdefault(_NO_DRIVER, "1")
    try:
        described = topologies.get_topology_desc(**topology.arguments)
    except NotImplementedError:  # JAX has looked for plugins before, and this one refused to load
        importlib.import_module(_PLUGIN).initialize()
        described = topologies.get_topology_desc(**topology.arguments)
    return list(described.devices)


def options_of_gpus(given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options for XLA for GPUs: those of programs that nothing times, the flags
    xla_gpu_... that XLA_FLAGS has got since this module was loaded, and those that are given.

    JAX has read the variable before, and tells the compiler what it was then.
    """
    flags: dict[str, Any] = {}
    for name, value in _flags(os.environ.get(VARIABLE, "")).items():
        if _AT_FIRST.get(name) != value:
            flags[name] = _BOOLEANS.get(value, value)
    return GPU_OPTIONS | flags | dict(given)


def _flags(text: str) -> dict[str, str]:
    """Returns the flags for GPUs in a text; one without a value is "true"."""
    found = _FLAG.findall(text)
    return {name: value if equals else "true" for name, equals, value in found}


_AT_FIRST = _flags(os.environ.get(VARIABLE, ""))


@contextlib.contextmanager
def cudnn_of(gpu: Gpu) -> Iterator[None]:
    """Lets JAX trace calls of cuDNN for a GPU on a machine without the library.

    JAX asks the library for its version, and this machine's GPU for what it can do, before it
    writes such a call; XLA compiles the call without either. The three functions that ask are
    JAX's own, and not public.
    """
    from jax._src.cudnn import fused_attention_stablehlo as module

    major, minor = _CUDNN

    def version() -> int:
        return major * 10000 + minor * 100

    def reaches(capability: str) -> bool:
        return gpu.compute_capability >= tuple(map(int, capability.split(".")))

    def is_equal(capability: str) -> bool:
        return gpu.compute_capability == tuple(map(int, capability.split(".")))

    answers: dict[str, Callable[..., Any]] = {
        "check_cudnn_version": version,
        "check_compute_capability": reaches,
        "is_cuda_compute_capability_equal": is_equal,
    }
    own = {name: getattr(module, name) for name in answers}
    for name, answer in answers.items():
        setattr(module, name, answer)
    try:
        yield
    finally:
        for name, function in own.items():
            setattr(module, name, function)


def target_description(gpu: Gpu) -> str:
    """Returns what XLA's compiler has to know of a GPU, as the text of a GpuTargetConfigProto."""
    major, minor = gpu.compute_capability
    if major == 8:
        units = _UNITS_OF_A100
        features = ""
    else:
        units = _UNITS
        features = "feature_extension: ACCELERATED_FEATURES"
    fields = {
        "threads_per_block_limit": _THREADS_OF_BLOCK,
        "threads_per_warp": _THREADS_OF_WARP,
        "shared_memory_per_block": _SHARED_WITHOUT_ASKING,
        "shared_memory_per_core": gpu.shared_bytes,
        "shared_memory_per_block_optin": gpu.shared_bytes_of_block,
        "threads_per_core_limit": _THREADS,
        "core_count": gpu.multiprocessors,
        "fpus_per_core": units,
        "block_dim_limit_x": _BLOCKS[0],
        "block_dim_limit_y": _BLOCKS[1],
        "block_dim_limit_z": _BLOCKS[2],
        "memory_bandwidth": round(gpu.hbm_bandwidth),
        "l2_cache_size": gpu.l2_bytes,
        "clock_rate_ghz": gpu.clock / 1e9,
        "device_memory_size": round(gpu.hbm_bytes),
        "registers_per_core_limit": _REGISTERS,
        "registers_per_block_limit": _REGISTERS,
    }
    described = " ".join(f"{name}: {value}" for name, value in fields.items())
    capability = f"cuda_compute_capability {{ major: {major} minor: {minor} {features} }}"
    return (
        f"gpu_device_info {{ {described} {capability} }}\n"
        'platform_name: "CUDA"\n'
        f"dnn_version_info {{ major: {_CUDNN[0]} minor: {_CUDNN[1]} }}\n"
        f"runtime_version {{ major: {_CUDA[0]} minor: {_CUDA[1]} }}\n"
        f'device_description_str: "{gpu.kind}"'
    )


def _check_wheels() -> None:
    if importlib.util.find_spec("jax_plugins") is None or importlib.util.find_spec(_PLUGIN) is None:
        raise ImportError(
            "compiling for a GPU needs JAX's wheels for NVIDIA GPUs (286 MB), and no GPU: "
            f"{INSTALL}"
        )
    try:
        version = importlib.metadata.version(_WHEEL)
    except importlib.metadata.PackageNotFoundError:  # a build of one's own
        return
    if version != jax.__version__:
        raise ImportError(
            f"{_WHEEL} must have the version of jax, which is {jax.__version__}: got {version}; "
            f"{INSTALL} 'jax=={jax.__version__}'"
        )
