"""The second mesh axis of an attention layer, which splits its sequences: keys and values travel along it."""

import dataclasses
import math

import jax
from jax import Array
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from flaxasync.mesh import mesh_axis_size
from flaxasync.nn.placement import Placement, axis_types
from flaxasync.ops.attention.layouts import AttentionLayout, check_sequence_layout, check_sequence_rows


@dataclasses.dataclass(frozen=True)
class Context:
    """How a sequence is split over a mesh axis. Layout and backend are those of `flaxasync.ring_attention`."""

    axis_name: str
    layout: AttentionLayout
    backend: str | None

    def check(self, layer: str) -> None:
        """Raises ValueError if there is no mesh, no such axis, or no such layout."""
        mesh_axis_size(layer, self.axis_name)
        check_sequence_layout(layer, self.layout)

    def in_spec(self, x: Array, axis_name: str) -> P | None:
        """Returns how the input of a layer on `axis_name` is sharded under Auto axes: its rows over both axes.

        The other axes shard the batch if they divide it. Under Explicit axes the type says how the input is sharded,
        and inside shard_map nothing has to be said: the result is None.
        """
        mesh = jax.sharding.get_abstract_mesh()
        auto = [name for name, kind in axis_types().items() if kind == AxisType.Auto]
        if not {self.axis_name, axis_name} <= set(auto):
            return None
        others = tuple(name for name in auto if name not in (self.axis_name, axis_name))
        fits = x.shape[0] % math.prod(mesh.shape[name] for name in others) == 0
        return P(others if others and fits else None, (self.axis_name, axis_name), None)

    def check_rows(self, layer: str, x: Array, placement: Placement) -> None:
        """Raises ValueError for an input whose rows are not on both axes, or cannot be shared out equally."""
        size = mesh_axis_size(layer, self.axis_name)
        if placement.manual:
            rows: tuple[str, ...] = (self.axis_name,) if self.axis_name in jax.typeof(x).mat.varying else ()
        else:
            rows = placement.rows
            check_sequence_rows(layer, self.layout, x.shape[1], size)
        if size > 1 and rows != (self.axis_name,):
            raise ValueError(
                f"{layer} with context_axis={self.axis_name!r} needs its input's rows sharded over "
                f"{(self.axis_name, placement.axis_name)}, or over {self.axis_name!r} alone: got "
                f"{placement.in_spec}; reshard it with jax.reshard"
            )
