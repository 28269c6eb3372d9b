"""The Pallas kernels beside the reference, in JAX's TPU interpreter on a CPU; their cost
estimates.
"""

import functools
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.core import jaxprs_in_params
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import PartitionSpec as P

import flaxasync as fa
from flaxasync import check, hardware
from flaxasync.check.player import play_dump, played_chip
from flaxasync.kernels import flash_attention
from flaxasync.kernels.attention_block import BlockOperands, Mask, Product, Scores
from flaxasync.kernels.flash_attention import Flash, unsupported
from flaxasync.kernels.flash_attention_grid import Grid
from flaxasync.ops.attention.blocks import Reference, finish, initial_carry
from tests.kernels.conftest import arranged, as_float32, draw
from tests.simulator.split_pairs import quick_callbacks

ROWS, HEAD = 256, 64


@pytest.fixture
def interpreter(monkeypatch):
    monkeypatch.setattr(flash_attention, "KV_ROWS", 128)  # two calls
    with pltpu.force_tpu_interpret_mode(), quick_callbacks():
        yield


def blocks(window, by_segment, q_rows, *, kernel):
    """Carry and gradients of one causal product by one kernel."""
    heads, mask = (1, 1, 2, ROWS, HEAD), Mask(True, window)
    q, do, kv = draw(heads), draw(heads, seed=1), draw((2, 1, 1, ROWS, HEAD), seed=2)
    ids = np.sort(np.random.default_rng(0).integers(0, 3, (1, ROWS)), axis=1).astype(np.int32)
    scores = Scores(mask, HEAD**-0.5, jax.lax.Precision.HIGHEST)
    # The second run of q where it is a half: rows before it stay as they are.
    product = Product(ROWS // q_rows - 1, q_rows, ROWS - q_rows, 0, ROWS, 0, mask.by_position, None)

    @jax.jit
    def both(q, kv, ids, do, sums):
        operands = BlockOperands(scores, q, kv, (ids, ids) if by_segment else None)
        carry = kernel.forward(operands, product, initial_carry(q))
        log_sum = jnp.nan_to_num(finish(carry, jnp.float32)[1], neginf=0.0, posinf=0.0)
        rows = jnp.stack([log_sum, sums], axis=-2)
        zeros = initial_carry(q)[0], jnp.zeros(kv.shape, jnp.float32)
        return *carry, *kernel.backward(operands, do, rows, product, zeros)

    return as_float32(both(q, kv, ids, do, draw((1, 1, 2, ROWS), seed=3)))


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize(
    ("window", "segments", "q_rows", "square"),
    [
        (100, True, 128, 128),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [(None, True, 256, 256), (200, False, 256, 128)]
        ),
    ],
)
def test_they_give_what_the_reference_gives(window, segments, q_rows, square, monkeypatch):
    """With square tiles, those on the diagonal are multiplied as triangles; tiles of 256 rows have
    two sub-blocks.
    """
    monkeypatch.setattr(flash_attention, "KV_ROWS", square)
    kernel = Flash(q_tile=128, kv_tile=256, triangle_tiles=(square, square), sub_block=128)
    both = (blocks(window, segments, q_rows, kernel=kernel) for kernel in (kernel, Reference()))
    for name, got, want in zip(("acc", "stats", "dq", "dkv"), *both, strict=True):
        # a maximum that no row has reached differs between tiles, and weighs nothing
        if name == "stats":
            got, want = got[..., 1, -q_rows:], want[..., 1, -q_rows:]
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=2e-4, err_msg=name)


@pytest.mark.slow
@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize(
    ("head", "window", "by_segment"),
    [
        (64, 200, False),
        (128, None, False),
        (128, 200, False),
        (128, None, True),
        (192, None, False),
        (256, None, False),
    ],
)
def test_whole_sequences_need_no_ring(head, window, by_segment):
    """Heads of 128 take no carry."""
    compare_whole_sequences(2, 1, head, window, by_segment)


@pytest.fixture
def two_cores(monkeypatch):
    monkeypatch.setattr(flash_attention, "chip_in_use", lambda: hardware.chip("v5p"))
    params = pltpu.InterpretParams(num_cores_or_threads=2, detect_races=True, on_race="raise")
    with pltpu.force_tpu_interpret_mode(params), quick_callbacks():
        yield


