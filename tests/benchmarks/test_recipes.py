"""benchmarks/recipes.py: it computes the decoder, and the compiled step sends one layer after the
other to the host.
"""

import collections
import dataclasses
import os
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import recipes
from benchmarks.recipes import Recipe
from flaxasync import check
from models.config import TransformerConfig
from tests.models.plain_decoder import plain_logits

SMALL = Recipe(
    "small",
    "v6e:2x2",
    1.0,
    2,
    layers=3,
    width=512,
    heads=4,
    kv_heads=2,
    mlp_width=768,
    vocabulary=1024,
    length=1024,
)
TINY = dataclasses.replace(
    SMALL, layers=2, width=32, heads=4, mlp_width=48, vocabulary=64, length=16, offloaded=()
)
DOCUMENT = (pathlib.Path(__file__).parents[2] / "docs" / "scaling.md").read_text()


def causal_attention(recipe):
    def attend(q, k, v):
        k, v = (jnp.repeat(x, recipe.heads // recipe.kv_heads, axis=1) for x in (k, v))
        scores = jnp.where(
            jnp.tri(q.shape[2], dtype=bool), jnp.einsum("bhqd,bhkd->bhqk", q, k), -jnp.inf
        )
        return jnp.einsum("bhqk,bhkd->bhqd", jax.nn.softmax(scores), v)

    return attend


@pytest.mark.parametrize("pairs", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_recipe_computes_the_loss_of_the_decoder(pairs, monkeypatch):
    monkeypatch.setattr(recipes, "attention_of", causal_attention)
    rng, mesh = (
        np.random.default_rng(0),
        jax.make_mesh((4,), ("fsdp",), (jax.sharding.AxisType.Auto,)),
    )
    drawn = jax.tree.map(
        lambda w: (rng.standard_normal(w.shape) / w.shape[-2 if w.ndim > 1 else -1] ** 0.5).astype(
            np.float32
        ),
        recipes.weights(TINY),
    )
    tokens, targets = rng.integers(0, TINY.vocabulary, (2, 8, TINY.length))
    given, layers = dict(drawn, layers=dict(drawn["layers"])), drawn["layers"]
    if pairs:  # neighbours are what halves are in another order of the features of a head
        order = np.arange(TINY.head_dim).reshape(2, -1).T.ravel()
        for name in ("query", "key"):
            kernel = layers[name].reshape(*layers[name].shape[:2], -1, TINY.head_dim)
            given["layers"][name] = kernel[..., order].reshape(layers[name].shape)
    recipe = dataclasses.replace(TINY, pairs=pairs)
    with jax.set_mesh(mesh):
        loss = jax.jit(lambda *args: recipes.loss(recipe, mesh, *args))(given, tokens, targets)
    kernels = {
        name: {"kernel": layers[name]}
        for name in ("query", "key", "value", "out", "gate", "up", "down")
    }
    params = {
        "embed": {"embedding": drawn["embed"]},
        "output": {"kernel": drawn["output"]},
        "final_norm": {"scale": drawn["final_norm"]},
        "layers": {
            "attention": kernels,
            "mlp": kernels,
            "attention_norm": {"scale": layers["attention_norm"]},
            "mlp_norm": {"scale": layers["mlp_norm"]},
        },
    }
    config = TransformerConfig(
        layers=2, width=32, heads=4, kv_heads=2, rope_theta=500_000.0, tie_embeddings=False
    )
    logits = plain_logits(params, config, tokens)
    likelihood = jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], -1)
    # bfloat16 keeps 8 bits
    assert float(loss) == pytest.approx(-float(likelihood.mean()), rel=1e-2)


@pytest.mark.slow
def test_a_compiled_step_offloads_layer_by_layer(tmp_path, monkeypatch):
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "")
    with jax.numpy_dtype_promotion("standard"):  # optax needs it
        program, timeline = recipes.estimated(SMALL, tmp_path)
        assert os.environ["LIBTPU_INIT_ARGS"] == "", "the flags are those of the step alone"
        monkeypatch.setattr(check, "compile_for", None)
        monkeypatch.setattr(recipes, "kernel_seconds", lambda recipe: {})
        assert recipes.estimated(SMALL, tmp_path)[0] == program, "it is kept"
    monkeypatch.setattr(recipes, "estimated", lambda recipe, folder: (program, timeline))
    cells = recipes.row(SMALL, tmp_path)
    assert (*cells[:3], cells[6]) == (
        "small",
        "v6e:2x2",
        "2 x 1024",
        f"{timeline.seconds - 1:+.1%}",
    )
    assert {"given"} == {
        source for source in timeline.slowest.sources if source in ("given", "estimate")
    }
    copies = [s for s in timeline.slices if s.lane in ("to host", "from host")]
    counted = collections.Counter(
        (s.lane, round(s.seconds * check.CHIPS["v6e"].host_bandwidth)) for s in copies
    )
    rows = SMALL.sequences * SMALL.length * 2  # bytes for each feature
    wide, narrow = rows * SMALL.width, rows * SMALL.kv_heads * SMALL.head_dim
    per_layer = {wide: 3, narrow: 2}  # input, query and out; key and value
    want = {
        (lane, size): 3 * n for lane in ("to host", "from host") for size, n in per_layer.items()
    }
    assert counted == want


def test_the_recipes_of_the_document_are_within_7_percent():
    section = DOCUMENT.partition("<!-- recipes -->")[2].partition("<!-- /recipes -->")[0]
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in section.splitlines()
        if "v6e" in line
    ]
    known = [[recipe.name, recipe.topology] for recipe in recipes.RECIPES]
    assert known[:3] == [row[:2] for row in rows][:3]
    assert all(row[:2] in known for row in rows)
    assert all(abs(float(row[6].rstrip("%"))) <= 7 for row in rows)
