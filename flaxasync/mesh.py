"""Meshes whose axes are rings of neighbouring chips, and what the enclosing mesh tells an op.

`make_mesh` and `mesh_report` are public. The other functions ask the enclosing mesh: that of
`jax.set_mesh`, or of an enclosing `jax.shard_map`. It may be of devices that are not present: a
mesh over the devices of a topology says "tpu" on a machine without one, and so does a simulator's.
"""

import dataclasses
import functools
import itertools
import math
import os
from collections.abc import Collection, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax.sharding import AxisType, Mesh
from jaxtyping import PyTree

from flaxasync import hardware
from flaxasync.device_order import DeviceGrid, order_slices, slices_of


class UnsupportedError(NotImplementedError):
    """An op or a backend of this package refuses a call.

    Other NotImplementedErrors come from JAX and its compilers, and are faults of a kernel.
    """


def make_mesh(
    axis_sizes: Sequence[int] | None = None,
    axis_names: Sequence[str] = (),
    axis_types: tuple[AxisType, ...] | None = None,
    *,
    devices: Sequence[Any] | None = None,
    axis_shapes: Sequence[int] | None = None,
) -> Mesh:
    """Makes a mesh like `jax.make_mesh`, on which neighbours on an axis are neighbours on the chip
    network.

    The blocks of a ring travel to the next device on an axis, so the links between the two decide
    what a hop costs. The last axis gets closed rings of single links wherever the network has them,
    then the axis before it gets the shortest hops that are left, and so on: put the axis with the
    most traffic, tensor parallelism, last. `mesh_report` shows the result. No ring lies across
    slices: an axis before the last one is divided among them.

    ```python
    mesh = fa.make_mesh((2, 4), ("data", "model"))                      # on a v5e:2x4: two squares of 2x2 chips
    devices = fa.check.topology_devices("v5e:2x4")                      # the same with no TPU
    mesh = fa.make_mesh((2, 4), ("data", "model"), devices=devices)
    ```

    Args:
      axis_sizes: The number of devices on each axis.
      axis_names: One name for each axis.
      axis_types: The type of each axis; by default all are Explicit, as with `jax.make_mesh`.
      devices: The devices, real ones or those of a topology; by default `jax.devices()`. The first
        ones are taken, as many as the axes need. Where they have no coordinates, as CPUs and GPUs,
        or do not fill a grid of chips in each slice, the mesh is that of `jax.make_mesh`.
      axis_shapes: The older name of axis_sizes.

    Raises:
      ValueError: There are not as many names, types or devices as the axes need; or TPUs are of
        several slices, of which one has more devices than another, or no axis but the last one can
        be divided among them.
    """
    if axis_sizes is None:
        given = axis_shapes
    else:
        given = axis_sizes
    if given is None or (axis_sizes is not None and axis_shapes is not None):
        raise ValueError(
            "make_mesh needs axis_sizes, or axis_shapes, its older name: give one of the two"
        )
    shape = tuple(given)
    names = tuple(axis_names)
    if len(shape) != len(names):
        raise ValueError(
            f"make_mesh needs one name for each axis: got axis_sizes={shape} and axis_names={names}"
        )
    if axis_types is None:
        types = (AxisType.Explicit,) * len(shape)
    else:
        types = axis_types
    if len(types) != len(shape):
        raise ValueError(
            f"make_mesh needs one type for each axis: got axis_sizes={shape} and axis_types={types}"
        )
    size = math.prod(shape)
    found = list(jax.devices() if devices is None else devices)
    if size > len(found):
        if devices is None:
            remedy = _how_to_simulate(size)
        else:
            remedy = ""
        raise ValueError(
            f"make_mesh needs a device for each place of the mesh: got {shape}, which is {size}, "
            f"and {len(found)} devices{remedy}"
        )
    found = found[:size]
    ordered = order_slices(found, shape, names)
    if ordered is None:
        return jax.make_mesh(shape, names, types, devices=found)
    return Mesh(ordered, names, axis_types=types)


def _how_to_simulate(size: int) -> str:
    """Returns what gives a program as many CPU devices as it needs, once it has fewer devices."""
    platform = jax.devices()[0].platform
    elsewhere = ""
    if platform != "cpu":
        elsewhere = f" and jax.config.update('jax_platforms', 'cpu'), which leaves the {platform}"
    return (
        f" of the platform {platform!r}. To simulate {size} devices on the CPU, call "
        f"jax.config.update('jax_num_cpu_devices', {size}) right after `import jax`{elsewhere}"
    )


