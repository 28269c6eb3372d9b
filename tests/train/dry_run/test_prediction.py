"""Tests of the predictions that rank meshes: they count parameters as the model does, and waits
where axes transfer.
"""

import dataclasses
import functools
from typing import get_args

import jax
import numpy as np
import pytest
from flax import nnx

import flaxasync as fa
from benchmarks.scaling import mfu, what_binds
from configs.llama_8b import llama_8b
from configs.qwen3_30b_a3b import qwen3_30b_a3b
from flaxasync.hardware import CHIPS
from models.config import Remat, TransformerConfig
from models.transformer import Transformer
from train.dry_run.device_share import DeviceShare
from train.dry_run.forms import AUTOMATIC
from train.dry_run.memory import predicted_memory
from train.dry_run.meshes import rank
from train.dry_run.policies import POLICIES
from train.dry_run.prediction import predict
from train.lifecycle.errors import InputError
from train.step.mesh import make_mesh

GIB = 2**30


@pytest.fixture
def step():
    """A function (mesh sizes, data, model) -> the prediction of a step of the 8B preset, B16 S4096,
    on v5e.
    """

    def step(data=1, fsdp=1, context=1, model=1, chip="v5e", sizes=llama_8b, **changes):
        config = sizes()
        batch = {
            "batch_size": changes.pop("batch", 16),
            "sequence_length": 4096,
            "microbatches": changes.pop("microbatches", 1),
        }
        config = dataclasses.replace(config, data=dataclasses.replace(config.data, **batch))
        config = dataclasses.replace(
            config, model=dataclasses.replace(config.model, **{"remat": "layer"} | changes)
        )
        mesh = {"data": data, "fsdp": fsdp, "context": context, "model": model}
        return predict(config, CHIPS[chip], mesh)

    return step


@pytest.mark.parametrize("first_moment", [None, "float32", "bfloat16"])
@pytest.mark.parametrize(
    "options", [{}, {"param_dtype": "bfloat16", "tie_embeddings": True}], ids=str
)
def test_parameters_and_optimizer_state_are_those_of_the_model(
    config, replace, trainer_of, options, first_moment
):
    config = replace(config, mesh={"data": 2, "fsdp": 2, "model": 2}, model=options)
    config = replace(config, optimizer={"first_moment_dtype": first_moment})
    mesh = make_mesh(config.mesh)
    with jax.set_mesh(mesh):
        state = trainer_of(config, mesh).abstract_state()

    def held(tree):
        leaves = [leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
                  if "scale" not in jax.tree_util.keystr(path) and leaf.ndim]  # fmt: skip
        return sum(
            int(np.prod(leaf.sharding.shard_shape(leaf.shape))) * leaf.dtype.itemsize
            for leaf in leaves
        )

    memory = predicted_memory(DeviceShare.of(config, CHIPS["v5e"], mesh.shape))
    assert (memory["parameters"], memory["optimizer state"]) == (
        held(state.params),
        held(state.opt_state),
    )


@pytest.mark.parametrize(
    ("mesh", "options", "counted", "within"),
    [
        ({"fsdp": 4, "model": 4}, {}, 3.526, 0.05),
        ({"fsdp": 4, "model": 4}, {"param_dtype": "bfloat16"}, 2.648, 0.05),
        ({"model": 16}, {}, 3.388, 0.05),
        # the compiler leaves gaps of 0.8 GiB between buffers of 2 GiB
        ({"fsdp": 16}, {}, 8.272, 0.09),
        ({"fsdp": 16}, {"batch": 48}, 8.337, 0.09),
    ],
    ids=str,
)
def test_memory_is_what_the_compiler_counted(step, mesh, options, counted, within):
    """GiB of four layers of the preset with 16 sequences on v6e:4x4, by libtpu 0.0.52; logits alone
    would be 4 GiB.
    """
    assert step(**mesh, chip="v6e", layers=4, **options).needed / GIB == pytest.approx(
        counted, rel=within
    )


