"""The compiled program of one training step: which collectives there are, over which axis, and how often."""

import collections
import dataclasses
import re

import jax
import pytest

from configs.tiny import tiny
from train.mesh import make_mesh

COLLECTIVE = re.compile(
    r"= (.*?) (all-gather|all-reduce|reduce-scatter|all-to-all)(?:-start)?\(.*?"
    r"replica_groups=mesh\[[^\]]*\] \{([^}]*)\}"
)


@pytest.fixture(params=[
    "little",  # the compiler chooses collectives before it optimizes code, and these programs others here need, too
    pytest.param("fully", marks=[pytest.mark.optimized, pytest.mark.slow]),  # as a run of configs/tiny.py has it
])  # fmt: skip
def compiled(request, config, trainer_of):
    """backend -> (HLO of a training step on a (2, 4) mesh, abstract parameters)."""
    config = dataclasses.replace(tiny(), mesh=config.mesh) if request.param == "fully" else config

    def compile_step(backend):
        with jax.set_mesh(make_mesh(config.mesh)):
            trainer = trainer_of(dataclasses.replace(config, backend=backend), jax.sharding.get_mesh())
            return trainer.compile_train_step().as_text(), trainer.abstract_state().params

    return compile_step


def collectives(text):
    """[(opcode, axes, local shapes)] of every collective of a program."""
    found = []
    for line in text.splitlines():
        if match := COLLECTIVE.search(line):
            shapes = [
                tuple(map(int, dims.split(","))) if dims else () for dims in re.findall(r"\w+\[([\d,]*)\]", match[1])
            ]
            found.append((match[2], set(re.findall(r"'(\w+)'", match[3])), shapes))
    # A collective that the pattern does not know must not go uncounted.
    assert len(found) == len(re.findall(r" (?:all-gather|all-reduce|reduce-scatter|all-to-all)(?:-start)?\(", text))
    return found


def gradient_shapes(params):
    """How often each local shape of a gradient occurs; a stacked layer's is reduced inside the loop over layers."""
    shapes = collections.Counter()
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        local = leaf.sharding.shard_shape(leaf.shape)
        shapes[local[1:] if path[0].key == "layers" else local] += 1
    return shapes


def test_the_ring_has_no_all_gather_and_one_sum_over_data_a_gradient(compiled):
    text, params = compiled("xla")
    found = collectives(text)
    assert [op for op, _, _ in found if op in ("all-gather", "reduce-scatter", "all-to-all")] == []
    reduced = collections.Counter(
        shape for op, axes, shapes in found if op == "all-reduce" and "data" in axes for shape in shapes if shape
    )
    assert reduced == gradient_shapes(params)


def test_the_same_check_sees_the_gathers_of_the_other_backend(compiled):
    found = collectives(compiled("none")[0])
    gathers = [axes for op, axes, _ in found if op == "all-gather"]
    assert len(gathers) >= 4
    assert all(axes == {"model"} for axes in gathers)
    assert [op for op, axes, _ in found if op == "reduce-scatter"] or pytest.fail("no reduce-scatter either")
