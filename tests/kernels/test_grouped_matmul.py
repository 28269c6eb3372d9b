"""The grouped products and their weight gradients beside NumPy, in JAX's TPU interpreter on a
CPU.
"""

import dataclasses
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from flaxasync import check, hardware
from flaxasync.kernels import grouped_blocks, grouped_weight_gradient
from flaxasync.kernels.engine.operands import Tiles
from flaxasync.kernels.engine.slots import IncomingTiles, OutgoingTiles
from flaxasync.kernels.engine.vector_memory import available
from flaxasync.kernels.grouped_blocks import Blocks, Problem
from flaxasync.kernels.grouped_matmul import grouped_matmul
from flaxasync.kernels.grouped_weight_gradient import Factors
from flaxasync.kernels.grouped_weight_gradient import grouped_weight_gradient as weight_gradients
from tests.kernels.conftest import as_float32, assert_close, draw
from tests.simulator.split_pairs import quick_callbacks

ROWS = 128  # of a tile
EXPERTS = np.array([0, 0, 0, 1, 2, 2, 7, 0], np.int32)  # of each tile
TILES = 6  # live ones: what the table says of the last two tiles means nothing
COUNT = 3
K, N = 256, 256


@pytest.fixture
def interpreter(quick_compile):
    with pltpu.force_tpu_interpret_mode(), quick_callbacks():
        yield


FORMS = {
    "K whole": Blocks(rows=ROWS, k=256, n=128, depth=1, columns=2, width=128, most=8),
    # two groups of expert 0
    "K divided": Blocks(rows=ROWS, k=128, n=256, depth=2, columns=1, width=128, most=2),
}


@pytest.fixture
def blocks(request, monkeypatch, interpreter):
    monkeypatch.setattr(Blocks, "choose", lambda *arguments: (FORMS[request.param], 2**20))


def quick_with(form):
    """Runs a test with both forms, of which `make test` has one."""
    params = [pytest.param(name, marks=[] if name == form else pytest.mark.slow) for name in FORMS]
    return pytest.mark.parametrize("blocks", params, indirect=True)


def rows(features, dtype="float32", seed=0):
    """Draws sorted rows. The second expert has padding only, and the rows of dead tiles are not
    numbers.
    """
    x = draw((len(EXPERTS) * ROWS, features), dtype, seed)
    x[3 * ROWS : 4 * ROWS] = 0
    x[TILES * ROWS - 50 : TILES * ROWS] = 0
    x[TILES * ROWS :] = np.nan
    return x


def draw_weights(*shape, dtype="float32"):
    return tuple(draw((COUNT, *shape), dtype, seed) for seed in (1, 2))


def compute(fn, *arguments, **options):
    """Calls a function with traced tiles; returns its results."""
    call = jax.jit(
        lambda arguments, experts, tiles: fn(*arguments, experts, tiles, tile_rows=ROWS, **options)
    )
    return call(arguments, EXPERTS, np.int32(TILES))


def live(y):
    return as_float32(y)[: TILES * ROWS]


def by_tile(x):
    return as_float32(x).reshape(-1, ROWS, x.shape[1])[:TILES]


def product(x, w):
    return np.concatenate(
        [tile @ as_float32(w)[e] for tile, e in zip(by_tile(x), EXPERTS, strict=False)]
    )


@pytest.mark.slow
@pytest.mark.parametrize("blocks", ["K divided"], indirect=True)
@pytest.mark.usefixtures("blocks")
def test_a_product():
    x, w = rows(K, "bfloat16"), draw_weights(K, N, dtype="bfloat16")[0]
    (y,) = compute(grouped_matmul, (x,), (w,))
    assert y.dtype == x.dtype
    assert_close(live(y), product(x, w), "bfloat16")


@quick_with("K divided")
@pytest.mark.usefixtures("blocks")
def test_a_sum_of_transposed_products():
    xs, ws = (rows(K), rows(K, seed=3)), draw_weights(N, K)
    (got,) = compute(grouped_matmul, xs, ws, transposed=True)
    assert_close(live(got), sum(product(x, w.swapaxes(1, 2)) for x, w in zip(xs, ws, strict=True)))


@dataclasses.dataclass(frozen=True)
class Gate:
    """An epilogue with two results: h, and the first product plus an operand."""

    results: int = 2

    def __call__(self, products, operands):
        up, gate = products
        return jax.nn.silu(gate) * up, up + operands[0]


