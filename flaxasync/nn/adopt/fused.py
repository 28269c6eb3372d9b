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
import re
from collections.abc import Iterator, Mapping, Set
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import PyTree

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

    def __str__(self) -> str:
        return f"fused {', '.join(f'{name} {features}' for name, features in self.parts.items())}"


def is_called_fused(path: str) -> bool:
    """Says whether the name of a layer is one that fused projections usually have."""
    return bool(re.search(r"qkv|query_key_value|c_attn|gate_up|up_gate", path.rpartition(".")[2]))


def parts_of(
    variables: Mapping[str, nnx.Variable], parts: Mapping[str, int]
) -> dict[str, nnx.Variable]:
    """Returns abstract variables of the parts of fused ones, with their metadata."""
    return {
        f"{part}.{name}": variable.replace(
            jax.ShapeDtypeStruct((*variable.shape[:-1], features), variable.dtype)
        )
        for part, features in parts.items()
        for name, variable in variables.items()
    }


def split_fused(module: nnx.Module, source: dict[str, Any], known: Set[str]) -> dict[str, Any]:
    """Returns the arrays of a source, with those of fused layers taken apart for the projections of
    a module.

    Raises:
      ValueError: A fused array has other features than its parts together.
    """
    split = dict(source)
    for fused, parts in _fused_arrays(module):
        if fused not in source or fused in known:
            continue
        value = on_host(split.pop(fused))
        if value.shape[-1] != sum(parts.values()):
            names = ", ".join(name.split(".")[-2] for name in parts)
            raise ValueError(
                f"load: {fused} is {list(value.shape)} in the source, and its parts {names} have "
                f"{' + '.join(map(str, parts.values()))} features here"
            )
        first = 0
        for name, features in parts.items():
            split[name] = value[..., first : first + features]
            first += features
    return split


def join_fused(params: PyTree, source: dict[str, Any], known: Set[str]) -> dict[str, Any]:
    """Returns the arrays of a source, with those of its projections side by side, where a module
    has a fused layer.
    """
    joined = dict(source)
    for fused, parts in _fused_arrays(params):
        if fused not in known or not parts.keys() <= joined.keys():
            continue
        values = [on_host(joined.pop(name)) for name in parts]
        are_on_host = all(isinstance(value, np.ndarray) for value in values)
        numpy = np if are_on_host else jnp
        joined[fused] = numpy.concatenate(values, axis=-1)
    return joined


def on_host(value: Any) -> Any:
    """Returns an array in the memory of this process, where it is there: slices of a sharded one
    are restricted.
    """
    if isinstance(value, jax.core.Tracer) or (
        isinstance(value, jax.Array) and not value.is_fully_addressable
    ):
        return value
    return np.asarray(value)


def _fused_arrays(module: Any) -> Iterator[tuple[str, dict[str, int]]]:
    """Yields the name that each array of fused projections would have, with the features of its
    parts by their names; nothing if it is no module.
    """
    if not isinstance(module, nnx.Module):
        return
    for path, layer in nnx.iter_modules(module):
        if not isinstance(layer, ColumnParallelProjections):
            continue
        prefix = "".join(f"{name}." for name in path)
        for array in ("kernel", "bias"):
            yield (
                f"{prefix}{array}",
                {
                    f"{prefix}{part}.{array}": getattr(layer, part).out_features
                    for part in layer.names
                },
            )
