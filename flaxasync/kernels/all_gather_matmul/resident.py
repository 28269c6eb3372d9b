"""The order of work of all_gather_matmul where the gathered x stays in vector memory.

Half-blocks arrive in vector memory and are sent onward from there. A product contracts all of k at
once. Only tiles of w come from HBM, and only the result, and x if it is kept, goes there.
`schedule` has the order of the products: a static schedule, because tiles of w should be fetched
few times and yet no product should wait for x.
"""

import dataclasses
import functools
import operator
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from flaxasync.kernels.all_gather_matmul.resident_schedule import (
    Task,
    TaskRates,
    TaskSchedule,
    TaskSizes,
    schedule,
)
from flaxasync.kernels.all_gather_matmul.work import GatherOperands, GatherResults, GatherWork
from flaxasync.kernels.engine.gather import Gather
from flaxasync.kernels.engine.matmul import dot
from flaxasync.kernels.engine.operands import (
    LANES,
    Condition,
    Ref,
    Scalar,
    Tiles,
    sides_of_w,
    when,
)
from flaxasync.kernels.engine.slots import IncomingTiles, OutgoingTiles, start_copy, wait
from flaxasync.kernels.engine.tiling import Tiling
from flaxasync.kernels.engine.vector_memory import SEMAPHORES, available

# What the plan chooses from.
ROWS = 512  # rows of one product, at most
COLUMNS = (512, 1024, 1280)  # columns of a tile of w
CHUNKS = ((1, 2, 4), (8,), (16,))  # chunks of a half-block; many only where fewer do not fit
CHUNK_ROWS = 128  # rows of an arrival, at least, where half-blocks travel in several chunks
W_SLOTS = 3  # tiles of w in vector memory, at most
TASKS = 256  # products of an arrival and a tile of w, at most: the table of tasks has no more

# Results wait in HBM's queue behind tiles of w, so many of them may be leaving at once.
OUT_SLOTS = 24  # results of an arrival, at most
OUT_ROWS = 3072  # rows of all these results, at most, unless they are fewer than two products

# Times. Those in cycles or rows are as played on v6e.
CYCLES = 13_500  # of one product, at most: the compiler unrolls it to as many instructions
PRODUCT_ROWS = 16  # rows in whose time a product starts and ends
TASK_CYCLES = 180  # cycles that a task takes beyond its products
ENTRY = 1.5e-6  # seconds of the entry barrier
LATENCY = 0.5e-6  # seconds until a transfer from HBM begins to arrive
_FIELDS = len(dataclasses.fields(Task))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ResidentScratch:
    x: Ref  # [arrivals, directions, batches, rows, k] VMEM, in the order of their arrival
    w: IncomingTiles  # [w_slots, k, n], or [w_slots, n, k] if transposed
    outgoing: OutgoingTiles  # [out_slots, directions, batches, rows, n] results of an arrival
    out_columns: Ref  # [out_slots] SMEM, the tile of columns of each of them
    tasks: Ref  # [tasks * fields] SMEM
    own_sem: Ref  # [chunks] DMA semaphores of the copies of the own block
    kept_sem: Ref  # DMA semaphore of the copies of arrivals to the gathered x in HBM


@dataclasses.dataclass(frozen=True)
class ResidentPlan:
    work: GatherWork
    columns: Tiling  # tiles of the columns of all ws
    sizes: TaskSizes  # the work to be done, and the buffers for it
    schedule: TaskSchedule  # the tasks
    vmem_bytes: int  # of all buffers

    @property
    def elements_read(self) -> int:
        """Elements of x and w that are read from HBM."""
        x = self.sizes.own * self.work.layout.arrival_rows * self.work.k
        return x + self.schedule.fetches * self.work.k * self.columns.size

    def scratch(self) -> ResidentScratch:
        sizes = self.sizes
        layout = self.work.layout
        dtype = self.work.dtype
        n = self.columns.size
        w_tile = sides_of_w(self.work.transposed, self.work.k, n)
        return ResidentScratch(
            x=pltpu.VMEM((sizes.arrivals, *layout.shape, self.work.k), dtype),
            w=IncomingTiles.allocate(sizes.w_slots, w_tile, dtype),
            outgoing=OutgoingTiles.allocate(sizes.out_slots, (*layout.shape, n), dtype),
            out_columns=pltpu.SMEM((sizes.out_slots,), jnp.int32),
            tasks=pltpu.SMEM((len(self.schedule.tasks) * _FIELDS,), jnp.int32),
            own_sem=pltpu.SemaphoreType.DMA((layout.chunks,)),
            kept_sem=pltpu.SemaphoreType.DMA,
        )