@quick_with("K whole")
@pytest.mark.usefixtures("blocks")
def test_an_epilogue_of_two_products_of_one_x():
    x, ws, operand = rows(K), draw_weights(K, N), rows(N, seed=3)

    def gated(x, ws, operand, *tiling, **options):
        return grouped_matmul((x,), ws, *tiling, epilogue=Gate(), operands=(operand,), **options)

    h, added = compute(gated, x, ws, operand)
    up, gate = (product(x, w) for w in ws)
    assert_close(live(h), gate / (1 + np.exp(-gate)) * up)
    assert_close(live(added), up + live(operand))


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize(
    ("adds", "sides", "times"),
    [
        pytest.param(False, (128, 256), 1, marks=pytest.mark.slow),
        (True, (256, 128), 1),
        pytest.param(False, (256, 256), 2, marks=pytest.mark.slow),
    ],
)
def test_weight_gradients(adds, sides, times, monkeypatch):
    """Blocks of dw are stored several times; of six experts, the first and two others have no
    tile.
    """
    monkeypatch.setattr(
        grouped_weight_gradient, "_choose", lambda *arguments: (Tiles(ROWS, *sides), 2**20)
    )
    experts = [np.where(EXPERTS > 1, 4, EXPERTS + 1), np.array([1, *[2] * 7])][:times]
    factors = [
        Factors(
            rows(K, seed=i),
            (rows(N, seed=i + 1), rows(N, seed=i + 2)),
            tiles.astype(np.int32),
            np.int32(TILES),
        )
        for i, tiles in enumerate(experts)
    ]
    initial = tuple(draw((6, K, N), "float32", seed) for seed in (7, 8)) if adds else ()
    call = jax.jit(
        lambda *operands: weight_gradients(operands[0], 6, tile_rows=ROWS, initial=operands[1])
    )
    for number, dw in enumerate(call(factors, initial)):
        want = np.zeros((6, K, N), np.float32) + (initial[number] if adds else 0)
        for one in factors:
            for x_tile, dy_tile, expert in zip(
                by_tile(one.x), by_tile(one.dys[number]), one.experts, strict=False
            ):
                want[expert] += x_tile.T @ dy_tile
        assert_close(dw, want)


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize(
    ("slots", "what", "wrong"),
    [
        (IncomingTiles, "wait", "y"),
        pytest.param(OutgoingTiles, "wait", "dw", marks=pytest.mark.slow),
    ],
)
def test_a_wait_that_is_left_out_is_seen(slots, what, wrong, monkeypatch):
    """Negative test: transfers of the interpreter move nothing before they are waited for, so that
    values are wrong.
    """
    monkeypatch.setattr(Blocks, "choose", lambda *arguments: (FORMS["K whole"], 2**20))
    monkeypatch.setattr(
        grouped_weight_gradient, "_choose", lambda *arguments: (Tiles(ROWS, 128, 128), 2**20)
    )
    monkeypatch.setattr(slots, what, lambda *arguments: None)
    x, w = rows(K), draw_weights(K, N)[0]
    if wrong == "y":
        got, want = live(compute(grouped_matmul, (x,), (w,))[0]), product(x, w)
    else:
        factors = Factors(x, (x,), EXPERTS, np.int32(TILES))
        (got,) = weight_gradients([factors], COUNT, tile_rows=ROWS)
        want = np.stack(
            [
                sum(t.T @ t for t, e in zip(by_tile(x), EXPERTS, strict=False) if e == i)
                for i in range(3)
            ]
        )
    with pytest.raises(AssertionError):
        assert_close(got, want)


@pytest.mark.slow
@pytest.mark.usefixtures("interpreter")
def test_two_cores_share_the_outer_blocks(monkeypatch):
    """Each core begins with nothing fetched and leaves nothing behind, whichever blocks it gets."""
    for module in (grouped_blocks, sys.modules[grouped_matmul.__module__], grouped_weight_gradient):
        monkeypatch.setattr(module, "chip_in_use", lambda: hardware.chip("v5p"))
    monkeypatch.setattr(Blocks, "choose", lambda *arguments: (FORMS["K whole"], 2**20))
    monkeypatch.setattr(
        grouped_weight_gradient, "_choose", lambda *arguments: (Tiles(ROWS, 128, 128), 2**20)
    )
    x, w, initial = rows(K), draw_weights(K, N)[0], draw((COUNT, K, K), "float32", seed=3)
    assert_close(live(compute(grouped_matmul, (x,), (w,))[0]), product(x, w))
    factors = Factors(x, (x,), EXPERTS, np.int32(TILES))
    (got,) = weight_gradients([factors], COUNT, tile_rows=ROWS, initial=(initial,))
    sums = [
        sum(t.T @ t for t, e in zip(by_tile(x), EXPERTS, strict=False) if e == i)
        for i in range(COUNT)
    ]
    assert_close(got, initial + np.stack(sums))


