"""The grouped products and their weight gradients beside NumPy, in JAX's TPU interpreter on a CPU."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from flaxasync import check
from flaxasync.kernels import grouped_matmul as kernel
from flaxasync.kernels.grouped_matmul import Blocks, grouped_matmul, grouped_sum
from flaxasync.kernels.grouped_weight_gradient import grouped_weight_gradient
from tests.kernels.conftest import as_float32, assert_close, draw
from tests.simulator.split_pairs import quick_callbacks

ROWS = 128  # of a tile
EXPERTS = np.array([0, 0, 0, 1, 2, 2, 7, 0], np.int32)  # of each tile
TILES = 6  # live ones: what the table says of the last two tiles means nothing
COUNT = 3
K, N = 256, 384


@pytest.fixture
def interpreter():
    with pltpu.force_tpu_interpret_mode(), quick_callbacks():
        yield


@pytest.fixture(params=["K whole", "K divided"])
def blocks(request, monkeypatch, interpreter):
    """Divided, K has two blocks and a group has at most two tiles, so the first expert has two groups."""
    if request.param == "K divided":
        divided = Blocks(rows=ROWS, k=128, n=128, depth=2, columns=3, width=128, most=2)
        monkeypatch.setattr(Blocks, "choose", lambda *arguments: (divided, 2**20))


def rows(features, dtype="float32", seed=0):
    """Draws sorted rows. The second expert has padding only, and the rows of dead tiles are not numbers."""
    x = draw((len(EXPERTS) * ROWS, features), dtype, seed)
    x[3 * ROWS : 4 * ROWS] = 0
    x[TILES * ROWS - 50 : TILES * ROWS] = 0
    x[TILES * ROWS :] = np.nan
    return x


def draw_weights(*shape, dtype="float32"):
    return tuple(draw((COUNT, *shape), dtype, seed) for seed in (1, 2))


def compute(fn, *arguments, **options):
    """Calls a function with traced tiles; returns its results."""
    call = jax.jit(lambda arguments, experts, tiles: fn(*arguments, experts, tiles, tile_rows=ROWS, **options))
    return call(arguments, EXPERTS, np.int32(TILES))


def live(y):
    return as_float32(y)[: TILES * ROWS]


def by_tile(x):
    return as_float32(x).reshape(-1, ROWS, x.shape[1])[:TILES]


def product(x, w):
    return np.concatenate([tile @ as_float32(w)[e] for tile, e in zip(by_tile(x), EXPERTS, strict=False)])


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_products_of_one_x(dtype):
    x, ws = rows(K, dtype), draw_weights(K, N, dtype=dtype)
    for y, w in zip(compute(grouped_matmul, x, ws), ws, strict=True):
        assert y.dtype == dtype
        assert_close(live(y), product(x, w), dtype)


@pytest.mark.usefixtures("blocks")
def test_a_sum_of_transposed_products():
    xs, ws = (rows(K), rows(K, seed=3)), draw_weights(N, K)
    got = compute(grouped_sum, xs, ws, transposed=True)
    assert_close(live(got), sum(product(x, w.swapaxes(1, 2)) for x, w in zip(xs, ws, strict=True)))


@dataclasses.dataclass(frozen=True)
class Gate:
    """An epilogue with two results: h, and the first product plus an operand."""

    results: int = 2

    def __call__(self, products, operands):
        up, gate = products
        return jax.nn.silu(gate) * up, up + operands[0]


@pytest.mark.usefixtures("blocks")
def test_an_epilogue():
    x, ws, operand = rows(K), draw_weights(K, N), rows(N, seed=3)
    h, added = compute(
        lambda *a, **b: grouped_matmul(*a[:2], *a[3:], operands=a[2:3], epilogue=Gate(), **b), x, ws, operand
    )
    up, gate = (product(x, w) for w in ws)
    assert_close(live(h), gate / (1 + np.exp(-gate)) * up)
    assert_close(live(added), up + live(operand))


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("adds", [False, True])
def test_weight_gradients(dtype, adds):
    x, dys = rows(K, dtype), (rows(N, dtype, 1), rows(N, dtype, 2))
    initial = draw_weights(K, N) if adds else ()
    got = compute(
        lambda x, dys, initial, *rest, **options: grouped_weight_gradient(
            x, dys, *rest, COUNT, initial=initial, **options
        ),
        x, dys, initial,
    )  # fmt: skip
    for number, (dw, dy) in enumerate(zip(got, dys, strict=True)):
        want = np.zeros((COUNT, K, N), np.float32) + (initial[number] if adds else 0)
        for x_tile, dy_tile, e in zip(by_tile(x), by_tile(dy), EXPERTS, strict=False):
            want[e] += x_tile.T @ dy_tile
        assert dw.dtype == jnp.float32
        assert_close(dw, want)  # products of bfloat16 are exact in float32


def test_blocks_of_dw_take_turns(monkeypatch, interpreter):
    """With several blocks of K and N, each of the two slots is stored and taken again."""
    from flaxasync.kernels import grouped_weight_gradient as module

    monkeypatch.setattr(module, "_choose", lambda *arguments: (module.Tiles(ROWS, 128, 128), 2**20))
    test_weight_gradients.__wrapped__ if False else test_weight_gradients("float32", False)


@pytest.mark.parametrize(("features", "dtype", "message"), [
    (200, "float32", "grouped_matmul needs features to be a multiple of 128: got 200"),
    (256, "float16", "grouped_matmul has kernels for float32 and bfloat16: got float16"),
])  # fmt: skip
def test_what_they_cannot_take_is_said(features, dtype, message):
    with pytest.raises(NotImplementedError, match=message):
        compute(grouped_matmul, rows(features, dtype), draw_weights(features, N, dtype=dtype))


@pytest.mark.parametrize(
    ("k", "n", "pairs", "tile_rows"), [(14336, 4096, 2, 512), (4096, 14336, 1, 512), (768, 2048, 2, 128)]
)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_blocks_fit_and_divide(k, n, pairs, tile_rows, dtype):
    x, w = jax.ShapeDtypeStruct((4096, k), dtype), jax.ShapeDtypeStruct((4, k, n), dtype)
    found, vmem_bytes = Blocks.choose([x] * pairs, [w] * 2, n, tile_rows, 2 // pairs)
    assert (found.k * found.depth, found.n * found.columns, found.width * found.panels) == (k, n, found.n)
    assert vmem_bytes <= kernel.available()


def test_the_program_for_a_tpu_is_the_kernels_alone():
    mesh = check.topology_mesh("v5e:1x1", (1,), ("x",))
    w = (COUNT, 256, 512)

    def step(x, gate, up, down, experts, tiles):
        pass

    del mesh, w, step, arranged, P
