"""Which devices a program is for: those of the ambient mesh, present or not; and who is next to whom."""

from typing import Any

import jax
from jax import lax

from flaxasync import hardware


def platform() -> str | None:
    """What the enclosing mesh is made of, "tpu" say; None where it does not tell.

    A mesh over the devices of a topology tells "tpu" with no TPU present, and so does the abstract mesh of a simulator.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    return device.platform if device is not None else None


def chip() -> hardware.Chip | None:
    """The chip that the enclosing mesh is made of; None where that is none of the table, or it does not tell."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return hardware.chip_of_device(device.device_kind if device is not None else None)


def check_tpu(caller: str, instead: str) -> None:
    """Raises NotImplementedError where the enclosing mesh is known to be of other devices than TPUs."""
    found = platform()
    if found not in ("tpu", None):
        raise NotImplementedError(
            f"{caller} is made of TPU kernels, and this mesh is of {found} devices; use {instead}"
        )


def all_axes_mapped() -> bool:
    """Whether shard_map maps every mesh axis of more than one device: XLA cannot part a Pallas kernel among devices."""
    mesh = jax.sharding.get_abstract_mesh()
    return all(size == 1 or name in mesh.manual_axes for name, size in mesh.shape.items())


def at(axis_name: str, shift: int) -> dict[str, Any]:
    """The id of the device `shift` places onward on an axis; its other coordinates are this device's.

    All axes are named: one that is left out is filled in while the kernel is lowered, with a type that then does not
    lower (jax 0.12, meshes of two axes under `check_vma`).
    """
    here = {name: lax.axis_index(name) for name in jax.sharding.get_abstract_mesh().manual_axes}
    size = lax.axis_size(axis_name)
    return here | {axis_name: lax.rem(here[axis_name] + shift % size, size)}
