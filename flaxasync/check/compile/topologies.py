"""The topologies that compilers describe, meshes over their devices, and the move of arguments to
them. Those of GPUs are in gpu_topologies.py.

The machine need not have the devices. The arguments of a function may be sharded over a mesh of CPU
devices, or over an AbstractMesh, as `nnx.eval_shape` leaves them. Both are moved to a mesh of the
topology with the same axes.
"""

import importlib.util
import math
import os
import re
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding

from flaxasync.check.compile.function_call import FunctionCall, is_array, is_number
from flaxasync.check.compile.gpu_topologies import GpuTopology, gpu_devices
from flaxasync.device_order import order_slices
from flaxasync.hardware import CHIPS, GPUS

# With these settings libtpu loads on a machine without a TPU, and beside another process that has
# loaded it.
ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
# The topologies that libtpu 0.0.51 describes. The sizes count chips and not cores: a tpu7x chip is
# two devices.
TOPOLOGIES = {
    "v5e": ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16"),
    "v6e": ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16"),
    "v5p": ("1x1x1", "2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "8x8x8"),
    "tpu7x": ("1x1x1", "2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4"),
}
MAX_CHIPS = 9216  # a larger topology is refused before libtpu is asked for it

_NAME = re.compile(
    r"([a-z0-9]+):([1-9]\d{0,3})x([1-9]\d{0,3})(?:x([1-9]\d{0,3}))?(\*[1-9]\d{0,3})?"
)


def topology_mesh(
    topology: str, axis_shapes: Sequence[int], axis_names: Sequence[str], *, axis_types: Any = None
) -> Mesh:
    """Returns the mesh that `flaxasync.make_mesh` makes over the devices of a topology, with Auto
    axes by default.

    Args:
      topology: The chip and its grid: "v5e:2x4", "v5p:2x2x2", ...; with "*2" for two slices,
        "v5e:2x4*2". An axis before the last one is divided among the slices. Or GPUs: "h100:8", and
        "h100:2x8" for two hosts, whose devices follow one another host by host.
      axis_shapes: The number of devices on each mesh axis. They must multiply to the devices of the
        topology.
      axis_names: One name for each axis.
      axis_types: As for jax.sharding.Mesh; Auto by default.

    Raises:
      ValueError: The topology is unknown, or the axes do not multiply to its devices or cannot be
        divided among its slices.
      ImportError: The compiler is not installed: libtpu, or JAX's wheels for GPUs.
    """
    devices = topology_devices(topology)
    shape = tuple(axis_shapes)
    names = tuple(axis_names)
    if len(shape) != len(names):
        raise ValueError(f"axis_names needs one name per axis: got {names} for axis_shapes {shape}")
    if (size := math.prod(shape)) != len(devices):
        raise ValueError(
            f"axis_shapes must multiply to the {len(devices)} devices of {topology}: got {shape}, "
            f"which is {size}; change the mesh, or choose a topology of that size"
        )
    if GpuTopology.of(topology) is not None:
        ordered = np.array(devices).reshape(shape)
    else:
        in_rings = order_slices(devices, shape, names)
        assert in_rings is not None  # the devices of each slice fill its grid
        ordered = in_rings
    return Mesh(ordered, names, axis_types=axis_types)


def topology_size(topology: str) -> int:
    """Returns the number of devices of a topology; a tpu7x chip is two. The errors are those of
    `topology_mesh`.
    """
    return len(topology_devices(topology))


def topology_devices(topology: str) -> list:
    """Returns the devices of a topology.

    Raises:
      ValueError: The topology is unknown, and the message lists those that exist; or a host has no
        such number of GPUs, or there are too many hosts.
      ImportError: The compiler is not installed: libtpu, or JAX's wheels for GPUs.
      RuntimeError: Another process holds libtpu.
    """
    if isinstance(topology, str) and (gpus := GpuTopology.of(topology)) is not None:
        return gpu_devices(gpus)
    if isinstance(topology, str):
        match = _NAME.fullmatch(topology)
    else:
        match = None
    known = "; ".join(f"{family}: {', '.join(sizes)}" for family, sizes in TOPOLOGIES.items())
    wanted = (
        f"topology must be one that libtpu describes, like 'v5e:2x4', or GPUs, like 'h100:8': got "
        f"{topology!r}; there are {known}; GPUs: {', '.join(GPUS)}"
    )
    if match:
        sizes = [int(n.lstrip("*")) for n in match.groups()[1:] if n]
    else:
        sizes = []
    if not match or match[1] not in TOPOLOGIES or math.prod(sizes) > MAX_CHIPS:
        raise ValueError(wanted)
    if importlib.util.find_spec("libtpu") is None:
        raise ImportError(
            "compiling for a TPU needs libtpu, no TPU: install flaxasync with its 'tpu' or 'dev' "
            "extra"
        )
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        return topologies.get_topology_desc(**topology_arguments(topology)).devices
    except jax.errors.JaxRuntimeError as error:
        if "lock" in str(error) or "in use" in str(error):
            raise RuntimeError(busy_message(error)) from error
        raise ValueError(f"{wanted} ({error})") from error


def topology_arguments(topology: str) -> dict[str, Any]:
    """Returns the arguments of `jax.experimental.topologies.get_topology_desc` by which a compiler
    describes a topology as the real one is.

    Unless it is told which dimensions wrap, libtpu describes every slice as a grid without the
    links that close its rings. Then it makes the permutes that cross them synchronous on v5e, and
    chooses slower algorithms for the collectives of whole slices.
    """
    if (gpus := GpuTopology.of(topology)) is not None:
        return gpus.arguments
    name, _, slices = topology.partition("*")
    family, _, grid = name.partition(":")
    wraps = CHIPS[family].wraps([int(size) for size in grid.split("x")])
    wraps_in_space = (*wraps, False)[:3]  # libtpu wants three dimensions
    described: dict[str, Any] = {
        "platform": "tpu",
        "topology_name": name,
        "wrap": wraps_in_space,
    }
    if slices:
        described["num_slices"] = int(slices)
    return described


def places_of(devices: list) -> dict[int, tuple[int, ...]]:
    """Returns, for the number of each device, the coordinates of its chip, and its core where a
    chip has several. Those of a GPU are its slice, its host, and its place in the host.
    """
    cores = any(getattr(device, "core_on_chip", 0) for device in devices)
    return {
        device.id: (*device.coords, device.core_on_chip) if cores else tuple(device.coords)
        for device in devices
    }


def place_arguments(
    topology: str, devices: list, call: FunctionCall
) -> tuple[FunctionCall, Mesh | None]:
    """Moves the shardings of a function's arguments to the devices of a topology.

    Returns the call with arrays as jax.ShapeDtypeStruct, and the mesh to trace the function under,
    None if nothing was moved. What is no array stays as it is, because it may be a static argument;
    numbers do so beside arrays.
    """
    arrays = [leaf for leaf in call.arrays if is_array(leaf)]
    shardings = [getattr(leaf, "sharding", None) for leaf in arrays]
    meshes: list[Any] = list(
        dict.fromkeys(s.mesh for s in shardings if isinstance(s, NamedSharding))
    )
    for mesh in meshes:
        if mesh.size != len(devices):
            raise ValueError(
                f"the mesh must have the {len(devices)} devices of {topology}: got "
                f"{dict(mesh.shape)}, which is {mesh.size}; use topology_mesh({topology!r}, ...) "
                "or another topology"
            )
    ambient: Any = jax.sharding.get_mesh()
    ambient_is_here = _is_of_topology(ambient, devices)
    # a mesh of other devices counts only where no argument lies on a mesh
    counts = ambient_is_here or not meshes
    if counts and not ambient.empty and ambient.size == len(devices):
        meshes.append(ambient)
    here = {mesh for mesh in meshes if _is_of_topology(mesh, devices)}
    elsewhere = [mesh for mesh in meshes if mesh not in here]
    if elsewhere:
        target = _one_mesh(topology, here, elsewhere)
    else:
        target = None
    # Without any sharding, and without an ambient mesh, the program is compiled for a single chip.
    if meshes or ambient_is_here:
        single = None
    else:
        single = SingleDeviceSharding(devices[0])

    def placed(leaf: object) -> Any:
        is_operand = is_array(leaf) or (is_number(leaf) and not arrays)
        if not is_operand:  # it may be a static argument
            return leaf
        sharding = getattr(leaf, "sharding", None)
        if not isinstance(sharding, NamedSharding):
            if single is None and isinstance(leaf, jax.ShapeDtypeStruct):
                return leaf  # there is nothing to move
            sharding = single
        elif target is not None and sharding.mesh in elsewhere:
            sharding = NamedSharding(target, sharding.spec)
        if isinstance(leaf, jax.ShapeDtypeStruct):
            aval = leaf
        else:
            aval = jax.typeof(leaf)
        weak = getattr(aval, "weak_type", False)
        return jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding, weak_type=weak)

    return call.map(placed), target


