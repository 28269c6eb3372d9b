"""all_gather_matmul alone: values in the race-detecting simulator, the order of work, what is refused, the program."""

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
from flaxasync.kernels.all_gather_matmul import all_gather_matmul
from flaxasync.kernels.gather import hops, resident_plan
from flaxasync.kernels.gather.items import LEAVING, Rates, Sizes
from flaxasync.kernels.gather.staircase import _Planner, staircase
from flaxasync.kernels.tiles import Tiles
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
    monkeypatch.setattr(resident_plan, "plan", lambda *args: None)


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


@pytest.mark.parametrize("options", [
    case(size=2, batch=1, m=256, k=512, widths=[1536], directions=1, tiles=Tiles(512, 128, 512)),  # in pieces, chunks
    pytest.param(case(size=3, batch=2, m=16, k=256, widths=[384, 128], mode="eager"), marks=pytest.mark.slow),
    pytest.param(case(size=2, batch=4, m=16, k=256, widths=[384], transposed=True, dtype="bfloat16", keep_gathered=True,
                      tiles=Tiles(32, 128, 128), mode="eager"), marks=pytest.mark.slow),  # several products of a group
    pytest.param(case(size=3, batch=1, m=512, k=128, widths=[512], keep_gathered=True, tiles=Tiles(512, 128, 256),
                      mode="eager"), marks=pytest.mark.slow),  # chunks of blocks, items of several groups
])  # fmt: skip
def test_values_where_x_stays_in_vector_memory(monkeypatch, options):
    monkeypatch.setattr(resident_plan, "ROOM", 1)  # results wait for each other's places
    run(**options)


def test_a_product_in_several_steps(monkeypatch):
    """And several products of a group."""
    monkeypatch.setattr(resident_plan, "CYCLES", 1)  # as where k is long: the contraction is cut
    run(size=2, batch=4, m=16, k=384, widths=[256], transposed=True, dtype="bfloat16", keep_gathered=True,
        tiles=Tiles(32, 128, 128), mode="eager")  # fmt: skip


def test_a_group_that_is_not_waited_for_is_seen(monkeypatch, stream):
    """The twin: rows that are used before they have arrived are a race, or wrong values."""
    monkeypatch.setattr(hops.Hops, "receive", lambda self, group: None)
    with pytest.raises((jax.errors.JaxRuntimeError, AssertionError)):
        run(2, 1, 16, 256, [256], directions=1)
    jax.clear_caches()


def test_a_result_that_overwrites_one_that_leaves_is_seen(monkeypatch):
    """The twin of the places of results: all take the first, and nobody waits."""
    monkeypatch.setattr(_Planner, "_put", lambda self, span: (self.leaving.clear(), (0, 0, 0))[1])
    with pytest.raises(jax.errors.JaxRuntimeError, match="RACE DETECTED"):
        run(2, 1, 16, 128, [384], directions=1, tiles=Tiles(64, 128, 128))
    jax.clear_caches()


def test_a_transfer_beyond_an_array_is_seen(monkeypatch):
    """Here, as the resident kernel has no checks of its own: rows of a block that no device has."""
    monkeypatch.setattr(hops.Hops, "block", lambda self, p, group: jnp.int32(self.size))
    with pytest.raises(jax.errors.JaxRuntimeError, match="Out-of-bounds write"):
        run(2, 1, 16, 256, [256], directions=1)
    jax.clear_caches()


times = st.floats(1e-7, 1e-4)


@given(
    st.integers(2, 9), st.integers(1, 2), st.integers(1, 9), st.integers(2, 5), st.integers(1, 5),
    st.sampled_from([(1,), (1, 2), (1, 2, 4)]), st.integers(0, 2), st.integers(0, 2), st.integers(4, 9),
    st.tuples(*[times] * 10),
)  # fmt: skip
def test_the_order_has_every_item_once_whatever_the_rates(
    size, own, columns, slots, pieces, spans, together, most, room, rates
):
    """Also: tiles, groups and places are there, or on their way, when they are used; nothing in use is overwritten."""
    groups, most = size * own, spans[min(most, len(spans) - 1)]
    sizes = Sizes(groups, own, columns, slots, pieces, spans, spans[: together + 1], most, room)
    order = staircase(sizes, Rates(*rates))
    held, received, done = dict(enumerate(order.loads)), own - 1, set()
    awaited, at_once, gone, left = dict.fromkeys(range(slots), 0), dict.fromkeys(range(slots), False), 0, []
    for number, item in enumerate(order.items):
        if item.receives:
            assert item.receives == received + 1
            received = item.receives
        if item.fetches >= 0:
            assert item.into not in held or awaited[item.into] == pieces  # nothing is still on its way there
            held[item.into], awaited[item.into], at_once[item.into] = item.fetches, 0, item.at_once
        assert held[item.slot] == item.column < columns
        assert item.group + item.span - 1 <= received
        assert item.begin <= awaited[item.slot]
        if at_once[item.slot] and not awaited[item.slot]:
            assert item.whole
            assert item.awaited == -1
        else:
            assert item.awaited == max(item.begin, awaited[item.slot])
        awaited[item.slot] = max(awaited[item.slot], item.end)
        assert (item.begin, item.end, item.span in spans) == (0, pieces, True) or not item.whole
        assert item.whole or item.span in sizes.together
        assert item.gone - item.goes == gone
        assert number - item.gone < LEAVING
        gone, places = item.gone, set(range(item.place, item.place + item.span))
        assert max(places) < room
        assert not any(places & others for others in left[gone:])
        left.append(places)
        new = {(item.column, group, piece) for group in range(item.group, item.group + item.span)
               for piece in range(item.begin, item.end)}  # fmt: skip
        assert not new & done
        done |= new
    assert len(done) == groups * columns * pieces
    assert received == groups - 1
    assert all(awaited[slot] == pieces for slot in held)  # no copy is left under way


def test_w_is_never_in_vector_memory_as_a_whole():
    """Unless it is two tiles."""
    whole = hops.Parts(2, 1, 1, 128, along_rows=True)
    for n in range(256, 6656, 640):
        plan = resident_plan.plan(whole, 8, 1024, [n], resident_plan.TILES, jnp.bfloat16)
        assert plan.slots <= max(2, plan.columns.count - 1)


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
    enter = hops.enter
    jax.clear_caches()  # the kernel's trace, too
    monkeypatch.setattr(hops, "enter", lambda tag, near, barrier: enter(tag, [hops.at("model", 1)], barrier))
    fn, *arguments = program("fused", "v5e:2x2", small, directions=1)
    with pytest.raises(RaceError, match="a barrier with the receiver is missing"):
        fa.check.play(fn, *arguments, topology="v5e:2x2")
    jax.clear_caches()