@dataclasses.dataclass(frozen=True)
class AxisReport:
    """How the devices of one mesh axis lie on the chip network.

    Attributes:
      name: The name of the axis.
      hops: The links of each hop to the next device on the axis, of the ring with the longest hop;
        the last hop closes the ring. Empty if the devices have no coordinates, or if the axis goes
        across slices.
      across_slices: Whether the axis goes across slices, whose devices no links connect.
      unmatched: On the last axis of a mesh of two, the share of devices that begin a
        `fa.mesh_matmul` over both without the rows of RHS that meet their columns of LHS: 1 - 1/N
        on N x N devices. None elsewhere.
    """

    name: str
    hops: tuple[int, ...]
    across_slices: bool = False
    unmatched: float | None = None

    @property
    def closed(self) -> bool:
        """Whether the devices form a closed ring of single links."""
        return bool(self.hops) and max(self.hops) <= 1

    def __str__(self) -> str:
        if self.unmatched is not None:
            links = dataclasses.replace(self, unmatched=None)
            return (
                f"{links}; {self.unmatched:.0%} of the devices begin mesh_matmul without matching "
                "operands"
            )
        if self.across_slices:
            return f"{self.name}: across slices"
        if not self.hops:
            return f"{self.name}: the devices have no coordinates"
        parts: list[str] = []
        for length, group in itertools.groupby(self.hops):
            count = len(list(group))
            if count > 2:
                parts.append(f"{count} x {length}")
            else:
                parts += [str(length)] * count
        if self.closed:
            kind = "closed ring"
        else:
            kind = "ring"
        return f"{self.name}: {kind}, links per hop {', '.join(parts)}"


def mesh_report(mesh: Mesh) -> tuple[AxisReport, ...]:
    """Reports, for each axis of a mesh, how far apart neighbours on the axis are on the chip
    network.

    `print(*fa.mesh_report(mesh), sep="\\n")` prints one line for each axis.
    """
    slices = slices_of(list(mesh.devices.flat))
    grid = DeviceGrid.of(slices[0])
    reports = []
    for axis, name in enumerate(mesh.axis_names):
        lines = np.moveaxis(mesh.devices, axis, -1).reshape(-1, mesh.devices.shape[axis])
        across = any(len(slices_of(list(line))) > 1 for line in lines)
        hops: tuple[int, ...] = ()
        if grid is not None and not across:
            order = np.array([[grid.position(device) for device in line] for line in lines])
            rings = [tuple(map(int, ring)) for ring in grid.hops(order, 1)]
            # the one with the longest hop; among equals, the one whose first hops are longer
            hops = max(rings, key=lambda ring: (max(ring), ring))
        reports.append(AxisReport(name, hops, across))
    if len(reports) == 2:
        reports[1] = dataclasses.replace(reports[1], unmatched=_unmatched(*mesh.devices.shape))
    return tuple(reports)


def _unmatched(x: int, y: int) -> float:
    """Returns the share of X x Y devices (i, j) whose block j of Y of the contraction is not within
    block i of X.
    """
    places = itertools.product(range(x), range(y))
    matched = sum(i * y <= j * x and (j + 1) * x <= (i + 1) * y for i, j in places)
    return 1 - matched / (x * y)


