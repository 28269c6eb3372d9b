"""What the enclosing mesh tells: the size of its axes, its platform and chip, the device at an offset on an axis.

The mesh is the ambient one, of `jax.set_mesh` or of an enclosing `jax.shard_map`. It may be of devices that are not
present: a mesh over the devices of a topology says "tpu" on a machine without one, and so does a simulator's.
"""

from typing import Any

import jax
from jax import lax

from flaxasync import hardware


def mesh_axis_size(caller: str, axis_name: str) -> int:
    """Returns the number of devices on an axis of the ambient mesh; outside and inside `jax.shard_map`.

    Raises:
      ValueError: no mesh is set, or it lacks the axis. The message begins with `caller`.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        raise ValueError(
            f"{caller} needs a mesh with the axis {axis_name!r}, and none is set; "
            f'wrap the call in `with jax.set_mesh(jax.make_mesh((devices,), ("{axis_name}",))):`'
        )
    if axis_name not in mesh.shape:
        raise ValueError(
            f"{caller} works on the mesh axis {axis_name!r}, and the mesh has {', '.join(map(repr, mesh.axis_names))}; "
            "pass axis_name, or add the axis to the mesh"
        )
    return mesh.shape[axis_name]


def mapped_axis_size(caller: str, axis_name: str) -> int:
    """Returns the number of devices on an axis that an enclosing `jax.shard_map` maps.

    Raises:
      ValueError: no enclosing `shard_map` maps an axis of this name. The message begins with `caller`.
    """
    try:
        return lax.axis_size(axis_name)
    except NameError:
        raise ValueError(
            f"{caller} needs the mesh axis {axis_name!r} inside jax.shard_map, and no enclosing shard_map maps it; "
            "call it from a function given to jax.shard_map, with a mesh that has this axis"
        ) from None


def all_axes_mapped() -> bool:
    """Says whether `shard_map` maps every mesh axis of more than one device.

    Otherwise XLA would have to partition the code inside, and it cannot partition a Pallas kernel.
    """
    mesh = jax.sharding.get_abstract_mesh()
    return all(size == 1 or name in mesh.manual_axes for name, size in mesh.shape.items())


def cast_to_varying(x: jax.Array, axes: set[str] | frozenset[str]) -> jax.Array:
    """Casts `x` to vary over the mesh axes `axes`. The transpose of the cast sums a gradient over them.

    Axes that the type of `x` already names as varying are left alone, so the cast can be applied twice.
    """
    missing = tuple(axis for axis in sorted(axes) if axis not in jax.typeof(x).mat.varying)
    return lax.pcast(x, missing, to="varying") if missing else x


def platform() -> str | None:
    """Returns the platform of the mesh's devices, "tpu" for example; None where the mesh does not say."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return device.platform if device is not None else None


def chip() -> hardware.Chip | None:
    """Returns the chip of the mesh's devices; None where the chip table lacks it, or the mesh does not say."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return hardware.chip_of_device(device.device_kind if device is not None else None)


def check_tpu(caller: str, instead: str) -> None:
    """Raises NotImplementedError where the mesh is known to be of devices other than TPUs."""
    found = platform()
    if found not in ("tpu", None):
        raise NotImplementedError(
            f"{caller} is made of TPU kernels, and this mesh is of {found} devices; use {instead}"
        )


def device_at(axis_name: str, shift: int) -> dict[str, Any]:
    """Returns the id of the device `shift` positions onward on an axis, in the form that Pallas takes as `device_id`.

    On all other axes the device is at this device's position. The id names every axis, because Pallas fills in a
    missing one with a type that fails to lower (jax 0.12, meshes of two axes under `check_vma`).
    """
    here = {name: lax.axis_index(name) for name in jax.sharding.get_abstract_mesh().manual_axes}
    size = lax.axis_size(axis_name)
    return here | {axis_name: lax.rem(here[axis_name] + shift % size, size)}