def plan(work: GatherWork) -> ResidentPlan | None:
    """Returns the plan that ends first by the chip's rates; None if the gathered x does not fit in
    vector memory.
    """
    most = work.tiles or Tiles(m=ROWS, n=max(COLUMNS))
    widest = min(most.n, max(work.widths))
    sides = {max(LANES, min(n, widest) // LANES * LANES) for n in COLUMNS}
    for counts in CHUNKS:
        candidates = []
        for layout in filter(None, map(work.layout.in_chunks, counts)):
            too_small = layout.chunks > 1 and layout.arrival_rows < CHUNK_ROWS
            if layout.arrival_rows <= most.m and not too_small:
                chunked = dataclasses.replace(work, layout=layout)
                for n in sorted(sides):
                    columns = Tiling(tuple(work.widths), n)
                    candidates.append(_plan_of(chunked, columns, most.m))
        fitting = [candidate for candidate in candidates if candidate is not None]
        if fitting:
            return min(fitting, key=operator.attrgetter("schedule.seconds"))
    return None


def _plan_of(work: GatherWork, columns: Tiling, most_rows: int) -> ResidentPlan | None:
    """Returns the plan with given chunks and tiles; None if something does not fit."""
    chip = work.cores.rates()
    itemsize = jnp.dtype(work.dtype).itemsize
    layout = work.layout
    k = work.k
    n = columns.size
    rows = layout.arrival_rows
    arrivals = work.arrivals
    multiply = 2 * rows * n * k / chip.flops  # seconds of an arrival and a tile of w
    arrivals_at_once = min(CYCLES / (multiply * chip.clock), most_rows // rows)
    if arrivals_at_once < 1 or arrivals * columns.count > TASKS or work.semaphores > SEMAPHORES:
        return None
    most = max(count for count in (1, 2, 4, 8) if count <= arrivals_at_once)
    out_slots = max(2 * most, min(OUT_SLOTS, OUT_ROWS // rows))
    w_slots = min(W_SLOTS, max(2, columns.count - 1))
    # all x, the results that leave, and the float32 values of a product
    fixed = itemsize * (arrivals * k + out_slots * n) * rows + 4 * most * rows * n
    of_w = itemsize * k * n
    w_slots = min(w_slots, (available() - fixed) // of_w)
    if w_slots < 2:
        return None
    hbm = chip.hbm_bandwidth * chip.hbm_efficiency
    rates = TaskRates(
        multiply=multiply,
        product=multiply * PRODUCT_ROWS / rows,
        task=TASK_CYCLES / chip.clock,
        load=of_w / hbm,
        own=itemsize * rows * k / hbm,
        store=itemsize * rows * n / hbm,
        latency=LATENCY,
        hop=itemsize * rows // layout.directions * k / chip.link_bandwidth,
        hop_latency=chip.hop_latency,
        entry=ENTRY,
    )
    sizes = TaskSizes(arrivals, layout.chunks, columns.count, w_slots, most, out_slots)
    vmem_bytes = fixed + w_slots * of_w
    return ResidentPlan(work, columns, sizes, schedule(sizes, rates), vmem_bytes)


@dataclasses.dataclass(frozen=True)
class Resident:
    plan: ResidentPlan
    gather: Gather
    operands: GatherOperands
    results: GatherResults
    keep_gathered: bool
    scratch: ResidentScratch

    def begin(self) -> None:
        """Does what needs no neighbour: fetches the own rows and the first tiles of w."""

        @pl.loop(0, self.gather.layout.chunks)  # a loop keeps the chunks in order
        def _(chunk: Scalar) -> None:
            for direction in self.gather.ring.both:
                source = self.gather.x.at[self.gather.layout.chunk(direction, chunk)]
                start_copy(
                    source, self.scratch.x.at[chunk, direction], self.scratch.own_sem.at[chunk]
                )

        for slot, column in enumerate(self.plan.schedule.loads):
            self.fetch(jnp.int32(column), slot)

    def run(self) -> None:
        """Does the rest, once the neighbours have entered."""
        tasks = self.plan.schedule.tasks
        scratch = self.scratch
        for number, task in enumerate(tasks):  # while the own rows come
            for field, value in enumerate(dataclasses.astuple(task)):
                scratch.tasks[number * _FIELDS + field] = value
        for chunk in range(self.gather.layout.chunks):
            for direction in self.gather.ring.both:
                wait(scratch.x.at[chunk, direction], scratch.own_sem.at[chunk])
            self.pass_on(chunk)
        pl.loop(0, len(tasks))(self.run_task)
        with jax.named_scope("finish"):
            last = {task.out_slot + i: task.column for task in tasks for i in range(task.count)}
            for slot, column in last.items():
                self.wait_until_left(slot, jnp.int32(column))
            self.gather.finish()
            if self.keep_gathered:
                for arrival in range(self.plan.sizes.arrivals):
                    for direction in self.gather.ring.both:
                        wait(scratch.x.at[arrival, direction], scratch.kept_sem)

    def run_task(self, number: Scalar) -> None:
        """Receives and fetches what the task says; multiplies."""
        scratch = self.scratch
        most = self.plan.sizes.most
        task = Task(*(scratch.tasks[number * _FIELDS + field] for field in range(_FIELDS)))

        @pl.loop(task.received, task.received + task.receives)
        def _(arrival: Scalar) -> None:
            self.gather.receive(arrival)
            self.pass_on(arrival)

        _rarely(task.fetches >= 0, self.replace, task)

        @pl.loop(task.out_slot, task.out_slot + task.waits)
        def _(slot: Scalar) -> None:
            self.wait_until_left(slot, scratch.out_columns[slot])

        # or else nobody has to know which tile of columns a result is of
        if len(set(self.plan.columns.sizes)) > 1:

            @pl.loop(task.out_slot, task.out_slot + task.count)
            def _(slot: Scalar) -> None:
                scratch.out_columns[slot] = task.column

        _rarely(task.awaits > 0, self.wait_for_tile, task.column, task.w_slot)
        for count in (1, 2, 4, 8):
            if count < most:
                when(task.count == count, self.multiply, task, count, 0)

        # Tasks of the largest product, or of two of them, share its code: it is the longest.
        @pl.loop(0, task.count // most)
        def _(i: Scalar) -> None:
            self.multiply(task, most, i * most)

    def replace(self, task: Task) -> None:
        """Fetches the tile of w that a task names, once nothing is on its way into its slot."""
        _rarely(task.unused >= 0, self.wait_for_tile, task.unused, task.fetch_slot)
        self.fetch(task.fetches, task.fetch_slot)

    def multiply(self, task: Task, count: int, start: Scalar) -> None:
        """Multiplies `count` arrivals of a task, from `start` on, and starts to store the
        results.
        """
        scratch = self.scratch
        plan = self.plan
        layout = self.gather.layout
        with jax.named_scope("multiply"):
            arrivals = scratch.x[pl.ds(task.first + start, count)]
            x = arrivals.reshape(count * layout.arrival_rows, plan.work.k)
            w = scratch.w.tiles[task.w_slot]
            y = dot(x, w, transposed=plan.work.transposed).astype(x.dtype)
            slots = pl.ds(task.out_slot + start, count)
            scratch.outgoing.tiles[slots] = y.reshape(count, *layout.shape, -1)

        def store(number: int, columns: pl.Slice) -> None:
            for i in range(count):
                slot = task.out_slot + start + i
                arrival = task.first + start + i
                for direction in self.gather.ring.both:
                    batches, block, rows = self.gather.in_gathered(direction, arrival)
                    source = scratch.outgoing.tiles.at[
                        slot, direction, :, :, pl.ds(0, columns.size)
                    ]
                    target = self.results.ys[number].at[batches, block, rows, columns]
                    start_copy(source, target, scratch.outgoing.sems.at[slot])

        with jax.named_scope("store"):  # within the code of the product, where it takes no time
            plan.columns.on_slice(task.column, store)

    def pass_on(self, arrival: Scalar) -> None:
        """Sends an arrival onward, from vector memory: HBM has enough to do. Starts to keep it."""
        self.gather.send(arrival)
        if self.keep_gathered:
            for direction in self.gather.ring.both:
                half_block = self.scratch.x.at[arrival, direction]
                target = self.gather.gathered.at[self.gather.in_gathered(direction, arrival)]
                start_copy(half_block, target, self.scratch.kept_sem)

    def fetch(self, column: Scalar, slot: Scalar) -> None:
        def start(number: int, columns: pl.Slice) -> None:
            w = self.operands.ws[number]
            tile = w.at[sides_of_w(self.plan.work.transposed, slice(None), columns)]
            self.scratch.w.start(slot, tile)

        with jax.named_scope("fetch"):
            self.plan.columns.on_slice(column, start)

    def wait_for_tile(self, column: Scalar, slot: Scalar) -> None:
        def wait_for(n: int) -> None:
            work = self.plan.work
            self.scratch.w.wait(slot, *sides_of_w(work.transposed, work.k, n))

        with jax.named_scope("wait"):
            self.plan.columns.on_size(column, wait_for)

    def wait_until_left(self, slot: Scalar, column: Scalar) -> None:
        """Waits until the results in an out slot, of a tile of columns, have left."""
        outgoing = self.scratch.outgoing
        wait_for = functools.partial(outgoing.wait, slot, *self.gather.layout.shape)
        self.plan.columns.on_size(column, wait_for)


def _rarely(condition: Condition, use: Callable[..., None], *operands: Scalar | Task) -> None:
    """Does what `when` does, but with a loop: code of a loop is jumped over, and code of a branch
    predicated.
    """

    @pl.loop(0, jnp.int32(condition))
    def _(_: Scalar) -> None:
        use(*operands)
