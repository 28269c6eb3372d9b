"""Fully sharded parameters: how they are stored between uses, and how a layer gathers them when it
needs them.

With `fsdp_axis="fsdp"` each device keeps 1 / (fsdp x model) of a parameter, and so of its gradient
and of the state of its optimizer. A layer needs the parameter sharded over its own axis alone. For
a kernel [in, out]:

```
                  stored              needed            gathered along
column-parallel   P(fsdp, model)      P(None, model)    in
row-parallel      P(model, fsdp)      P(model, None)    out

forward   w  = all_gather(cast(w_shard))        in the dtype of the computation or 8 bits: it is cast before the trip
backward  dw_shard = reduce_scatter(dw)         summed in the dtype of the parameter
```

Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models"
(2019), stage 3.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any, ClassVar, cast

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from flaxasync.mesh import cast_to_varying, mesh_axis_size
from flaxasync.nn.options import Configured, Settings
from flaxasync.nn.placement import Entry, all_explicit, axes_of, entries_of, put, spec_of
from flaxasync.ops.quantization import Operand, Quantization, Quantized, quantize
from flaxasync.ops.saved import PARAMETER

# How metadata of Flax say in which way a parameter is sharded; the second is an older name of the
# first.
ANNOTATIONS = ("out_sharding", "sharding_names", "sharding_rules")


class StoredLayer(Configured):
    """A layer that keeps how its parameters are stored, because `nnx.update` may replace their
    metadata.
    """

    names: ClassVar[tuple[str, ...]]  # of the parameters
    stored: tuple[P | None, ...]  # how each of them is stored; None for one that is not there

    @property
    def specs(self) -> dict[str, P]:
        """How each parameter that is there is stored."""
        return {
            name: spec
            for name, spec in zip(self.names, self.stored, strict=True)
            if spec is not None
        }

    def parameters(self) -> tuple[Any, ...]:
        """Returns the parameters, None for one that is not there, once it is checked that they are
        sharded so.
        """
        found = {name: getattr(self, name)[...] for name in self.specs}
        for name, parameter in found.items():
            check_sharded(type(self).__name__, name, parameter, self.specs[name])
        return tuple(map(found.get, self.names))


def check_sharded(layer: str, name: str, parameter: jax.Array, spec: P) -> None:
    """Raises ValueError for a parameter that lost its sharding, which under Explicit axes its
    gradient would lack too.

    Under Auto axes no type says how a parameter is sharded, and XLA shards its gradient as the
    layer uses it.
    """
    if parameter.ndim > len(spec):
        raise ValueError(
            f"{layer}: the {name} {list(parameter.shape)} has {parameter.ndim} dimensions, and one "
            f"layer's has {len(spec)}: this is a stack of layers, as nnx.vmap makes it; call it "
            "inside nnx.scan or nnx.vmap"
        )
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or not all_explicit():
        return  # `place` tells that there is no mesh
    typed = P(*jax.typeof(parameter).sharding.spec)

    def axes_that_split(spec: P) -> list[Entry]:
        return [
            tuple(axis for axis in axes if mesh.shape[axis] > 1)
            for axes in entries_of(spec, parameter.ndim)
        ]

    if axes_that_split(typed) != axes_that_split(spec):
        raise ValueError(
            f"{layer}: the {name} {list(parameter.shape)} must be sharded {spec}: got {typed}; "
            "arrays that nnx.update or an assignment put into a layer keep the sharding that they "
            "have, and their gradients get the same: put them in with flaxasync.nn.load"
        )


def stored_parameter(
    layer: str, name: str, value: Any, settings: Settings, needed: P, metadata: Mapping[str, Any]
) -> tuple[nnx.Param, P]:
    """Returns a new parameter, and how it is stored; see `stored_spec`.

    It is sharded so where Flax's eager sharding is off, too, because the layer could not be called
    otherwise.
    """
    array = value
    given = dict(metadata)
    if isinstance(value, nnx.VariableMetadata):  # as nnx.with_partitioning makes it
        array = value.raw_value
        given |= value.metadata
    annotation = _mesh_axes(layer, name, given)
    spec = stored_spec(layer, name, array.shape, needed, settings, annotation)
    if not given.get("eager_sharding", nnx.using_eager_sharding()):
        array = put(array, spec)
    kept = {key: given[key] for key in given if key not in ANNOTATIONS}
    return nnx.Param(array, **kept, out_sharding=tuple(spec)), spec


def _mesh_axes(layer: str, name: str, metadata: Mapping[str, Any]) -> P | None:
    """Returns the annotation of a parameter in axes of the mesh; None if there is none.

    Logical names are resolved as Flax resolves them, by `sharding_rules` of the metadata and
    `nnx.logical_axis_rules`.
    """
    annotations = {key: metadata[key] for key in ANNOTATIONS if metadata.get(key)}
    if not annotations.keys() - {"sharding_rules"}:
        return None
    variable = nnx.Variable(
        jax.ShapeDtypeStruct((), jnp.float32), **annotations, eager_sharding=False
    )
    spec = cast(P, nnx.get_partition_spec(variable).get_value())
    axes = jax.sharding.get_abstract_mesh().axis_names
    for entry in spec:
        for axis in axes_of(entry):
            if axis not in axes:
                raise ValueError(
                    f"{layer}: the {name} has "
                    f"out_sharding={variable.get_metadata('out_sharding')}, in which {axis!r} is "
                    f"neither an axis of the mesh, {', '.join(map(repr, axes))}, nor a logical "
                    "name with a rule: name a mesh axis, or give a rule by nnx.logical_axis_rules, "
                    "or in sharding_rules"
                )
    return spec


def without_axis(module: nnx.Module, axis: str) -> None:
    """Makes the layers of a module, in place, take parameters that were gathered over an axis
    before.
    """

    def without(spec: P) -> P:
        return spec_of(tuple(name for name in axes_of(entry) if name != axis) for entry in spec)

    for _, layer in nnx.iter_modules(module):
        if isinstance(layer, StoredLayer):
            layer.stored = tuple(spec and without(spec) for spec in layer.stored)


def stored_spec(
    layer: str, name: str, shape: tuple[int, ...], needed: P, settings: Settings, annotation: Any
) -> P:
    """Returns how a parameter is stored.

    The layer needs it sharded as `needed` says, and `fsdp_axis` shards it as well: along the first
    dimension that is whole and that the axis divides, or else along one that is sharded. A bias
    that the axis does not divide is not sharded over it. `annotation` is the `out_sharding` that
    the user gave; see `flaxasync.nn.LinearOptions`.
    """
    axis_name = settings.axis_name
    fsdp_axis = settings.fsdp_axis
    entries = entries_of(needed, len(shape))
    if annotation is not None:
        extra = _extra_axes(layer, name, shape, entries, axis_name, annotation)
        for dim, axes in enumerate(extra):
            devices = math.prod(mesh_axis_size(layer, axis) for axis in (*entries[dim], *axes))
            if axes and shape[dim] % devices:
                raise ValueError(
                    f"{layer}: dimension {dim} of the {name} {list(shape)} must be divisible by "
                    f"the axes of its annotation, {', '.join(map(repr, (*entries[dim], *axes)))}: "
                    f"got {shape[dim]} on {devices} devices; use "
                    f"{-(-shape[dim] // devices) * devices}, or a smaller axis"
                )
        return spec_of(own + more for own, more in zip(entries, extra, strict=True))
    if fsdp_axis is None:
        return needed
    if fsdp_axis == axis_name:
        raise ValueError(
            f"{layer} got fsdp_axis={fsdp_axis!r}, which is its axis_name, too; name another mesh "
            "axis"
        )
    size = mesh_axis_size(layer, fsdp_axis)
    works = []
    for dim in sorted(range(len(shape)), key=lambda dim: bool(entries[dim])):
        devices = size * math.prod(mesh_axis_size(layer, axis) for axis in entries[dim])
        if shape[dim] % devices == 0:
            entries[dim] += (fsdp_axis,)
            return spec_of(entries)
        works.append(f"{-(-shape[dim] // devices) * devices} for dimension {dim}")
    if len(shape) == 1:
        return needed
    raise ValueError(
        f"{layer} cannot share out the {name} {list(shape)}, which is sharded {needed}, over "
        f"{size} devices of the {fsdp_axis!r} axis as well: use {' or '.join(works)}, or a smaller "
        "axis"
    )


def gather(
    parameter: Array,
    stored: P | None,
    like: Array,
    axis_name: str,
    dtype: DTypeLike | None,
    quantization: Quantization | None = None,
) -> Any:
    """Returns a parameter, inside shard_map, as the layer needs it, and in `dtype` if it had to be
    gathered.

    With a quantization, a kernel that one axis shards is gathered in 8 bits with its scales, and
    stays quantised.

    Nothing is gathered over the layer's axis, and where an enclosing shard_map of the user does not
    shard the parameter. The gradient is summed over the mesh axes over which `like` varies, as the
    batch does.
    """
    varying = jax.typeof(like).mat.varying - {axis_name}
    held = jax.typeof(parameter).mat.varying
    whole: Any = parameter
    trips = [
        (dim, axis)
        for dim, entry in enumerate(stored or ())
        for axis in reversed(
            [name for name in axes_of(entry) if name != axis_name and name in held]
        )
    ]
    # what one trip has quantised, a second one could not gather
    in_8_bits = None
    if len(trips) == 1:
        in_8_bits = quantization
    for dim, axis in trips:
        with jax.named_scope("gather_parameter"):
            if axis in varying:
                whole = cast_to_varying(whole, varying)
                trip = _Trip(axis, dim, jnp.dtype(dtype), whole.dtype, in_8_bits)
                whole = _gather(trip, whole)
            else:
                # the batch is the same on all devices of the axis, and so is the gradient
                whole = lax.all_gather(
                    whole.astype(dtype), axis, axis=dim, tiled=True, to="invarying"
                )
    if whole is parameter:
        return parameter
    return checkpoint_name(whole, PARAMETER)


@dataclasses.dataclass(frozen=True)
class _Trip:
    """What is static where a parameter is gathered along one dimension."""

    axis: str
    dim: int
    dtype: jnp.dtype  # in which it travels
    stored: jnp.dtype  # in which its gradient is summed
    quantization: Quantization | None


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gather(trip: _Trip, shard: Array) -> Operand:
    axis = trip.axis
    quantization = trip.quantization
    travelling = shard.astype(trip.dtype)
    if quantization is None:
        return lax.all_gather(travelling, axis, axis=trip.dim, tiled=True)
    # the product contracts dimension 0 of a kernel
    shared = trip.dim == 0 or quantization.scale == "tensor"
    over = (axis,) if shared else ()
    quantized = quantize(travelling, quantization.forward, 0, scale=quantization.scale, over=over)
    values = lax.all_gather(quantized.values, axis, axis=trip.dim, tiled=True)
    if trip.dim == 0:
        scales = quantized.scales
    else:
        scales = lax.all_gather(quantized.scales, axis, axis=0, tiled=True)
    return Quantized(values, scales, trip.dtype, jnp.zeros_like(values, trip.dtype))


def _gather_fwd(trip: _Trip, shard: Array) -> tuple[Operand, None]:
    return _gather(trip, shard), None


def _gather_bwd(trip: _Trip, _: None, gradient: Operand) -> tuple[Array]:
    if isinstance(gradient, Quantized):
        dw = gradient.weight
    else:
        dw = gradient
    dw = dw.astype(trip.stored)
    return (lax.psum_scatter(dw, trip.axis, scatter_dimension=trip.dim, tiled=True),)


_gather.defvjp(_gather_fwd, _gather_bwd)


def _extra_axes(
    layer: str,
    name: str,
    shape: tuple[int, ...],
    needed: list[Entry],
    axis_name: str,
    annotation: Any,
) -> list[Entry]:
    """Returns the axes of an annotation other than the layer's, for each dimension."""
    given = entries_of(annotation, len(shape))
    if len(given) > len(shape):
        raise ValueError(
            f"{layer}: the {name} {list(shape)} has {len(shape)} dimensions: got "
            f"out_sharding={annotation}"
        )
    for entry in given:
        if axis_name in entry[1:]:
            raise ValueError(
                f"{layer}: {axis_name!r} must come before the other axes of a dimension: got "
                f"out_sharding={annotation} for the {name}"
            )
    places = [
        [dim for dim, entry in enumerate(entries) if axis_name in entry]
        for entries in (given, needed)
    ]
    if len(given) == 2 and places[0] and places[0] != places[1]:
        given = given[::-1]
    return [tuple(axis for axis in entry if axis != axis_name) for entry in given]