def mesh_axis_size(caller: str, axis_name: str) -> int:
    """Returns the number of devices on an axis of the ambient mesh; outside and inside
    `jax.shard_map`.

    Raises:
      ValueError: no mesh is set, or it lacks the axis. The message begins with `caller`.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        raise ValueError(
            f"{caller} needs a mesh with the axis {axis_name!r}, and none is set; "
            "wrap the call in `with jax.set_mesh(flaxasync.make_mesh((devices,), "
            f'("{axis_name}",))):`'
        )
    if axis_name not in mesh.shape:
        raise ValueError(
            f"{caller} works on the mesh axis {axis_name!r}, and the mesh has "
            f"{', '.join(map(repr, mesh.axis_names))}; pass axis_name, or add the axis to the mesh"
        )
    return mesh.shape[axis_name]


def mapped_axis_size(caller: str, axis_name: str) -> int:
    """Returns the number of devices on an axis that an enclosing `jax.shard_map` maps.

    Raises:
      ValueError: no enclosing `shard_map` maps an axis of this name. The message begins with
        `caller`.
    """
    try:
        return lax.axis_size(axis_name)
    except NameError:
        raise ValueError(
            f"{caller} needs the mesh axis {axis_name!r} inside jax.shard_map, and no enclosing "
            "shard_map maps it; call it from a function given to jax.shard_map, with a mesh that "
            "has this axis"
        ) from None


def all_axes_mapped() -> bool:
    """Says whether `shard_map` maps every mesh axis of more than one device.

    Otherwise XLA would have to partition the code inside, and it cannot partition a Pallas kernel.
    """
    mesh = jax.sharding.get_abstract_mesh()
    return all(size == 1 or name in mesh.manual_axes for name, size in mesh.shape.items())


def cast_to_varying(x: jax.Array, axes: set[str] | frozenset[str]) -> jax.Array:
    """Casts `x` to vary over the mesh axes `axes`. The transpose of the cast sums a gradient over
    them.

    Axes that the type of `x` already names as varying are left alone, so the cast can be applied
    twice.
    """
    missing = tuple(axis for axis in sorted(axes) if axis not in jax.typeof(x).mat.varying)
    if not missing:
        return x
    return lax.pcast(x, missing, to="varying")


def vary_like[T](tree: T, *others: PyTree, over: Collection[str] = ()) -> T:
    """Casts all arrays of a pytree to vary over the mesh axes `over`, and over those of any array
    of other pytrees.
    """
    of_others = [jax.typeof(leaf).mat.varying for leaf in jax.tree.leaves(others)]
    axes = frozenset(over).union(*of_others)
    return jax.tree.map(functools.partial(cast_to_varying, axes=axes), tree)


def vary_alike[T](tree: T, *axes: str) -> T:
    """Casts all arrays of a pytree to vary over the mesh axes over which any of them varies, and
    over `axes`.
    """
    return vary_like(tree, tree, over=axes)


def declare_invarying(x: jax.Array, axes: set[str] | frozenset[str]) -> jax.Array:
    """Declares, inside `jax.shard_map`, that `x` is the same on all devices of `axes`. Nothing
    moves or is checked.

    It is for what permutes have made the same: JAX has no cast from varying to invarying, because
    it cannot prove one.
    """
    return _declare_invarying.bind(x, axes=tuple(sorted(axes)))


_declare_invarying = Primitive("declare_invarying")
_declare_invarying.def_abstract_eval(
    lambda x, *, axes: x.update_manual_axis_type(x.mat.update(varying=x.mat.varying - set(axes)))
)
mlir.register_lowering(_declare_invarying, lambda _, x, *, axes: [x])


def platform() -> str | None:
    """Returns the platform of the mesh's devices, "tpu" for example; None where the mesh does not
    say.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    if device is None:
        return None
    return device.platform


def chip() -> hardware.Chip | None:
    """Returns the chip of the mesh's devices; None where the chip table lacks it, or the mesh does
    not say.
    """
    return hardware.chip_of_device(_device_kind())


def gpu() -> hardware.Gpu | None:
    """Returns the GPU of the mesh's devices; None where the table lacks it, or the mesh does not
    say.
    """
    return hardware.gpu_of_device(_device_kind())


def gpus_hide_latency(gpu: hardware.Gpu) -> bool:
    """Says whether XLA puts work beside transfers of a GPU: by default, or because XLA_FLAGS says
    so, in the last one of several flags.
    """
    schedules = gpu.schedules
    for flag in os.environ.get("XLA_FLAGS", "").split():
        name, _, value = flag.partition("=")
        if name == f"--{hardware.SCHEDULER}":
            schedules = value.lower() in ("", "true", "1")  # as XLA reads it
    return schedules


def chip_name() -> str:
    """Returns the name of the chip of the mesh's devices, or what the devices call themselves if it
    is not known.
    """
    found = chip()
    if found is not None:
        return found.name
    return _device_kind() or "unknown"


def _device_kind() -> str | None:
    """Returns what JAX calls the mesh's devices; None where the mesh does not say."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    if device is None:
        return None
    return device.device_kind


def check_tpu(caller: str, instead: str) -> None:
    """Raises UnsupportedError where the mesh is known to be of devices other than TPUs."""
    found = platform()
    if found not in ("tpu", None):
        raise UnsupportedError(
            f"{caller} is made of TPU kernels, and this mesh is of {found} devices; use {instead}"
        )


def device_at(axis_name: str, shift: int) -> dict[str, Any]:
    """Returns the id of the device `shift` positions onward on an axis, in the form that Pallas
    takes as `device_id`.

    On all other axes the device is at this device's position. The id names every axis, because
    Pallas fills in a missing one with a type that fails to lower (jax 0.12, meshes of two axes
    under `check_vma`).
    """
    here = {name: lax.axis_index(name) for name in jax.sharding.get_abstract_mesh().manual_axes}
    size = lax.axis_size(axis_name)
    return here | {axis_name: lax.rem(here[axis_name] + shift % size, size)}