@pytest.mark.parametrize("xp", [np, jnp])
def test_tiles_of_an_expert_follow_each_other(xp):
    experts = np.array([0, 0, 2, 9], np.int32), np.array([0, 1, 2, 2], np.int32)
    nothing = jax.ShapeDtypeStruct((4 * ROWS, K), np.float32)

    def order_of_tiles(experts, counts):
        return grouped_weight_gradient.order_of_tiles(
            [
                Factors(nothing, (nothing,), tiles, count)
                for tiles, count in zip(experts, counts, strict=True)
            ]
        )

    find = order_of_tiles if xp is np else jax.jit(order_of_tiles)
    order = find(experts, (np.int32(3), np.int32(4)))
    assert np.asarray(order)[:, :7].tolist() == [
        [0, 0, 0, 1, 2, 2, 2],  # the expert
        [0, 0, 0, 1, 2, 2, 2],  # how many came before
        [0, 0, 1, 1, 0, 1, 1],  # whose tile
        [1, 1, 1, 2, 0, 0, 0],  # the next expert
        [0, 1, 1, 1, 2, 2, 2],
        [0, 0, 0, 1, 1, 2, 3],
    ]
    assert isinstance(order, np.ndarray) == (xp is np)


@pytest.mark.parametrize(("features", "dtype", "message"), [
    (200, "float32", "grouped_matmul needs features to be a multiple of 128: got 200"),
    (256, "float16", "grouped_matmul has kernels for float32 and bfloat16: got float16"),
])  # fmt: skip
def test_what_they_cannot_take_is_said(features, dtype, message):
    with pytest.raises(NotImplementedError, match=message):
        grouped_blocks.check_grouped("grouped_matmul", jnp.dtype(dtype), N, features)


@pytest.mark.parametrize(("k", "n", "pairs", "tile_rows"), [
    (14336, 4096, 2, 512), (4096, 14336, 1, 512), (768, 2048, 2, 128),
])  # fmt: skip
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_blocks_fit_and_divide(k, n, pairs, tile_rows, dtype):
    x, w = jax.ShapeDtypeStruct((4096, k), dtype), jax.ShapeDtypeStruct((4, k, n), dtype)
    found, vmem_bytes = Blocks.choose(Problem.of([x] * pairs, [w] * 2, n, tile_rows, 2 // pairs))
    assert (found.k * found.depth, found.n * found.columns, found.width * found.panels) == (
        k,
        n,
        found.n,
    )
    assert vmem_bytes <= available()


def test_the_program_for_a_tpu_is_the_kernels_alone():
    """Gate and up with an epilogue, the sum of two products, and gradients that are added to others
    in place.
    """
    mesh = check.topology_mesh("v5e:1x1", (1,), ("x",))

    def array(*shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P()))

    def step(x, operand, ws, dws, experts, tiles):
        products = grouped_matmul(
            (x,),
            ws,
            experts,
            tiles,
            tile_rows=ROWS,
            epilogue=Gate(),
            operands=(operand,),
            transposed=True,
        )
        (dx,) = grouped_matmul(products, ws, experts, tiles, tile_rows=ROWS)
        factors = Factors(x, products, experts, tiles)
        return dx, weight_gradients([factors, factors], COUNT, tile_rows=ROWS, initial=dws)

    x, operand, w = array(1024, 256), array(1024, 512), array(COUNT, 512, 256)
    dw, experts, tiles = (
        array(COUNT, 256, 512, dtype=jnp.float32),
        array(8, dtype=jnp.int32),
        array(dtype=jnp.int32),
    )
    with jax.set_mesh(mesh):
        fn = jax.jit(step, donate_argnums=3)
        program = check.compile_for("v5e:1x1", fn, x, operand, (w, w), (dw, dw), experts, tiles)
    instructions = check.parse(program.as_text()).entry.instructions
    calls = [
        i
        for i in instructions
        if i.opcode == "custom-call" and i.custom_call_target != "ConcatBitcast"
    ]
    kernels = sorted(i.name.partition(".")[0] for i in calls)
    assert kernels == ["grouped_matmul", "grouped_sum", "grouped_weight_gradient"]
    assert not [i for i in instructions if i.opcode == "copy" and i.shape.element_type == "f32"]


def test_tiles_of_which_none_fits_are_refused():
    rows = 2**20
    x = jax.ShapeDtypeStruct((rows, K), jnp.bfloat16)
    w = jax.ShapeDtypeStruct((COUNT, K, N), jnp.bfloat16)
    dy = jax.ShapeDtypeStruct((rows, N), jnp.bfloat16)
    with pytest.raises(NotImplementedError, match="1048576 rows: none fits into vector memory"):
        Blocks.choose(Problem.of([x], [w], N, rows, 1))
    factors = [Factors(x, (dy,), jnp.zeros(1, jnp.int32), jnp.int32(1))]
    with pytest.raises(NotImplementedError, match="1048576 rows in 1 factors: none fits"):
        weight_gradients(factors, COUNT, tile_rows=rows)
