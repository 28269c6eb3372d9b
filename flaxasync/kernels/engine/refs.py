"""Names for the types of what a kernel body handles, and the spec of an operand that stays in HBM."""

from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

# An array in HBM, vector memory or scalar memory, an array of semaphores, or a view `ref.at[...]` of one. Pallas has no
# public type that covers them all. As a field of a class of scratch memory it is also the shape to allocate.
type Ref = Any

# A Python int where it is known while the kernel is traced, else an int32 in the scalar core's registers.
type Scalar = int | jax.Array
type Condition = bool | jax.Array

# What indexes one dimension of a Ref.
type Index = Scalar | slice | pl.Slice

type DType = jax.typing.DTypeLike

# What to allocate as scratch memory: a class of Refs, with shapes and memory spaces as fields.
type ScratchShapes = Any

HBM = pl.BlockSpec(memory_space=pltpu.HBM)


def aligned(first: Scalar, size: Scalar, unit: int) -> pl.Slice:
    """Returns a slice whose first index is known to be a multiple of a hardware tile's side."""
    return pl.ds(pl.multiple_of(first, unit), size)  # type: ignore[arg-type]  # which takes an int, too


def beginning(*sizes: Scalar) -> tuple[pl.Slice, ...]:
    """Returns the indices of the first elements of each dimension, where a partial tile lies in its buffer."""
    return tuple(pl.ds(0, size) for size in sizes)
