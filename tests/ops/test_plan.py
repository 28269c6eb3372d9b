"""The roofline: how it ranks backends, what reasons it gives, and what it refuses."""

import functools

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

import flaxasync as fa
from flaxasync.hardware import chip, chip_of_device
from flaxasync.kernels.engine.cores import best_cores
from flaxasync.ops import roofline

LLAMA = (1, 4096, 32, 128), (1, 4096, 8, 128)


def test_a_ring_that_hides_its_transfers_is_chosen_with_a_reason():
    plan = fa.plan(fa.ring_attention, *LLAMA, chip="v5e", ring=8, layout="zigzag")
    assert plan.backend == "xla"
    assert "its waits for transfers take 0 ms where those of none take" in plan.reason
    assert set(plan.seconds) == {"xla", "none"}
    assert plan.seconds["xla"] < plan.seconds["none"]
    assert str(plan).startswith("ring_attention: xla, because its waits for transfers take 0 ms")


@pytest.mark.parametrize(
    ("op", "shapes", "options", "why"),
    [
        (
            "ring_attention",
            [(1, 16, 8, 64), (1, 16, 1, 64)],
            {},
            "its steps take 0.04 ms where those of xla take 0.08 ms",
        ),
        (
            "all_gather_matmul",
            [(8, 1024), (1024, 256)],
            {"kernels": False},
            "its steps take 0.0032 ms where those of xla take 0.0176 ms",
        ),
    ],
)
def test_where_blocks_are_small_steps_cost_more_than_waiting(op, shapes, options, why):
    """Negative test: with few rows on a device, and without kernels, gathering once is predicted to
    be faster.
    """
    plan = fa.plan(op, *shapes, chip="v5e", ring=8, backward=False, **options)
    assert plan.backend == "none"
    assert why in plan.reason


@pytest.mark.parametrize(
    ("batches", "block", "kernels"),
    [(1, 80, 1), (24, 80, 1), (24, 96, 2), (3, 96, 3), (1, 96, 0), (4, 4 * 80 + 1, 0)],
)
def test_a_block_of_sums_that_is_too_large_takes_several_kernels(batches, block, kernels):
    assert roofline.kernels_of_sums(batches, block * 2**20) == kernels


def test_kernels_serve_large_blocks_of_several_sequences():
    """The MLP of a published model on v5p, with 24 sequences of 2048 on a ring of four."""
    shapes = (24, 512, 8192), (8192, 7168), (8192, 7168)
    found = fa.plan(fa.all_gather_matmul, *shapes, chip="v5p", ring=4)
    assert found.backend == "fused"
    assert found.costs["fused"].steps == 4 * (1 + 2 + 1)
    one = (1, 24 * 512, 8192), *shapes[1:]
    assert "fused" not in fa.plan(fa.all_gather_matmul, *one, chip="v5p", ring=4).costs


@pytest.mark.parametrize(("ring", "serve"), [(97, True), (98, False)])
def test_kernels_serve_rings_that_they_have_semaphores_for(ring, serve):
    shapes = (1, 512, 8192), (8192, 1024)
    found = fa.plan(fa.all_gather_matmul, *shapes, chip="v5p", ring=ring)
    assert ("fused" in found.costs) is serve


def test_a_backend_that_exceeds_memory_is_not_chosen():
    plan, larger = (
        fa.plan("ring_attention", *[(n, 131072, 16, 128)] * 2, chip="v5e", ring=8) for n in (1, 64)
    )
    assert plan.backend == "xla"
    assert "none would hold" in plan.reason
    assert "GiB beside its operands, too much for each of 8 v5e" in plan.reason
    assert larger.reason.startswith("nothing fits: even xla would hold")


