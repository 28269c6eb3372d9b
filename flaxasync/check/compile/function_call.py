"""A call that is compiled: whatever a caller holds of a function becomes one that can be lowered,
and its arguments.

`jax.jit` and `nnx.jit`, `functools.partial` of either, methods and callable modules differ in where
their arguments are. A module that a function closes over would be compiled as constants of the
devices on which it lies.
"""

import dataclasses
import functools
import sys
import types
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jaxtyping import PyTree


@dataclasses.dataclass(frozen=True)
class FunctionCall:
    """A function with the method `lower`, and all of its arguments."""

    fn: Any
    args: tuple
    kwargs: Mapping[str, Any]

    @classmethod
    def of(cls, fn: Callable, args: tuple, kwargs: Mapping[str, Any]) -> "FunctionCall":
        """Returns a call, with the arguments that `functools.partial`, a method or a module brings
        along.

        Raises:
          TypeError: `fn` is no function, or one of `nnx.jit_partial`, whose arguments cannot be
            moved any more.
        """
        if isinstance(fn, functools.partial):
            return cls.of(fn.func, (*fn.args, *args), {**fn.keywords, **kwargs})
        if isinstance(fn, types.MethodType) and (
            hasattr(fn.__func__, "lower") or _is_module(fn.__self__)
        ):
            return cls.of(fn.__func__, (fn.__self__, *args), kwargs)
        if _is_module(fn):
            return cls.of(type(fn).__call__, (fn, *args), kwargs)
        if hasattr(fn, "partial_args"):
            raise TypeError(
                "compile_for cannot move the arguments that nnx.jit_partial has bound to other "
                "devices: give it nnx.jit(fun), or functools.partial(nnx.jit(fun), ...), with "
                "these arguments"
            )
        if not callable(fn):
            raise TypeError(f"compile_for compiles a function: got {type(fn).__name__}")
        if not hasattr(fn, "lower"):
            fn = _jit(fn, (args, kwargs))
        return cls(fn, args, dict(kwargs))

    @property
    def arrays(self) -> list[Any]:
        """The arrays of the arguments, and whatever else is a leaf of their pytrees."""
        return jax.tree.leaves((self.args, self.kwargs))

    def map(self, function: Callable[[Any], Any]) -> "FunctionCall":
        """Returns the call with what a function returns for each array.

        Modules that share variables share them afterwards, too.
        """
        leaves, tree = jax.tree.flatten((self.args, dict(self.kwargs)), is_leaf=_is_module)
        modules = tuple(leaf for leaf in leaves if _is_module(leaf))
        if modules:
            from flax import nnx  # it is loaded already, because there are modules

            graph, state = nnx.split(modules)
            merged: Any = nnx.merge(graph, jax.tree.map(function, state))
            changed = iter(merged)
            leaves = [next(changed) if _is_module(leaf) else function(leaf) for leaf in leaves]
        else:
            leaves = list(map(function, leaves))
        args, kwargs = jax.tree.unflatten(tree, leaves)
        return FunctionCall(self.fn, args, kwargs)

    def lower(self) -> Any:
        """Traces and lowers the function. Returns JAX's own `jax.stages.Lowered`, which those of
        Flax contain.
        """
        lowered = self.fn.lower(*self.args, **self.kwargs)
        return getattr(lowered, "lowered", lowered)


def is_array(leaf: object) -> bool:
    """Says whether an argument is an array, or stands for one; other values may be static
    arguments.
    """
    return isinstance(leaf, jax.Array | jax.ShapeDtypeStruct | np.ndarray | np.generic)


def is_number(leaf: object) -> bool:
    """Says whether an argument is a number of Python, which is an array unless it is static."""
    return isinstance(leaf, bool | int | float | complex)


def _is_module(value: object) -> bool:
    """Says whether a value is a module, an optimizer or the like of Flax, without loading Flax."""
    flax = sys.modules.get("flax.nnx")
    return flax is not None and isinstance(value, flax.Pytree)


def _jit(fn: Callable, arguments: PyTree) -> Any:
    """Returns the jitted function; by `nnx.jit`, which returns what the function changes, where
    modules are given.
    """
    if any(map(_is_module, jax.tree.leaves(arguments, is_leaf=_is_module))):
        from flax import nnx

        return nnx.jit(fn)
    return jax.jit(fn)
