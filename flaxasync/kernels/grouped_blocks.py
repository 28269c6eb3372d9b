"""The blocks of the kernel `grouped_matmul`: which fit into vector memory, which are the fastest,
and what is in each step of the grid.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Literal, NamedTuple, Self

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental import pallas as pl

from flaxasync.kernels.engine.operands import LANES, Ref, Scalar, check_dtype, largest_divisor
from flaxasync.kernels.engine.tiling import split
from flaxasync.kernels.engine.vector_memory import available, chip_in_use
from flaxasync.mesh import UnsupportedError

SUB_BLOCK = 512  # rows of y that are multiplied at once
PANEL = 2**21  # elements of w that are multiplied at once, at most
PANELS = 4  # panels of a block of w at least, if they are wider than `NARROWEST`
NARROWEST = 512  # columns of a panel that is not made narrower to have more panels
DEEPEST = 4096  # elements of a block of K at most
STEP_SECONDS = 0.3e-6  # what a step takes beside its products
SUMS_RATE = 1e12  # elements in a second that are read, added and written


def check_grouped(caller: str, dtype: jnp.dtype, *features: int) -> None:
    """Raises NotImplementedError if the grouped kernels cannot serve operands of this dtype and of
    these features.
    """
    check_dtype(caller, dtype, remedy="cast the operands")
    for size in features:
        if size % LANES:
            raise UnsupportedError(
                f"{caller} needs features to be a multiple of {LANES}: got {size}; pad the operands"
            )


class GroupStep(NamedTuple):
    first: Scalar  # the first tile of the group
    size: Scalar  # tiles of the group
    k: Scalar  # block of K
    tile: Scalar  # tile of the group, counted from its first one


@dataclasses.dataclass(frozen=True)
class Blocks:
    """The blocks of a call: [rows, k] of each x, [k, n] of each w, [rows, n] of each y."""

    rows: int
    k: int
    n: int
    depth: int  # blocks of K
    columns: int  # blocks of N
    width: int  # columns of y that are multiplied at once
    most: int  # tiles of a group at most

    @property
    def panels(self) -> int:
        return self.n // self.width

    @classmethod
    def choose(cls, problem: "Problem") -> tuple[Self, int]:
        """Returns the blocks that fit into vector memory and are the fastest, and what they take of
        that memory.

        Experts are assumed to have equally many tiles.
        """
        k = problem.k
        n = problem.n
        rows = problem.rows
        candidates = []
        for deep, wide in itertools.product(divisors(k), divisors(n)):
            sizes = range(1, problem.tiles_of_an_expert + 1)
            if deep == k:
                sizes = range(problem.m // rows, problem.m // rows + 1)
            if deep <= DEEPEST:
                width = _width(deep, wide, problem.joined)
                candidates += [
                    cls(rows, deep, wide, k // deep, n // wide, width, most) for most in sizes
                ]
        fitting = [blocks for blocks in candidates if problem.vmem_bytes(blocks) <= available()]
        if not fitting:
            raise UnsupportedError(
                f"grouped_matmul lacks tiles of {rows} rows: none fits into vector memory; use "
                "fewer rows a tile"
            )
        best = min(fitting, key=problem.seconds)
        return best, problem.vmem_bytes(best)

    def table(self, experts: Array, tiles: Array) -> Array:
        """Returns the table [3, M / t]: each tile's expert, the first tile of its group, and the
        tiles of its group.
        """
        xp = table_library([experts])
        index = xp.arange(experts.shape[0], dtype=np.int32)
        live = index < tiles
        first = xp.sum(live[None] & (experts[None] < experts[:, None]), axis=1, dtype=np.int32)
        end = xp.sum(live[None] & (experts[None] <= experts[:, None]), axis=1, dtype=np.int32)
        first += (index - first) // self.most * self.most
        return xp.stack([experts, first, xp.minimum(end - first, self.most)])

    def at(self, step: Scalar, table: Ref) -> GroupStep:
        some = split(step, self.depth)[0]  # a tile of the same group
        first = table[1, some]
        count = table[2, some]
        if self.depth == 1:
            return GroupStep(first, count, 0, step - first)
        return GroupStep(first, count, *split(step - first * self.depth, count))

    def x_index(self, j: Scalar, step: Scalar, table: Ref) -> tuple[Scalar, Scalar]:
        at = self.at(step, table)
        return at.first + at.tile, at.k

    def y_index(self, j: Scalar, step: Scalar, table: Ref) -> tuple[Scalar, Scalar]:
        """Returns the index of a block of y; that of the group's first tile until the last block of
        K comes.
        """
        at = self.at(step, table)
        return at.first + jnp.where(at.k == self.depth - 1, at.tile, 0), j


@dataclasses.dataclass(frozen=True)
class Problem:
    """What a call multiplies, and what it costs with given blocks."""

    m: int  # rows
    k: int
    n: int
    rows: int  # of a tile
    pairs: int  # arrays x
    joined: int  # arrays w for each x
    results: int  # arrays [M, N] that are read or written
    experts: int
    itemsize: int

    @classmethod
    def of(cls, xs: Sequence[Array], ws: Sequence[Array], n: int, rows: int, results: int) -> Self:
        m, k = xs[0].shape
        joined = len(ws) // len(xs)
        experts = ws[0].shape[0]
        return cls(m, k, n, rows, len(xs), joined, results, experts, xs[0].dtype.itemsize)

    @property
    def ws(self) -> int:
        """Arrays w."""
        return self.pairs * self.joined

    @property
    def tiles_of_an_expert(self) -> int:
        return pl.cdiv(self.m // self.rows, self.experts)

    def vmem_bytes(self, blocks: Blocks) -> int:
        of_x = self.pairs * blocks.k * self.rows
        of_w = self.ws * blocks.k * blocks.n
        of_results = self.results * self.rows * blocks.n
        sums = 2 * SUB_BLOCK * blocks.width
        if blocks.depth > 1:
            sums += blocks.most * self.rows * blocks.n
        return 2 * self.itemsize * (of_x + of_w + of_results) + 4 * sums * self.joined

    def elements(self, blocks: Blocks, readings: int) -> int:
        """Returns the elements that HBM moves, if each w is read so many times."""
        of_x = self.pairs * self.m * self.k * blocks.columns
        of_w = self.ws * self.experts * self.k * self.n
        return of_x + readings * of_w + self.results * self.m * self.n

    def seconds(self, blocks: Blocks) -> float:
        chip = chip_in_use()
        # in which HBM moves one element
        second = self.itemsize / (chip.hbm_bandwidth * chip.hbm_efficiency)
        readings = 1
        if blocks.depth > 1:
            readings = pl.cdiv(self.tiles_of_an_expert, blocks.most)
        # nothing is multiplied while these are fetched or stored
        first_and_last = self.ws * blocks.k * blocks.width
        first_and_last += self.rows * blocks.k + self.results * self.rows * blocks.n
        products = 2 * self.m * self.k * self.n * self.ws / chip.flops
        products *= imbalance(blocks.columns, chip.cores)
        products += self.m * self.n * self.joined * (blocks.depth - 1) / SUMS_RATE
        steps = blocks.columns * blocks.depth * (self.m // self.rows)
        moving = max(products, self.elements(blocks, readings) * second)
        return moving + first_and_last * second + steps * STEP_SECONDS


def table_library(experts: Sequence[Array]) -> ModuleType:
    """Returns what computes a table of these: numpy for constants, which have to stay constants to
    be simulated, and jax.numpy for what is traced.
    """
    constant = all(isinstance(one, np.ndarray) for one in experts)
    if constant:
        return np
    return jnp


def _width(k: int, n: int, joined: int) -> int:
    """Returns the columns of a block of y that are multiplied at once."""
    if joined == 1:
        unit = math.gcd(n, 2 * LANES)
    else:
        unit = LANES
    most = min(max(NARROWEST, n // PANELS), PANEL // (k * joined))
    return largest_divisor(n, max(unit, most), unit)


def outer_semantics(cores: int) -> Literal["parallel", "arbitrary"]:
    """Returns the semantics of an outer dimension of a grid, whose steps the cores of a chip share
    out.
    """
    if cores > 1:
        return "parallel"
    return "arbitrary"


def imbalance(steps: int, cores: int) -> float:
    """Returns how much longer so many equal steps take than if the cores could divide them
    evenly.
    """
    return pl.cdiv(steps, cores) * cores / steps


def divisors(size: int) -> Iterator[int]:
    """Returns the sides that a block of a dimension of this size may have."""
    unit = math.gcd(size, 2 * LANES)  # the side of the matrix units of some chips
    return (side for side in range(unit, size + 1, unit) if size % side == 0)
