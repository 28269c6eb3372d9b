"""The decoder and its options against one written out; its remat policies, and sizes that do not
fit.
"""

import collections
import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import flaxasync as fa
from flaxasync import check
from flaxasync import mesh as ambient_mesh
from models import transformer
from models.config import TransformerConfig, check_fits
from models.transformer import Transformer
from tests.models.plain_decoder import plain_logits
from tests.nn.conftest import drawn, make_fsdp_mesh, make_mesh

pytestmark = pytest.mark.usefixtures("quick_compile")

CONFIG = TransformerConfig(vocab_size=32, layers=2, width=16, heads=4, kv_heads=4, mlp_width=24)
# Four devices share two key-value heads, and do not divide the vocabulary.
BASE = TransformerConfig(vocab_size=30, layers=3, width=16, heads=4, kv_heads=2, mlp_width=24)
LLAMA_AND_QWEN = dataclasses.replace(
    BASE,
    head_dim=8,
    tie_embeddings=True,
    qk_norm=True,
    attention_bias=True,
    mlp_bias=True,
    rope_factor=8.0,
    rope_original_length=16,
)
GEMMA = dataclasses.replace(
    BASE, head_dim=8, activation="gelu", norm_plus_one=True, post_norms=True, scale_embeddings=True,
    attention_scale=0.7, attention_softcap=0.5, logit_softcap=1.5, alternating_window=3,
)  # fmt: skip
MIXTURE = dataclasses.replace(
    CONFIG,
    vocab_size=30,
    experts=4,
    experts_per_token=2,
    load_balance_weight=0.5,
    router_z_weight=0.1,
)
# Four devices do not divide the experts.
SIGMOID = dataclasses.replace(
    MIXTURE,
    experts=6,
    experts_per_token=3,
    expert_width=10,
    shared_expert_width=8,
    router_scores="sigmoid",
    normalize_expert_weights=False,
)
TOKENS = np.random.default_rng(0).integers(0, 30, (4, 8)).astype(np.int32)
TARGETS = np.roll(TOKENS, -1, axis=1)


def split(config, **options):
    """Returns a model's parameters, and its loss as a function of them and of a batch."""
    graph, params = nnx.split(drawn(lambda: Transformer(config, **options, rngs=nnx.Rngs(0))))
    return params, lambda params, *batch: nnx.merge(graph, params).loss(*batch)


def place(spec, order=slice(None)):
    return [jax.device_put(t[:, order], spec) for t in (TOKENS, TARGETS)]


def parameter_shapes(config, mesh):
    with jax.set_mesh(mesh):
        state = nnx.state(nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0))))
    return {path: variable.shape for path, variable in nnx.to_flat_state(state)}


@functools.cache  # compiling takes nearly all of the time, and most tests compare with CONFIG's
def loss_and_gradients(config, axis_type=AxisType.Explicit):
    """Returns the loss, the gradients and the parameters of a model on eight devices, and its
    logits.
    """
    with jax.set_mesh(make_mesh(axis_type=axis_type)):
        model = drawn(lambda: Transformer(config, backend="xla", rngs=nnx.Rngs(0)))
        both = nnx.value_and_grad(
            lambda model, *batch: (model.loss(*batch), model(batch[0])), has_aux=True
        )
        (loss, logits), grads = nnx.jit(both)(model, *place(P("data", None)))
        params = nnx.to_pure_dict(nnx.state(model))
    return (
        float(loss),
        jax.tree.map(np.asarray, nnx.to_pure_dict(grads)),
        params,
        np.asarray(logits),
    )


def plain_loss(params, config):
    routers = []
    log_probabilities = jax.nn.log_softmax(plain_logits(params, config, TOKENS, jnp, routers))
    loss = -jnp.mean(jnp.take_along_axis(log_probabilities, TARGETS[..., None], -1))
    if routers:
        balance, z = map(sum, zip(*routers, strict=True))
        loss += (config.load_balance_weight * balance + config.router_z_weight * z) / config.layers
    return loss


def assert_gradients_close(got, want, tolerance=2e-5):
    jax.tree.map(
        lambda g, w: np.testing.assert_allclose(g, w, atol=tolerance * max(np.abs(w).max(), 1e-2)),
        got,
        want,
    )


