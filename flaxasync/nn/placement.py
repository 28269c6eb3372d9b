"""How a layer's input is sharded over the ambient mesh, and how to run a function of its shards.

A layer works on global arrays. Under Explicit axes the type of an array says how it is sharded.
Under Auto axes the layer is told (`in_spec`), or assumes the usual sharding: the leading dimension
over every axis but the layer's own. Inside a `jax.shard_map` that already maps the layer's axis,
input and parameters are local shards, and are used as such.
"""

import dataclasses
import functools
import math
import traceback
from collections.abc import Callable, Hashable, Iterable
from typing import Any, Literal

import jax
from jax import lax
from jax.extend.core import get_opaque_trace_state
from jax.sharding import AxisType, PartitionSpec
from jaxtyping import PyTree

from flaxasync.mesh import mesh_axis_size, vary_like
from flaxasync.ops import trust

type Layout = Literal["sequence", "replicated"]
type Dimension = Literal["rows", "features"]
type Entry = tuple[str, ...]  # the mesh axes that shard one dimension


@dataclasses.dataclass(frozen=True)
class Placement:
    """How the input [..., rows, features] of a layer is sharded."""

    axis_name: str  # the layer's mesh axis
    size: int  # the number of devices on that axis
    batch: tuple[Entry, ...]  # the mesh axes that shard each dimension before the rows
    rows: Entry  # the mesh axes that shard the rows, except `axis_name`
    # whether `axis_name` shards the rows; it is then the minor-most of their axes
    rows_sharded: bool
    features_sharded: bool  # whether `axis_name` shards the features
    manual: bool  # whether an enclosing shard_map maps `axis_name`

    def spec(self, layout: Layout | None = None, *, features: bool = False) -> PartitionSpec:
        """Returns the spec of an array [*batch, rows, features]; `axis_name` shards the rows of
        "sequence".
        """
        if layout == "sequence":
            rows = (*self.rows, self.axis_name)
        else:
            rows = self.rows
        return spec_of((*self.batch, rows, (self.axis_name,) if features else ()))

    @property
    def in_spec(self) -> PartitionSpec:
        """The spec of the input."""
        return self.spec(
            "sequence" if self.rows_sharded else "replicated", features=self.features_sharded
        )

    def token_spec(self) -> PartitionSpec:
        """Returns the spec of an array [*batch, rows] that is the same on every device of
        `axis_name`.
        """
        return spec_of((*self.batch, self.rows))

    def all_rows(self, x: jax.Array) -> int:
        """Returns the rows of a sequence, of which an enclosing shard_map may give this device a
        share.
        """
        return x.shape[-2] * (self.size if self.manual and self.rows_sharded else 1)

    def check_output_rows(self, layer: str, rows: int, layout: Layout) -> None:
        """Raises ValueError if the rows of a layer's output are to be sharded and cannot be shared
        out equally.
        """
        axes = (*self.rows, self.axis_name)
        devices = self.size * math.prod(
            jax.sharding.get_abstract_mesh().shape[name] for name in self.rows
        )
        if layout == "sequence" and rows % devices:
            raise ValueError(
                f"{layer} with layout='sequence' shards the rows of its output over "
                f"{', '.join(map(repr, axes))}: got {rows} rows on {devices} devices; pad them to "
                f"{-(-rows // devices) * devices}, or use layout='replicated'"
            )

    def run(
        self, fn: Callable, static: Hashable, args: tuple, in_specs: tuple, out_specs: PyTree
    ) -> Any:
        """Runs `fn(static, *shards)` on the shards of `args`; see `mapped`."""
        apply, given = self.mapped(fn, static, args, in_specs, out_specs)
        return apply(*given)

    def mapped(
        self, fn: Callable, static: Hashable, args: tuple, in_specs: tuple, out_specs: PyTree
    ) -> tuple[Callable[..., Any], tuple]:
        """Returns the function of global arrays that runs `fn(static, *shards)` on their shards,
        and `args` as it takes them.

        It runs `fn` under `jax.shard_map`, or directly inside one. A spec stands for all arrays of
        an argument that is a pytree; None has none. The layer applies the function, so that no
        function of this file is between the layer and `fn` in a traceback. Outside of `jax.jit` the
        program is compiled once for each `fn`, `static` and type of `args`, so `fn` must not be a
        closure, which would be a new one in every call.
        """
        given = args
        if self.manual:
            mapped: Callable = functools.partial(fn, static)
        else:
            types = axis_types()
            if all_explicit():
                given = jax.tree.map(reshard, in_specs, args)
            axes = frozenset(name for name, kind in types.items() if kind != AxisType.Manual)
            if len(axes) == len(types):
                # stands for all axes but those of `jax.vmap`, which takes an axis away
                axes = frozenset()
            call = _MappedCall(ambient_state(), fn, static, in_specs, out_specs, axes)
            if is_eager():
                mapped = _compiled(call)
            else:
                mapped = _traced(call)
        if args[0].size == 0:
            mapped = functools.partial(_empty, mapped)
        return mapped, given


