"""Tile sizes of the kernels: what one step holds in vector memory, and what is too much or too small."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax

from flaxasync import hardware, mesh

LANES = 128  # columns of a register; rows are 8, times the elements that share 32 bits
MIB = 2**20
RESERVED = 8 * MIB  # of vector memory, for what the compiler adds: semaphores, spilled registers, its own scratch
DTYPES = ("float32", "bfloat16")
FALLBACK = "v5e"  # whose vector memory counts where no device is known


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Sides of the tiles of a matmul x [m, k] @ w [k, n], in elements, at most: smaller operands have smaller tiles."""

    m: int = 1024
    k: int = 1024
    n: int = 1024

    def __post_init__(self) -> None:
        if min(self.m, self.k, self.n) < 1:
            raise ValueError(f"Tiles need positive sides: got m={self.m}, k={self.k}, n={self.n}")

    def within(self, m: int, k: int, n: int) -> "Tiles":
        """The same tiles, no larger than the operands."""
        return Tiles(min(self.m, m), min(self.k, k), min(self.n, n))

    def vmem_bytes(self, dtype: Any) -> int:
        """Bytes of vector memory: two tiles each of x, w and the result, a float32 sum."""
        streamed = self.m * self.k + self.k * self.n + self.m * self.n
        return 2 * streamed * jnp.dtype(dtype).itemsize + 4 * self.m * self.n

    def check(self, caller: str, dtype: Any) -> int:
        """Returns the bytes that these tiles need. Raises as `check_vmem`."""
        return check_vmem(caller, self, lambda tiles: tiles.vmem_bytes(dtype))

    def halved(self) -> "Tiles":
        """These tiles with half of the longest side."""
        longest = max(("k", "m", "n"), key=lambda side: getattr(self, side))
        return dataclasses.replace(self, **{longest: max(1, getattr(self, longest) // 2)})


def check_vmem(caller: str, tiles: Tiles, need: Callable[[Tiles], int]) -> int:
    """Returns the bytes of vector memory that tiles need.

    Args:
      caller: for the message.
      tiles: of a step.
      need: the bytes of any tiles, in the caller's kernel.

    Raises:
      ValueError: the chip has less. The error has the sum, the limit and the largest tiles that fit.
    """
    chip = chip_in_use()
    limit = chip.vmem_bytes - RESERVED
    if need(tiles) > limit:
        fit = tiles
        while need(fit) > limit and max(fit.m, fit.k, fit.n) > 1:
            fit = fit.halved()
        raise ValueError(
            f"{caller} needs tiles that fit in vector memory: got m={tiles.m}, k={tiles.k}, n={tiles.n}, which take "
            f"{need(tiles) / MIB:.1f} MiB with all buffers, and a {chip.name} has {limit / MIB:.0f} MiB to give; the "
            f"largest of this form are m={fit.m}, k={fit.k}, n={fit.n}"
        )
    return need(tiles)


def chip_in_use() -> hardware.Chip:
    """The chip of the devices that are traced for; `FALLBACK` where they are no TPU of the table."""
    return mesh.chip() or hardware.chip(FALLBACK)


def sublanes(dtype: Any) -> int:
    """Rows of a hardware tile."""
    return 8 * 4 // jnp.dtype(dtype).itemsize


def check_operand(caller: str, name: str, shape: tuple[int, ...], dtype: Any) -> None:
    """Raises where the kernels cannot move blocks of this array.

    Raises:
      ValueError: a side is no multiple of a hardware tile's.
      NotImplementedError: a dtype that the kernels do not know.
    """
    if jnp.dtype(dtype).name not in DTYPES:
        raise NotImplementedError(
            f"{caller} has kernels for {' and '.join(DTYPES)}: got {name} of {jnp.dtype(dtype).name}; cast it, or use "
            "backend='none'"
        )
    rows, lanes = sublanes(dtype), LANES
    if len(shape) != 2 or shape[0] % rows or shape[1] % lanes or 0 in shape:
        raise ValueError(
            f"{caller} needs {name} in whole hardware tiles, [multiple of {rows}, multiple of {lanes}] for "
            f"{jnp.dtype(dtype).name}: got {list(shape)}; pad it, or use backend='none'"
        )


def largest_side(size: int, most: int, unit: int) -> int:
    """The largest divisor of `size` that is a multiple of `unit` and at most `most`; `unit` divides `size`."""
    return next(side for side in range(max(unit, min(size, most) // unit * unit), 0, -unit) if size % side == 0)


def fitting(tiles: Tiles | None, default: Tiles, cut: Callable[[Tiles], Tiles], need: Callable[[Tiles], int]) -> Tiles:
    """Returns the tiles to use: those asked for, or where none were, the default ones halved until the chip has room.

    Args:
      tiles: asked for, at most; None for the default.
      default: likewise.
      cut: the largest tiles that divide the operands, and are at most those given.
      need: bytes of vector memory of such tiles.
    """
    most = tiles or default
    while tiles is None and need(cut(most)) > chip_in_use().vmem_bytes - RESERVED and max(most.m, most.k, most.n) > 1:
        most = most.halved()
    return cut(most)


def vmem_limit(need: int) -> int:
    """What a kernel asks the compiler for: what its tiles take, and room for what the compiler adds."""
    return min(2 * need + RESERVED, chip_in_use().vmem_bytes)


def split(value: Any, by: int) -> tuple[Any, Any]:
    """Quotient and remainder of a number that is not negative."""
    value, divisor = jnp.int32(value), jnp.int32(by)
    return lax.div(value, divisor), lax.rem(value, divisor)
