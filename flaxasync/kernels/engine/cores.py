"""The cores of a device that share the work of a kernel, and the part of each.

A device of a v5p has two cores. Each has its own vector memory, matrix units and semaphores; HBM
and links are shared. A kernel without a grid runs on core 0 alone. A kernel on all cores has a grid
of one step for each core, and libtpu runs step c on core c.

Each core runs the whole protocol of the kernel on its own part of the operands:

```
device i      core 0: rows 0 .. m/2 - 1   ->   core 0 of device i + 1
              core 1: rows m/2 .. m - 1   ->   core 1 of device i + 1
```

A transfer or a signal raises a semaphore of the sender's own core number on the receiver. So the
cores of a device never wait for each other, and a schedule for m/2 rows is all that a core needs.
The only exception is the entry: the bundles of a kernel on all cores begin with a barrier between
the cores of the device. So a device has entered with all of its cores when one of them signals.

What both cores read, such as w, HBM brings twice. So operands with few rows are left to one core.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal

from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import PyTree

from flaxasync import mesh
from flaxasync.hardware import Chip
from flaxasync.kernels.engine.operands import Ref, Scalar, aligned, in_hbm
from flaxasync.kernels.engine.vector_memory import chip_in_use, vmem_limit


@dataclasses.dataclass(frozen=True)
class Cores:
    """The cores of a device that run a kernel."""

    count: int = 1

    @property
    def grid(self) -> tuple[int, ...]:
        if self.count == 1:
            return ()
        return (self.count,)

    @property
    def semantics(self) -> tuple[Literal["parallel"], ...] | None:
        """The semantics of the dimensions of the grid."""
        if self.count == 1:
            return None
        return ("parallel",)

    @property
    def index(self) -> Scalar | None:
        """The number of this core, inside a kernel; None where there is only one."""
        if self.count == 1:
            return None
        return pl.program_id(0)

    def part(self, ref: Ref, axis: int) -> Ref:
        """Returns this core's part of an array: equal parts of a dimension, in order."""
        core = self.index
        if core is None or ref is None:
            return ref
        length = ref.shape[axis] // self.count
        before = (slice(None),) * axis
        return ref.at[*before, aligned(core * length, length, length)]

    def rates(self) -> Chip:
        """Returns what one of these cores can do: the cores in use share HBM and links."""
        chip = chip_in_use()
        return dataclasses.replace(
            chip,
            flops=chip.flops / chip.cores,
            hbm_bandwidth=chip.hbm_bandwidth / self.count,
            link_bandwidth=chip.link_bandwidth / self.count,
        )


ONE_CORE = Cores()


@dataclasses.dataclass(frozen=True)
class CoreRows:
    """The rows [batches, rows] of a block, of which each core has equally many: whole batches, or
    rows of every batch.
    """

    cores: Cores
    batches: int  # of one core
    rows: int  # of one core, in each of its batches
    by_batch: bool

    @classmethod
    def of(
        cls, caller: str, batches: int, rows: int, unit: int, directions: int, asked: int | None
    ) -> "CoreRows":
        """Divides rows among as many cores as were asked for; None is `best_cores`.

        Each core has whole hardware tiles of `unit` rows, and with two directions two halves of
        them.

        Raises:
          ValueError: the rows cannot be divided among the cores that were asked for.
        """
        count = cores_for(caller, batches * rows, asked)
        if batches % count == 0:
            parts = [(batches // count, rows, True)]
        else:
            parts = []
        if rows % (count * unit) == 0:
            parts.append((batches, rows // count, False))
        for batches_of_one, rows_of_one, by_batch in parts:
            halves = batches_of_one % 2 == 0 or rows_of_one % (2 * unit) == 0
            if halves or directions == 1:
                return cls(Cores(count), batches_of_one, rows_of_one, by_batch)
        if asked is not None and asked > 1:
            raise ValueError(
                f"{caller} divides whole tiles of {unit} rows among {asked} cores, in "
                f"{directions} directions: got {batches} x {rows} rows; use cores=1"
            )
        return cls(ONE_CORE, batches, rows, by_batch=True)

    def part(self, ref: Ref, batch_axis: int, row_axis: int) -> Ref:
        """Returns this core's part of an array with these dimensions of batches and rows."""
        if self.by_batch:
            return self.cores.part(ref, batch_axis)
        return self.cores.part(ref, row_axis)


def call_on_cores(
    body: Callable[..., None],
    operands: PyTree,
    results: PyTree,
    scratch: Sequence[Ref],
    *,
    cores: Cores,
    collective_id: int | None,
    vmem_bytes: int,
    flops: int,
    moved: int,
    sent: int,
    name: str,
) -> Any:
    """Calls `body(operands, results, *scratch)` as a kernel on these cores, with all operands and
    results in HBM; returns the results.

    The numbers are its bytes of vector memory, and, on one device, its operations, the bytes that
    it moves to and from HBM, and those that it sends.
    """
    (made,) = pl.pallas_call(
        body,
        grid=cores.grid,
        out_shape=(results,),
        in_specs=in_hbm((operands,)),
        out_specs=in_hbm((results,)),
        scratch_shapes=scratch,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=cores.semantics,
            collective_id=collective_id,
            vmem_limit_bytes=vmem_limit(vmem_bytes),
        ),
        cost_estimate=pl.CostEstimate(
            flops=flops,
            transcendentals=0,
            bytes_accessed=moved,
            remote_bytes_transferred=sent,
        ),
        name=name,
    )(operands)
    return made


def cores_for(caller: str, length: int, asked: int | None, tile: int = 1) -> int:
    """Returns on how many cores a kernel runs: those asked for, or the best ones for a length in
    tiles.

    Raises:
      ValueError: the chip has no such number of cores.
    """
    if asked is None:
        return best_cores(chip_in_use(), length, tile)
    known = [1]
    chip = mesh.chip()
    if chip is not None and chip.cores > 1:
        known.append(chip.cores)
    if asked < 1 or (chip is not None and asked not in known):
        counts = " or ".join(map(str, known))
        raise ValueError(f"{caller} runs on {counts} of a device's cores: got cores={asked}")
    return asked


def best_cores(chip: Chip, length: int, tile: int = 1) -> int:
    """Returns on how many cores a kernel ends first, if they share out this length of a block in
    whole tiles.

    HBM brings the other operand, in 16 bits, to each core. If the block is shorter than the chip
    has flops for each byte, this takes longer than all products on one core.
    """
    bytes_per_second = chip.hbm_bandwidth * chip.hbm_efficiency
    if length * bytes_per_second < chip.flops or length % (chip.cores * tile) != 0:
        return 1
    return chip.cores