def place(
    layer: str,
    x: jax.Array,
    axis_name: str,
    in_spec: PartitionSpec | None,
    sharded: Dimension,
    features: int | None,
    rows_axis: str | None = None,
) -> Placement:
    """Reads how `x` [..., rows, features] is sharded.

    `axis_name` may split no other dimension than `sharded`: it must split features, and may split
    rows.

    `features` is the number for which the layer was built, on all devices of the axis together;
    None takes any. A second axis of the layer, `rows_axis`, may split the rows, and must where
    `axis_name` splits the features.
    """
    size = mesh_axis_size(layer, axis_name)
    if x.ndim < 2:
        raise ValueError(
            f"{layer} needs an input [..., rows, features]: got {list(x.shape)}; add a dimension "
            "of rows"
        )
    by_rows = sharded == "rows"
    manual = axis_types()[axis_name] == AxisType.Manual
    varies = manual and _varies(layer, x, axis_name)
    features_split = varies and not by_rows
    if features is not None:
        wanted = features // size if features_split else features
        if x.shape[-1] != wanted:
            raise ValueError(
                f"{layer} was built for {features} input "
                f"features{' over the axis' if features_split else ''}: got {list(x.shape)}, "
                f"needed [..., {wanted}]"
            )
    if manual:
        return Placement(
            axis_name, size, ((),) * (x.ndim - 2), (), varies and by_rows, features_split, True
        )
    entries = _entries(layer, x, in_spec, axis_name, x.ndim - 2, -2 if by_rows else -1, rows_axis)
    *batch, rows, last = entries
    if by_rows:
        # it is minor-most in the rows, so that what is gathered over it is in order
        in_its_place = not last and (axis_name not in rows or rows[-1] == axis_name)
        needed = (
            f"whose rows (dimension -2) are sharded over {axis_name!r}, or are the same on all of "
            "its devices"
        )
    else:
        # one device has all features: they count as split
        is_split = last == (axis_name,) or (size == 1 and not last)
        in_its_place = is_split and axis_name not in rows
        needed = f"whose features (dimension -1) are sharded over {axis_name!r}"
    if rows_axis is not None and not by_rows:
        if rows_axis not in rows and mesh_axis_size(layer, rows_axis) == 1:
            rows = (*rows, rows_axis)  # one device has all rows: they count as sharded
        needed = f"whose rows (dimension -2) are sharded over {rows_axis!r}, and {needed}"
        in_its_place = in_its_place and rows_axis in rows
        # before that is judged: under Auto axes rows that do not divide were not sharded
        check_divides(layer, rows_axis, rows=x.shape[-2])
    if not in_its_place or any(axis_name in entry for entry in batch):
        raise ValueError(
            f"{layer} takes an input {needed}: got {spec_of(entries)}; reshard it with jax.reshard"
        )
    others = tuple(name for name in rows if name != axis_name)
    return Placement(
        axis_name, size, tuple(batch), others, axis_name in rows, bool(last), manual=False
    )


def place_tokens(
    layer: str, ids: jax.Array, axis_name: str, in_spec: PartitionSpec | None
) -> Placement:
    """Reads how `ids` [..., rows] is sharded; every device of `axis_name` must have all of them."""
    size = mesh_axis_size(layer, axis_name)
    if ids.ndim < 1:
        raise ValueError(f"{layer} needs ids [..., rows]: got a scalar; add a dimension")
    manual = axis_types()[axis_name] == AxisType.Manual
    if manual:
        entries: list[Entry] = [()] * ids.ndim
        split = _varies(layer, ids, axis_name)
        found = "ids that vary over it"
        remedy = "gather them first"
    else:
        entries = _entries(layer, ids, in_spec, axis_name, ids.ndim - 1, None)
        split = any(axis_name in entry for entry in entries)
        found = str(spec_of(entries))
        remedy = "reshard them with jax.reshard"
    if size > 1 and split:
        raise ValueError(
            f"{layer} needs all ids on every device of {axis_name!r}: got {found}; {remedy}"
        )
    *batch, rows = (tuple(name for name in entry if name != axis_name) for entry in entries)
    return Placement(axis_name, size, tuple(batch), rows, False, False, manual)