@pytest.mark.parametrize(
    ("config", "changes", "axis_type"),
    [
        (CONFIG, {"tie_embeddings": True}, AxisType.Auto),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [
                (LLAMA_AND_QWEN, {}, AxisType.Explicit),
                (GEMMA, {}, AxisType.Explicit),
                (MIXTURE, {}, AxisType.Explicit),
                # each is split over the devices
                (MIXTURE, {"experts": 2, "experts_per_token": 1}, AxisType.Auto),
                (SIGMOID, {}, AxisType.Explicit),
                *(
                    (
                        CONFIG,
                        {
                            "vocab_size": 30,
                            "width": 24,
                            "heads": heads,
                            "kv_heads": kv_heads,
                            "tie_embeddings": tied,
                        },
                        kind,
                    )
                    for heads, kv_heads, tied, kind in (
                        (6, 2, False, AxisType.Explicit),
                        (2, 1, True, AxisType.Auto),
                    )
                ),
            ]
        ),
    ],
)
def test_a_model_computes_what_the_plain_decoder_does(config, changes, axis_type):
    """Its parameters, and so its checkpoints, have the shapes of the model on one device, also
    where none divides.
    """
    config = dataclasses.replace(config, **changes)
    check_fits(config, sequence_length=8, mesh_shape={"data": 2, "model": 4})
    assert parameter_shapes(config, make_mesh()) == parameter_shapes(config, make_mesh(1, 1))
    loss, grads, params, logits = loss_and_gradients(config, axis_type)
    plain = jax.jit(jax.value_and_grad(functools.partial(plain_loss, config=config)))
    want, want_grads = plain(jax.tree.map(np.asarray, params))
    want_logits = plain_logits(
        jax.tree.map(lambda x: np.asarray(x, np.float64), params), config, TOKENS
    )
    np.testing.assert_allclose(loss, want, rtol=1e-5)
    np.testing.assert_allclose(logits[..., : config.vocab_size], want_logits, atol=2e-5)
    assert logits.shape == (4, 8, 32)
    assert (logits[..., config.vocab_size :] == np.finfo(np.float32).min).all()
    assert_gradients_close(grads, want_grads, tolerance=1e-5 if "heads" in changes else 2e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "options", "mesh"),
    [
        ({"remat": "layer"}, {}, make_mesh()),
        ({"fsdp_overlap": "prefetch"}, {}, make_mesh()),
        ({}, {"fsdp_axis": "fsdp"}, make_fsdp_mesh(1, 2, 1, 4)),
        (
            {"fsdp_overlap": "prefetch", "remat": "cheap"},
            {"fsdp_axis": "fsdp"},
            make_fsdp_mesh(2, 2, 1, 2),
        ),
    ],
)
def test_a_mixture_has_the_same_losses_and_gradients_in_every_form(changes, options, mesh):
    with jax.set_mesh(mesh):
        params, loss = split(dataclasses.replace(MIXTURE, **changes), backend="xla", **options)
        batch = P(("data", "fsdp") if options else "data", None)
        value, grads = jax.jit(jax.value_and_grad(loss))(params, *place(batch))
    want, want_grads, *_ = loss_and_gradients(MIXTURE)
    np.testing.assert_allclose(value, want, rtol=1e-5)
    assert_gradients_close(jax.tree.map(np.asarray, nnx.to_pure_dict(grads)), want_grads)


def test_the_losses_of_routers_are_apart_from_the_cross_entropy():
    with jax.set_mesh(make_mesh(1, 1)):
        model = drawn(lambda: Transformer(dataclasses.replace(MIXTURE, layers=1), rngs=nnx.Rngs(0)))
        every, alone = nnx.jit(
            lambda model, *batch: (model.losses(*batch), model.losses(*batch, routed=False))
        )(model, TOKENS, TARGETS)  # fmt: skip
    assert alone == (every.cross_entropy, None, None)
    want = every.cross_entropy + 0.5 * every.load_balance + 0.1 * every.router_z
    np.testing.assert_allclose(model.total(every), want, rtol=1e-6)
    assert every.load_balance > 1


