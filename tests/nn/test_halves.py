"""Attention layers on GPUs in two halves of the batch, against plain layers and against those whose
rows travel around a ring.

Values are those of CPU devices, which `mesh.gpu` is told to be GPUs. Programs are those of XLA's
compiler for GPUs.
"""

import dataclasses

import jax
import numpy as np
import pytest
from flax import nnx

import flaxasync as fa
from benchmarks import gpu
from flaxasync import check, hardware
from flaxasync import mesh as ambient
from flaxasync.nn.attention import halves
from flaxasync.ops.attention import cudnn
from flaxasync.ops.attention import halves as block
from flaxasync.ops.attention.halves import HalvedAttention
from tests.nn.conftest import (
    ROWS,
    assert_alike,
    check_parity,
    drawn,
    gradients,
    make_mesh,
    ones,
)
from tests.nn.test_attention import pair

pytestmark = pytest.mark.usefixtures("quick_compile")


@pytest.fixture
def on_gpus(monkeypatch):
    monkeypatch.setattr(ambient, "platform", lambda: "gpu")
    monkeypatch.setattr(ambient, "gpu", lambda: hardware.GPUS["h100"])


@pytest.fixture
def calls(on_gpus, monkeypatch):
    """Every call that can take halves does; returns the numbers of sequences of all parts."""
    found = []
    seconds = halves._seconds
    gathered = HalvedAttention.gathered

    def no_time(*arguments):
        return seconds(*arguments) * 0

    def counted(block, xs):
        found.append([x.shape[0] for x in xs])
        return gathered(block, xs)

    monkeypatch.setattr(halves, "_seconds", no_time)
    monkeypatch.setattr(HalvedAttention, "gathered", counted)
    return found


def call(layer, *arguments):
    """Has the programs of this file traced anew: others may have traced the same layers."""
    return layer(*arguments)