def _one_mesh(topology: str, here: set[Mesh], elsewhere: Sequence[Any]) -> Mesh:
    """Returns the one mesh of the topology that has the axes of all these meshes, some of which are
    of the topology.
    """
    axes = dict.fromkeys(str(dict(mesh.shape)) for mesh in (*here, *elsewhere))
    if len(axes) > 1 or len(here) > 1:
        raise ValueError(
            f"the arguments must lie on one mesh: got {', '.join(axes)}; give all of them "
            f"shardings on the same topology_mesh({topology!r}, ...), or on an AbstractMesh with "
            "its axes"
        )
    mesh = elsewhere[0]
    return next(iter(here), None) or topology_mesh(
        topology, mesh.axis_sizes, mesh.axis_names, axis_types=mesh.axis_types
    )


def _is_of_topology(mesh: object, devices: list) -> bool:
    """Says whether the devices of a mesh are described ones (which exist on no machine) of the
    topology's kind.
    """
    if not isinstance(mesh, Mesh) or mesh.empty or mesh.devices.flat[0].platform == "cpu":
        return False
    first = mesh.devices.flat[0]
    return (
        type(first.client) is type(devices[0].client)
        and first.device_kind == devices[0].device_kind
    )


def busy_message(error: object) -> str:
    return (
        f"libtpu is in use: {error}. Start the other process with ALLOW_MULTIPLE_LIBTPU_LOAD=1, or "
        "wait for it"
    )