@pytest.mark.parametrize("config", [LLAMA_AND_QWEN, GEMMA], ids=["llama and qwen", "gemma"])
def test_every_option_changes_the_logits(config):
    """Negative test: the comparison above would notice an option that the model ignores."""
    untied = dataclasses.replace(config, tie_embeddings=False)
    with jax.set_mesh(make_mesh(1, 1)):
        params = nnx.to_pure_dict(nnx.state(drawn(lambda: Transformer(untied, rngs=nnx.Rngs(0)))))
    params = jax.tree.map(np.asarray, params)
    attention, mlp = params["layers"]["attention"], params["layers"]["mlp"]
    for part, names, biased in (
        (attention, ("query", "key", "value", "out"), config.attention_bias),
        (mlp, ("up", "gate", "down"), config.mlp_bias),
    ):
        assert all(("bias" in part[name]) == biased for name in names)
    want = plain_logits(params, config, TOKENS)
    for field in dataclasses.fields(config):
        default = getattr(BASE, field.name)
        seen_above = ("attention_bias", "mlp_bias", "head_dim", "rope_original_length")
        if getattr(config, field.name) != default and field.name not in seen_above:
            changed = plain_logits(
                params, dataclasses.replace(config, **{field.name: default}), TOKENS
            )
            assert np.abs(changed - want).max() > 1e-3, field.name


@pytest.mark.slow
def test_remat_changes_nothing_but_memory():
    """The mixture above has the other policies."""
    want, want_grads, *_ = loss_and_gradients(CONFIG)
    for remat in ("dots", "operands", "mlp", "attention"):
        loss, grads, *_ = loss_and_gradients(dataclasses.replace(CONFIG, remat=remat))
        np.testing.assert_allclose(loss, want, rtol=1e-6)
        assert_gradients_close(grads, want_grads)


def test_a_form_that_is_not_named_is_the_plain_one():
    def program(**form):
        with jax.set_mesh(make_mesh()):
            params, loss = split(dataclasses.replace(CONFIG, **form), backend="xla")
            return str(jax.make_jaxpr(jax.grad(loss))(params, *place(P("data", None))))

    assert CONFIG.remat is CONFIG.fsdp_overlap is None
    assert program() == program(remat="none", fsdp_overlap="xla") != program(remat="layer")


def sent_to_host(jaxpr):
    """Returns how often a program sends an array of each shape to the memory of the host."""
    return collections.Counter(re.findall(r"<host>\[([^]]+)\]\S* = device_put", str(jaxpr)))


def on_device(policy):
    """Returns a policy that keeps on the device what another one offloads."""

    def keep(*operands, **parameters):
        case = policy(*operands, **parameters)
        return True if hasattr(case, "dst") else case

    return keep


@pytest.mark.slow
@pytest.mark.parametrize(("remat", "offloaded", "overlap"), [
    ("offload", 3, "prefetch"),  # heads of queries, keys and values
    ("offload_most", 4, "xla"),  # and what attention returns
])  # fmt: skip
def test_offloading_changes_no_bit_of_loss_and_gradients(remat, offloaded, overlap, monkeypatch):
    """Both offload the inputs of layers, too."""
    stream = "2,2,16" if overlap == "prefetch" else "4@data,8@model,16"
    config = dataclasses.replace(CONFIG, remat=remat, fsdp_overlap=overlap)

    def run():
        with jax.set_mesh(make_mesh()):
            params, loss = split(config, backend="xla")
            both, batch = jax.jit(jax.value_and_grad(loss)), place(P("data", None))
            return sent_to_host(jax.make_jaxpr(both)(params, *batch)), both(params, *batch)

    there, found = run()
    monkeypatch.setitem(transformer._POLICIES, remat, on_device(transformer._POLICIES[remat]))
    nothing, want = run()
    assert there["2,8,4"] == offloaded * there[stream] > 0
    assert not nothing
    jax.tree.map(np.testing.assert_array_equal, found, want)


def test_each_policy_repeats_the_products_and_transfers_that_it_does_not_keep():
    """Attention has two products, of queries and keys, and of scores and values."""

    def counts(remat):
        with jax.set_mesh(make_mesh()):
            params, loss = split(dataclasses.replace(CONFIG, remat=remat), backend="none")
            text = str(jax.make_jaxpr(jax.grad(loss))(params, *place(P("data", None))))
        return (
            text.count(" dot_general["),
            text.count(" all_gather["),
            text.count(" reduce_scatter["),
        )

    products, gathers, scatters = counts("none")
    assert counts("cheap") == (products, gathers, scatters)
    attention = 2
    assert counts("dots") == (products + attention, gathers, scatters)
    assert counts("operands") == (products + attention + 1, gathers, scatters + 1)
    assert counts("mlp") == (products + attention + 3, gathers + 1, scatters)
    assert counts("attention") == (products + 2, gathers + 1, scatters)
    # Negative test: a whole layer has four collective matmuls, of which the gradient does not need
    # the last one again.
    assert counts("layer") == (products + attention + 6, gathers + 2, scatters + 1)


