"""Dense layers that compute several projections side by side, such as a kernel [in, q + k + v]
under the name "qkv".

Split over an axis as a whole, the first devices would have all of q, and the last ones all of v:
whoever takes the output apart moves q, k and v between devices. So each part is a layer of its own,
and is split by itself:

```
kernel [in, q + k + v]   ->   query.kernel [in, q],  key.kernel [in, k],  value.kernel [in, v]
```
"""

import dataclasses
from collections.abc import Iterator, Mapping, Set
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from flaxasync.nn.adopt.names import name_of
from flaxasync.nn.linear import ColumnParallelProjections


@dataclasses.dataclass(frozen=True)
class Fused:
    """A rule of `parallelize` for an `nnx.Linear` whose output is taken apart: it becomes
    `ColumnParallelProjections`.

    ```python
    fa.nn.parallelize(model, {"blocks.*.qkv": fa.nn.Fused({"query": 64, "key": 32, "value": 32})})
    ```

    The new layer returns a tuple, so that the model has to say `q, k, v = self.qkv(x)`, without
    `jnp.split`.

    Attributes:
      parts: The features of each part by its name, in the order in which they lie in the output.
    """

    parts: Mapping[str, int]


def regroup(
    module: nnx.Module, params: object, source: Mapping[str, Any], known: Set[str]
) -> dict[str, Any]:
    """Returns the arrays of a source, by the names of a module.

    Arrays of fused layers are taken apart for the projections of the module. Those of projections,
    where `params` is a module that has some, are put side by side where the module has a fused
    layer, which `known`, the names of all that it has, says.

    Raises:
      ValueError: A fused array has other features than its parts together.
    """
    regrouped = dict(source)
    for fused, parts in _fused_arrays(module):
        if fused not in source:
            continue
        value = on_host(regrouped.pop(fused))
        if value.shape[-1] != sum(parts.values()):
            raise ValueError(
                f"{fused} is {list(value.shape)}, and its parts have the features {parts} here"
            )
        for name, features in parts.items():
            regrouped[name] = value[..., :features]
            value = value[..., features:]
    for fused, parts in _fused_arrays(params):
        if fused in known and parts.keys() <= source.keys():
            values = [on_host(regrouped.pop(name)) for name in parts]
            are_on_host = all(isinstance(value, np.ndarray) for value in values)
            numpy = np if are_on_host else jnp
            regrouped[fused] = numpy.concatenate(values, axis=-1)
    return regrouped


def on_host(value: jax.Array | np.ndarray) -> Any:
    """Returns an array in the memory of this process, where it is there: slices of a sharded one
    are restricted.
    """
    if isinstance(value, jax.core.Tracer) or (
        isinstance(value, jax.Array) and not value.is_fully_addressable
    ):
        return value
    return np.asarray(value)


def _fused_arrays(module: object) -> Iterator[tuple[str, dict[str, int]]]:
    """Yields the name that each array of fused projections would have, with the features of its
    parts by their names; nothing if it is no module.
    """
    if not isinstance(module, nnx.Module):
        return
    for path, layer in nnx.iter_modules(module):
        if isinstance(layer, ColumnParallelProjections):
            for array in ("kernel", "bias"):
                parts = {
                    name_of((*path, part, array)): getattr(layer, part).out_features
                    for part in layer.names
                }
                yield name_of((*path, array)), parts