@pytest.mark.parametrize(
    ("remat", "overlap", "counted"),
    [
        ("none", "xla", 16.66),
        ("none", "prefetch_pallas", 21.56),
        ("none", "prefetch", 20.88),
        ("cheap", "xla", 12.44),
        ("cheap", "prefetch_pallas", 11.92),
    ],
)
def test_what_a_form_keeps_is_what_the_compiler_counted(step, remat, overlap, counted):
    """GiB of six layers of the preset with 16 sequences on v5p:2x2x2, by libtpu 0.0.52."""
    predicted = step(fsdp=2, model=4, chip="v5p", layers=6, remat=remat, fsdp_overlap=overlap)
    assert predicted.needed / GIB == pytest.approx(counted, rel=0.08)


def test_each_axis_waits_for_what_it_transfers(step):
    alone = step()
    assert alone.exposed == 0
    assert what_binds(alone) == "matmuls"
    expected = {
        "model": "model: activations",
        "context": "context: keys and values",
        "fsdp": "fsdp: weights and gradients",
        "data": "data: gradients",
    }
    for axis, name in expected.items():
        waits = {
            cause for cause, seconds in step(**{axis: 16}, chip="v6e").waits.items() if seconds > 0
        }
        # Devices of the context axis hold the same parameters, so that they sum gradients as those
        # of data do.
        assert waits == {name} | ({"data: gradients"} if axis == "context" else set()), axis
    assert what_binds(step(fsdp=16, chip="v6e")) == expected["fsdp"]


def test_the_work_of_a_step_is_at_least_its_floating_point_operations_and_shared_by_all_devices(
    step,
):
    one, sixteen = step(), step(fsdp=4, model=4)
    # three quarters of the work count: a layer is computed twice forward
    assert 0.5 < mfu(one, CHIPS["v5e"]) < 0.75
    assert sixteen.work == pytest.approx(one.work / 16, rel=0.1)
    assert step(remat="none").work < 0.85 * one.work


def test_memory_falls_with_the_axes_that_share_it_and_micro_batches_share_activations(step):
    assert step(fsdp=4, model=4).fits
    assert not step(data=4, model=4).fits
    assert (
        step(data=4, model=4).memory["optimizer state"]
        == 4 * step(fsdp=4, model=4).memory["optimizer state"]
    )
    whole, parts = step(fsdp=4, model=4), step(fsdp=4, model=4, microbatches=4)
    assert parts.memory["kept"] == whole.memory["kept"] / 4
    assert parts.memory["gradients"] == 2 * whole.memory["gradients"]
    fsdp = "fsdp: weights and gradients"
    assert parts.waits[fsdp] > 3 * whole.waits[fsdp]


def test_float32_waits_longer_because_twice_the_bytes_travel(step):
    for axis, wait in (("model", "model: activations"), ("context", "context: keys and values")):
        short, long = (
            step(**{axis: 16}, chip="v6e", dtype=dtype).waits[wait]
            for dtype in ("bfloat16", "float32")
        )
        assert long > 1.5 * short > 0, axis


@pytest.mark.parametrize(("chip", "mesh", "param_dtype", "seconds"), [
    ("v5p", {"fsdp": 2, "model": 4}, "float32", 6.64),
    ("v6e", {"fsdp": 4, "model": 4}, "bfloat16", 3.76),
])  # fmt: skip
def test_a_mixture_takes_about_what_its_compiled_step_takes(step, chip, mesh, param_dtype, seconds):
    """The estimates of docs/moe.md. An MLP with the features that a token meets would take half of
    them or less.
    """
    options = {"fsdp_overlap": "prefetch_pallas", "param_dtype": param_dtype, "batch": 64}
    mixture = step(**mesh, chip=chip, sizes=qwen3_30b_a3b, **options)
    assert 0.6 < mixture.seconds / seconds < 1.1
    # As many products, but twice as many rows of half the features each.
    narrow = step(
        **mesh, chip=chip, sizes=qwen3_30b_a3b, experts_per_token=16, expert_width=384, **options
    )
    assert narrow.work > 1.2 * mixture.work