def test_predictions_follow_the_work():
    def seconds(**options):
        return fa.plan("ring_attention", *LLAMA, chip="v5e", ring=8, **options).costs["xla"].compute

    # the last device has every block
    assert seconds(layout="zigzag") < 0.6 * seconds(layout="contiguous")
    assert seconds(causal=False) >= seconds(layout="contiguous")
    assert seconds(window=4096) < 0.3 * seconds()
    # seven matmuls with gradients, two without
    assert 3.4 < seconds() / seconds(backward=False) < 3.6
    one = fa.plan("ring_attention", *LLAMA, chip="v5e", ring=1)
    assert one.reason.startswith("one device has every row: there is nothing to transfer; ")


@pytest.mark.parametrize(
    ("op", "shapes", "ring", "message"),
    [
        (
            "attention",
            LLAMA,
            8,
            "plan knows all_gather_matmul, .*, ring_attention: got 'attention'",
        ),
        ("ring_attention", LLAMA, 0, "ring of 1 device or more: got ring=0"),
        (
            "ring_attention",
            LLAMA,
            (2, 2),
            r"ring=\(x, y\) for mesh_matmul, and one number for other ops",
        ),
        (
            "all_gather_matmul",
            [(8, 16), (32, 16)],
            4,
            r"x \[8, 16\] cannot be contracted with w \[32, 16\]",
        ),
        ("all_gather_matmul", [(0, 16), (16, 16)], 4, r"dimensions of 1 or more: got \[0, 16\]"),
        ("all_gather_matmul", [(8, 16), (16, 16)], 2.5, "ring of 1 device or more: got ring=2.5"),
        (
            "matmul_reduce_scatter",
            [(9, 16), (16, 16)],
            4,
            r"rows of x \[9, 16\] cannot be shared out equally to 4",
        ),
        (
            "mesh_matmul",
            [(8, 16), (16, 16)],
            (2, 4),
            r"x \[8, 16\] cannot be contracted with w \[16, 16\]",
        ),
        (
            "ring_attention",
            [(1, 8, 4, 8), (1, 8, 3, 8)],
            4,
            r"q \[1, 8, 4, 8\] cannot attend to k or v \[1, 8, 3, 8\]",
        ),
    ],
)
def test_what_no_op_takes_is_refused(op, shapes, ring, message):
    with pytest.raises(ValueError, match=message):
        fa.plan(op, *shapes, chip="v5e", ring=ring)


def test_an_unknown_chip_or_option_is_refused():
    with pytest.raises(ValueError, match="chip must be one of"):
        fa.plan("ring_attention", *LLAMA, chip="v4", ring=8)
    with pytest.raises(
        ValueError, match=r"plan cannot take these shapes or options for ring_attention: .*'rows'"
    ):
        fa.plan("ring_attention", *LLAMA, chip="v5e", ring=8, rows=3)


EXPERTS = (64, 128), (64, 2), (64, 2), (1, 128, 256), (1, 256, 128)


@pytest.mark.parametrize(
    ("op", "shapes", "options", "message"),
    [
        (
            "ring_attention",
            LLAMA,
            {"layout": "zigzagg"},
            "layout='zigzagg': it must be one of 'contiguous', 'zigzag'",
        ),
        (
            "ring_attention",
            [(1, 5, 4, 8)] * 2,
            {"layout": "zigzag"},
            "two equal chunks of the sequence: got 40 rows, needed a multiple of 16",
        ),
        ("ring_attention", LLAMA, {"window": 0}, "window to be 1 or more rows, or None: got 0"),
        ("expert_mlp", EXPERTS, {"split": "rows"}, "to be 'experts' or 'hidden'.*: got 'rows'"),
        ("expert_mlp", EXPERTS, {"capacity": 0}, "capacity to be 1 or more, or None: got .* 0"),
    ],
)
def test_a_value_that_the_op_refuses_is_refused(op, shapes, options, message):
    assert fa.plan(op, *(EXPERTS if op == "expert_mlp" else LLAMA), chip="v5e", ring=8).costs
    with pytest.raises(ValueError, match=message):
        fa.plan(op, *shapes, chip="v5e", ring=8, **options)


