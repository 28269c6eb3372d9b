"""The names of what a module has: paths with dots, such as "layers.0.mlp.up.kernel"."""

from collections.abc import Iterable
from typing import Any

from flax import nnx


def name_of(path: Iterable[Any]) -> str:
    """Returns the name of what is at a path."""
    return ".".join(map(str, path))


def variables_of(module: nnx.Module) -> dict[str, nnx.Variable]:
    """Returns the variables of a module that are no random streams, by their names."""
    return {
        name_of(path): value
        for path, value in nnx.iter_graph(module)
        if isinstance(value, nnx.Variable) and not isinstance(value, nnx.RngState)
    }
