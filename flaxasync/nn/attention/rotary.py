"""Rotary position embedding, and the scaling of its frequencies for sequences that are longer than
those of training.

Source: Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding" (2021), in the
half-split layout of the public Llama checkpoints.
"""

import dataclasses
import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from flaxasync import mesh
from flaxasync.kernels import rotate_heads
from flaxasync.mesh import vary_like
from flaxasync.ops import trust
from flaxasync.ops.matmul.products import accumulator_dtype


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """Divides the low frequencies of a rotary position embedding by a factor, as Llama 3.1 does.
    Hashable.

    A frequency that turns fewer than `low_frequency` times within `original_length` positions is
    divided by `factor`; one that turns more than `high_frequency` times is kept; between the two
    the result is interpolated linearly.
    """

    factor: float
    low_frequency: float = 1.0
    high_frequency: float = 4.0
    # of the sequences for which the frequencies were meant, in positions
    original_length: int = 8192

    def apply(self, frequency: Array) -> Array:
        """Returns the scaled frequencies (radians per position)."""
        turns = frequency * (self.original_length / (2 * math.pi))
        kept = jnp.clip(
            (turns - self.low_frequency) / (self.high_frequency - self.low_frequency), 0, 1
        )
        return frequency * (kept + (1 - kept) / self.factor)


class RotaryTables(NamedTuple):
    """The cosines and sines by which rows of heads are rotated."""

    cos: Float[Array, "s d/2"]
    sin: Float[Array, "s d/2"]


def rotary_embedding(
    x: Float[Array, "*batch s h d"],
    *,
    theta: float = 10_000.0,
    positions: Int[Array, "*s"] | None = None,
    scaling: RopeScaling | None = None,
) -> Float[Array, "*batch s h d"]:
    """Rotates each pair (x[i], x[i + d/2]) by position * theta ** (-2 i / d), in float32, or
    float64 for such an x.

    Args:
      x: Rows of heads.
      theta: The base of the frequencies.
      positions: The positions of the rows; 0 .. s - 1 by default.
      scaling: How the frequencies are scaled; None for as they are.

    Returns:
      The rotated rows, in the dtype of x.
    """
    tables = rotary_tables(
        x.shape[-3],
        x.shape[-1],
        accumulator_dtype(x),
        theta=theta,
        positions=positions,
        scaling=scaling,
    )
    return rotate(x, tables)


def rotary_tables(
    rows: int,
    dim: int,
    dtype: DTypeLike,
    *,
    theta: float = 10_000.0,
    positions: Array | None = None,
    scaling: RopeScaling | None = None,
) -> RotaryTables:
    """Returns the cosines and sines with which `rotate` rotates rows of heads of `dim` features."""
    frequency = theta ** (-jnp.arange(dim // 2, dtype=dtype) / (dim // 2))
    if scaling is not None:
        frequency = scaling.apply(frequency)
    if positions is None:
        position = jnp.arange(rows)
    else:
        position = positions
    angle = position.astype(dtype)[:, None] * frequency[None]
    return RotaryTables(jnp.cos(angle), jnp.sin(angle))


def rotate(
    x: Float[Array, "*batch s h d"], tables: RotaryTables, kernel: bool | None = None
) -> Float[Array, "*batch s h d"]:
    """Rotates heads by the angles of `rotary_tables`; see `rotary_embedding`.

    The kernel of `flaxasync.kernels.rotate_heads` does it where that can serve and the attention
    kernel, which `flaxasync.verify` verifies together with it, is trusted; a bool as `kernel`
    chooses.
    """
    if kernel is None:
        fits = x.ndim == 4 and mesh.platform() == "tpu" and mesh.all_axes_mapped()
        fits = fits and not rotate_heads.unsupported(side_by_side(x), x.shape[-1])
        kernel = fits and trust.is_trusted("attention", "flash", mesh.chip_name(), 1)
    return _rotate(kernel, x, vary_like(tables, x))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _rotate(kernel: bool, x: Array, tables: RotaryTables) -> Array:
    """The gradient of a rotation is the rotation by the negative angles. As a rule of its own it
    needs nothing but the tables, and a policy of `jax.checkpoint` that keeps products does not see,
    and keep, the one below.
    """
    if kernel:
        return rotate_heads.rotate_heads(side_by_side(x), *tables).reshape(x.shape)
    cos = lax.broadcast_to_rank(tables.cos[:, None, :], x.ndim)
    sin = lax.broadcast_to_rank(tables.sin[:, None, :], x.ndim)
    if mesh.platform() == "tpu":
        # A product with a permutation of 1 and -1 is exact. XLA copies halves of registers to
        # registers of their own.
        one = jnp.eye(cos.shape[-1], dtype=x.dtype)
        turn = jnp.block([[jnp.zeros_like(one), one], [-one, jnp.zeros_like(one)]])
        turned = jnp.einsum(
            "...d,de->...e", x, turn, precision="highest", preferred_element_type=cos.dtype
        )
        cos = jnp.concatenate([cos, cos], axis=-1)
        sin = jnp.concatenate([sin, sin], axis=-1)
        return (x.astype(cos.dtype) * cos + turned * sin).astype(x.dtype)
    first, second = jnp.split(x.astype(cos.dtype), 2, axis=-1)
    return jnp.concatenate(
        [first * cos - second * sin, second * cos + first * sin], axis=-1
    ).astype(x.dtype)


def side_by_side(x: Array) -> Array:
    """Turns heads [b, s, h, d] into [b, s, h * d]."""
    return x.reshape(*x.shape[:2], x.shape[2] * x.shape[3])


def _rotate_fwd(kernel: bool, x: Array, tables: RotaryTables) -> tuple[Array, RotaryTables]:
    return _rotate(kernel, x, tables), tables


def _rotate_bwd(kernel: bool, tables: RotaryTables, dy: Array) -> tuple[Array, None]:
    return _rotate(kernel, dy, RotaryTables(tables.cos, -tables.sin)), None


_rotate.defvjp(_rotate_fwd, _rotate_bwd)