@pytest.mark.parametrize(
    ("batch", "heads", "kv_heads", "options", "form"),
    [
        (2, 8, 4, {"use_bias": True}, {"size": 4}),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [
                (3, 4, 4, {"backend": "none", "gathered_bytes": 2**20}, {"size": 2}),
                (4, 8, 4, {"causal": False, "rope_theta": None}, {"size": 4, "data": 2}),
                (4, 8, 8, {"gathered_bytes": 2**20}, {"size": 4, "dtype": "bfloat16"}),
            ]
        ),
    ],
)
def test_parity(calls, batch, heads, kv_heads, options, form):
    make, plain = pair(heads, kv_heads, **options)
    check_parity(make, plain, (batch, 8, 8), apply=call, **form)
    of_device = batch // form.get("data", 1)
    # forward x, which is traced twice, backward dy, and x once more unless it was kept
    trips = 4 - ("gathered_bytes" in options)
    assert calls == [[of_device // 2, of_device - of_device // 2]] * trips


def layer(backend=None, **options):
    return drawn(
        lambda: fa.nn.ParallelSelfAttention(
            8,
            8,
            kv_heads=4,
            head_dim=8,
            normalize_qk="rms",
            backend=backend,
            rngs=nnx.Rngs(0),
            **options,
        )
    )


def test_segments_and_norms_of_each_half(calls):
    """Against the layer whose rows travel around a ring, which is never halved."""
    rng = np.random.default_rng(0)
    with jax.set_mesh(make_mesh(1, 4)):
        x, dy = (
            jax.device_put(rng.standard_normal((2, 8, 8)).astype(np.float32), ROWS)
            for _ in range(2)
        )
        ids = jax.device_put(np.asarray([[3, 3, 3, 5, 5, 5, 5, 5], [1] * 7 + [7]], np.int32))
        wanted = gradients(layer("xla"), x, dy, ids, apply=call)
        assert not calls
        found = gradients(layer(), x, dy, ids, apply=call)
    assert calls
    assert_alike(found, wanted)


def test_heads_travel_where_they_are_to_travel(calls):
    """Weights are gathered as rows are, and kept: on GPUs by one collective."""
    make, plain = pair(4, 4, exchange_heads=True, gathered_bytes=2**20)
    check_parity(make, plain, (2, 8, 8), size=2, apply=call)
    assert not calls


def test_a_policy_keeps_the_results_of_products_and_not_what_they_were_tied_to(calls):
    """As much as of a layer whose rows travel around a ring."""

    def kept(backend):
        graph, state = nnx.split(layer(backend))
        x = ones((2, 8, 8), ROWS)

        def apply(state, x):
            return nnx.merge(graph, state)(x) ** 2  # whose gradient needs the result

        apply = jax.checkpoint(apply, policy=fa.save_matmuls)
        pull = jax.eval_shape(lambda *operands: jax.vjp(apply, *operands)[1], state, x)
        return sum(leaf.size for leaf in jax.tree.leaves(pull))

    with jax.set_mesh(make_mesh(1, 4)):
        assert kept(None) == kept("xla")
    assert calls


@pytest.mark.parametrize(
    ("batch", "options", "given"),
    [
        (1, {}, {}),
        (2, {"backend": "xla"}, {}),
        (2, {"preferred_element_type": "float32", "dtype": "bfloat16"}, {}),
        (2, {"quantization": fa.Quantization("int8")}, {}),
        (2, {}, {"mask": np.ones((2, 1, 8, 8), bool)}),
    ],
    ids=["one sequence", "a ring", "wider results", "8 bits", "a mask"],
)
def test_calls_that_are_not_halved(calls, batch, options, given):
    with jax.set_mesh(make_mesh(1, 4)):
        y = nnx.jit(lambda layer, x: layer(x, **given))(layer(**options), ones((batch, 8, 8), ROWS))
    assert y.shape == (batch, 8, 8)
    assert not calls


@pytest.mark.parametrize(
    ("chip", "devices", "shape", "flags", "halved"),
    [
        ("h100", 8, (4, 4096), "", True),
        ("h100", 8, (3, 4096), "", True),
        ("b200", 8, (4, 4096), "", True),
        # the products of wide projections hide all of a ring
        ("h100", 2, (4, 4096), "", False),
        ("h100", 2, (3, 4096), "", False),
        # most of the time is that in which NCCL begins
        ("h100", 8, (4, 64), "", False),
        # on which XLA puts nothing beside transfers, unless it is told to
        ("a100", 8, (2, 8192), "--xla_gpu_other=true", False),
        ("a100", 8, (2, 8192), "--xla_gpu_enable_latency_hiding_scheduler=true", True),
        ("h100", 8, (4, 4096), "--xla_gpu_enable_latency_hiding_scheduler=false", False),
    ],
)
def test_when_halves_are_predicted_to_be_faster(chip, devices, shape, flags, halved, monkeypatch):
    """The projections of attention of llama_8b."""
    monkeypatch.setenv("XLA_FLAGS", flags)
    monkeypatch.setattr(ambient, "platform", lambda: "gpu")
    monkeypatch.setattr(ambient, "gpu", lambda: hardware.GPUS[chip])
    monkeypatch.setattr(cudnn, "is_known_here", lambda: False)  # JAX looks for the library
    found = []
    monkeypatch.setattr(halves, "apply", lambda call, x, *_: found.append(True) or x)
    with jax.set_mesh(make_mesh(1, devices)):
        attention = nnx.eval_shape(
            lambda: fa.nn.ParallelSelfAttention(
                4096, 32, kv_heads=8, dtype="bfloat16", rngs=nnx.Rngs(0)
            )
        )
        graph, state = nnx.split(attention)
        x = jax.ShapeDtypeStruct((*shape, 4096), "bfloat16", sharding=ROWS)
        jax.eval_shape(lambda state, x: nnx.merge(graph, state)(x), state, x)
    assert bool(found) is halved


@pytest.mark.slow
def test_what_runs_beside_each_transfer_on_gpus():
    """Only the first gather and the last sum of the forward pass have no product beside them, and
    the first gather of the backward pass, which has those of an MLP in a layer.
    """
    case = gpu.Case("h100:8", "attention", 4, 4096)
    program = gpu.compiled(case, gpu.OURS)
    assert gpu.transfers(program) == (3, 8)
    ring = gpu.compiled(dataclasses.replace(case, backend="xla"), gpu.OURS)
    automatic = gpu.compiled(case, "automatic")
    found, rings, others = map(check.timeline, (program, ring, automatic))
    assert others.seconds > 1.45 * found.seconds
    assert rings.seconds > 1.4 * found.seconds
    assert found.flops == pytest.approx(others.flops, rel=0.01)
    layer = gpu.Case("h100:8", "layer", 4, 4096)
    assert gpu.transfers(gpu.compiled(layer, gpu.OURS))[0] == 3


@pytest.mark.slow
def test_without_ties_less_runs_beside_transfers(monkeypatch):
    case = gpu.Case("h100:8", "attention", 4, 4096)
    whole = check.timeline(gpu.compiled(case, gpu.OURS))
    monkeypatch.setattr(block, "tie", lambda *values: values)
    found = check.timeline(gpu.compiled(case, gpu.OURS))
    assert found.exposed > 1.2 * whole.exposed