@pytest.mark.usefixtures("two_cores")
@pytest.mark.parametrize(
    ("heads", "kv_heads"), [(2, 1), pytest.param(6, 3, marks=pytest.mark.slow)]
)
def test_two_cores_share_out_the_heads_of_a_group(heads, kv_heads):
    """The only group, or three: each part has sums of its own for dk and dv."""
    compare_whole_sequences(heads, kv_heads, 128, None, by_segment=False)


@pytest.mark.parametrize(
    ("heads", "parts"),
    [
        ((1, 1, 4, 8192, 128), 2),
        ((3, 1, 4, 4096, 256), 2),
        ((1, 1, 4, 8192, 256), 1),  # vector memory has no room
        ((2, 1, 4, 4096, 128), 1),  # cores share out the sequences
        ((1, 2, 4, 4096, 128), 1),  # the groups
        ((1, 1, 3, 4096, 128), 1),  # nothing is even
    ],
)
def test_groups_have_parts_where_cores_cannot_share_out_more(monkeypatch, heads, parts):
    assert flash_attention._parts_of_groups(heads) == 1
    monkeypatch.setattr(flash_attention, "chip_in_use", lambda: hardware.chip("v5p"))
    assert flash_attention._parts_of_groups(heads) == parts


@pytest.mark.slow
@pytest.mark.usefixtures("two_cores")
def test_sums_of_one_part_alone_are_seen(monkeypatch):
    """Negative test: the gradients of keys lack what the other core adds."""
    add = flash_attention._sum_of_parts

    monkeypatch.setattr(flash_attention, "_sum_of_parts", lambda sums, dtype: add(sums[:1], dtype))
    with pytest.raises(AssertionError, match="dk"):
        compare_whole_sequences(2, 1, 128, None, by_segment=False)


def compare_whole_sequences(heads, kv_heads, head, window, by_segment):
    """Compares o, dq, dk and dv, through the op and its rule, with those of the reference."""
    q, do = (draw((1, ROWS, heads, head), seed=seed) for seed in (0, 1))
    k, v = (draw((1, ROWS, kv_heads, head), seed=seed) for seed in (2, 3))
    ids = (
        np.sort(np.random.default_rng(0).integers(0, 3, (1, ROWS)), axis=1) if by_segment else None
    )

    def both(kernel):
        attention = functools.partial(fa.attention, kernel=kernel, window=window, segment_ids=ids)
        out, vjp = jax.jit(lambda *qkv: jax.vjp(attention, *qkv))(q, k, v)
        return out, *jax.jit(vjp)(do)

    kernel = Flash(q_tile=128, kv_tile=256, triangle_tiles=(128, 128), sub_block=128)
    for name, got, want in zip(
        ("o", "dq", "dk", "dv"), both(kernel), both("reference"), strict=True
    ):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=5e-4, err_msg=name)


@pytest.mark.parametrize(("dtype", "sizes", "lacking"), [
    ("bfloat16", (128, 256, 128), None),
    ("float16", (128, 256, 128), "float32 and bfloat16: got float16"),
    ("float32", (80, 256, 256), "head sizes 64, 128, 192 and 256: got 80"),
    ("float32", (128, 200, 128), "chunks of a multiple of 128 rows: got 200"),
])  # fmt: skip
def test_what_they_cannot_take_is_said(dtype, sizes, lacking):
    assert unsupported(jnp.dtype(dtype), *sizes) == lacking


HEADS, FEATURES = 2, 128


def flops(mask, rows, tiles, sub_block, *, starts=(0,), q_start=0):
    """Returns the FLOPs of one call, or their mean, of two matmuls for each pair of tiles."""
    products = [
        Product(0, rows, q_start, 0, rows, start, mask.by_position, None) for start in starts
    ]
    return (
        Grid.of((1, 1, HEADS, rows, FEATURES), products[0], *tiles, sub_block)
        .cost(mask, products, matmuls=2, itemsize=2)
        .flops
    )


