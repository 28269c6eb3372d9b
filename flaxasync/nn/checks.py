"""What layers refuse before they run: sizes, features, rows and parameters that do not fit the mesh."""

import math

import jax
from jax.sharding import AxisType, PartitionSpec

from flaxasync.mesh import mesh_axis_size
from flaxasync.nn.placement import Entry, Layout, Placement, axes_of, axis_types


def check_divides(layer: str, axis_name: str, **sizes: int) -> None:
    """Raises ValueError for a size, given by its name, that the axis does not divide."""
    devices = mesh_axis_size(layer, axis_name)
    for name, size in sizes.items():
        if size % devices:
            lower, upper = size // devices * devices, -(-size // devices) * devices
            raise ValueError(
                f"{layer}: {name} must be divisible by the {axis_name!r} axis: got {name}={size} on {devices} devices; "
                f"use {f'{lower} or ' if lower else ''}{upper}, or a smaller axis"
            )


def check_sharded(layer: str, name: str, parameter: jax.Array, spec: PartitionSpec) -> None:
    """Raises ValueError for a parameter that lost its sharding, which under Explicit axes its gradient would lack too.

    Under Auto axes no type says how a parameter is sharded, and XLA shards its gradient as the layer uses it.
    """
    if parameter.ndim > len(spec):
        raise ValueError(
            f"{layer}: the {name} {list(parameter.shape)} has {parameter.ndim} dimensions, and one layer's has "
            f"{len(spec)}: this is a stack of layers, as nnx.vmap makes it; call it inside nnx.scan or nnx.vmap"
        )
    mesh, types = jax.sharding.get_abstract_mesh(), axis_types()
    if not types or any(kind != AxisType.Explicit for kind in types.values()):
        return  # `place` tells that there is no mesh
    typed = PartitionSpec(*jax.typeof(parameter).sharding.spec)

    def axes_that_split(spec: PartitionSpec) -> list[Entry]:
        return [tuple(axis for axis in axes_of(entry) if mesh.shape[axis] > 1) for entry in spec]

    whole = PartitionSpec(*typed, *(None,) * (parameter.ndim - len(typed)))
    if axes_that_split(whole) != axes_that_split(spec):
        raise ValueError(
            f"{layer}: the {name} {list(parameter.shape)} must be sharded {spec}: got {typed}; arrays that nnx.update "
            "or an assignment put into a layer keep the sharding that they have, and their gradients get the same: put "
            "them in with flaxasync.nn.load"
        )


def check_output_layout(layer: str, layout: str) -> Layout:
    """Returns the layout of a layer's output. Raises ValueError for an unknown one."""
    if layout not in ("sequence", "replicated"):
        raise ValueError(f"{layer} got layout={layout!r}: it must be 'sequence' or 'replicated'")
    return layout  # type: ignore[return-value]


def check_input(layer: str, x: jax.Array, features: int, placement: Placement) -> None:
    """Raises ValueError if the input does not have the number of features for which the layer was built."""
    local = placement.manual and placement.features_sharded
    needed = features // placement.size if local else features
    if x.shape[-1] != needed:
        raise ValueError(
            f"{layer} was built for {features} input features{' over the axis' if local else ''}: "
            f"got {list(x.shape)}, needed [..., {needed}]"
        )


def check_output_rows(layer: str, rows: int, layout: Layout, placement: Placement) -> None:
    """Raises ValueError if the rows of a layer's output are to be sharded and cannot be shared out equally."""
    axes = (*placement.rows, placement.axis_name)
    devices = placement.size * math.prod(jax.sharding.get_abstract_mesh().shape[name] for name in placement.rows)
    if layout == "sequence" and rows % devices:
        raise ValueError(
            f"{layer} with layout='sequence' shards the rows of its output over {', '.join(map(repr, axes))}: "
            f"got {rows} rows on {devices} devices; pad them to {-(-rows // devices) * devices}, "
            "or use layout='replicated'"
        )
