"""prototype"""
import dataclasses, os
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from flaxasync.kernels.all_gather_matmul.blocks import Cut, Trips
from flaxasync.kernels.all_gather_matmul.schedule import Rates, Task, schedule
from flaxasync.kernels.engine.operands import Tiles, LANES
from flaxasync.kernels.engine.product import dot
from flaxasync.kernels.engine.refs import Condition, DType, Index, Ref, Scalar, beginning
from flaxasync.kernels.engine.slots import OutgoingTiles, start_copy, wait
from flaxasync.kernels.engine.tiling import Tiling
from flaxasync.kernels.engine.vmem import available, chip_in_use

PIECE = 256
ROOM = 3072
CYCLES = int(dict(kv.split('=') for kv in os.environ.get('RES', '').split(',') if kv).get('C', 13500))
_FIELDS = len(dataclasses.fields(Task))
ENV = dict(kv.split("=") for kv in os.environ.get("RES", "").split(",") if kv)


@dataclasses.dataclass(frozen=True)
class Plan:
    cut: Cut
    size: int
    k: int
    columns: Tiling
    transposed: bool
    slots: int
    most: int
    room: int
    pieces: int
    tasks: tuple
    loads: tuple
    seconds: float
    vmem_bytes: int

    @property
    def tiles(self):
        return self

    @property
    def arrivals(self):
        return self.size * self.cut.chunks

    @property
    def elements_read(self):
        loads = len(self.loads) + sum(t.fetches >= 0 for t in self.tasks)
        return self.cut.chunks * self.cut.arrival * self.k + loads * self.k * self.columns.size