def test_logits_stay_split_over_the_vocabulary():
    with jax.set_mesh(make_mesh()):
        abstract = nnx.eval_shape(lambda: Transformer(CONFIG, rngs=nnx.Rngs(0)))
        tokens = jax.device_put(TOKENS, P("data", None))
        logits = nnx.eval_shape(lambda model, tokens: model(tokens), abstract, tokens)
    assert logits.sharding.spec == P("data", None, "model")


def test_bfloat16_computes_in_bfloat16_and_keeps_float32_parameters():
    # flax's RMSNorm mixes bfloat16 and float32
    with jax.set_mesh(make_mesh()), jax.numpy_dtype_promotion("standard"):
        params, loss = split(dataclasses.replace(CONFIG, dtype="bfloat16"), backend="xla")
        batch = place(P("data", None))
        value, grads = (
            float(jax.jit(loss)(params, *batch)),
            jax.eval_shape(jax.grad(loss), params, *batch),
        )
    whole = jax.tree.map(np.asarray, nnx.to_pure_dict(params))
    want = float(jax.jit(functools.partial(plain_loss, config=CONFIG))(whole))
    assert {leaf.dtype for leaf in jax.tree.leaves((params, grads))} == {jnp.dtype("float32")}
    assert value != want
    np.testing.assert_allclose(value, want, rtol=2e-2)


TWO_AXES, THREE_AXES = {"data": 2, "model": 4}, {"data": 1, "context": 4, "model": 4}


@pytest.mark.parametrize(
    ("change", "length", "mesh_shape", "message"),
    [
        (
            {"heads": 8, "kv_heads": 3},
            8,
            TWO_AXES,
            "heads must be a multiple of kv_heads: got heads=8, kv_heads=3",
        ),
        (
            {"width": 18},
            8,
            TWO_AXES,
            "an even multiple of heads, for rotary positions: got width=18, heads=4",
        ),
        ({"mlp_width": 25}, 8, TWO_AXES, "mlp_width=25 on 4 devices; use 28"),
        ({"layers": 0}, 8, TWO_AXES, "layers must be 1 or more: got 0"),
        (
            {"experts": 4, "experts_per_token": 5},
            8,
            TWO_AXES,
            "must be 1 to experts=4, .* got experts_per_token=5",
        ),
        (
            {"experts": 2, "expert_width": 6},
            8,
            TWO_AXES,
            "got expert_width=6 for experts=2 on 4 devices; use 8, or a sma",
        ),
        (
            {"experts": 2, "mlp_width": 25},
            8,
            TWO_AXES,
            "got mlp_width=25 for experts=2 on 4 devices; use 28",
        ),
        (
            {"experts": 4, "expert_width": 0},
            8,
            TWO_AXES,
            "expert_width must be 1 or more, or None for mlp_width: got 0",
        ),
        (
            {"experts": 4, "shared_expert_width": 6},
            8,
            TWO_AXES,
            "got shared_expert_width=6 on 4 devices; use 8",
        ),
        (
            {"experts": 4, "mlp_bias": True},
            8,
            TWO_AXES,
            "experts have no biases: use mlp_bias=False",
        ),
        (
            {"experts": 4, "capacity_factor": 0.0},
            8,
            TWO_AXES,
            "capacity_factor must be above 0, or None .*: got 0.0",
        ),
        ({"gathered_mib": -1}, 8, TWO_AXES, "gathered_mib must be 0 or more: got -1"),
        (
            {"head_dim": 0},
            8,
            TWO_AXES,
            "head_dim must be even, for rotary positions, or None: got head_dim=0",
        ),
        (
            {"head_dim": 7},
            8,
            TWO_AXES,
            "head_dim must be even, for rotary positions, or None: got head_dim=7",
        ),
        (
            {"attention_softcap": 4},
            32,
            THREE_AXES,
            "attention_softcap needs all scores .*'context' axis of 4 devices",
        ),
        (
            {"alternating_window": 4},
            32,
            THREE_AXES,
            "alternating_window needs all scores .*'context' axis of 4 devices",
        ),
        ({}, 10, TWO_AXES, "sequence_length=10 on 4 devices; use 12"),
        (
            {},
            40,
            THREE_AXES,
            "divisible by 16, for a 'context' axis of 4 devices in 'zigzag' layout .* use 48",
        ),
        ({}, 12, THREE_AXES | {"model": 1}, r"divisible by 8, .* use 16"),
    ],
)
def test_a_size_that_does_not_fit_is_named(change, length, mesh_shape, message):
    with pytest.raises(ValueError, match=message):
        check_fits(
            dataclasses.replace(CONFIG, **change), sequence_length=length, mesh_shape=mesh_shape
        )


