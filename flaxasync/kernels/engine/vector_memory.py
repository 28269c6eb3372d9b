"""The budget of vector memory for the tiles of a kernel, and that of semaphores."""

from collections.abc import Callable

import jax.numpy as jnp

from flaxasync import hardware, mesh
from flaxasync.hardware import MIB
from flaxasync.kernels.engine.operands import DType, Tiles
from flaxasync.mesh import UnsupportedError

# bytes left to the compiler, for semaphores, spilled registers and its own scratch memory
RESERVED = 8 * MIB
# for what arrives: libtpu 0.0.52 leaves a kernel 436 to 440 of 512, and other transfers need some
SEMAPHORES = 384
FALLBACK = "v5e"  # chip whose vector memory is assumed if the kernel is traced for no known chip


def chip_in_use() -> hardware.Chip:
    """Returns the chip that the kernel is traced for; `FALLBACK` where the mesh names no TPU of the
    chip table.
    """
    return mesh.chip() or hardware.chip(FALLBACK)


def available() -> int:
    """Returns the bytes of vector memory that a kernel may use for its buffers."""
    return chip_in_use().vmem_bytes - RESERVED


def matmul_bytes(
    tiles: Tiles, dtype: DType, results: int, sums: int, result: DType | None = None
) -> int:
    """Returns the bytes of two tiles of x, two of w, some of the result, and some of 32-bit
    sums.
    """
    operands = 2 * tiles.m * tiles.k + 2 * tiles.k * tiles.n
    of_results = jnp.dtype(result or dtype).itemsize * results + 4 * sums
    return jnp.dtype(dtype).itemsize * operands + of_results * tiles.m * tiles.n


def fitting(
    tiles: Tiles | None, default: Tiles, fit: Callable[[Tiles], Tiles], need: Callable[[Tiles], int]
) -> Tiles:
    """Returns the tiles to use: those asked for, or else the default ones, halved until they fit
    the vector memory.

    `fit` returns the tiles that suit the operands and are no larger than its argument, and `need`
    the bytes they take.
    """

    def need_fitted(most: Tiles) -> int:
        return need(fit(most))

    return fit(tiles or _largest(default, need_fitted))


def check_vmem(caller: str, tiles: Tiles, need: Callable[[Tiles], int]) -> int:
    """Returns the bytes of vector memory that tiles take in a kernel, by `need`.

    Raises:
      ValueError: the chip has less. The message has the sum, the limit and the largest tiles that
        fit.
    """
    limit = available()
    if need(tiles) > limit:
        fit = _largest(tiles, need)
        chip = f"a {chip_in_use().name} has {limit / MIB:.0f} MiB to give"
        taken = f"which take {need(tiles) / MIB:.1f} MiB with all buffers"
        raise ValueError(
            f"{caller} needs tiles that fit in vector memory: got m={tiles.m}, k={tiles.k}, "
            f"n={tiles.n}, {taken}, and {chip}; the largest of this form are m={fit.m}, k={fit.k}, "
            f"n={fit.n}"
        )
    return need(tiles)


def check_semaphores(caller: str, size: int, count: int) -> None:
    """Raises NotImplementedError if a kernel has more semaphores on a ring of `size` devices than a
    TPU has for transfers.
    """
    if count > SEMAPHORES:
        raise UnsupportedError(
            f"{caller} has {count} semaphores on {size} devices, and a TPU has {SEMAPHORES} for "
            "transfers; use a smaller axis, or an op with backend='none'"
        )


def vmem_limit(need: int) -> int:
    """Returns what a kernel whose buffers take `need` bytes asks the compiler for, with room for
    what that adds.
    """
    return min(2 * need + RESERVED, chip_in_use().vmem_bytes)


def _largest(tiles: Tiles, need: Callable[[Tiles], int]) -> Tiles:
    """Returns tiles, halved until they fit the vector memory."""
    while need(tiles) > available() and max(tiles.m, tiles.k, tiles.n) > 1:
        tiles = tiles.halved()
    return tiles