def test_eight_bits_work_and_wait_less_where_the_chip_has_a_rate(step, replace):
    plain, forward, both, whole = (
        step(model=16, quantization=kind, quantization_backward=back, quantization_weights=weights)
        for kind, back, weights in (
            (None,) * 3,
            ("int8", None, None),
            ("int8", "int8", None),
            ("int8",) * 3,
        )
    )
    assert whole.work < both.work < forward.work < plain.work
    assert both.exposed < forward.exposed
    fsdp = "fsdp: weights and gradients"
    for overlap, least, most in (
        ("xla", 0.7, 0.85),
        ("prefetch", 1, 1),
    ):  # kernels that are prefetched are not in 8 bits
        plain, eight = (
            step(fsdp=4, model=4, fsdp_overlap=overlap, quantization=q).waits[fsdp]
            for q in (None, "int8")
        )
        assert least <= eight / plain <= most
    with pytest.raises(
        InputError,
        match=r"quantization in fp8, for which a v5e has no rate .*; use quantization='int8'",
    ):
        rank(replace(llama_8b(), model={"quantization": "fp8"}), CHIPS["v5e"], 8)


def test_scores_are_counted_where_all_of_them_are_in_memory(step):
    """8 sequences of 4096 tokens and 8 heads on a device: 4 GiB of float32 scores for each layer
    that keeps them.
    """
    # with few logits the layers need the most
    step = functools.partial(step, fsdp=2, model=4, vocab_size=1024)
    for option in ({"attention_softcap": 50.0}, {"alternating_window": 128}):
        for remat, uses in (("layer", {"working": 3}), ("none", {"working": 3, "kept": 32})):
            plain = step(remat=remat).memory
            capped = step(remat=remat, **option).memory
            more = {
                name: (capped[name] - plain[name]) / (4 * GIB)
                for name in plain
                if capped[name] != plain[name]
            }
            assert more == pytest.approx(uses), (option, remat)


@pytest.mark.parametrize(("remat", "post_norms", "gathered_mib"), [
    ("dots", True, 0), ("cheap", True, 1),
    ("operands", True, 1), ("mlp", False, 0), ("attention", True, 0),
    *(pytest.param(*case, marks=pytest.mark.slow)
      for case in [
          ("dots", False, 1), ("cheap", False, 0),
          ("operands", False, 0), ("mlp", True, 1), ("attention", False, 1),
      ]),
])  # fmt: skip
def test_what_remat_keeps_is_what_the_gradient_of_the_model_saves(remat, post_norms, gathered_mib):
    """All residuals that have the dimension of the layers, but those of remat layer too: its input
    and kernels.
    """
    sizes = {
        "vocab_size": 32,
        "layers": 2,
        "width": 16,
        "heads": 8,
        "kv_heads": 4,
        "mlp_width": 24,
        "head_dim": 4,
    }
    config = llama_8b()
    data = dataclasses.replace(config.data, batch_size=4, sequence_length=8, microbatches=1)
    # rows are kept on a CPU wherever the limit allows it, and there where a second trip takes long
    slow = dataclasses.replace(CHIPS["v5e"], link_bandwidth=1.0)

    def saved_and_predicted(remat):
        model = TransformerConfig(
            **sizes, post_norms=post_norms, remat=remat, gathered_mib=gathered_mib
        )
        mesh = jax.make_mesh((2, 4), ("data", "model"))
        with jax.set_mesh(mesh):
            graph, params = nnx.split(
                nnx.eval_shape(lambda: Transformer(model, backend="none", rngs=nnx.Rngs(0)))
            )
            tokens = jax.ShapeDtypeStruct(
                (4, 8), np.int32, sharding=jax.NamedSharding(mesh, jax.P("data", None))
            )
            loss = lambda params, tokens: nnx.merge(graph, params).loss(tokens, tokens)  # noqa: E731
            saved = jax.tree.leaves(
                jax.eval_shape(lambda *xs: jax.vjp(loss, *xs)[1], params, tokens)
            )
        kept = sum(
            leaf.size * leaf.dtype.itemsize
            for leaf in saved
            if leaf.ndim > 2 and leaf.shape[0] == model.layers
        )
        of_model = dataclasses.replace(config, model=model, data=data, backend="pallas")
        share = DeviceShare.of(of_model, slow, mesh.shape)
        return kept // 8, predicted_memory(share)["kept"]

    (kept, predicted_kept), (layer, predicted_layer) = (
        saved_and_predicted(remat),
        saved_and_predicted("layer"),
    )
    assert kept - layer == predicted_kept - predicted_layer > 0


