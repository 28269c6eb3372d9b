"""`out_sharding`, a keyword of a call as Flax's layers have it: how the output is to be sharded.

A row-parallel layer and an embedding choose their layout by it, so that nothing is gathered that
was scattered before. Whatever else it asks for costs a resharding of the output.
"""

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from flaxasync.nn.placement import Layout, axis_types, constrain, entries_of

type OutSharding = PartitionSpec | NamedSharding | None


def output_spec(layer: str, out_sharding: OutSharding, axis_name: str) -> PartitionSpec | None:
    """Returns the spec of an `out_sharding`; None if there is none.

    Raises:
      TypeError: It is neither a PartitionSpec nor a NamedSharding.
      ValueError: An enclosing `jax.shard_map` maps the layer's axis, or the sharding is on another
        mesh.
    """
    if out_sharding is None:
        return None
    if not isinstance(out_sharding, PartitionSpec | NamedSharding):
        raise TypeError(
            f"{layer} got an out_sharding of type {type(out_sharding).__name__}, {out_sharding!r}: "
            "it must be a PartitionSpec or a NamedSharding"
        )
    if axis_types().get(axis_name) == AxisType.Manual:
        raise ValueError(
            f"{layer} inside jax.shard_map returns this device's part of its output: got "
            f"out_sharding={out_sharding}; leave it out, and say in out_specs how the output is "
            "sharded"
        )
    if isinstance(out_sharding, PartitionSpec):
        return out_sharding
    ambient = jax.sharding.get_abstract_mesh()
    if out_sharding.mesh.abstract_mesh.shape != ambient.shape:
        raise ValueError(
            f"{layer} got an out_sharding on a mesh {dict(out_sharding.mesh.shape)}, and the mesh "
            f"that is set is {dict(ambient.shape)}; give it a PartitionSpec, or set that mesh"
        )
    return out_sharding.spec


def layout_for(spec: PartitionSpec | None, dims: int, axis_name: str, layout: Layout) -> Layout:
    """Returns the layout of an output of `dims` dimensions that a spec asks for; `layout` where it
    asks for neither.
    """
    if spec is None:
        return layout
    entries = entries_of(spec, max(dims, 2))  # the layer refuses fewer
    if axis_name in entries[-2]:
        return "sequence"
    is_named = any(axis_name in entry for entry in entries)
    if is_named:
        return layout
    return "replicated"


def shard_output(y: jax.Array, spec: PartitionSpec | None) -> jax.Array:
    """Returns the output of a layer, sharded as the spec says."""
    if spec is None:
        return y
    return constrain(y, spec)
