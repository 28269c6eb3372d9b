"""`fa.nn.parallelize` on whole models that were not written for it: parity, and the collectives of
a compiled step.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import flaxasync as fa
from flaxasync import check
from tests.nn.conftest import assert_close, assert_model_close, drawn, make_mesh
from tests.user.models import Gemma, LanguageModel, VisionTransformer

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quick_compile")]

BLOCKS = {"blocks.*.attention": "attention", "blocks.*.mlp.wi": "column"}
MODELS = {
    "lm1b": (LanguageModel, BLOCKS | {"embed": "embed", "blocks.*.mlp.wo": "row"}, (4, 8), 61),
    "gemma": (
        Gemma,
        {"embedder": "embed", "head": "logits"}
        | {f"layers.*.attention.{name}": "column" for name in "qkv"}
        | {
            "layers.*.attention.o": "row",
            "layers.*.gate": "column",
            "layers.*.up": "column",
            "layers.*.down": "row",
        },
        (4, 8),
        61,
    ),
    "vit": (VisionTransformer, BLOCKS | {"blocks.*.mlp.wo": "row_replicated"}, (4, 16, 16, 3), 10),
}
IN_SEQUENCES = {"all_gather_matmul", "matmul_reduce_scatter", "vocab_parallel", "take_share"}
SCOPES = {"lm1b": IN_SEQUENCES, "gemma": IN_SEQUENCES, "vit": {"matmul_all_reduce"}}
OURS = (
    "all_gather_matmul",
    "matmul_reduce_scatter",
    "matmul_all_reduce",
    "vocab_parallel",
    "take_share",
)


def example(kind):
    model, _, shape, classes = MODELS[kind]
    rng = np.random.default_rng(0)
    x = (
        rng.integers(0, 60, shape).astype(np.int32)
        if len(shape) == 2
        else rng.standard_normal(shape).astype(np.float32)
    )
    weights = rng.standard_normal((*shape[: 1 if kind == "vit" else 2], classes)).astype(np.float32)
    return drawn(lambda: model(rngs=nnx.Rngs(0))), x, weights


def loss(model, x, weights):
    y = model(x)
    return jnp.sum(jnp.sin(y) * weights), y


step = nnx.jit(nnx.value_and_grad(loss, has_aux=True))


@pytest.mark.parametrize(
    ("kind", "axis_type"),
    [*((kind, AxisType.Explicit) for kind in MODELS), ("lm1b", AxisType.Auto)],
)
def test_a_model_computes_what_it_did(kind, axis_type):
    model, x, weights = example(kind)
    (_, want_y), want = step(model, x, weights)
    with jax.set_mesh(make_mesh(2, 4, axis_type)):
        fa.nn.parallelize(model, MODELS[kind][1], verbose=False)
        if kind != "vit":  # 61 entries are padded to 64
            weights = np.pad(weights, [(0, 0), (0, 0), (0, 3)])
        x = jax.device_put(x, P("data"))
        weights = jax.device_put(weights, P("data") if kind == "vit" else P("data", None, "model"))
        (_, y), got = step(model, x, weights)
        graph, params, rest = nnx.split(model, nnx.Param, ...)
        step_of = jax.jit(
            jax.grad(lambda params: loss(nnx.merge(graph, params, rest), x, weights)[0])
        )
        compiled = step_of.lower(params).compile()
    assert_close(np.asarray(y)[..., : want_y.shape[-1]], want_y, "float32", "y")
    assert_model_close(got, want)
    ours, others = collectives(compiled.as_text())
    assert {scope for scope in OURS if any(scope in name for name in ours)} == SCOPES[kind]
    assert not others, "\n".join(others)


def test_a_layer_that_was_not_replaced_is_reported():
    """Negative test: XLA moves the output of the gate, which is sharded by rows, to the features of
    the other half.
    """
    model, x, _ = example("gemma")
    rules = {
        pattern: rule for pattern, rule in MODELS["gemma"][1].items() if pattern != "layers.*.gate"
    }
    with jax.set_mesh(make_mesh(2, 4, AxisType.Auto)):
        fa.nn.parallelize(model, rules, verbose=False)
        graph, state = nnx.split(model)
        run = jax.jit(lambda state, x: nnx.merge(graph, state)(x))
        _, others = collectives(run.lower(state, jax.device_put(x, P("data"))).compile().as_text())
    assert any(
        "all-to-all" in name or "all-gather" in name or "collective-permute" in name
        for name in others
    ), others


def collectives(text):
    """Returns the collectives of parallel layers, and others, but for sums of gradients, which data
    parallelism has.
    """
    module = check.parse(text)
    ours, others = [], []
    for computation in module.computations.values():
        for instruction in computation.instructions:
            opcode = instruction.opcode.removesuffix("-start")
            if opcode not in (
                "all-gather",
                "all-to-all",
                "collective-permute",
                "reduce-scatter",
                "all-reduce",
            ):
                continue
            found = f"{instruction.name}: {instruction.op_name}"
            if any(name in instruction.op_name for name in OURS):
                ours.append(found)
            elif opcode != "all-reduce":
                others.append(found)
    return ours, others