def check_divides(layer: str, axis_name: str, **sizes: int) -> None:
    """Raises ValueError for a size, given by its name, that the axis does not divide."""
    devices = mesh_axis_size(layer, axis_name)
    for name, size in sizes.items():
        if size % devices:
            lower = size // devices * devices
            upper = -(-size // devices) * devices
            raise ValueError(
                f"{layer}: {name} must be divisible by the {axis_name!r} axis: got {name}={size} "
                f"on {devices} devices; use {f'{lower} or ' if lower else ''}{upper}, or a smaller "
                "axis"
            )


def check_output_layout(layer: str, layout: str) -> Layout:
    """Returns the layout of a layer's output. Raises ValueError for an unknown one."""
    if layout not in ("sequence", "replicated"):
        raise ValueError(f"{layer} got layout={layout!r}: it must be 'sequence' or 'replicated'")
    return layout  # type: ignore[return-value]


def _entries(
    layer: str,
    x: jax.Array,
    in_spec: PartitionSpec | None,
    axis_name: str,
    batch_dims: int,
    split: int | None,
    rows_axis: str | None = None,
) -> list[Entry]:
    """Returns the mesh axes of every dimension of x: by the type, by `in_spec`, or by the usual
    sharding.

    In the usual sharding the first of `batch_dims` leading dimensions is sharded over all other
    axes, dimension -2 over `rows_axis`, and dimension `split` over `axis_name`, each if the axes
    divide it.
    """
    typed = entries_of(jax.typeof(x).sharding.spec, x.ndim)
    auto = tuple(name for name, kind in axis_types().items() if kind == AxisType.Auto)
    if in_spec is not None:
        given = entries_of(in_spec, x.ndim)
        given_in_types = [tuple(name for name in entry if name not in auto) for entry in given]
        if given_in_types != typed:
            raise ValueError(
                f"{layer} was built with in_spec={in_spec}, and its input {list(x.shape)} is "
                f"sharded {spec_of(typed)}; leave in_spec out where all axes are Explicit or Manual"
            )
        return given
    # (dimension, axes); `axis_name` is last, the minor-most of its dimension
    wishes: list[tuple[int, Entry]] = []
    if batch_dims:
        wishes.append((0, tuple(name for name in auto if name not in (axis_name, rows_axis))))
    if rows_axis in auto:
        wishes.append((-2, (rows_axis,)))
    if split is not None and axis_name in auto:
        wishes.append((split, (axis_name,)))
    entries = typed
    mesh = jax.sharding.get_abstract_mesh()
    for dim, names in wishes:
        wished = (*entries[dim], *names)
        if x.shape[dim] % math.prod(mesh.shape[name] for name in wished) == 0:
            entries[dim] = wished
    return entries


@dataclasses.dataclass(frozen=True)
class _MappedCall:
    """A function of shards under `jax.shard_map`, and all that tracing it reads beside arrays."""

    ambient: Hashable  # what `ambient_state` says now
    fn: Callable
    static: Hashable
    in_specs: tuple
    out_specs: PyTree
    axes: frozenset[str]

    def jitted(self, inline: bool | jax.Inline) -> Callable:
        """Returns the function of arrays, which is traced once for each of their types."""
        mapped = jax.shard_map(
            functools.partial(self.fn, self.static),
            in_specs=self.in_specs,
            out_specs=self.out_specs,
            axis_names=self.axes,
        )
        return jax.jit(mapped, inline=inline)


@dataclasses.dataclass(frozen=True)
class _Trace:
    """The calls of layers in one trace, by what was called from where."""

    state: object  # what tells the trace from others
    calls: dict[Hashable, Callable]


_latest_trace = _Trace(None, {})


def ambient_state() -> Hashable:
    """Returns what tracing a layer reads beside its arguments: the mesh with its axis types, and
    which kernels count.

    Every cache of something that was traced has it in its key, because a program that was traced
    for one mesh, or with the kernels that one block of code trusts, is not that of another.
    """
    return jax.sharding.get_abstract_mesh(), trust.state()


@functools.lru_cache(1024)
def _compiled(call: _MappedCall) -> Callable:
    """Returns the program of an eager call."""
    return call.jitted(inline=True)


def _traced(call: _MappedCall) -> Callable:
    """Returns the function of a call that is traced, the same one for a layer that is called again
    in the same trace from the same lines.

    So blocks that a model calls in a loop are traced, differentiated and transposed once. JAX
    inlines the result, and the model's program is the one that it would be without. A call from
    other lines is traced for itself, because a program names the lines of each operation. No trace
    shares with another one, because which kernels are trusted can change between the two.
    """
    global _latest_trace
    latest = _latest_trace
    state = get_opaque_trace_state(convention="nnx")
    if latest.state != state:
        latest = _Trace(state, {})
        _latest_trace = latest
    lines = tuple((frame.f_code.co_filename, line) for frame, line in traceback.walk_stack(None))
    found = latest.calls.get((call, lines))
    if found is None:
        found = call.jitted(inline=jax.Inline.JAX_EARLY)
        latest.calls[call, lines] = found
    return found


def _empty(mapped: Callable, *args: PyTree) -> jax.Array:
    """Returns the output of a layer for an input without elements. Collectives without elements
    never end on a CPU.
    """
    y = jax.eval_shape(mapped, *args)
    if y.sharding is None:
        spec = PartitionSpec()
    else:
        spec = y.sharding.spec
    zeros = lax.full(
        y.shape, 0, y.dtype, sharding=jax.NamedSharding(jax.sharding.get_abstract_mesh(), spec)
    )
    return vary_like(zeros, y)


def is_eager() -> bool:
    """Says whether operations are executed now, though perhaps under `jax.grad` or `jax.vmap`, and
    not traced by jit.

    An operation without operands is left to the outermost transformation. Inside of jit its result
    is a tracer.
    """
    return not isinstance(lax.iota(jax.numpy.int32, 1), jax.core.Tracer)


def put(x: Any, spec: PartitionSpec) -> jax.Array:
    """Returns `x` sharded over the ambient mesh: it is put there now, or by the program that is
    being traced.
    """
    if is_eager():
        return jax.device_put(x, jax.NamedSharding(jax.sharding.get_mesh(), spec))
    return constrain(x, spec)


def constrain(x: jax.Array, spec: PartitionSpec) -> jax.Array:
    """Returns an array of the program that is being traced, sharded as a spec says."""
    if all_explicit():
        return reshard(spec, x)
    return lax.with_sharding_constraint(x, spec)


def _varies(layer: str, x: jax.Array, axis_name: str) -> bool:
    """Says whether `x`, inside shard_map, varies over an axis. Under check_vma=False no type says
    it.
    """
    if axis_name not in jax.typeof(lax.axis_index(axis_name)).mat.varying:
        raise ValueError(
            f"{layer} inside jax.shard_map reads from its input's type whether that is sharded "
            f"over {axis_name!r}, and check_vma=False hides it; leave check_vma on, or call a "
            "function of shards: flaxasync.all_gather_matmul"
        )
    return axis_name in jax.typeof(x).mat.varying


def axis_types() -> dict[str, AxisType]:
    """Returns the types of the axes of the ambient mesh by their names."""
    mesh = jax.sharding.get_abstract_mesh()
    return dict(zip(mesh.axis_names, mesh.axis_types, strict=True))


def all_explicit() -> bool:
    """Says whether all axes of the ambient mesh are Explicit, as they are where none is set."""
    return all(kind == AxisType.Explicit for kind in axis_types().values())


def on_all_devices(layer: str, axis_name: str, size: int) -> int:
    """Returns the size on all devices of a dimension of a parameter that an axis splits, of which
    an enclosing shard_map gives this device a share.
    """
    devices = mesh_axis_size(layer, axis_name)
    if axis_types()[axis_name] == AxisType.Manual:
        return size * devices
    return size


def reshard(spec: PartitionSpec, args: PyTree) -> Any:
    """Shards arrays as a layer needs them under Explicit axes: parameters that were loaded may be
    sharded otherwise.
    """

    def reshard_one(x: jax.Array) -> jax.Array:
        is_so = entries_of(jax.typeof(x).sharding.spec, x.ndim) == entries_of(spec, x.ndim)
        if is_so:
            return x
        return jax.reshard(x, spec)

    return jax.tree.map(reshard_one, args)


def axes_of(entry: Any) -> Entry:
    """Returns the mesh axes that an entry of a PartitionSpec names."""
    if entry is None:
        return ()
    if isinstance(entry, str):
        return (entry,)
    return tuple(entry)


def entries_of(spec: Iterable[Any], dims: int) -> list[Entry]:
    """Returns the mesh axes that shard each of `dims` dimensions; a spec may leave the last ones
    out.
    """
    entries = [axes_of(entry) for entry in spec]
    return entries + [()] * (dims - len(entries))


def spec_of(entries: Iterable[Entry]) -> PartitionSpec:
    """Returns the spec of a dimension for each entry."""
    return PartitionSpec(*(names[0] if len(names) == 1 else names or None for names in entries))
