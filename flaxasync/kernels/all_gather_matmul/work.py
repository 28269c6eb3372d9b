"""What all_gather_matmul is asked to do on one device: both orders of work plan for it."""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from flaxasync.kernels.engine.cores import ONE_CORE, CoreRows, Cores
from flaxasync.kernels.engine.gather import BlockLayout
from flaxasync.kernels.engine.matmul import Epilogue
from flaxasync.kernels.engine.operands import DType, Ref, Tiles


@dataclasses.dataclass(frozen=True)
class GatherWork:
    layout: BlockLayout  # how blocks, or a core's part, are divided into half-blocks and chunks
    size: int  # devices of the ring
    k: int  # length of the contraction
    widths: Sequence[int]  # columns of each w
    transposed: bool  # whether each w is [n, k]
    dtype: DType  # of x
    w_dtype: DType  # that of x, or another one of 8 bits
    result: DType  # of the results, and of the operands of the epilogue
    scaled: bool = False  # whether x and w are 8-bit values with scales
    tiles: Tiles | None = None  # the largest tiles of a product, if they were asked for
    epilogue: Epilogue | None = None
    operands: int = 0  # operands of the epilogue
    # results of the epilogue whose largest magnitudes in each row are asked for
    measured: slice | None = None
    cores: Cores = ONE_CORE  # of which each does this work, for its own rows

    @property
    def arrivals(self) -> int:
        return self.size * self.layout.chunks

    @property
    def semaphores(self) -> int:
        """Semaphores of what arrives; see `GatherSemaphores.allocate`."""
        return self.layout.directions * self.arrivals


class GatherOperands(NamedTuple):
    """The operands, in HBM."""

    x: Ref  # [B, m, k]
    ws: Sequence[Ref]  # [k, n], or [n, k] if transposed
    of_epilogue: Sequence[Ref]  # [B, R, m, n]
    # of the rows, [B, R, m, LANES], and of the columns of each w, [SUBLANES, n]; or none
    scales: Sequence[Ref]

    def on_core(self, share: CoreRows) -> "GatherOperands":
        """Returns the part of one core: its rows, and all of w."""
        return GatherOperands(
            share.part(self.x, 0, 1),
            self.ws,
            [share.part(one, 0, 2) for one in self.of_epilogue],
            [share.part(one, 0, 2) for one in self.scales[:1]] + list(self.scales[1:]),
        )


class GatherResults(NamedTuple):
    """The results, in HBM."""

    ys: Sequence[Ref]  # [B, R, m, n]
    maxima: Ref | None  # [B, R, m, tiles of columns * LANES], if they are asked for
    gathered: Ref | None  # [B, R, m, k], if x streams from there or is kept

    def on_core(self, share: CoreRows) -> "GatherResults":
        """Returns the part of one core: its rows."""
        return GatherResults(
            [share.part(y, 0, 2) for y in self.ys],
            share.part(self.maxima, 0, 2),
            share.part(self.gathered, 0, 2),
        )