def test_the_chip_of_a_device():
    assert chip_of_device("TPU v5 lite") == chip("v5e")
    assert chip_of_device("cpu") is None
    assert chip_of_device(None) is None


UP, DOWN = ((8, 256, 8192), (8192, 3584)), ((8, 2048, 3584), (3584, 8192))


@pytest.mark.parametrize(
    ("op", "shapes"), [("all_gather_matmul", UP), ("matmul_reduce_scatter", DOWN)]
)
def test_large_matmuls_are_one_kernel_where_kernels_can_serve(op, shapes):
    plan = fa.plan(op, *shapes, chip="v5e", ring=8)
    assert plan.backend == "fused"
    assert max(plan.seconds, key=plan.seconds.get) == "none"
    assert fa.plan(op, *shapes, chip="v5e", ring=8, kernels=False).backend in ("xla", "pallas")
    alone = fa.plan(op, *shapes, chip="v5e", ring=1)
    assert alone.reason.startswith("one device has every row: there is nothing to transfer; ")


@pytest.mark.parametrize(
    ("op", "shapes", "ring", "intensity"),
    [
        # the figures of the published study
        ("mesh_matmul", [(16384, 16384), (16384, 8192)], (1, 1), 4096),
        ("mesh_matmul", [(8192, 8192), (8192, 8192)], (2, 2), 2731),
        # three matrices [1024, 1024]
        ("all_gather_matmul", [(2, 128, 1024), (1024, 512), (1024, 512)], 4, 341),
        # 4 * 128 * 8 * 512 / (4 * 128 * (8 + 4 * 2))
        ("ring_attention", [(2, 128, 8, 64), (2, 128, 2, 64)], 4, 256),
        # three products of 2 * 512 choices, [256, 1024] each; rows twice, and 8 experts
        (
            "expert_mlp",
            [(512, 256), (512, 2), (512, 2), (8, 256, 1024), (8, 256, 1024), (8, 1024, 256)],
            4,
            123,
        ),
    ],
)
def test_the_reason_has_the_arithmetic_intensity_beside_the_balance_of_the_chip(
    op, shapes, ring, intensity
):
    reason = fa.plan(op, *shapes, chip="v5e", ring=ring).reason
    assert reason.endswith(
        f"an arithmetic intensity of {intensity} flops a byte, where the balance of a v5e is 241"
    )


@pytest.mark.parametrize(
    ("op", "x", "w", "chip", "ring", "backward", "backend"),
    [
        # A ring of two has one hop forward; with gradients XLA hides hops behind the products of
        # other trips.
        ("all_gather_matmul", (2048, 2048), (2048, 2048), "v5e", 2, False, "fused"),
        ("all_gather_matmul", (512, 2048), (2048, 2048), "v5e", 2, True, "xla"),
        # XLA copies w for a kernel alone; with gradients it does so while another kernel runs.
        ("matmul_reduce_scatter", (512, 4096), (4096, 4096), "v6e", 4, False, "fused"),
        ("matmul_reduce_scatter", (1024, 4096), (4096, 4096), "v5e", 8, True, "fused"),
        # A kernel contracts a few rows at a time, and wide matrix units wait for more.
        ("all_gather_matmul", (128, 8192), (8192, 3584), "v6e", 8, True, "none"),
    ],
)
def test_what_plays_fastest_is_chosen(op, x, w, chip, ring, backward, backend):
    """In these cases of benchmarks/plan.py every other backend takes at least 1.08 times as long
    when played.
    """
    assert fa.plan(op, x, w, chip=chip, ring=ring, backward=backward).backend == backend


