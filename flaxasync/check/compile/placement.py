"""Moves the shardings of a function's arguments from their mesh to the devices of a topology.

The arguments may be sharded over a mesh of CPU devices, or over an AbstractMesh, as `nnx.eval_shape` leaves them. Both
are moved to a mesh of the topology with the same axes.
"""

from collections.abc import Collection
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding

from flaxasync.check.compile.topologies import topology_mesh


def place_arguments(topology: str, devices: list, args: tuple) -> tuple[tuple, Mesh | None]:
    """Moves the shardings of arguments to a topology.

    Args:
      topology: The name of the topology.
      devices: Its devices.
      args: Arrays or jax.ShapeDtypeStruct, or pytrees of them.

    Returns:
      The arguments as jax.ShapeDtypeStruct, and the mesh to trace the function under. The mesh is None if nothing
      was moved.

    Raises:
      ValueError: A mesh is not of the topology's size, or the arguments lie on several meshes.
    """
    leaves, tree = jax.tree.flatten(args)
    shardings = [getattr(leaf, "sharding", None) for leaf in leaves]
    named = [s for s in shardings if isinstance(s, NamedSharding)]
    moved = _new_meshes(topology, devices, {s.mesh: None for s in named})
    ambient = jax.sharding.get_mesh()
    if not named and not ambient.empty and not _is_of_topology(ambient, devices) and ambient.size == len(devices):
        moved[ambient] = topology_mesh(topology, ambient.axis_sizes, ambient.axis_names, axis_types=ambient.axis_types)
    # Without any sharding, and without an ambient mesh, the program is compiled for a single chip.
    is_single = not named and not moved and (ambient.empty or not _is_of_topology(ambient, devices))
    single = SingleDeviceSharding(devices[0]) if is_single else None

    def placed(leaf: Any, sharding: Any) -> Any:
        if isinstance(sharding, NamedSharding):
            mesh = moved.get(sharding.mesh)
            if mesh is None and isinstance(leaf, jax.ShapeDtypeStruct):
                return leaf
            sharding = sharding if mesh is None else NamedSharding(mesh, sharding.spec)
        elif single is not None:
            sharding = single
        elif isinstance(leaf, jax.ShapeDtypeStruct):
            return leaf
        else:
            sharding = None
        aval = jax.typeof(leaf) if not isinstance(leaf, jax.ShapeDtypeStruct) else leaf
        weak = getattr(aval, "weak_type", False)
        return jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding, weak_type=weak)

    all_placed = jax.tree.unflatten(tree, [placed(leaf, s) for leaf, s in zip(leaves, shardings, strict=True)])
    return all_placed, next(iter(moved.values()), None)


def _new_meshes(topology: str, devices: list, meshes: Collection[Any]) -> dict[Any, Mesh]:
    """Returns the mesh of the topology that each mesh of the arguments moves to.

    A mesh over the devices of the topology is not moved, so it is not in the result.

    Raises:
      ValueError: A mesh is not of the topology's size, or the meshes would move to more than one.
    """
    moved: dict[Any, Mesh] = {}
    ambient = jax.sharding.get_mesh()
    here = []  # the meshes in use that are over the devices of the topology already
    if not ambient.empty and _is_of_topology(ambient, devices) and ambient.size == len(devices):
        here.append(ambient)
    for mesh in meshes:
        if mesh.size != len(devices):
            raise ValueError(
                f"the mesh must have the {len(devices)} devices of {topology}: got {dict(mesh.shape)}, which is "
                f"{mesh.size}; use topology_mesh({topology!r}, ...) or another topology"
            )
        if _is_of_topology(mesh, devices):
            here.append(mesh)
    for mesh in meshes:
        if mesh not in here:
            known = (m for m in (*here, *moved.values()) if _axes(m) == _axes(mesh))
            moved[mesh] = next(known, None) or topology_mesh(
                topology, mesh.axis_sizes, mesh.axis_names, axis_types=mesh.axis_types
            )
    if moved and len({*here, *moved.values()}) > 1:
        described = ", ".join(dict.fromkeys(str(dict(m.shape)) for m in (*here, *moved.values())))
        raise ValueError(
            f"the arguments must lie on one mesh: got {described}; give all of them shardings on the same "
            f"topology_mesh({topology!r}, ...), or on an AbstractMesh with its axes"
        )
    return moved


def _axes(mesh: Any) -> tuple[tuple[str, ...], tuple[int, ...]]:
    return mesh.axis_names, mesh.axis_sizes


def _is_of_topology(mesh: Any, devices: list) -> bool:
    """Says whether the devices of a mesh are described ones (which exist on no machine) of the topology's kind."""
    if not isinstance(mesh, Mesh) or mesh.devices.flat[0].platform != "tpu":
        return False
    first = mesh.devices.flat[0]
    return type(first.client) is type(devices[0].client) and first.device_kind == devices[0].device_kind
