"""all_gather_matmul alone: values in the race-detecting simulator, the static schedule, refusals, the program."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import flaxasync as fa
from benchmarks.all_gather_matmul import SHAPES, program
from flaxasync.check.player.errors import RaceError
from flaxasync.kernels.all_gather_matmul import all_gather_matmul, resident, schedule
from flaxasync.kernels.all_gather_matmul import stream as stream_form
from flaxasync.kernels.engine.gather import BlockLayout, Gather
from flaxasync.kernels.engine.matmul import MatmulTiles
from flaxasync.kernels.engine.operands import Tiles
from flaxasync.kernels.engine.ring import Ring
from flaxasync.kernels.engine.slots import IncomingTiles
from tests.kernels.conftest import simulated


def case(**options):
    return options


def run(size, batch, m, k, widths, *, mode="on_wait", dtype="float32", **options):
    """Compares y and the gathered x with an unsharded product; m and widths are those of one device."""
    transposed, keep = options.get("transposed", False), options.get("keep_gathered", False)
    draw = np.random.default_rng(size).standard_normal
    x = draw((batch, size * m, k)).astype(jnp.dtype(dtype))
    ws = [draw((n * size, k) if transposed else (k, n * size)).astype(jnp.dtype(dtype)) for n in widths]
    xs, wspec = P(None, "ring", None), P("ring", None) if transposed else P(None, "ring")
    local = functools.partial(all_gather_matmul, axis_name="ring", **options)
    with simulated((size,), ("ring",), mode) as mesh:
        fn = jax.jit(jax.shard_map(
            lambda x, *ws: local(x, ws), in_specs=(xs, *[wspec] * len(ws)),
            out_specs=(tuple(P(None, None, "ring") for _ in ws), P(None, "ring", None) if keep else None),
        ))  # fmt: skip
        place = lambda a, spec: jax.device_put(a, NamedSharding(mesh, spec))  # noqa: E731
        ys, gathered = fn(place(x, xs), *(place(w, wspec) for w in ws))
        ys = [np.asarray(y, np.float32) for y in ys]
        gathered = np.asarray(gathered, np.float32) if keep else None
    tolerance = 1e-5 if dtype == "float32" else 2e-2  # order of additions; the result, rounded
    for y, w in zip(ys, ws, strict=True):
        want = np.asarray(x, np.float32) @ np.asarray(w.T if transposed else w, np.float32)
        np.testing.assert_allclose(y, want, rtol=tolerance, atol=tolerance * np.abs(want).max())
    if keep:
        np.testing.assert_array_equal(gathered, np.tile(np.asarray(x, np.float32), (1, size, 1)))


@pytest.fixture
def stream(monkeypatch):
    monkeypatch.setattr(resident, "plan", lambda *args: None)


@pytest.mark.parametrize("options", [
    pytest.param(case(size=2, batch=1, m=16, k=256, widths=[384], directions=1, tiles=Tiles(8, 128, 256)),
                 marks=pytest.mark.slow),
    pytest.param(case(size=3, batch=2, m=16, k=256, widths=[384, 128], tiles=Tiles(16, 128, 256), mode="eager"),
                 marks=pytest.mark.slow),
    case(size=2, batch=4, m=16, k=256, widths=[384, 128], transposed=True, dtype="bfloat16", keep_gathered=True,
         tiles=Tiles(32, 128, 256), mode="eager"),
])  # fmt: skip
def test_values_where_x_streams(stream, options):
    run(**options)


@pytest.mark.slow
@pytest.mark.parametrize("options", [
    case(size=3, batch=2, m=16, k=256, widths=[384, 128], tiles=Tiles(16, 128, 256), mode="eager"),
    case(size=2, batch=4, m=16, k=256, widths=[384], transposed=True, dtype="bfloat16", keep_gathered=True,
         tiles=Tiles(32, 128, 256)),
])  # fmt: skip
def test_values_where_w_comes_again(stream, w_comes_again, options):
    run(**options)


@pytest.mark.parametrize("options", [
    case(size=2, batch=2, m=32, k=256, widths=[256], keep_gathered=True, tiles=Tiles(16, 128, 256)),
    pytest.param(case(size=3, batch=1, m=64, k=256, widths=[384, 128], tiles=Tiles(16, 128, 256), mode="eager"),
                 marks=pytest.mark.slow),
    pytest.param(case(size=4, batch=8, m=16, k=256, widths=[256], dtype="bfloat16", keep_gathered=True,
                      transposed=True, mode="eager"), marks=pytest.mark.slow),
])  # fmt: skip
def test_values_where_half_blocks_travel_in_chunks(monkeypatch, stream, options):
    monkeypatch.setattr(stream_form, "CHUNK_ROWS", 8)
    run(**options)


def test_chunks_are_for_links_that_bind_and_a_w_that_stays():
    """Four chunks where a hop takes longer than the products of what it brings."""
    layout = BlockLayout.of("test", 4, 512, 16, directions=2)
    chunks = lambda k, n: stream_form.plan(layout, 8, k, [n], False, None, jnp.bfloat16).layout.chunks  # noqa: E731
    assert chunks(4096, 768) == 4
    assert chunks(4096, 3584) == 1  # the matrix units bind
    assert chunks(32768, 2048) == 1  # w does not fit


@pytest.mark.parametrize("options", [
    case(size=2, batch=1, m=256, k=256, widths=[640], directions=1, tiles=Tiles(512, 128, 256)),  # a partial tile of w
    pytest.param(case(size=3, batch=2, m=16, k=256, widths=[384, 128], mode="eager"), marks=pytest.mark.slow),
    pytest.param(case(size=2, batch=4, m=16, k=256, widths=[384], transposed=True, dtype="bfloat16", keep_gathered=True,
                      tiles=Tiles(64, 128, 128), mode="eager"), marks=pytest.mark.slow),
    pytest.param(case(size=3, batch=1, m=512, k=128, widths=[512], keep_gathered=True, tiles=Tiles(256, 128, 256),
                      mode="eager"), marks=pytest.mark.slow),  # half-blocks in chunks
])  # fmt: skip
def test_values_where_x_stays_in_vector_memory(monkeypatch, options):
    monkeypatch.setattr(resident, "OUT_SLOTS", 1)  # results wait until others have left their slots
    run(**options)


@dataclasses.dataclass(frozen=True)
class Mix:
    """An epilogue that tells all products and operands apart."""

    results: int

    def __call__(self, products, operands):
        total = sum((i + 1) * value for i, value in enumerate((*products, *operands)))
        return tuple(total * (i + 1) - products[0] for i in range(self.results))


@pytest.mark.parametrize("options", [
    case(size=2, m=16, k=256, n=256, columns=2, operands=1, results=3, tiles=Tiles(32, 128, 128)),
    pytest.param(case(size=3, m=16, k=384, n=384, columns=2, operands=2, results=2, tiles=Tiles(16, 128, 256),
                      mode="eager"), marks=pytest.mark.slow),  # a partial tile of columns
    pytest.param(case(size=2, m=32, k=256, n=256, columns=1, operands=2, results=3, transposed=True,
                      dtype="bfloat16", tiles=Tiles(32, 256, 128), mode="eager"), marks=pytest.mark.slow),
    pytest.param(case(size=4, m=16, k=256, n=384, columns=1, operands=2, results=1, transposed=True,
                      tiles=Tiles(8, 128, 256)), marks=pytest.mark.slow),
    pytest.param(case(size=4, m=16, k=128, n=256, columns=2, operands=0, results=1, mode="eager"),
                 marks=pytest.mark.slow),
])  # fmt: skip
def test_values_of_an_epilogue(options):
    epilogue_parity(**options)


def epilogue_parity(
    size, m, k, n, columns, operands, results, tiles=None, transposed=False, dtype="float32", mode="on_wait"
):
    draw = lambda *shape: np.random.default_rng(sum(shape)).standard_normal(shape).astype(jnp.dtype(dtype))  # noqa: E731
    x, ws = draw(2, size * m, k), [draw(n * size, k) if transposed else draw(k, n * size) + i for i in range(columns)]
    more = [draw(2, size * m, n * size) + i for i in range(operands)]
    rows, by_columns, w_spec = P(None, "ring"), P(None, None, "ring"), P("ring") if transposed else P(None, "ring")
    local = functools.partial(
        all_gather_matmul, axis_name="ring", epilogue=Mix(results), transposed=transposed, tiles=tiles
    )
    with simulated((size,), ("ring",), mode) as mesh:
        fn = jax.jit(jax.shard_map(
            lambda x, ws, more: local(x, ws, operands=more)[0], in_specs=(rows, w_spec, by_columns),
            out_specs=by_columns,
        ))  # fmt: skip
        place = lambda values, spec: [jax.device_put(v, NamedSharding(mesh, spec)) for v in values]  # noqa: E731
        got = [np.asarray(y, np.float32) for y in fn(*place([x], rows), place(ws, w_spec), place(more, by_columns))]
    x, ws, more = jax.tree.map(lambda value: np.asarray(value, np.float32), (x, ws, more))
    want = Mix(results)([x @ (w.T if transposed else w) for w in ws], more)
    assert len(got) == results
    tolerance = 1e-5 if dtype == "float32" else 1e-2  # order of additions; the result alone is rounded
    for ours, theirs in zip(got, want, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=tolerance, atol=tolerance * np.abs(theirs).max())


def test_an_operand_that_is_not_waited_for_is_seen(monkeypatch):
    """A negative test: an epilogue sees tiles of its operands that have not arrived."""
    wait = MatmulTiles.wait_result
    skip = lambda self, slots, *rest: None if isinstance(slots, IncomingTiles) else wait(self, slots, *rest)  # noqa: E731
    monkeypatch.setattr(MatmulTiles, "wait_result", skip)
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        epilogue_parity(2, 16, 256, 128, columns=1, operands=1, results=1)
    jax.clear_caches()


def test_rows_that_are_not_waited_for_are_seen(monkeypatch, stream):
    """A negative test: what has not arrived is multiplied."""
    monkeypatch.setattr(Gather, "receive", lambda self, arrival: None)
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        run(2, 1, 16, 256, [256], directions=1)
    jax.clear_caches()


def test_a_result_that_overwrites_one_that_leaves_is_seen(monkeypatch):
    """A negative test of the out slots: all results take the first, and nobody waits."""
    monkeypatch.setattr(schedule._Device, "_take_out_slots", lambda self, count: (0, 0))
    with pytest.raises(jax.errors.JaxRuntimeError, match="RACE DETECTED"):
        run(2, 1, 16, 128, [384], mode="eager", directions=1, tiles=Tiles(64, 128, 128))
    jax.clear_caches()


def test_a_transfer_beyond_an_array_is_seen(monkeypatch):
    """A negative test: these are rows of a block that no device has, and the kernel checks nothing."""
    monkeypatch.setattr(Gather, "block", lambda self, direction, arrival: jnp.int32(self.ring.size))
    with pytest.raises(jax.errors.JaxRuntimeError, match="Out-of-bounds write"):
        run(2, 1, 16, 256, [256], directions=1)
    jax.clear_caches()


times = st.floats(1e-7, 1e-4)


@given(
    st.integers(2, 9), st.integers(1, 2), st.integers(1, 9), st.integers(2, 5), st.sampled_from([1, 2, 4]),
    st.integers(0, 9), st.tuples(*[times] * 10),
)  # fmt: skip
def test_the_schedule_has_every_product_once_whatever_the_rates(size, own, columns, w_slots, most, more, rates):
    """Also: tiles, arrivals and slots are there, or on their way, when they are used; nothing in use is overwritten."""
    sizes = schedule.Sizes(size * own, own, columns, w_slots, most, 2 * most + more)
    order = schedule.schedule(sizes, schedule.Rates(*rates))
    tiles, coming, received, done, leaving = (
        dict(enumerate(order.loads)),
        set(range(len(order.loads))),
        own,
        set(),
        set(),
    )
    for task in order.tasks:
        assert task.received == received
        received += task.receives
        if task.fetches >= 0:
            assert (task.unused >= 0) == (task.fetch_slot in coming)  # nothing is still on its way there
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
    layout = BlockLayout.of("test", 1, 256, 16, directions=2)
    for n in range(256, 6656, 640):
        plan = resident.plan(layout, 8, 1024, [n], False, None, jnp.bfloat16)
        assert plan.sizes.w_slots <= max(2, plan.columns.count - 1)


def traced(shape, widths, size=2, dtype=jnp.float32, k=None, **options):
    with simulated((size,), ("ring",)):
        local = functools.partial(all_gather_matmul, axis_name="ring", **options)
        fn = jax.shard_map(
            lambda x, *ws: local(x, ws)[0], in_specs=(P(None, "ring"), *[P(None, "ring")] * len(widths)),
            out_specs=P(None, None, "ring"), check_vma=False,
        )  # fmt: skip
        ws = [jax.ShapeDtypeStruct((k or shape[2], n * size), dtype) for n in widths]
        jax.eval_shape(fn, jax.ShapeDtypeStruct((shape[0], shape[1] * size, shape[2]), dtype), *ws)


@pytest.mark.parametrize(("error", "message", "options"), [
    (ValueError, "or more on 'ring': got an axis of size 1", case(shape=(1, 32, 128), widths=[128], size=1)),
    (ValueError, r"multiple of 128\] for float32: got \[30, 128\]", case(shape=(1, 30, 128), widths=[128])),
    (ValueError, r"multiple of 128\] for float32: got \[128, 64\]", case(shape=(1, 32, 128), widths=[64])),
    (ValueError, "3 batches need rows in multiples of 16 for that: got 24", case(shape=(3, 24, 128), widths=[128])),
    (ValueError, "directions to be 1 or 2: got 3", case(shape=(1, 32, 128), widths=[128], directions=3)),
    (ValueError, r"contracts x \[B, m, k\] with w \[k, n\].*32,128.*256,128",
     case(shape=(1, 32, 128), widths=[128], k=256)),
    (ValueError, "one or more w", case(shape=(1, 32, 128), widths=[])),
    (NotImplementedError, "float32 and bfloat16: got a batch of x of float16",
     case(shape=(1, 32, 128), widths=[128], dtype=jnp.float16)),
    (ValueError, "a v5e has 120 MiB to give; the largest of this form are m=",
     case(shape=(8, 4096, 8192), widths=[8192], tiles=Tiles(8192, 8192, 8192))),
])  # fmt: skip
def test_what_does_not_fit_is_refused_with_its_numbers(error, message, options):
    with pytest.raises(error, match=message):
        traced(**options)


@pytest.mark.parametrize(("message", "options"), [
    ("all w of one width n: got \\[128, 256\\]", case(widths=[128, 256], epilogue=Mix(1))),
    ("needed float32\\[1, 64, 128\\]", case(widths=[128], epilogue=Mix(1), operands=[(1, 32, 128)])),
])  # fmt: skip
def test_operands_that_do_not_fit_an_epilogue_are_refused(message, options):
    operands = [jnp.zeros(shape) for shape in options.pop("operands", [])]
    with pytest.raises(ValueError, match=message):
        traced((1, 32, 128), operands=operands, **options)


@pytest.mark.slow
@pytest.mark.parametrize("topology", ["v6e:2x4", "v5e:2x4", "v5p:2x2x2", "tpu7x:2x2x1"])
def test_it_compiles_at_full_size(topology):
    """Nothing but the kernel, and the copy that XLA adds where a kernel that communicates ends a program."""
    for shape in SHAPES[::3]:  # one whose x stays, one whose x streams, and the latter transposed
        fn, *arguments = program("fused", topology, shape)
        text = fa.check.compile_for(topology, fn, *arguments).as_text()
        opcodes = [i.opcode for i in fa.check.parse(text).entry.instructions]
        assert opcodes.count("custom-call") == 1
        assert not {"fusion", "slice", "concatenate", "pad"} & set(opcodes)


def test_a_barrier_that_tells_the_wrong_neighbour_is_seen(monkeypatch):
    """The player follows who has heard of whom; without the fault nothing is wrong."""
    small = (2, 64, 512, 512, False)
    fn, *arguments = program("fused", "v5e:2x2", small, directions=1)
    result = fa.check.play(fn, *arguments, topology="v5e:2x2")
    assert not result.notes
    jax.clear_caches()  # the kernel's trace, too
    monkeypatch.setattr(Ring, "sender", Ring.receiver)
    fn, *arguments = program("fused", "v5e:2x2", small, directions=1)
    with pytest.raises(RaceError, match="a barrier with the receiver is missing"):
        fa.check.play(fn, *arguments, topology="v5e:2x2")
    jax.clear_caches()