def test_rings_with_equal_products_and_waits_are_told_apart_by_their_overheads():
    options = {"chip": "v5p", "ring": 4, "backward": False, "kernels": False}
    plan = fa.plan("matmul_reduce_scatter", (1024, 2048), (2048, 4096), **options)
    beside = [f"{1e3 * plan.costs[name].overhead:.3g} ms" for name in ("xla", "pallas")]
    assert plan.backend == "xla"
    assert beside[0] != beside[1]
    assert f"its steps take {beside[0]} where those of pallas take {beside[1]}" in plan.reason


def test_a_block_with_more_tiles_than_semaphores_is_no_kernel():
    large = (8, 32768 * 8, 1024), (1024, 8192)
    assert "fused" not in fa.plan("matmul_reduce_scatter", *large, chip="v5p", ring=8).seconds


def test_the_mesh_matmul_has_the_order_of_the_study():
    plan = fa.plan(fa.mesh_matmul, (8192, 8192), (8192, 8192), chip="v5e", ring=(2, 2))
    assert plan.backend == "overlapped"
    alone = fa.plan(
        fa.mesh_matmul, (8192, 8192), (8192, 100), chip="v5e", ring=(2, 2), kernels=False
    )
    assert alone.backend == "none"
    assert alone.reason.startswith("no other backend can serve this call; ")
    published, played = (
        {"none": 12.05e-3, "xla_gemm": 12.5e-3, "serial": 13.17e-3},
        {"fused": 9.28e-3},
    )
    for backend, seconds in (published | played).items():
        assert plan.seconds[backend] == pytest.approx(seconds, rel=0.05)


@pytest.mark.parametrize(
    ("op", "rows"), [("all_gather_matmul", 4 * 8192), ("matmul_reduce_scatter", 8192)]
)
def test_a_kernel_runs_on_both_cores_of_a_v5p(op, rows):
    """Where products take all of the time, kernels take as long as at the peak of both cores, and
    are chosen.
    """
    plan = fa.plan(op, (8192, 8192), (8192, 8192), chip="v5p", ring=4)
    peak = 3 * 2 * rows * 8192 * 8192 / chip("v5p").flops  # forward, dx and dw
    assert peak < plan.seconds["fused"] < 1.15 * peak
    assert plan.backend == "fused"


@given(st.integers(1, 1024))
def test_a_kernel_runs_on_one_core_where_both_would_wait_longer_for_w(rows):
    """HBM brings a w of one element to each core, while one core, or half of it, multiplies it."""
    v5p = chip("v5p")
    hbm = v5p.hbm_bandwidth * v5p.hbm_efficiency
    alone = max(2 * rows / (v5p.flops / 2), 2 / hbm)
    together = max(2 * rows / v5p.flops, 2 * 2 / hbm)
    can_be_shared_out = rows % 2 == 0
    expected = 1
    if together <= alone and can_be_shared_out:
        expected = 2
    assert best_cores(v5p, rows) == expected
    assert best_cores(chip("v5e"), rows) == 1


@pytest.mark.parametrize(("rows", "kernel"), [(1024, True), (8, False)])
def test_an_op_that_names_no_backend_does_what_is_planned(rows, kernel):
    """On a TPU with a data sheet an op does what `fa.plan` says for the same shapes."""
    mesh = fa.check.topology_mesh("v5e:2x4", (8,), ("model",))
    x, w = (
        jax.ShapeDtypeStruct((8 * rows, 1024), jnp.bfloat16),
        jax.ShapeDtypeStruct((1024, 8 * 1024), jnp.bfloat16),
    )
    local = jax.shard_map(
        functools.partial(fa.all_gather_matmul, axis_name="model"),
        mesh=mesh,
        in_specs=(P("model"), P(None, "model")),
        out_specs=P(None, "model"),
    )
    planned = fa.plan("all_gather_matmul", (rows, 1024), (1024, 1024), chip="v5e", ring=8).backend
    assert (planned == "fused") == kernel
    assert ("pallas_call" in str(jax.make_jaxpr(local)(x, w))) == kernel
