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

    Returns the arguments as jax.ShapeDtypeStruct, and the mesh to trace the function under, None if nothing was moved.

    Raises:
      ValueError: A mesh is not of the topology's size, or the arguments lie on several meshes.
    """
    shardings = [getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(args)]
    meshes = dict.fromkeys(s.mesh for s in shardings if isinstance(s, NamedSharding))
    ambient = jax.sharding.get_mesh()
    ambient_is_here = not ambient.empty and _is_of_topology(ambient, devices)
    moved = _new_meshes(topology, devices, meshes, ambient if ambient_is_here else None)
    if not meshes and not ambient.empty and not ambient_is_here and ambient.size == len(devices):
        moved[ambient] = _mesh_like(topology, ambient)
    # Without any sharding, and without an ambient mesh, the program is compiled for a single chip.
    single = None if meshes or moved or ambient_is_here else SingleDeviceSharding(devices[0])

    def placed(leaf: Any) -> Any:
        sharding = getattr(leaf, "sharding", None)
        if isinstance(sharding, NamedSharding):
            sharding = NamedSharding(moved[sharding.mesh], sharding.spec) if sharding.mesh in moved else sharding
        elif single is None and isinstance(leaf, jax.ShapeDtypeStruct):
            return leaf
        else:
            sharding = single
        aval = leaf if isinstance(leaf, jax.ShapeDtypeStruct) else jax.typeof(leaf)
        weak = getattr(aval, "weak_type", False)
        return jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding, weak_type=weak)

    return jax.tree.map(placed, args), next(iter(moved.values()), None)


def _new_meshes(topology: str, devices: list, meshes: Collection[Any], ambient: Any) -> dict[Any, Mesh]:
    """Returns the mesh of the topology that each mesh of the arguments moves to.

    A mesh over the devices of the topology is not moved, so it is not in the result. `ambient` is the mesh that is set,
    if it is one of those.
    """
    moved: dict[Any, Mesh] = {}
    here = [ambient] if ambient is not None and ambient.size == len(devices) else []
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
            same_axes = [m for m in (*here, *moved.values()) if list(m.shape.items()) == list(mesh.shape.items())]
            moved[mesh] = same_axes[0] if same_axes else _mesh_like(topology, mesh)
    if moved and len({*here, *moved.values()}) > 1:
        described = ", ".join(dict.fromkeys(str(dict(m.shape)) for m in (*here, *moved.values())))
        raise ValueError(
            f"the arguments must lie on one mesh: got {described}; give all of them shardings on the same "
            f"topology_mesh({topology!r}, ...), or on an AbstractMesh with its axes"
        )
    return moved


def _mesh_like(topology: str, mesh: Any) -> Mesh:
    return topology_mesh(topology, mesh.axis_sizes, mesh.axis_names, axis_types=mesh.axis_types)


def _is_of_topology(mesh: Any, devices: list) -> bool:
    """Says whether the devices of a mesh are described ones (which exist on no machine) of the topology's kind."""
    if not isinstance(mesh, Mesh) or mesh.devices.flat[0].platform != "tpu":
        return False
    first = mesh.devices.flat[0]
    return type(first.client) is type(devices[0].client) and first.device_kind == devices[0].device_kind
