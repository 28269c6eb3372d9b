"""Puts plain arrays into a model of parallel layers, each under the sharding that its layer
needs.
"""

import dataclasses
import itertools
import math
import operator
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec as P

from flaxasync.nn.adopt.fused import on_host, regroup
from flaxasync.nn.adopt.names import name_of, variables_of
from flaxasync.nn.fully_sharded import StoredLayer
from flaxasync.nn.placement import put


@dataclasses.dataclass(frozen=True)
class Loaded:
    """What `load` did. Names are paths with dots: "layers.0.mlp.up.kernel"."""

    names: tuple[str, ...]  # the parameters that were loaded
    missing: tuple[str, ...]  # those of the model that the source lacks; they keep their values
    unexpected: tuple[str, ...]  # names of the source that the model lacks; they were left out
    # shapes in the source and in the model, if not one
    reshaped: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]]

    def __str__(self) -> str:
        reshaped = [
            f"reshaped: {name} from {list(old)} to {list(new)}"
            for name, (old, new) in self.reshaped.items()
        ]
        return "\n  ".join([f"loaded {len(self.names)} parameters", *self._unmatched(), *reshaped])

    def _unmatched(self) -> list[str]:
        """Returns sentences about the names that only the model or only the source has."""
        sides = {"missing": self.missing, "left over": self.unexpected}
        return [
            f"{side} in the source: {_some_of(names)}" for side, names in sides.items() if names
        ]


def load(
    module: nnx.Module, params: nnx.Module | Mapping[Any, Any], *, strict: bool = True
) -> Loaded:
    """Puts arrays into a model by their names, under the shardings that its layers need.

    `nnx.update` with plain arrays does not: it takes their shardings too, and their metadata.
    Dimensions may be merged or split: a kernel [in, heads, head_dim] of `nnx.MultiHeadAttention` is
    one [in, heads * head_dim] here. A fused kernel is taken apart for `ColumnParallelProjections`,
    and those of a module of parallel layers are put together.

    Args:
      module: The model, on the ambient mesh. Parameters that are abstract, of `nnx.eval_shape`, get
        values too. It may be traced, as in a function that `nnx.jit` compiles, and then arrays that
        are not become constants there.
      params: A model of plain or parallel layers; a state; what orbax restores of a state, without
        a target; or a dict of arrays, nested or with names such as "mlp.up.kernel", with lists of
        blocks. Arrays may be on any devices, or of numpy. They are cast to the dtypes of the model.
      strict: Whether names that are missing or left over are an error. Otherwise the result tells
        them.

    Returns:
      Which names were loaded, missing, left over and reshaped; str() makes a list.

    Raises:
      ValueError: A shape does not fit, names do not (`strict`), or something else is in the place
        of an array. Nothing was loaded then.
    """
    targets = variables_of(module)
    # all names of the model: constants and random streams, too, are neither loaded nor left over
    known = {name_of(path) for path, _ in nnx.to_flat_state(nnx.state(module))}
    flat = {_variable_name(name, known): array for name, array in _flatten(params).items()}
    source = regroup(module, params, flat, known)
    names = tuple(sorted(targets.keys() & source.keys()))
    missing = tuple(sorted(targets.keys() - source.keys()))
    unexpected = tuple(sorted(source.keys() - known))
    reshaped = {
        name: (source[name].shape, targets[name].shape)
        for name in names
        if source[name].shape != targets[name].shape
    }
    loaded = Loaded(names, missing, unexpected, reshaped)
    errors = [
        f"{name} is {list(old)} in the source and {list(new)} here"
        for name, (old, new) in reshaped.items()
        if not _merges(old, new)
    ]
    if strict and (missing or unexpected):
        errors += [*loaded._unmatched(), "strict=False leaves names out"]
    if errors:
        raise ValueError(
            f"load cannot put these arrays into a {type(module).__name__}: {'; '.join(errors)}"
        )
    specs = _layer_specs(module)
    for name in names:
        variable = targets[name]
        target = variable.get_value()
        if name in specs:
            # a stack of layers has leading dimensions
            stack = (None,) * (target.ndim - len(specs[name]))
            spec = P(*stack, *specs[name])
            variable.set_metadata(out_sharding=tuple(spec))
        else:
            spec = _current_spec(variable)
        variable.set_value(_put(source[name], target, spec))
    return loaded


def _put(value: jax.Array | np.ndarray, target: jax.ShapeDtypeStruct, spec: P) -> jax.Array:
    array = on_host(value).reshape(target.shape).astype(target.dtype)
    if jax.sharding.get_abstract_mesh().empty:
        return jnp.asarray(array)
    return put(array, spec)


def _flatten(source: Any, prefix: str = "") -> dict[str, Any]:
    """Returns the arrays by their names, but for the states of random streams."""
    flat: dict[str, Any] = {}
    for last_name, found in _named(source):
        name = f"{prefix}{last_name}"
        value = found
        if isinstance(found, nnx.Variable):
            value = found.get_value()
        if found is None or isinstance(found, nnx.RngState):
            continue
        if isinstance(value, nnx.Module | Mapping) or not jax.tree_util.all_leaves([value]):
            flat |= _flatten(value, f"{name}.")
        elif hasattr(value, "shape") and hasattr(value, "dtype"):
            flat[name] = value
        else:
            raise ValueError(
                f"load: {name} is {value!r}, of type {type(value).__name__}; give an array"
            )
    return flat


def _named(source: Any) -> Iterable[tuple[Any, Any]]:
    """Returns what is in a part of a source, with the names."""
    if isinstance(source, nnx.Module):  # arrays of a module that are no variables stay as they are
        return variables_of(source).items()
    if isinstance(source, Mapping):
        return [(name_of(k) if isinstance(k, tuple) else k, value) for k, value in source.items()]
    leaves = jax.tree.leaves_with_path(source, is_leaf=_is_part)  # of a list, or another pytree
    return [(jax.tree_util.keystr(k, simple=True, separator="."), leaf) for k, leaf in leaves]


def _is_part(node: object) -> bool:
    return isinstance(node, nnx.Variable | nnx.Module | Mapping)


def _variable_name(name: str, known: Set[str]) -> str:
    """Returns the name of a variable. In what orbax restores of a state, its array has the name
    `value` after that.
    """
    if name in known:
        return name
    return name.removesuffix(".value")


def _some_of(names: Sequence[str]) -> str:
    """Returns the first ten names, and how many more there are."""
    some = ", ".join(names[:10])
    if len(names) > 10:
        return f"{some} and {len(names) - 10} more"
    return some


def _layer_specs(module: nnx.Module) -> dict[str, P]:
    """Returns how the parameters of parallel layers are stored, by their names."""
    return {
        name_of((*path, name)): spec
        for path, layer in nnx.iter_modules(module)
        if isinstance(layer, StoredLayer)
        for name, spec in layer.specs.items()
    }


def _current_spec(variable: nnx.Variable) -> P:
    """Returns how a parameter is sharded; in a program that is traced, how its annotation says."""
    target = variable.get_value()
    if isinstance(target, jax.core.Tracer):
        return nnx.get_partition_spec(variable).get_value()
    sharding = getattr(target, "sharding", None)
    spec = getattr(sharding, "spec", sharding)
    if isinstance(spec, P):
        return spec
    return P()


def _merges(one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    """Says whether merging neighbouring dimensions of the longer shape gives the shorter one."""
    fewer, more = (
        set(itertools.accumulate(shape, operator.mul, initial=1))
        for shape in sorted((one, other), key=len)
    )
    return math.prod(one) == math.prod(other) and fewer <= more