def test_gathered_rows_are_counted_where_they_are_kept(step):
    """16 sequences of 4096 rows on 4 x 4 v6e: each gather of a layer brings 128 MiB, and so does a
    limit of 128 MiB.
    """
    step = functools.partial(step, fsdp=4, model=4, chip="v6e", vocab_size=1024)
    for remat in ("none", "cheap", "dots", "layer"):
        use, layers = ("working", 1) if remat == "layer" else ("kept", 32)
        plain, kept, less = (step(remat=remat, gathered_mib=limit) for limit in (0, 128, 127))
        more = {name: kept.memory[name] - plain.memory[name] for name in plain.memory}
        assert more == {
            **dict.fromkeys(plain.memory, 0),
            use: layers * gathers_that_gain(step) * 128 * 2**20,
        }, remat
        assert kept.seconds < plain.seconds
        assert (less.memory, less.seconds) == (plain.memory, plain.seconds)


def gathers_that_gain(step):
    """Returns how many gathers of a layer `fa.plan` keeps on this mesh, of query, key and value,
    and of the MLP.
    """
    shapes = [
        ((4, 1024, 4096), (4096, columns)) for columns in (8 * 128 + 2 * 2 * 128, 2 * 14336 // 4)
    ]
    options = {"chip": "v6e", "ring": 4, "gathered_bytes": 128 * 2**20}
    plans = [fa.plan("all_gather_matmul", *each, **options) for each in shapes]
    return sum(plan.costs[plan.backend].kept > 0 for plan in plans)


def test_every_policy_is_known_and_none_is_the_plain_one(step):
    assert set(POLICIES) == set(get_args(Remat.__value__)) > set(AUTOMATIC)
    assert step(fsdp=4, model=4, remat=None) == step(
        fsdp=4, model=4, remat="none", fsdp_overlap="xla"
    )


@pytest.mark.parametrize("chip", ["v5e", "v6e"])
def test_direct_copies_are_faster_than_collectives_as_the_compiled_step_of_the_document_says(
    step, chip
):
    """docs/scaling.md."""
    plain, direct = (
        step(fsdp=4, model=4, chip=chip, fsdp_overlap=overlap).seconds
        for overlap in ("xla", "prefetch_pallas")
    )
    assert direct < 0.95 * plain


def test_a_scan_that_prefetches_hides_what_the_work_of_its_layers_covers(step):
    fsdp, data = "fsdp: weights and gradients", "data: gradients"
    plain, direct = (
        step(fsdp=4, model=4, fsdp_overlap=overlap) for overlap in ("xla", "prefetch_pallas")
    )
    assert direct.waits[fsdp] < 0.1 * plain.waits[fsdp]
    assert direct.work == plain.work
    short = step(fsdp=16, chip="v6e", fsdp_overlap="prefetch_pallas", batch=16)
    # 16 devices send 4 times what a ring would
    assert short.waits[fsdp] > step(fsdp=16, chip="v6e").waits[fsdp]
    plain, beside = (step(data=2, model=8, fsdp_overlap=overlap) for overlap in ("xla", "prefetch"))
    assert (beside.waits[data] < 0.5 * plain.waits[data], beside.work) == (True, plain.work)


def test_what_is_offloaded_waits_for_the_host_where_the_work_is_shorter(step, monkeypatch):
    """On v6e, what attention gets and returns leaves and comes back beside the work of a layer."""
    name, fast = "host: activations", CHIPS["v6e"]
    some, most, dots = (
        step(fsdp=4, model=4, chip="v6e", remat=remat)
        for remat in ("offload", "offload_most", "dots")
    )
    assert some.waits[name] == most.waits[name] == 0
    assert most.memory["kept"] < 0.1 * some.memory["kept"] < 0.1 * dots.memory["kept"]
    # its rate is not known
    assert step(fsdp=4, model=4, chip="tpu7x", remat="offload").waits[name] == 0
    monkeypatch.setitem(CHIPS, "v6e", dataclasses.replace(fast, host_bandwidth=1e9))
    slow = step(fsdp=4, model=4, chip="v6e", remat="offload_most")
    # the layer's input; queries, keys and values; the result
    values = 4096 + (32 + 2 * 8) * 128 + 4096
    sent = 4 * 4096 / 4 * 2 * values / 1e9  # 4 sequences, of which a device has a fourth
    assert 2 * 32 * sent - slow.work < slow.waits[name] < 2 * 32 * sent
