"""Operands whose second derivative does not exist, because the first one is a kernel or a ring of its own."""

from collections.abc import Callable
from typing import Any

import jax

from flaxasync.mesh import UnsupportedError


def first_only(op: str, why: str, instead: str) -> Callable[..., tuple[Any, ...]]:
    """Returns the identity of some operands, with a derivative that raises NotImplementedError."""

    @jax.custom_jvp
    def identity(*operands: Any) -> tuple[Any, ...]:
        return operands

    @identity.defjvp
    def refuse(primals: tuple, tangents: tuple) -> Any:
        raise UnsupportedError(f"{op} has a first derivative only: {why}; {instead}")

    return identity
