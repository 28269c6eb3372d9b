"""benchmarks/step.py and benchmarks/whole_step.py: their programs compute the same, and what they print is right."""

import dataclasses
import pathlib

import jax
import numpy as np
import pytest

from benchmarks import step, whole_step
from benchmarks.plain_transformer import Layout
from configs.tiny import tiny
from flaxasync.hardware import chip
from models.config import TransformerConfig
from train.config import MeshConfig
from train.step.trainer import Trainer

pytestmark = pytest.mark.usefixtures("quick_compile")

TINY = TransformerConfig(width=64, heads=8, kv_heads=4, mlp_width=96, param_dtype="float32", dtype="float32")
BATCH, SEQUENCE = 2, 8


def named(tree):
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def drawn(tree):
    """Returns arrays that depend on their names, because the models order their parameters differently."""
    rng, leaves = np.random.default_rng(1), sorted(named(tree).items())
    values = {name: jax.device_put(rng.standard_normal(a.shape, np.float32) / 8, a.sharding) for name, a in leaves}
    return jax.tree_util.tree_map_with_path(lambda path, _: values[jax.tree_util.keystr(path)], tree)


def assert_all_close(got, want, **tolerance):
    assert got.keys() == want.keys()
    for name, value in want.items():  # float32, sums in another order
        atol = tolerance["atol"] * np.abs(value).max()
        np.testing.assert_allclose(got[name], value, rtol=tolerance["rtol"], atol=atol, err_msg=name)


def outcome(variant):
    config = dataclasses.replace(TINY, gathered_mib=1 if variant == step.KEPT else 0)
    mesh = step.mesh_of(jax.devices()[:4], variant, config)
    with jax.set_mesh(mesh):
        fn, (state, *arrays) = step.program(variant, config, BATCH, SEQUENCE, mesh)
        y, gradients, dx = fn(drawn(state), *drawn(arrays))
        return jax.tree.map(np.asarray, named(gradients) | {"y": y, "dx": dx})


@pytest.mark.slow
def test_all_variants_compute_the_same():
    want = outcome("automatic")
    for variant in step.OURS:
        assert_all_close(outcome(variant), want, rtol=1e-4, atol=1e-5)


def test_the_peak_counts_every_product_and_the_causal_half():
    """An MLP and four projections of 16 tokens forward and twice backward, and half of all scores."""
    weights = 64 * (64 + 2 * 32 + 64) + 3 * 64 * 96
    flops = 3 * (2 * 16 * weights + 2 * 2 * 2 * 8 * 8 * 8 * 8 / 2)
    seconds = step.peak_seconds(TINY, BATCH, SEQUENCE, "v5e:2x4")
    assert seconds == pytest.approx(flops / 8 / chip("v5e").flops)
    layer = step.architecture("llama_8b", "flaxasync")
    assert step.peak_seconds(layer, 4, 4096, "v5e:2x4") == pytest.approx(14.65e-3, rel=1e-3)


def run_of(data, fsdp, model, remat):
    config = tiny()
    sizes = {"vocab_size": 64, "layers": 2, "width": 32, "heads": 8, "kv_heads": 4, "mlp_width": 48, "remat": remat}
    return dataclasses.replace(
        config,
        mesh=MeshConfig(data=data, fsdp=fsdp, model=model),
        model=dataclasses.replace(config.model, **sizes, tie_embeddings=False),
        data=dataclasses.replace(config.data, batch_size=8, sequence_length=16, microbatches=1),
    )


@pytest.mark.slow
@pytest.mark.parametrize(("sizes", "remat"), [((1, 2, 4), "layer"), ((2, 4, 1), "dots")])
def test_both_programs_compute_the_same_step(monkeypatch, sizes, remat):
    config = run_of(*sizes, remat)
    # The kernel of flaxasync needs a TPU. Attention of JAX alone takes its place.
    monkeypatch.setattr(whole_step, "Layout", lambda batch, fsdp, flash: Layout(batch, fsdp))
    tokens = np.random.default_rng(0).integers(0, 64, (8, 16)).astype(np.int32)
    found = []
    for program, kind in ((whole_step.OURS, Trainer), (whole_step.AUTOMATIC, whole_step.AutomaticTrainer)):
        mesh = whole_step.mesh_of(program, config, jax.devices(), "cpu")
        with jax.set_mesh(mesh):
            trainer = kind(config, mesh)
            params, batch = trainer.abstract_state().params, trainer.abstract_batch()
            given = [jax.device_put(each, leaf.sharding) for each, leaf in zip((tokens, tokens), batch, strict=True)]
            after, metrics = trainer.train_step(trainer.start_from(drawn(params)), *given)
            shards = {name: leaf.sharding.shard_shape(leaf.shape) for name, leaf in named(params).items()}
            moments = {name: np.asarray(leaf) for name, leaf in named(after.opt_state).items() if leaf.ndim}
            found.append((metrics, shards, moments))
    (metrics, shards, moments), (plain_metrics, plain_shards, plain_moments) = found
    assert float(metrics["loss"]) == pytest.approx(float(plain_metrics["loss"]), rel=1e-5)
    assert float(metrics["grad_norm"]) == pytest.approx(float(plain_metrics["grad_norm"]), rel=1e-4)
    assert shards == plain_shards
    assert_all_close(plain_moments, moments, rtol=1e-7, atol=1e-4)


def test_the_moments_of_the_automatic_step_are_sharded_as_the_parameters():
    config = run_of(1, 2, 4, "layer")
    mesh = whole_step.mesh_of(whole_step.AUTOMATIC, config, jax.devices(), "cpu")
    with jax.set_mesh(mesh):
        state = whole_step.AutomaticTrainer(config, mesh).abstract_state()
    specs = [leaf.sharding.spec for leaf in jax.tree.leaves(state.params)]
    moments = [leaf.sharding.spec for leaf in jax.tree.leaves(state.opt_state) if leaf.ndim]
    assert moments == specs + specs
    assert {jax.P(None, "fsdp", "model"), jax.P(None, "model", "fsdp")} < set(specs)


def test_a_result_is_known_by_its_configuration_and_flags(monkeypatch):
    def files():
        return [whole_step.file_of(case, pathlib.Path("programs")) for case in whole_step.CASES]

    before = files()
    assert len(set(before)) == len(before)
    monkeypatch.setitem(whole_step.FLAGS, "windowed", {"another": "true"})
    changed = [case for case, one, other in zip(whole_step.CASES, before, files(), strict=True) if one != other]
    assert {case.flags for case in changed} == {"windowed"}


def test_a_step_that_does_not_fit_has_no_time():
    row = whole_step.row(whole_step.CASES[0], {"memory": 40 << 30})
    assert row[6:] == ("40 GiB (too much)", "-", "-", "-", "-")
