"""matmul_reduce_scatter in the race-detecting simulator."""

import dataclasses
import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from flaxasync.kernels import reduce_scatter_schedule
from flaxasync.kernels.engine import beside, tiling
from flaxasync.kernels.engine.matmul import MatmulTiles
from flaxasync.kernels.engine.operands import Tiles
from flaxasync.kernels.engine.ring import Acknowledgements
from flaxasync.kernels.engine.tiling import Tiling
from flaxasync.kernels.engine.vector_memory import SEMAPHORES
from flaxasync.kernels.matmul_reduce_scatter import matmul_reduce_scatter
from flaxasync.kernels.reduce_scatter_schedule import BlockOfRows
from flaxasync.ops.roofline import LARGEST_BLOCK
from tests.kernels.conftest import as_float32, assert_close, draw
from tests.kernels.conftest import run as simulate

TILES = Tiles(32, 128, 128)


def run(
    size,
    *,
    batch=1,
    m=32,
    ks=(128,),
    n=256,
    dtype="float32",
    mode="on_wait",
    transposed=False,
    tiles=TILES,
    cores=1,
    **options,
):
    """Runs the kernel on an axis of `size` devices; returns what it gave and what it should
    have.
    """
    xs = tuple(draw((batch, size * m, size * k), dtype, i) for i, k in enumerate(ks))
    ws = tuple(draw((size * k, n), dtype, i + size) for i, k in enumerate(ks))
    given = tuple(w.T for w in ws) if transposed else ws
    specs = P(None, None, "ring"), P(None, "ring") if transposed else P("ring", None)
    local = functools.partial(
        matmul_reduce_scatter,
        axis_name="ring",
        transposed=transposed,
        tiles=tiles,
        cores=cores,
        **options,
    )
    (got,) = simulate(
        local, (xs, given), specs, (P(None, "ring"),), shape=(size,), mode=mode, cores=cores
    )
    want = sum(x @ w for x, w in zip(as_float32(xs), as_float32(ws), strict=True))
    if "batches" in options:
        want = want[list(options["batches"])]
    return got, want


# The last tile of every side is partial; what lies beyond it in vector memory is not a number at
# first.
RAGGED = {"ks": (640,), "n": 640, "tiles": Tiles(32, 384, 384)}  # 384 + 256
W_COMES_AGAIN = MatmulTiles, "keeping_w", lambda self, used_bytes, dtype: (self, used_bytes)
SMALL_PARTS = tiling, "SUB_BLOCK", 16


@pytest.mark.parametrize(
    ("size", "replaced", "options"),
    [
        (
            3,
            None,
            {"directions": 2, "batch": 2, "ks": (256, 128), "dtype": "bfloat16", "mode": "eager"},
        ),
        # the last two of three batches, one on each core
        (2, None, {"batch": 3, "batches": range(1, 3), "ks": (256,), "cores": 2}),
        # Each core has rows of the only batch, and a receive buffer is written a second time.
        (4, None, {"m": 64, "ks": (256,), "cores": 2, "mode": "eager"}),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [
                # nothing can be fetched ahead of its sum
                (2, None, {"directions": 2, "m": 8, "n": 128, "mode": "eager"}),
                (
                    3,
                    None,
                    RAGGED | {"batch": 3, "m": 16, "ks": (640, 384), "n": 256, "dtype": "bfloat16"},
                ),  # batches 2 + 1
                (2, None, {"directions": 1}),  # the neighbour is one and the same
                (3, None, {"batch": 4, "ks": (128, 256), "cores": 2, "transposed": True}),
                (4, None, {"m": 64, "ks": (384,), "transposed": True, "mode": "eager"}),
                (
                    3,
                    W_COMES_AGAIN,
                    {"batch": 2, "ks": (256, 128), "dtype": "bfloat16", "mode": "eager"},
                ),
                # Rows in three parts of 16, of which the last is half full.
                (
                    4,
                    SMALL_PARTS,
                    RAGGED
                    | {"m": 40, "tiles": Tiles(64, 384, 384), "transposed": True, "mode": "eager"},
                ),
            ]
        ),
    ],
)
def test_values(monkeypatch, size, replaced, options):
    if replaced:
        monkeypatch.setattr(*replaced)
    assert_close(*run(size, **options), options.get("dtype", "float32"))


