"""benchmarks/whole_step.py: its two programs compute the same step, and a result is found again by what decides it."""

import dataclasses
import pathlib

import jax
import numpy as np
import pytest

from benchmarks import whole_step
from benchmarks.plain_transformer import Layout
from configs.tiny import tiny
from train.config import MeshConfig
from train.step.trainer import Trainer

pytestmark = pytest.mark.usefixtures("quick_compile")


def run_of(data, fsdp, model, remat):
    config = tiny()
    sizes = {"vocab_size": 64, "layers": 2, "width": 32, "heads": 8, "kv_heads": 4, "mlp_width": 48, "remat": remat}
    return dataclasses.replace(
        config,
        mesh=MeshConfig(data=data, fsdp=fsdp, model=model),
        model=dataclasses.replace(config.model, **sizes, tie_embeddings=False),
        data=dataclasses.replace(config.data, batch_size=8, sequence_length=16, microbatches=1),
    )


@pytest.mark.parametrize(
    ("sizes", "remat"), [((1, 2, 4), "layer"), pytest.param((2, 4, 1), "dots", marks=pytest.mark.slow)]
)
def test_both_programs_compute_the_same_step(monkeypatch, sizes, remat):
    config = run_of(*sizes, remat)
    # The kernel of flaxasync needs a TPU. Attention of JAX alone takes its place.
    monkeypatch.setattr(whole_step, "Layout", lambda batch, fsdp, flash: Layout(batch, fsdp))
    tokens = np.random.default_rng(0).integers(0, 64, (8, 16)).astype(np.int32)
    found = {}
    for program, kind in ((whole_step.OURS, Trainer), (whole_step.AUTOMATIC, whole_step.AutomaticTrainer)):
        mesh = whole_step.mesh_of(program, config, jax.devices(), "cpu")
        with jax.set_mesh(mesh):
            trainer = kind(config, mesh)
            abstract, batch = trainer.abstract_state(), trainer.abstract_batch()
            params = {  # by name: the models order their parameters differently
                jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(abstract.params)
            }
            drawn = drawn_by_name(params)
            state = trainer.start_from(
                jax.tree_util.tree_map_with_path(lambda path, _: drawn[jax.tree_util.keystr(path)], abstract.params)
            )
            given = [jax.device_put(each, leaf.sharding) for each, leaf in zip((tokens, tokens), batch, strict=True)]
            after, metrics = trainer.train_step(state, *given)
            shards = {name: leaf.sharding.shard_shape(leaf.shape) for name, leaf in params.items()}
            leaves = jax.tree_util.tree_leaves_with_path(after.opt_state)
            moments = {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves if leaf.ndim}
            found[program] = float(metrics["loss"]), float(metrics["grad_norm"]), shards, moments
    (loss, norm, shards, moments), (plain_loss, plain_norm, plain_shards, plain_moments) = found.values()
    assert loss == pytest.approx(plain_loss, rel=1e-5)
    assert norm == pytest.approx(plain_norm, rel=1e-4)
    assert shards == plain_shards
    assert moments.keys() == plain_moments.keys()
    for name, value in moments.items():  # float32, sums in another order
        np.testing.assert_allclose(plain_moments[name], value, atol=1e-4 * np.abs(value).max(), err_msg=name)


def drawn_by_name(params):
    rng = np.random.default_rng(1)
    return {
        name: jax.device_put(rng.standard_normal(params[name].shape, np.float32) / 8, params[name].sharding)
        for name in sorted(params)
    }


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
