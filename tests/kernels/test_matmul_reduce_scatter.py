"""matmul_reduce_scatter in the race-detecting simulator; what is refused."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import flaxasync as fa
from flaxasync.kernels import matmul_reduce_scatter as reduce_scatter_form
from flaxasync.kernels.engine import tiling
from flaxasync.kernels.engine.matmul import MatmulTiles
from flaxasync.kernels.engine.operands import Tiles
from flaxasync.kernels.engine.ring import Acknowledgements
from flaxasync.kernels.engine.tiling import Tiling
from flaxasync.kernels.matmul_reduce_scatter import matmul_reduce_scatter
from tests.kernels.conftest import simulated

TILES = Tiles(32, 128, 128)


def run(
    size, *, batch=1, m=32, ks=(128,), n=256, dtype="float32", mode="on_wait", transposed=False, tiles=TILES, **options
):
    """Runs the kernel on an axis of `size` devices; returns what it gave and what it should have."""
    rng = np.random.default_rng(size)
    xs = tuple(rng.standard_normal((batch, size * m, size * k)).astype(jnp.dtype(dtype)) for k in ks)
    ws = tuple(rng.standard_normal((size * k, n)).astype(jnp.dtype(dtype)) for k in ks)
    want = sum(np.asarray(x, np.float32) @ np.asarray(w, np.float32) for x, w in zip(xs, ws, strict=True))
    given = tuple(w.T for w in ws) if transposed else ws
    specs = P(None, None, "ring"), P(None, "ring") if transposed else P("ring", None)
    local = functools.partial(matmul_reduce_scatter, axis_name="ring", transposed=transposed, tiles=tiles, **options)
    with simulated((size,), ("ring",), mode) as mesh:
        fn = jax.jit(jax.shard_map(local, in_specs=specs, out_specs=P(None, "ring", None)))
        place = lambda values, spec: tuple(jax.device_put(v, NamedSharding(mesh, spec)) for v in values)  # noqa: E731
        y = np.asarray(fn(place(xs, specs[0]), place(given, specs[1])), np.float32)
    return y, want


def close(got, want, tolerance=1e-5):
    assert np.abs(got - want).max() <= tolerance * np.abs(want).max()


@pytest.mark.parametrize(("size", "options"), [
    pytest.param(2, {"directions": 1}, marks=pytest.mark.slow),  # the neighbour is one and the same; see partial tiles
    (3, {"directions": 2, "batch": 2, "ks": (256, 128), "dtype": "bfloat16", "mode": "eager"}),
    # All of the contraction at once.
    pytest.param(4, {"directions": 2, "batch": 4, "m": 8, "n": 384, "tiles": None}, marks=pytest.mark.slow),
    pytest.param(4, {"m": 64, "ks": (384,), "transposed": True, "mode": "eager"}, marks=pytest.mark.slow),
    (2, {"directions": 2, "m": 8, "n": 128, "mode": "eager"}),  # one tile: nothing can be fetched ahead of its sum
])  # fmt: skip
def test_values(size, options):
    close(*run(size, **options), 2e-2 if options.get("dtype") == "bfloat16" else 1e-5)  # sums travel in x's dtype


@pytest.mark.slow
@pytest.mark.parametrize("options", [
    {"size": 3, "batch": 2, "ks": (256, 128), "dtype": "bfloat16", "mode": "eager"},
    {"size": 4, "m": 64, "ks": (384,), "transposed": True},
])  # fmt: skip
def test_values_where_w_comes_again(w_comes_again, options):
    close(*run(**options), 2e-2 if options.get("dtype") == "bfloat16" else 1e-5)


def test_w_stays_where_it_fits():
    """All of it, beside the other buffers; else it has two slots."""
    x, w = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in [(4, 4096, 1792), (1792, 4096)])
    assert reduce_scatter_form._plan((x,), (w,), False, None, 8, 2)[0].tiles.w_stays
    x, w = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in [(4, 4096, 8192), (8192, 8192)])
    schedule, _ = reduce_scatter_form._plan((x,), (w,), False, None, 8, 2)
    assert schedule.tiles.w_slots == 2


RAGGED = {"ks": (640,), "n": 640, "tiles": Tiles(32, 384, 384)}  # 384 + 256


@pytest.mark.parametrize(("size", "part", "options"), [
    pytest.param(2, 512, {"directions": 1, "m": 40, "mode": "eager"}, marks=pytest.mark.slow),  # rows 24 + 16
    (3, 512, {"batch": 3, "m": 16, "ks": (640, 384), "n": 256, "dtype": "bfloat16"}),  # batches 2 + 1; two pairs
    pytest.param(4, 16, {"m": 40, "tiles": Tiles(64, 384, 384), "transposed": True, "mode": "eager"},
                 marks=pytest.mark.slow),  # rows in three parts of 16, of which the last is half full
])  # fmt: skip
def test_partial_tiles(monkeypatch, size, part, options):
    """The last tile of every side is partial; what lies beyond it in vector memory is not a number at first."""
    monkeypatch.setattr(tiling, "SUB_BLOCK", part)
    close(*run(size, **RAGGED | options), 2e-2 if options.get("dtype") == "bfloat16" else 1e-5)


def test_a_product_of_a_whole_tile_is_seen(monkeypatch):
    """Negative test: a partial tile of the contraction is multiplied as if it were whole, with what lies beyond it."""
    multiply = MatmulTiles.multiply

    def whole(self, *args):
        size = self.contraction.size
        multiply(dataclasses.replace(self, contraction=Tiling((2 * size,), size)), *args)

    monkeypatch.setattr(MatmulTiles, "multiply", whole)
    got, want = run(2, **RAGGED | {"directions": 1, "n": 128})
    assert np.isnan(got).any()
    assert not np.isnan(want).any()


def test_a_receive_buffer_that_is_written_before_it_was_read_is_seen(monkeypatch):
    """Negative test: a sender that does not wait for acknowledgements overwrites a sum that was not read."""
    monkeypatch.setattr(Acknowledgements, "send", lambda self, ring, direction: None)
    monkeypatch.setattr(Acknowledgements, "wait", lambda self, direction: None)
    with pytest.raises(jax.errors.JaxRuntimeError, match="RACE DETECTED"):
        run(4, directions=1, tiles=None, mode="eager")


def traced(size, xs, ws, dtype=jnp.float32, **options):
    """Traces the kernel on a simulated ring, for devices that hold such xs and ws each."""
    with simulated((size,), ("ring",)):
        local = functools.partial(matmul_reduce_scatter, axis_name="ring", **options)
        fn = jax.shard_map(local, in_specs=P(), out_specs=P("ring"), check_vma=False)
        jax.eval_shape(fn, *(tuple(jax.ShapeDtypeStruct(s, dtype) for s in shapes) for shapes in (xs, ws)))


@pytest.mark.parametrize(("error", "message", "size", "x", "w", "options"), [
    (ValueError, "needs two devices or more on 'ring': got an axis of size 1", 1, (1, 32, 128), (128, 128), {}),
    (ValueError, "directions to be 1 or 2: got 3", 2, (1, 32, 128), (128, 128), {"directions": 3}),
    (ValueError, r"pairs of x \[B, R\*m, k\] and w \[k, n\]: got \[\[32, 128\]\]", 2, (32, 128), (128, 128), {}),
    (ValueError, r"of one shape: got \[1, 32, 128\] and \[256, 128\]", 2, (1, 32, 128), (256, 128), {}),
    (ValueError, r"for float32: got \[32, 64\]; pad it", 2, (1, 32, 64), (64, 128), {}),
    (ValueError, "multiple of 128: got n=64", 2, (1, 32, 128), (64, 128), {"transposed": True}),
    (ValueError, "got 24 rows of float32, needed a multiple of 16; pad x", 2, (1, 24, 128), (128, 128), {}),
    (NotImplementedError, "got a batch of x of float16", 2, (1, 32, 128), (128, 128), {"dtype": jnp.float16}),
    (NotImplementedError, "a TPU has 400 for them: 8192 rows and n=4096 .* are 1024 tiles", 2, (1, 16384, 128),
     (128, 4096), {"tiles": Tiles(256, 128, 128)}),
    (ValueError, r"take \d{3}\.\d MiB with all buffers, and a v5e has 120 MiB to give; the largest", 2,
     (1, 16384, 4096), (4096, 8192), {"tiles": Tiles(4096, 4096, 2048)}),
])  # fmt: skip
def test_what_does_not_fit_is_refused_with_its_numbers(error, message, size, x, w, options):
    with pytest.raises(error, match=message):
        traced(size, (x,), (w,), **options)


@pytest.mark.parametrize(
    "topology",
    ["v5e:2x4", *(pytest.param(t, marks=pytest.mark.slow) for t in ("v6e:2x4", "v5p:2x2x2", "tpu7x:2x2x1"))],
)
def test_full_size_compiles(topology):
    """Rows of a sequence of 2048 in batches of 8, features of a model of 8192, hidden ones of 28672 over the ring."""
    size = fa.check.topology_size(topology)
    mesh = fa.check.topology_mesh(topology, (size,), ("ring",))
    specs = P(None, None, "ring"), P("ring", None)
    fn = jax.jit(
        jax.shard_map(
            lambda x, w: matmul_reduce_scatter((x,), (w,), "ring"), mesh=mesh, in_specs=specs,
            out_specs=P(None, "ring", None),
        )
    )  # fmt: skip
    shapes = (8, 2048, 28672), (28672, 8192)
    x, w = (
        jax.ShapeDtypeStruct(s, jnp.bfloat16, sharding=NamedSharding(mesh, spec))
        for s, spec in zip(shapes, specs, strict=True)
    )
    with jax.set_mesh(mesh):
        compiled = fa.check.compile_for(topology, fn, x, w)
    opcodes = [i.opcode for i in fa.check.parse(compiled.as_text()).entry.instructions]
    assert opcodes.count("custom-call") == 1
    assert "fusion" not in opcodes