def plan(batch, m, k, n, size):
    """Returns the schedule of bfloat16 rows of one device of a ring, in both directions."""
    block = BlockOfRows(batch, m, n, 16)
    dtype = jnp.dtype(jnp.bfloat16)
    return reduce_scatter_schedule.plan_schedule(
        block, [k], dtype, False, None, size, 2, dtype, scaled=False
    )[0]


def test_w_stays_where_it_fits():
    """All of it, beside the other buffers; else it has two slots."""
    assert plan(4, 512, 1792, 4096, 8).tiles.w_stays
    assert plan(4, 512, 8192, 8192, 8).tiles.w_slots == 2


@pytest.mark.parametrize("n", [2560, 3072, 4096, 5120, 7168])
def test_both_directions_have_as_many_tiles_of_columns(n):
    """With three tiles of 2560 columns, the links of one direction had twice as much to send."""
    columns = plan(4, 512, 1024, n, 4).tiles.columns
    assert columns.count % 2 == 0
    assert columns.size <= reduce_scatter_schedule.WIDEST


@pytest.mark.parametrize(
    ("batch", "m", "n"),
    [(1, 50576, 1152), (1, 92640, 512), (8, 6448, 1280), (1, 2320, 34048), (8, 352, 28800)],
)
def test_a_block_that_a_call_without_a_backend_may_have_has_semaphores(batch, m, n):
    """Tiles that divide these rows are small, and would be too many."""
    assert batch * m * n < LARGEST_BLOCK
    assert 2 * plan(batch, m, 1024, n, 8).tiles_of_block <= SEMAPHORES


@pytest.mark.parametrize(
    ("sums", "steps", "apart"),
    [(7, 32, 1), (100, 32, 1), (46_000, 46_001, 1), (99_999, 100_000, 5), (250_000, 100_000, 3)],
)
def test_steps_of_sums_beside_are_divided_evenly(monkeypatch, sums, steps, apart):
    """Each is done once, in order, and at most `apart` steps from where an even division has it. Here
    the product of two numbers of steps may exceed an int32.
    """
    monkeypatch.setattr(beside.pl, "loop", lambda *ends: lambda _: found.append(ends))
    found = []
    local = beside.Beside(types.SimpleNamespace(steps=sums), (), (), None)
    numbers = [*range(40), *range(steps // 2, steps // 2 + 40), *range(steps - 40, steps)]
    for step in sorted(set(range(steps)) & set(numbers)):
        local.between(jnp.int32(step), steps)
        first, end = map(int, found[-1])
        if len(found) > 1 and step - 1 in numbers:
            assert first == int(found[-2][1])
        assert abs(first - step * sums / steps) <= apart * max(1, sums / steps)
        assert step or first == 0
        assert step < steps - 1 or end == sums


@pytest.mark.slow
def test_the_fewest_tiles_of_rows_that_nothing_divides(monkeypatch):
    """328 rows in tiles of 64, of which the last has half a part of 16 rows: 7 tiles of 48 would be
    too many.
    """
    for name, value in (("TILES", Tiles(64, 128, 128)), ("SMALLEST", 8 * 128), ("SEMAPHORES", 24)):
        monkeypatch.setattr(reduce_scatter_schedule, name, value)
    monkeypatch.setattr(tiling, "SUB_BLOCK", 16)
    assert_close(*run(2, m=328, ks=(256,), tiles=None), "float32")


@pytest.mark.slow
def test_a_product_of_a_whole_tile_is_seen(monkeypatch):
    """Negative test: a partial tile of the contraction is multiplied as if it were whole, with what
    lies beyond it.
    """
    multiply = MatmulTiles.multiply

    def whole(self, *args):
        size = self.contraction.size
        multiply(dataclasses.replace(self, contraction=Tiling((2 * size,), size)), *args)

    monkeypatch.setattr(MatmulTiles, "multiply", whole)
    got, want = run(2, **RAGGED | {"directions": 1, "n": 128})
    assert np.isnan(got).any()
    assert not np.isnan(want).any()


def test_a_receive_buffer_that_is_written_before_it_was_read_is_seen(monkeypatch):
    """Negative test: a sender that does not wait for acknowledgements overwrites a sum that was not
    read.
    """
    monkeypatch.setattr(Acknowledgements, "send", lambda self, ring, direction: None)
    monkeypatch.setattr(Acknowledgements, "wait", lambda self, direction: None)
    with pytest.raises(jax.errors.JaxRuntimeError, match="RACE DETECTED"):
        run(4, directions=1, tiles=None, mode="eager")
