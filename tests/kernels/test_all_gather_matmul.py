"""all_gather_matmul alone: values in the race-detecting simulator, and the static schedule."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

import flaxasync as fa
from benchmarks.all_gather_matmul import program
from flaxasync.check.player.errors import RaceError
from flaxasync.kernels.all_gather_matmul import all_gather_matmul, resident, resident_schedule
from flaxasync.kernels.all_gather_matmul import stream as stream_form
from flaxasync.kernels.all_gather_matmul.work import GatherWork
from flaxasync.kernels.engine.gather import BlockLayout, Gather, GatherSemaphores
from flaxasync.kernels.engine.matmul import MatmulTiles
from flaxasync.kernels.engine.operands import Tiles
from flaxasync.kernels.engine.ring import Ring
from flaxasync.kernels.engine.slots import IncomingTiles
from flaxasync.kernels.engine.vector_memory import SEMAPHORES
from tests.kernels.conftest import as_float32, assert_close, draw
from tests.kernels.conftest import run as simulate


def run(
    size,
    batch,
    m,
    k,
    widths,
    *,
    mode="on_wait",
    dtype="float32",
    epilogue=None,
    operands=0,
    cores=1,
    **options,
):
    """Compares y and the gathered x with an unsharded product; m and widths are those of one
    device.
    """
    transposed, keep = options.get("transposed", False), options.get("keep_gathered", False)
    x = draw((batch, size * m, k), dtype)
    ws = [
        draw((n * size, k) if transposed else (k, n * size), dtype, i + 1)
        for i, n in enumerate(widths)
    ]
    more = [draw((batch, size * m, widths[0] * size), dtype, 10 + i) for i in range(operands)]
    rows, columns, w_spec = (
        P(None, "ring"),
        P(None, None, "ring"),
        P("ring") if transposed else P(None, "ring"),
    )

    def local(x, ws, more):
        ys, gathered = all_gather_matmul(
            x, ws, "ring", epilogue=epilogue, operands=more, cores=cores, **options
        )
        count = epilogue.results if epilogue else len(ws)
        return ys[:count], gathered, ys[count:]

    out_specs = columns, rows if keep else None, rows
    in_specs = rows, w_spec, columns
    ys, gathered, most = simulate(
        local, (x, ws, more), in_specs, out_specs, shape=(size,), mode=mode, cores=cores
    )
    if "measured" in options:  # on each device those of its own columns
        of_device = np.split(np.abs(np.stack(ys[options["measured"]])).max(axis=0), size, axis=-1)
        np.testing.assert_array_equal(
            most[0], np.concatenate([one.max(axis=-1) for one in of_device], axis=1)
        )
    x, ws, more = as_float32((x, ws, more))
    want = [x @ (w.T if transposed else w) for w in ws]
    for y, w in zip(ys, epilogue(want, more) if epilogue else want, strict=True):
        assert_close(y, w, dtype)
    if keep:
        np.testing.assert_array_equal(gathered, np.tile(x, (1, size, 1)))


@dataclasses.dataclass(frozen=True)
class Mix:
    """An epilogue that tells all products and operands apart."""

    results: int

    def __call__(self, products, operands):
        total = sum((i + 1) * value for i, value in enumerate((*products, *operands)))
        return tuple(total * (i + 1) - products[0] for i in range(self.results))


STREAMS = resident, "plan", lambda *args: None
FORMS = {  # what is replaced, so that the plan for small operands has this form
    "as planned": [],
    "x stays": [(resident, "OUT_SLOTS", 1)],  # results wait until others have left their slots
    "x streams": [STREAMS],
    "w comes again": [
        STREAMS,
        (MatmulTiles, "keeping_w", lambda self, used_bytes, dtype: (self, used_bytes)),
    ],
    "in chunks": [STREAMS, (stream_form, "CHUNK_ROWS", 8)],
}


def case(form, *, slow=True, batch=2, k=256, **options):
    return pytest.param(
        form, {"batch": batch, "k": k} | options, marks=[pytest.mark.slow] if slow else []
    )


@pytest.mark.parametrize(
    ("form", "options"),
    [
        case(
            "x streams", size=2, batch=1, m=16, widths=[384], directions=1, tiles=Tiles(8, 128, 256)
        ),
        case(
            "x streams",
            size=2,
            batch=4,
            m=16,
            widths=[256, 128],
            transposed=True,
            dtype="bfloat16",
            keep_gathered=True,
            tiles=Tiles(32, 128, 256),
            mode="eager",
        ),
        case(
            "w comes again",
            size=3,
            m=16,
            widths=[384, 128],
            tiles=Tiles(16, 128, 256),
            mode="eager",
        ),
        case(
            "in chunks",
            size=2,
            m=32,
            widths=[256],
            keep_gathered=True,
            tiles=Tiles(16, 128, 256),
        ),
        case(
            "in chunks",
            size=4,
            batch=8,
            m=16,
            widths=[256],
            dtype="bfloat16",
            keep_gathered=True,
            transposed=True,
            mode="eager",
        ),
        case(
            "x stays",
            size=2,
            batch=1,
            m=256,
            widths=[640],
            directions=1,
            tiles=Tiles(512, 128, 256),
        ),
        case(
            "x stays",
            size=2,
            batch=4,
            m=16,
            widths=[384],
            transposed=True,
            dtype="bfloat16",
            keep_gathered=True,
            tiles=Tiles(64, 128, 128),
            mode="eager",
        ),
        case(
            "x stays",
            size=3,
            batch=1,
            m=512,
            k=128,
            widths=[512],
            keep_gathered=True,
            tiles=Tiles(256, 128, 256),
            mode="eager",
        ),  # half-blocks in chunks
        case(
            "x stays",
            size=3,
            batch=1,
            m=64,
            k=128,
            widths=[256],
            transposed=True,
            keep_gathered=True,
            tiles=Tiles(64, 128, 128),
            cores=2,
        ),
        case(
            "w comes again",
            size=3,
            batch=4,
            m=16,
            widths=[256, 128],
            dtype="bfloat16",
            keep_gathered=True,
            tiles=Tiles(16, 128, 128),
            cores=2,
            mode="eager",
            slow=False,
        ),
        case(
            "as planned",
            size=2,
            m=16,
            k=128,
            widths=[128] * 2,
            operands=1,
            epilogue=Mix(3),
            tiles=Tiles(32, 128, 128),
            dtype="bfloat16",
            measured=slice(1, None),
            slow=False,
        ),
        case(
            "as planned",
            size=3,
            m=16,
            k=384,
            widths=[384] * 2,
            operands=2,
            epilogue=Mix(2),
            tiles=Tiles(16, 128, 256),
            mode="eager",
            measured=slice(0, 2),
        ),  # a partial tile of columns
        case(
            "as planned",
            size=2,
            batch=1,
            m=64,
            k=128,
            widths=[128] * 2,
            operands=1,
            epilogue=Mix(2),
            tiles=Tiles(16, 128, 128),
            dtype="bfloat16",
            measured=slice(0, 1),
            cores=2,
            directions=1,
        ),
    ],
)
def test_values(monkeypatch, form, options):
    for replaced in FORMS[form]:
        monkeypatch.setattr(*replaced)
    run(**options)


def test_chunks_are_for_links_that_bind_and_a_w_that_stays():
    """Four chunks where a hop takes longer than the products of what it brings."""
    layout = BlockLayout.of(4, 512, 16, directions=2)
    for k, n, chunks in [
        (4096, 768, 4),
        (4096, 3584, 1),  # the matrix units bind
        (32768, 2048, 1),  # w does not fit
    ]:
        plan = stream_form.plan(
            GatherWork(
                layout,
                8,
                k,
                [n],
                transposed=False,
                dtype=jnp.bfloat16,
                w_dtype=jnp.bfloat16,
                result=jnp.bfloat16,
            )
        )
        assert plan.work.layout.chunks == chunks


@pytest.mark.parametrize(("size", "chunks"), [(48, 4), (49, 2), (64, 2), (96, 2), (97, 1)])
def test_there_are_no_more_chunks_than_semaphores(size, chunks):
    """libtpu refused the four chunks of 64 devices: it leaves a kernel fewer than 2 * 64 * 4."""
    layout = BlockLayout.of(4, 512, 16, directions=2)
    work = GatherWork(
        layout,
        size,
        4096,
        [768],
        transposed=False,
        dtype=jnp.bfloat16,
        w_dtype=jnp.bfloat16,
        result=jnp.bfloat16,
    )
    assert stream_form.plan(work).work.layout.chunks == chunks
    resident_plan = resident.plan(dataclasses.replace(work, k=256))
    for plan in filter(None, [stream_form.plan(work), resident_plan]):
        allocated = GatherSemaphores.allocate(plan.work.layout, size).recv
        assert math.prod(allocated.shape) == plan.work.semaphores <= SEMAPHORES


@pytest.mark.slow
def test_an_operand_that_is_not_waited_for_is_seen(monkeypatch):
    """A negative test: an epilogue sees tiles of its operands that have not arrived."""
    wait = MatmulTiles.wait_result

    def skip(self, slots, *rest):
        if not isinstance(slots, IncomingTiles):
            wait(self, slots, *rest)

    monkeypatch.setattr(MatmulTiles, "wait_result", skip)
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        run(2, 2, 16, 256, [128], operands=1, epilogue=Mix(1))


def test_rows_that_are_not_waited_for_are_seen(monkeypatch):
    """A negative test: what has not arrived is multiplied."""
    monkeypatch.setattr(*STREAMS)
    monkeypatch.setattr(Gather, "receive", lambda self, arrival: None)
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        run(2, 1, 16, 128, [128], directions=1)


@pytest.mark.slow
def test_a_result_that_overwrites_one_that_leaves_is_seen(monkeypatch):
    """A negative test of the out slots: all results take the first, and nobody waits."""
    monkeypatch.setattr(resident_schedule._Device, "_take_out_slots", lambda self, count: (0, 0))
    with pytest.raises(jax.errors.JaxRuntimeError, match="RACE DETECTED"):
        run(2, 1, 16, 128, [384], mode="eager", directions=1, tiles=Tiles(64, 128, 128))


@pytest.mark.slow
def test_a_transfer_beyond_an_array_is_seen(monkeypatch):
    """A negative test: these are rows of a block that no device has, and the kernel checks
    nothing.
    """
    monkeypatch.setattr(Gather, "block", lambda self, direction, arrival: jnp.int32(self.ring.size))
    with pytest.raises(jax.errors.JaxRuntimeError, match="Out-of-bounds write"):
        run(2, 1, 16, 256, [256], directions=1)


times = st.floats(1e-7, 1e-4)


@given(
    st.integers(2, 9),
    st.integers(1, 2),
    st.integers(1, 9),
    st.integers(2, 5),
    st.sampled_from([1, 2, 4]),
    st.integers(0, 9),
    st.tuples(*[times] * 10),
)
def test_the_schedule_has_every_product_once_whatever_the_rates(
    size, own, columns, w_slots, most, more, rates
):
    """Also: tiles, arrivals and slots are there, or on their way, when they are used; nothing in
    use is overwritten.
    """
    sizes = resident_schedule.TaskSizes(size * own, own, columns, w_slots, most, 2 * most + more)
    order = resident_schedule.schedule(sizes, resident_schedule.TaskRates(*rates))
    tiles, coming = dict(enumerate(order.loads)), set(range(len(order.loads)))
    received, done, leaving = own, set(), set()
    for task in order.tasks:
        assert task.received == received
        received += task.receives
        if task.fetches >= 0:
            # nothing is still on its way there
            assert (task.unused >= 0) == (task.fetch_slot in coming)
            assert task.unused < 0 or tiles[task.fetch_slot] == task.unused
            tiles[task.fetch_slot] = task.fetches
            coming.add(task.fetch_slot)
        assert tiles[task.w_slot] == task.column < columns
        assert task.awaits == (task.w_slot in coming)
        coming.discard(task.w_slot)
        assert task.first + task.count <= received
        assert task.count in (1, 2, 4, 8)
        assert task.count <= 2 * most
        results = set(range(task.out_slot, task.out_slot + task.count))
        assert max(results) < sizes.out_slots
        assert results & leaving == set(range(task.out_slot, task.out_slot + task.waits))
        leaving |= results
        new = {(task.column, task.first + i) for i in range(task.count)}
        assert not new & done
        done |= new
    assert len(done) == size * own * columns
    assert received == size * own
    assert not coming


def test_w_is_never_in_vector_memory_as_a_whole():
    """Unless it is two tiles."""
    layout = BlockLayout.of(1, 256, 16, directions=2)
    for n in range(256, 6656, 640):
        plan = resident.plan(
            GatherWork(
                layout,
                8,
                1024,
                [n],
                transposed=False,
                dtype=jnp.bfloat16,
                w_dtype=jnp.bfloat16,
                result=jnp.bfloat16,
            )
        )
        assert plan.sizes.w_slots <= max(2, plan.columns.count - 1)


def test_a_barrier_that_tells_the_wrong_neighbour_is_seen(monkeypatch):
    """The player follows who has heard of whom; without the fault nothing is wrong."""

    def play():
        jax.clear_caches()  # the kernel's trace, too
        fn, *arguments = program("fused", "v5e:2x2", (2, 64, 512, 512, False), directions=1)
        return fa.check.play(fn, *arguments, topology="v5e:2x2")

    assert not play().notes
    monkeypatch.setattr(Ring, "sender", Ring.receiver)
    with pytest.raises(RaceError, match="a barrier with the receiver is missing"):
        play()
    jax.clear_caches()
