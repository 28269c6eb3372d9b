"""The cost estimates of the flash attention kernels count what is computed, triangles of the diagonal as such."""

import functools
import tempfile

import jax
import jax.numpy as jnp
import pytest
from jax._src.core import jaxprs_in_params
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import flaxasync as fa
from flaxasync import check
from flaxasync.check.player import play_dump, played_chip
from flaxasync.kernels.attention_block import Mask, Product
from flaxasync.kernels.flash_attention_grid import Grid

HEADS, HEAD = 2, 128


def flops(mask, rows, tiles, sub_block, *, starts=(0,), q_start=0):
    """Returns the FLOPs of one call, or their mean, of two matmuls for each pair of tiles."""
    q = jax.ShapeDtypeStruct((1, 1, HEADS, rows, HEAD), jnp.bfloat16)
    products = [Product(0, rows, q_start, 0, rows, start, mask.by_position, None) for start in starts]
    return Grid.of(q, products[0], *tiles, sub_block).cost(mask, products, matmuls=2, itemsize=2).flops


@pytest.mark.parametrize(("tile", "sub_block"), [(2048, 512), (1024, 512), (1024, 1024), (512, 128)])
def test_a_triangle_is_counted_by_sub_blocks(tile, sub_block):
    """Each sub-block of keys is multiplied with the queries from its own first row on, in its tile and below it."""
    scores = sum((4096 - start) * sub_block for start in range(0, 4096, sub_block))
    assert flops(Mask(True, None), 4096, (tile, tile), sub_block) == 2 * 2 * HEADS * HEAD * scores


@pytest.mark.parametrize(("mask", "tiles", "share"), [
    (Mask(False, None), (1024, 1024), 1),
    (Mask(True, None), (1024, 2048), 6 / 8),  # no square tiles, so none is split: of 4 x 2 tiles, 6 are reached
    (Mask(True, 1024), (1024, 1024), 7 / 16),  # of 4 x 4 tiles, those on the diagonal and those below it
])  # fmt: skip
def test_other_tiles_are_counted_whole(mask, tiles, share):
    assert flops(mask, 4096, tiles, 512) == 2 * 2 * HEADS * HEAD * 4096 * 4096 * share


def test_the_cost_of_a_loop_is_the_mean_of_its_calls():
    """Rows from 4096 on attend to the first 4096 as a square, and to themselves as a triangle."""
    count = functools.partial(flops, Mask(True, None), 4096, (1024, 1024), 512, q_start=4096)
    assert count(starts=(0, 4096)) == (count(starts=(0,)) + count(starts=(4096,))) / 2
    assert count(starts=(0,)) > count(starts=(4096,)) > count(starts=(8192,)) == 0


def test_a_long_sequence_has_the_cost_of_its_triangle_in_both_kernels():
    """Beyond 4096 rows the backward kernel is called in a loop, whose index is a traced value."""
    rows, tile, sub_block = 8192, {"flash_attention": 2048, "flash_attention_backward": 1024}, 512
    shape = jax.ShapeDtypeStruct((1, rows, HEADS, HEAD), jnp.bfloat16)
    traced = jax.make_jaxpr(lambda q, k, v: jax.vjp(functools.partial(fa.attention, kernel="flash"), q, k, v)[1](q))(
        shape, shape, shape
    )
    found = {eqn.params["name"]: eqn.params["cost_estimate"].flops for eqn in kernels(traced.jaxpr)}
    for name, matmuls, calls in (("flash_attention", 2, 1), ("flash_attention_backward", 5, 2)):
        assert rows % tile[name] == 0
        scores = sum((rows - start) * sub_block for start in range(0, rows, sub_block))
        assert found[name] * calls == 2 * matmuls * HEADS * HEAD * scores


def kernels(jaxpr):
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "pallas_call":
            yield eqn
        else:
            for inner in jaxprs_in_params(eqn.params):
                yield from kernels(inner)


@pytest.mark.slow
def test_the_simulator_multiplies_as_much():
    """Of 4096 rows, v5e: a head of 128 features fills the matrix unit, so its busy time is the FLOPs at the peak."""
    mesh = check.topology_mesh("v5e:1x1", (1,), ("x",))
    x = jax.ShapeDtypeStruct((1, 4096, HEADS, HEAD), jnp.bfloat16, sharding=NamedSharding(mesh, P()))
    fn = jax.jit(lambda q, k, v: jax.vjp(functools.partial(fa.attention, kernel="flash"), q, k, v)[1](q))
    with tempfile.TemporaryDirectory() as folder, jax.set_mesh(mesh):
        program = check.compile_for("v5e:1x1", fn, x, x, x, keep_dumps=folder)
        result = play_dump(folder, topology="v5e:1x1")
    instructions = [i for c in check.parse(program.as_text()).computations.values() for i in c.instructions]
    estimated = {i.name: i.kernel_flops for i in instructions if i.kernel_flops}
    assert len(estimated) == 2
    for name, count in estimated.items():
        busy = sum(phase.matrix_busy for phase in result.slowest.phases if phase.name == name)
        assert busy == pytest.approx(count / played_chip("v5e").sheet.flops, rel=0.01), name
