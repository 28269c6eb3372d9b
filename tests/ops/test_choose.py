"""The vocabulary of backends: which op has which, what a call gets, and what the errors say."""

import jax
import pytest

import flaxasync as fa
from flaxasync.ops import choose, plan

SHAPES = {
    "expert_mlp": (
        (64, 128),
        (64, 2),
        (64, 2),
        (1, 128, 256),
        (1, 128, 256),
        (1, 256, 128),
    ),  # of a call that plan can predict
    "all_gather_matmul": [(256, 4096), (4096, 4096)],
    "matmul_reduce_scatter": [(2048, 4096), (4096, 4096)],
    "matmul_all_reduce": [(2048, 4096), (4096, 4096)],
    "mesh_matmul": [(4096, 2048), (4096, 4096)],
    "ring_attention": [(1, 4096, 32, 128), (1, 4096, 8, 128)],
}


@pytest.mark.parametrize("op", choose.OPS)
def test_the_default_runs_on_every_device_and_an_unknown_backend_is_an_error_that_lists_the_known_ones(
    op,
):
    support = choose.OPS[op]
    assert support.default in support.backends
    assert support.default in choose.ON_EVERY_DEVICE
    # no mesh is set, so no chip is known
    assert choose.decide(op, None, ring=8).backend == support.default
    known = ", ".join(support.backends)
    with pytest.raises(
        ValueError,
        match=rf"^{op} got backend='rings': it must be one of {known}, or None to choose$",
    ):
        choose.decide(op, "rings", ring=8)


@pytest.mark.parametrize("op", plan.MODELS)
def test_plan_predicts_only_backends_that_the_op_has(op):
    ring = (2, 4) if op == "mesh_matmul" else 8
    costs = fa.plan(op, *SHAPES[op], chip="v5e", ring=ring).costs
    assert set(costs) <= set(choose.OPS[op].backends)
    assert len(costs) > 1


@pytest.mark.parametrize(
    ("op", "backend", "default"),
    [
        ("ring_attention", "fused", "xla"),
        ("lookup_reduce_scatter", "fused", "xla"),
        ("mesh_matmul", "pallas", "none"),
    ],
)
def test_a_backend_that_only_other_ops_have_is_an_error_that_says_what_to_use(op, backend, default):
    message = (
        f"^{op} has no '{backend}' backend: it has .*; use backend='{default}', which runs on "
        "every device$"
    )
    with pytest.raises(NotImplementedError, match=message):
        choose.decide(op, backend, ring=8)


def test_a_kernel_that_cannot_serve_is_not_planned():
    """On TPUs with a data sheet plan chooses, and leaves out kernels that `check` refuses."""

    def refuse(backend):
        raise choose.cannot_serve("all_gather_matmul", backend, "is refused", "use backend='xla'")

    call = {"shapes": SHAPES["all_gather_matmul"], "ring": 8}
    with jax.set_mesh(fa.check.topology_mesh("v5e:2x4", (8,), ("model",))):
        assert choose.decide("all_gather_matmul", None, **call).backend == "fused"
        assert (
            choose.decide("all_gather_matmul", None, **call, check=refuse).backend in choose.RINGS
        )


def test_an_op_of_a_layer_chooses_if_it_lacks_the_layers_backend():
    # A name that no op has is not dropped: the op refuses it.
    for requested, used in {
        "fused": None,
        "none": "none",
        None: None,
        "rings": "rings",
    }.items():
        assert choose.if_available("ring_attention", requested) == used
    assert choose.if_available("all_gather_matmul", "fused") == "fused"


def test_what_is_decided_makes_the_ring():
    with jax.set_mesh(jax.make_mesh((8,), ("model",))):
        assert choose.decide("all_gather_matmul", "none", ring=8).ring("model").transport is None
        ring = choose.decide("all_gather_matmul", "xla", ring=8).ring("model")
        assert hash(ring) == hash(choose.decide("all_gather_matmul", "xla", ring=8).ring("model"))
    assert (ring.directions, ring.unroll) == (1, 2)
    with jax.set_mesh(fa.check.topology_mesh("v5e:2x4", (8,), ("model",))):
        assert choose.decide("all_gather_matmul", "pallas", ring=8).directions == 2
        assert choose.decide("all_gather_matmul", "pallas", ring=8, halves=False).directions == 1
        assert (
            choose.decide(
                "all_gather_matmul", "pallas", ring=8, halves=False, directions=2
            ).directions
            == 2
        )
        assert choose.decide("all_gather_matmul", "pallas", ring=2).directions == 1