def test_a_scan_that_prefetches_has_no_layers_of_another_window():
    config = dataclasses.replace(CONFIG, alternating_window=4, fsdp_overlap="prefetch")
    with (
        jax.set_mesh(make_fsdp_mesh(2, 2, 1, 2)),
        pytest.raises(ValueError, match="to all layers, which alternating_window=4 does not"),
    ):
        Transformer(config, fsdp_axis="fsdp", rngs=nnx.Rngs(0))


def test_sequences_that_fit():
    check_fits(CONFIG, sequence_length=8, mesh_shape=TWO_AXES)
    check_fits(
        dataclasses.replace(CONFIG, mlp_width=25, experts=6), sequence_length=8, mesh_shape=TWO_AXES
    )
    check_fits(CONFIG, sequence_length=32, mesh_shape=THREE_AXES)
    check_fits(
        CONFIG,
        sequence_length=12,
        mesh_shape=THREE_AXES | {"model": 1},
        context_layout="contiguous",
    )


@pytest.mark.slow
def test_with_a_context_axis_loss_and_gradients_are_the_same():
    mesh = jax.make_mesh((2, 2, 2), ("data", "context", "model"), (AxisType.Explicit,) * 3)
    order = fa.sequence_order("zigzag", TOKENS.shape[1], 2)
    with jax.set_mesh(mesh):
        params, loss = split(CONFIG, context_axis="context")
        value, grads = jax.jit(jax.value_and_grad(loss))(
            params, *place(P("data", "context"), order)
        )
    want, want_grads, *_ = loss_and_gradients(CONFIG)
    np.testing.assert_allclose(value, want, rtol=1e-5)
    assert_gradients_close(jax.tree.map(np.asarray, nnx.to_pure_dict(grads)), want_grads)


# The ring backends for TPUs, in layers that are scanned and computed again. Tracing needs no TPU.
WIDE = TransformerConfig(vocab_size=512, layers=2, width=512, heads=4, kv_heads=4, mlp_width=512)
KERNELS = {"pallas": "ppermute_start", "stateful": "ppermute_stateful_start"}


def gradient(backend, remat):
    """Returns the value and gradient of a scanned decoder as a function of its parameters and
    tokens, and both.
    """
    config = dataclasses.replace(WIDE, remat=remat)
    graph, params = nnx.split(
        nnx.eval_shape(lambda: Transformer(config, backend=backend, rngs=nnx.Rngs(0)))
    )
    mesh = jax.sharding.get_mesh()
    tokens = jax.ShapeDtypeStruct(
        (8, 512), np.int32, sharding=jax.NamedSharding(mesh, P("data", None))
    )
    return (
        jax.value_and_grad(lambda params, tokens: nnx.merge(graph, params).loss(tokens, tokens)),
        params,
        tokens,
    )


@pytest.mark.parametrize(("backend", "remat"), [
    ("stateful", "layer"), *(pytest.param(*case, marks=pytest.mark.slow) for case in [
        ("stateful", "none"), ("pallas", "dots"), ("pallas", "layer"),
    ]),
])  # fmt: skip
def test_a_scanned_model_is_differentiated(monkeypatch, backend, remat):
    monkeypatch.setattr(ambient_mesh, "platform", lambda: "tpu")
    with jax.set_mesh(make_mesh()):
        loss, params, tokens = gradient(backend, remat)
        jaxpr = str(jax.make_jaxpr(loss)(params, tokens))
    assert KERNELS[backend] in jaxpr


@pytest.mark.slow
@pytest.mark.optimized
def test_a_scanned_model_compiles_for_tpus():
    with jax.set_mesh(check.topology_mesh("v5e:2x4", (2, 4), ("data", "model"))):
        loss, params, tokens = gradient("stateful", "layer")
        program = check.compile_for(
            "v5e:2x4", jax.jit(loss), params, tokens, compiler_options=check.HLO_ONLY
        )
    assert KERNELS["stateful"] in program.as_text()
    assert check.audit(program).ok
