"""The TPU topologies that libtpu describes, and meshes over their devices, which the machine need not have."""

import importlib.util
import math
import os
import re
from collections.abc import Sequence
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import Mesh

from flaxasync.check.compile.process import ENVIRONMENT, busy_message
from flaxasync.device_order import order_slices

# The topologies that libtpu 0.0.51 describes. The sizes count chips and not cores: a tpu7x chip is two devices.
TOPOLOGIES = {
    "v5e": ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16"),
    "v6e": ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16"),
    "v5p": ("1x1x1", "2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "8x8x8"),
    "tpu7x": ("1x1x1", "2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4"),
}
MAX_CHIPS = 9216  # a larger topology is refused before libtpu is asked for it

_NAME = re.compile(r"([a-z0-9]+):([1-9]\d{0,3})x([1-9]\d{0,3})(?:x([1-9]\d{0,3}))?(\*[1-9]\d{0,3})?")


def topology_mesh(
    topology: str, axis_shapes: Sequence[int], axis_names: Sequence[str], *, axis_types: Any = None
) -> Mesh:
    """Returns the mesh that `flaxasync.make_mesh` makes over the devices of a topology, with Auto axes by default.

    Args:
      topology: The chip and its grid: "v5e:2x4", "v5p:2x2x2", ...; with "*2" for two slices, "v5e:2x4*2". An axis
        before the last one is divided among the slices.
      axis_shapes: The number of devices on each mesh axis. They must multiply to the devices of the topology.
      axis_names: One name for each axis.
      axis_types: As for jax.sharding.Mesh; Auto by default.

    Raises:
      ValueError: The topology is unknown, or the axes do not multiply to its devices or cannot be divided among its
        slices.
      ImportError: libtpu is not installed.
    """
    devices = topology_devices(topology)
    shape, names = tuple(axis_shapes), tuple(axis_names)
    if len(shape) != len(names):
        raise ValueError(f"axis_names needs one name per axis: got {names} for axis_shapes {shape}")
    if (size := math.prod(shape)) != len(devices):
        raise ValueError(
            f"axis_shapes must multiply to the {len(devices)} devices of {topology}: got {shape}, which is {size}; "
            "change the mesh, or choose a topology of that size"
        )
    ordered = order_slices(devices, shape, names)
    assert ordered is not None  # the devices of each slice fill its grid
    return Mesh(ordered, names, axis_types=axis_types)


def topology_size(topology: str) -> int:
    """Returns the number of devices of a topology; a tpu7x chip is two. The errors are those of `topology_mesh`."""
    return len(topology_devices(topology))


def topology_devices(topology: str) -> list:
    """Returns the devices of a topology.

    Raises:
      ValueError: The topology is unknown. The message lists those that exist.
      ImportError: libtpu is not installed.
      RuntimeError: Another process holds libtpu.
    """
    match = _NAME.fullmatch(topology) if isinstance(topology, str) else None
    known = "; ".join(f"{family}: {', '.join(sizes)}" for family, sizes in TOPOLOGIES.items())
    wanted = f"topology must be one that libtpu describes, like 'v5e:2x4': got {topology!r}; there are {known}"
    sizes = [int(n.lstrip("*")) for n in match.groups()[1:] if n] if match else []
    if not match or match[1] not in TOPOLOGIES or math.prod(sizes) > MAX_CHIPS:
        raise ValueError(wanted)
    if importlib.util.find_spec("libtpu") is None:
        raise ImportError("compiling for a TPU needs libtpu, no TPU: install flaxasync with its 'tpu' or 'dev' extra")
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        name, _, slices = topology.partition("*")
        several = {"num_slices": int(slices)} if slices else {}
        return topologies.get_topology_desc(name, platform="tpu", **several).devices
    except jax.errors.JaxRuntimeError as error:
        if "lock" in str(error) or "in use" in str(error):
            raise RuntimeError(busy_message(error)) from error
        raise ValueError(f"{wanted} ({error})") from error