@pytest.mark.parametrize(
    ("tile", "sub_block"), [(2048, 512), (1024, 512), (1024, 1024), (512, 128)]
)
def test_a_triangle_is_counted_by_sub_blocks(tile, sub_block):
    """Each sub-block of keys is multiplied with the queries from its own first row on, in its tile
    and below it.
    """
    scores = sum((4096 - start) * sub_block for start in range(0, 4096, sub_block))
    assert (
        flops(Mask(True, None), 4096, (tile, tile), sub_block) == 2 * 2 * HEADS * FEATURES * scores
    )


@pytest.mark.parametrize(
    ("mask", "tiles", "share"),
    [
        (Mask(False, None), (1024, 1024), 1),
        # no square tiles, so none is split: of 4 x 2 tiles, 6 are reached
        (Mask(True, None), (1024, 2048), 6 / 8),
        # of 4 x 4 tiles, those on the diagonal and those below it
        (Mask(True, 1024), (1024, 1024), 7 / 16),
    ],
)
def test_other_tiles_are_counted_whole(mask, tiles, share):
    assert flops(mask, 4096, tiles, 512) == 2 * 2 * HEADS * FEATURES * 4096 * 4096 * share


def test_the_cost_of_a_loop_is_the_mean_of_its_calls():
    """Rows from 4096 on attend to the first 4096 as a square, and to themselves as a triangle."""
    count = functools.partial(flops, Mask(True, None), 4096, (1024, 1024), 512, q_start=4096)
    assert count(starts=(0, 4096)) == (count(starts=(0,)) + count(starts=(4096,))) / 2
    assert count(starts=(0,)) > count(starts=(4096,)) > count(starts=(8192,)) == 0


def test_a_long_sequence_has_the_cost_of_its_triangle_in_both_kernels():
    """Beyond 8192 rows the backward kernel is called in a loop, whose index is a traced value."""
    rows, tile, sub_block = 16_384, {"flash_attention": 2048, "flash_attention_backward": 2048}, 256
    shape = jax.ShapeDtypeStruct((1, rows, HEADS, FEATURES), jnp.bfloat16)
    traced = jax.make_jaxpr(
        lambda q, k, v: jax.vjp(functools.partial(fa.attention, kernel="flash"), q, k, v)[1](q)
    )(shape, shape, shape)
    found = {eqn.params["name"]: eqn.params["cost_estimate"].flops for eqn in kernels(traced.jaxpr)}
    for name, matmuls, calls in (("flash_attention", 2, 1), ("flash_attention_backward", 5, 4)):
        assert rows % tile[name] == 0
        scores = sum((rows - start) * sub_block for start in range(0, rows, sub_block))
        assert found[name] * calls == 2 * matmuls * HEADS * FEATURES * scores


def kernels(jaxpr):
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "pallas_call":
            yield eqn
        else:
            for inner in jaxprs_in_params(eqn.params):
                yield from kernels(inner)


@pytest.mark.slow
def test_the_simulator_multiplies_as_much():
    """Of 4096 rows, v5e: a head of 128 features fills the matrix unit, so its busy time is the
    FLOPs at the peak.
    """
    mesh = check.topology_mesh("v5e:1x1", (1,), ("x",))
    operands = arranged(mesh, [(1, 4096, HEADS, FEATURES)] * 3, [P()] * 3)
    fn = jax.jit(
        lambda q, k, v: jax.vjp(functools.partial(fa.attention, kernel="flash"), q, k, v)[1](q)
    )
    with tempfile.TemporaryDirectory() as folder, jax.set_mesh(mesh):
        program = check.compile_for("v5e:1x1", fn, *operands, keep_dumps=folder)
        result = play_dump(folder, topology="v5e:1x1")
    instructions = [
        i for c in check.parse(program.as_text()).computations.values() for i in c.instructions
    ]
    estimated = {i.name: i.kernel_flops for i in instructions if i.kernel_flops}
    assert len(estimated) == 2
    for name, count in estimated.items():
        busy = sum(phase.matrix_busy for phase in result.slowest.phases if phase.name == name)
        assert busy == pytest.approx(count / played_chip("v5e").sheet.flops, rel=0.01), name
