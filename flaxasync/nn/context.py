"""The second mesh axis of an attention layer, which splits its sequences: keys and values travel along it."""

import dataclasses
import math

import jax
from jax import Array
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from flaxasync.mesh import mesh_axis_size
from flaxasync.nn.placement import Placement
from flaxasync.ops.attention.layouts import AttentionLayout, check_sequence_layout, check_sequence_rows


@dataclasses.dataclass(frozen=True)
class Context:
    """How a sequence is split over a mesh axis.

    Attributes:
      axis_name: The mesh axis.
      layout: Which rows a device holds; see `flaxasync.ring_attention`.
      backend: What moves keys and values; see `flaxasync.ring_attention`.
    """

    axis_name: str
    layout: AttentionLayout
    backend: str | None


def make_context(layer: str, axis_name: str, layout: AttentionLayout, backend: str | None) -> Context:
    """Returns the context, after checking that the mesh has the axis and that the layout exists.

    Raises:
      ValueError: There is no mesh, no such axis, or no such layout. The message begins with `layer`.
    """
    mesh_axis_size(layer, axis_name)
    check_sequence_layout(layer, layout)
    return Context(axis_name, layout, backend)


def context_in_spec(x: Array, axis_name: str, context: Context) -> P | None:
    """Returns how the input is sharded under Auto axes: the rows over both axes, the batch over the others.

    Other axes that do not divide the batch leave it whole. Under Explicit axes the type says how the input is
    sharded, and inside shard_map nothing has to be said: the result is None.
    """
    mesh = jax.sharding.get_abstract_mesh()
    auto = [name for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind == AxisType.Auto]
    if not {context.axis_name, axis_name} <= set(auto):
        return None
    others = tuple(name for name in auto if name not in (context.axis_name, axis_name))
    fits = x.shape[0] % math.prod(mesh.shape[name] for name in others) == 0
    return P(others if others and fits else None, (context.axis_name, axis_name), None)


def check_context(layer: str, x: Array, placement: Placement, context: Context) -> None:
    """Raises ValueError for an input whose rows are not on the axes where they belong, or cannot be shared out equally.

    The message begins with `layer`.
    """
    size = mesh_axis_size(layer, context.axis_name)
    if placement.manual:
        varies = context.axis_name in jax.typeof(x).mat.varying
        rows: tuple[str, ...] = (context.axis_name,) if varies else ()
    else:
        rows = placement.rows
        check_sequence_rows(layer, context.layout, x.shape[1], size)
    if size > 1 and rows != (context.axis_name,):
        raise ValueError(
            f"{layer} with context_axis={context.axis_name!r} needs its input's rows sharded over "
            f"{(context.axis_name, placement.axis_name)}, or over {context.axis_name!r} alone: got "
            f"{placement.in_spec}; reshard it with jax.reshard"
        )