def plan(cut, size, k, widths, transposed, tiles, dtype):
    plans = []
    chip, itemsize = chip_in_use(), jnp.dtype(dtype).itemsize
    hbm = chip.hbm_bandwidth * chip.hbm_efficiency
    for chunks in (1, 2, 4, 8):
        if "chunks" in ENV and chunks != int(ENV["chunks"]): continue
        one = cut.in_chunks(chunks)
        if one is None or (chunks > 1 and one.arrival < 128) or one.arrival > 512: continue
        for n in map(int, ENV.get("ns", "512 1024 1280").split()):
            if "n" in ENV and n != int(ENV["n"]): continue
            if n > max(widths) and n > 512: continue
            columns = Tiling(tuple(widths), min(n, max(widths)))
            n = columns.size
            tile, fixed = itemsize * k * n, 0
            S = min(int(ENV.get("S", 3)), max(2, columns.count - 1))
            if "only" in ENV and columns.count * n > sum(widths) * 1.1: pass
            limit = CYCLES * chip.flops / (2 * one.arrival * n * k * chip.clock)
            if limit < 1: continue
            most = max(q for q in (1, 2, 4, 8) if q <= limit and q * one.arrival <= int(ENV.get("M", 512)))
            if "most" in ENV: most = int(ENV["most"])
            room = max(2 * most, ROOM // one.arrival)
            pieces = n // PIECE if all(w % n == 0 for w in widths) and n % PIECE == 0 and ENV.get("pieces", "1") == "1" else 1
            need = itemsize * (size * chunks * one.arrival * k + S * k * n + room * one.arrival * n) + 4 * most * one.arrival * n
            while need > available() and S > 2:
                S, need = S - 1, need - itemsize * k * n
            if need > available(): continue
            rates = Rates(
                multiply=2 * one.arrival * k * n / chip.flops, product=float(ENV.get("P", 16)) * 2 * k * n / chip.flops, task=float(ENV.get("T", 180)) / chip.clock,
                load=k * n * itemsize / hbm, latency=0.5e-6, store=one.arrival * n * itemsize / hbm,
                trip=float(ENV.get("L", 1.0)) * (one.arrival // one.directions * k * itemsize / chip.link_bandwidth), hop_latency=1e-6, entry=1.5e-6,
                own=one.arrival * k * itemsize / hbm)
            tasks, loads, seconds = schedule(size * chunks, chunks, columns.count, S, most, room, pieces, rates)
            plans.append(Plan(one, size, k, columns, transposed, S, most, room, pieces, tuple(tasks), tuple(loads), seconds, need))
    if not plans: return None
    best = min(plans, key=lambda p: p.seconds)
    print("PLAN", "chunks", best.cut.chunks, "n", best.columns.size, "cols", best.columns.count, "S", best.slots, "most", best.most, "room", best.room, "pieces", best.pieces, "tasks", len(best.tasks), "loads", len(best.loads) + sum(t.fetches >= 0 for t in best.tasks), "us", round(best.seconds * 1e6, 1), flush=True)
    if "v" in ENV: print(*best.tasks, sep="\n")
    return best


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Scratch:
    x: Ref
    w: Ref
    outgoing: OutgoingTiles
    table: Ref
    x_sem: Ref
    w_sem: Ref
    kept_sem: Ref
    held: Ref

    @classmethod
    def allocate(cls, plan, dtype):
        dma, n, k = pltpu.SemaphoreType.DMA, plan.columns.size, plan.k
        return cls(
            pltpu.VMEM((plan.arrivals, *plan.cut.shape, k), dtype),
            pltpu.VMEM((plan.slots, *((n, k) if plan.transposed else (k, n))), dtype),
            OutgoingTiles.allocate(plan.room, (*plan.cut.shape, n), dtype),
            pltpu.SMEM((len(plan.tasks) * _FIELDS,), jnp.int32),
            dma((plan.cut.chunks,)),
            dma((plan.slots, plan.pieces)),
            dma,
            pltpu.SMEM((plan.room,), jnp.int32),
        )


class Resident:
    def __init__(self, plan, trips, ws, ys, keep, scratch):
        self.plan, self.ws, self.ys, self.keep, self.scratch = plan, ws, ys, keep, scratch
        self.trips = dataclasses.replace(trips, arrivals=scratch.x)

    def begin(self):
        @pl.loop(0, self.plan.cut.chunks)
        def _(chunk):
            for d in range(self.plan.cut.directions):
                start_copy(self.trips.x.at[self.plan.cut.chunk(d, chunk)], self.scratch.x.at[chunk, d], self.scratch.x_sem.at[chunk])
        for column, slot in self.plan.loads:
            self.fetch(column, slot)

    def run(self):
        plan, s = self.plan, self.scratch
        for number, task in enumerate(plan.tasks):
            for field, value in enumerate(dataclasses.astuple(task)):
                s.table[number * _FIELDS + field] = value
        for chunk in range(plan.cut.chunks):
            for d in range(plan.cut.directions):
                wait(s.x.at[chunk, d], s.x_sem.at[chunk])
            self.arrived(chunk)
        pl.loop(0, len(plan.tasks))(self.task)
        with jax.named_scope("finish"):
            last = {}
            for t in plan.tasks:
                last.update(dict.fromkeys(range(t.place, t.place + abs(t.count)), t.column))
            for slot, column in last.items():
                self.wait_left(slot, jnp.int32(column))
            self.trips.finish()
            if self.keep:
                for a in range(plan.arrivals):
                    for d in range(plan.cut.directions):
                        wait(s.x.at[a, d], s.kept_sem)

    def arrived(self, a):
        self.trips.send(a)
        if self.keep:
            for d in range(self.plan.cut.directions):
                start_copy(self.scratch.x.at[a, d], self.trips.gathered.at[self.trips.place(d, a)], self.scratch.kept_sem)

    def wait_left(self, slot, column):
        D, b, r = self.plan.cut.shape
        self.plan.columns.on_size(column, lambda n: self.scratch.outgoing.wait(slot, D, b, r, n))

    def task(self, number):
        plan, s = self.plan, self.scratch
        here = Task(*(s.table[number * _FIELDS + f] for f in range(_FIELDS)))
        self.here = here

        @pl.loop(here.received, here.received + here.receives)
        def _(a):
            self.trips.receive(a)
            self.arrived(a)

        @sometimes(here.fetches >= 0)
        def _():
            self.fetch(here.fetches, here.into)

        count = jnp.abs(here.count)

        @pl.loop(here.place, here.place + here.waits)
        def _(i):
            self.wait_left(i, s.held[i])

        if len(set(plan.columns.sizes)) > 1:
            pl.loop(here.place, here.place + count)(lambda i: s.held.__setitem__(i, here.column))

        @sometimes(here.awaits > 0)
        def _():
            pl.loop(0, plan.pieces)(lambda p: self.wait_piece(here, p))

        for q in (1, 2, 4, 8):
            if q <= plan.most:
                pl.when(here.count == q)(lambda q=q: self.product(here, here.first, here.place, q))
        for q in (2, 4, 8, 16):
            if q > plan.most:
              if q <= 2 * plan.most:
                @sometimes(here.count == q)
                def _(q=q):
                    pl.loop(0, q // plan.most)(lambda i: self.product(here, here.first + i * plan.most, here.place + i * plan.most, plan.most))
        if plan.pieces > 1:
            @sometimes(here.count < 0)
            def _():
                @pl.loop(0, plan.pieces)
                def _(p):
                    self.wait_piece(here, p)
                    @pl.loop(0, count)
                    def _(i):
                        self.piece_product(here, here.first + i, here.place + i, p)
                @pl.loop(0, count)
                def _(i):
                    self.store(here, here.first + i, here.place + i)

    def piece_product(self, here, a, number, piece):
        s, plan = self.scratch, self.plan
        cols = pl.ds(pl.multiple_of(piece * PIECE, PIECE), PIECE)
        x = s.x[a].reshape(plan.cut.arrival, plan.k)
        w = s.w[here.slot, cols, :] if plan.transposed else s.w[here.slot, :, cols]
        with jax.named_scope("multiply"):
            v = dot(x, w, transposed=plan.transposed)
            s.outgoing.tiles[number, :, :, :, cols] = v.astype(s.x.dtype).reshape(*plan.cut.shape, PIECE)

    def product(self, here, a, number, q):
        s, plan = self.scratch, self.plan
        with jax.named_scope("multiply"):
            x = s.x[pl.ds(a, q)].reshape(q * plan.cut.arrival, plan.k)
            v = dot(x, s.w[here.slot], transposed=plan.transposed).astype(s.x.dtype)
            s.outgoing.tiles[pl.ds(number, q)] = v.reshape(q, *plan.cut.shape, -1)
        for i in range(q):
            self.store(here, a + i, number + i)

    def store(self, here, a, slot):
        s, plan = self.scratch, self.plan

        def put(q, columns):
            for d in range(plan.cut.directions):
                batches, block, rows = self.trips.place(d, a)
                start_copy(s.outgoing.tiles.at[slot, d, :, :, pl.ds(0, columns.size)], self.ys[q].at[batches, block, rows, columns], s.outgoing.sems.at[slot])

        with jax.named_scope("store"):
            plan.columns.on_slice(here.column, put)

    def fetch(self, column, slot):
        with jax.named_scope("fetch"):
            @pl.loop(0, self.plan.pieces)
            def _(p):
                def one(q, columns):
                    if self.plan.pieces > 1:
                        columns, here = pl.ds(columns.start + pl.multiple_of(p * PIECE, PIECE), PIECE), pl.ds(pl.multiple_of(p * PIECE, PIECE), PIECE)
                    else:
                        here = pl.ds(0, columns.size)
                    t = self.plan.transposed
                    source = self.ws[q].at[columns, :] if t else self.ws[q].at[:, columns]
                    tile = self.scratch.w.at[slot]
                    start_copy(source, tile.at[here, :] if t else tile.at[:, here], self.scratch.w_sem.at[slot, p])
                self.plan.columns.on_slice(jnp.int32(column), one)

    def wait_piece(self, here, p):
        def one(n):
            n = PIECE if self.plan.pieces > 1 else n
            tile = self.scratch.w.at[here.slot]
            part = tile.at[pl.ds(0, n), :] if self.plan.transposed else tile.at[:, pl.ds(0, n)]
            wait(part, self.scratch.w_sem.at[here.slot, p])
        with jax.named_scope("wait"):
            self.plan.columns.on_size(here.column, one)


def sometimes(condition):
    def run(do):
        pl.loop(0, condition.astype(jnp.int32))(lambda _: do())
    return run
