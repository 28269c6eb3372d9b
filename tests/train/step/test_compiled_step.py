"""Tests of the compiled training step: which collectives it has, over which axis, and how many."""

import collections
import dataclasses
import re

import jax
import pytest

from configs.tiny import tiny
from train.step.mesh import make_mesh

COLLECTIVE = re.compile(
    r"= (.*?) (all-gather|all-reduce|reduce-scatter|all-to-all)(?:-start)?\(.*?"
    r"replica_groups=mesh\[[^\]]*\] \{([^}]*)\}"
)


@pytest.fixture(params=[
    "little",  # collectives are chosen before code is optimized, and other tests share these programs
    pytest.param("fully", marks=[pytest.mark.optimized, pytest.mark.slow]),  # the program of a run of configs/tiny.py
])  # fmt: skip
def compiled(request, config, trainer_of):
    """A function from a backend to the HLO of a training step on a (2, 4) mesh and the abstract parameters."""
    config = dataclasses.replace(tiny(), mesh=config.mesh) if request.param == "fully" else config

    def compile_step(backend):
        with jax.set_mesh(make_mesh(config.mesh)):
            trainer = trainer_of(dataclasses.replace(config, backend=backend), jax.sharding.get_mesh())
            return trainer.compile_train_step().as_text(), trainer.abstract_state().params

    return compile_step


def collectives(text):
    """Returns (opcode, axes, local shapes) of every collective of a program."""
    found = []
    for line in text.splitlines():
        if match := COLLECTIVE.search(line):
            shapes = [
                tuple(map(int, dims.split(","))) if dims else () for dims in re.findall(r"\w+\[([\d,]*)\]", match[1])
            ]
            found.append((match[2], set(re.findall(r"'(\w+)'", match[3])), shapes))
    # A collective whose line the pattern does not match must not be left out silently.
    assert len(found) == len(re.findall(r" (?:all-gather|all-reduce|reduce-scatter|all-to-all)(?:-start)?\(", text))
    return found


def gradient_shapes(params):
    """Counts the local shapes of all gradients; those of stacked layers are reduced inside the loop over layers."""
    shapes = collections.Counter()
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        local = leaf.sharding.shard_shape(leaf.shape)
        shapes[local[1:] if path[0].key == "layers" else local] += 1
    return shapes


def test_the_ring_has_no_all_gather_and_one_all_reduce_over_data_per_gradient(compiled):
    text, params = compiled("xla")
    found = collectives(text)
    assert [op for op, _, _ in found if op in ("all-gather", "reduce-scatter", "all-to-all")] == []
    reduced = collections.Counter(
        shape for op, axes, shapes in found if op == "all-reduce" and "data" in axes for shape in shapes if shape
    )
    assert reduced == gradient_shapes(params)


def test_the_gathering_backend_has_the_collectives_that_the_ring_lacks(compiled):
    """The negative test: the same search finds all-gathers and reduce-scatters where there are some."""
    found = collectives(compiled("none")[0])
    gathers = [axes for op, axes, _ in found if op == "all-gather"]
    assert len(gathers) >= 4
    assert all(axes == {"model"} for axes in gathers)
    assert "reduce-scatter" in {op for op, _, _ in found}
