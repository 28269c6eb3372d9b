"""What a kernel handles: names for the types, hardware tiles, the sizes of matmul tiles, the types
of its outputs.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import PyTree

from flaxasync.mesh import UnsupportedError

# An array in HBM, vector memory or scalar memory, an array of semaphores, or a view `ref.at[...]`
# of one. Pallas has no public type that covers them all. As a field of a class of scratch memory it
# is also the shape to allocate.
type Ref = Any

# A Python int where it is known while the kernel is traced, else an int32 in the scalar core's
# registers.
type Scalar = int | jax.Array
type Condition = bool | jax.Array

# What indexes one dimension of a Ref.
type Index = Scalar | slice | pl.Slice

type DType = jax.typing.DTypeLike

HBM = pl.BlockSpec(memory_space=pltpu.HBM)

LANES = 128  # columns of a hardware tile
SUBLANES = 8  # rows of a hardware tile of 32 bits
DTYPES = ("float32", "bfloat16")


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Largest sides of the tiles of a matmul x [m, k] @ w [k, n], in elements. Smaller operands
    have smaller tiles.
    """

    m: int = 1024
    k: int = 1024
    n: int = 1024

    def __post_init__(self) -> None:
        if min(self.m, self.k, self.n) < 1:
            raise ValueError(f"Tiles need positive sides: got m={self.m}, k={self.k}, n={self.n}")

    def within(self, m: int, k: int, n: int) -> "Tiles":
        return Tiles(min(self.m, m), min(self.k, k), min(self.n, n))

    def halved(self) -> "Tiles":
        """Returns these tiles with half of the longest side."""
        sides = {"k": self.k, "m": self.m, "n": self.n}
        longest = max(sides, key=sides.__getitem__)
        return dataclasses.replace(self, **{longest: max(1, sides[longest] // 2)})


def when(
    condition: Condition, use: Callable[..., None], *operands: PyTree, **named: PyTree
) -> None:
    """Calls `use(*operands, **named)` in a kernel where a condition holds. The operands are
    computed in either case.
    """
    pl.when(condition)(functools.partial(use, *operands, **named))


def aligned(first: Scalar, size: Scalar, unit: int) -> pl.Slice:
    """Returns a slice whose first index is known to be a multiple of a hardware tile's side."""
    return pl.ds(pl.multiple_of(first, unit), size)  # type: ignore[arg-type]  # which takes an int, too


def beginning(*sizes: Scalar) -> tuple[pl.Slice, ...]:
    """Returns the indices of the first elements of each dimension, where a partial tile lies in its
    buffer.
    """
    return tuple(pl.ds(0, size) for size in sizes)


def sublanes(dtype: DType) -> int:
    """Returns the rows of a hardware tile: 8 times the number of elements that share 32 bits."""
    return SUBLANES * 4 // jnp.dtype(dtype).itemsize


def largest_divisor(size: int, most: int, unit: int) -> int:
    """Returns the largest divisor of `size` that is a multiple of `unit` and at most `most`; `unit`
    divides `size`.
    """
    largest = max(unit, min(size, most) // unit * unit)
    return next(side for side in range(largest, 0, -unit) if size % side == 0)


def sides_of_w[T](transposed: bool, k: T, n: T) -> tuple[T, T]:
    """Returns what belongs to the contraction and to the columns in the order of w's sides."""
    if transposed:
        return (n, k)
    return (k, n)


def check_dtype(caller: str, dtype: DType, *, name: str = "", remedy: str) -> None:
    """Raises NotImplementedError for a dtype that kernels lack, of the operand `name` if one is
    meant.
    """
    found = jnp.dtype(dtype).name
    if found not in DTYPES:
        raise UnsupportedError(
            f"{caller} has kernels for {' and '.join(DTYPES)}: got {name}{found}; {remedy}"
        )


def check_operand(caller: str, name: str, shape: tuple[int, ...], dtype: DType) -> None:
    """Raises if an array is not in whole hardware tiles (ValueError) or of another dtype
    (NotImplementedError).
    """
    check_dtype(caller, dtype, name=f"{name} of ", remedy="cast it, or use backend='none'")
    rows = sublanes(dtype)
    lanes = LANES
    if len(shape) != 2 or shape[0] % rows or shape[1] % lanes or 0 in shape:
        raise ValueError(
            f"{caller} needs {name} in whole hardware tiles, [multiple of {rows}, multiple of "
            f"{lanes}] for {jnp.dtype(dtype).name}: got {list(shape)}; pad it, or use "
            "backend='none'"
        )


def in_hbm(arrays: PyTree) -> Any:
    """Returns the block specs of a pytree of arrays, or of types, that a kernel finds in HBM."""
    return jax.tree.map(lambda _: HBM, arrays)


def output(
    shape: tuple[int, ...],
    like: jax.Array,
    *others: jax.Array,
    invarying: tuple[str, ...] = (),
    dtype: DType | None = None,
) -> jax.ShapeDtypeStruct:
    """Returns the type of a kernel's output: its shape on one device, and its dtype, by default
    that of an operand.

    It varies over the mesh axes over which any operand varies, except for `invarying`.
    """
    kind = jax.typeof(like).mat
    of_others = [jax.typeof(other).mat.varying for other in others]
    varying = kind.varying.union(*of_others) - set(invarying)
    axes = kind.update(varying=varying)
    return jax.ShapeDtypeStruct(shape, dtype or like.dtype, manual_axis_type=axes)
