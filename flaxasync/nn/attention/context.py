"""The second mesh axis of an attention layer, which splits its sequences: keys and values travel along it."""

import math

import jax
from jax import Array
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from flaxasync.mesh import mesh_axis_size
from flaxasync.nn.placement import Placement, axis_types
from flaxasync.ops.attention.layouts import AttentionLayout, check_sequence_rows


def context_in_spec(x: Array, axis_name: str, context_axis: str) -> P | None:
    """Returns how the input of a layer on `axis_name` is sharded under Auto axes: its rows over both axes.

    The other axes shard the batch if they divide it. Under Explicit axes the type says how the input is sharded,
    and inside shard_map nothing has to be said: the result is None.
    """
    mesh = jax.sharding.get_abstract_mesh()
    auto = [name for name, kind in axis_types().items() if kind == AxisType.Auto]
    if not {context_axis, axis_name} <= set(auto):
        return None
    others = tuple(name for name in auto if name not in (context_axis, axis_name))
    fits = x.shape[0] % math.prod(mesh.shape[name] for name in others) == 0
    return P(others if others and fits else None, (context_axis, axis_name), None)


def check_context(layer: str, x: Array, placement: Placement, context_axis: str, layout: AttentionLayout) -> None:
    """Raises ValueError for an input whose rows are not on both axes, or cannot be shared out equally."""
    size = mesh_axis_size(layer, context_axis)
    if placement.manual:
        rows: tuple[str, ...] = (context_axis,) if context_axis in jax.typeof(x).mat.varying else ()
    else:
        rows = placement.rows
        check_sequence_rows(layer, layout, x.shape[1], size)
    if size > 1 and rows != (context_axis,):
        raise ValueError(
            f"{layer} with context_axis={context_axis!r} needs its input's rows sharded over "
            f"{(context_axis, placement.axis_name)}, or over {context_axis!r} alone: got "
            f"{placement.in_spec}; reshard it with jax.reshard"
        )
