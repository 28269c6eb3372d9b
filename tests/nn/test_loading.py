"""`load` takes what orbax restores of a saved state, from every checkpointer, as well as what a
user has in memory.
"""

import collections
import types

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import linen as nn
from flax import nnx
from jax.sharding import PartitionSpec as P

import flaxasync as fa
from tests.nn.conftest import Block, assert_model_close, drawn, make_mesh

pytestmark = pytest.mark.usefixtures("quick_compile")

RULES = {"blocks.*.attention": "attention", "blocks.*.up": "column", "blocks.*.down": "row"}


class Plain(nnx.Module):
    """Two blocks, one of which has a parameter that is called as orbax calls the array of a
    variable.
    """

    def __init__(self):
        self.blocks = nnx.List([Block(nnx.Rngs(0)) for _ in range(2)])
        self.gain = nnx.Dict(value=nnx.Param(jnp.ones(16)))
        self.dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(0))


@pytest.fixture(scope="module")
def plain():
    model, rng = Plain(), np.random.default_rng(0)
    nnx.update(
        model,
        jax.tree.map(
            lambda p: rng.standard_normal(p.shape, np.float32), nnx.state(model, nnx.Param)
        ),
    )
    return model


def check_loads(restored, plain):
    """Loads into a model of parallel layers, and compares every parameter."""
    with jax.set_mesh(make_mesh(2, 4)):
        model = nnx.eval_shape(Plain)
        fa.nn.parallelize(model, RULES, verbose=False)
        loaded = fa.nn.load(model, restored)
        assert (loaded.missing, loaded.unexpected) == ((), ())
        assert_model_close(nnx.state(model, nnx.Param), nnx.state(plain, nnx.Param), tolerance=0)
        assert model.blocks[1].up.kernel[...].sharding.spec == P(None, "model")


def by_standard_checkpointer(path, state):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, state)
        checkpointer.wait_until_finished()
        return checkpointer.restore(path)


def by_pytree_checkpointer(path, state):
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(path, state)
        return checkpointer.restore(path)


def by_manager(path, state):
    with ocp.CheckpointManager(path) as manager:
        manager.save(3, args=ocp.args.StandardSave(state))
        manager.wait_until_finished()
        return manager.restore(3)


def by_manager_of_items(path, state):
    with ocp.CheckpointManager(path) as manager:
        manager.save(3, args=ocp.args.Composite(model=ocp.args.StandardSave(state)))
        manager.wait_until_finished()
        return manager.restore(3, args=ocp.args.Composite(model=ocp.args.StandardRestore()))[
            "model"
        ]


@pytest.mark.filterwarnings("ignore:Sharding info not provided")
@pytest.mark.parametrize(
    "save",
    [
        by_standard_checkpointer,
        by_pytree_checkpointer,
        pytest.param(by_manager, marks=pytest.mark.slow),
        pytest.param(by_manager_of_items, marks=pytest.mark.slow),
    ],
)
def test_what_orbax_restores_without_a_target(plain, tmp_path, save):
    check_loads(save(tmp_path / "saved", nnx.state(plain)), plain)


@pytest.mark.filterwarnings("ignore:Sharding info not provided")
def test_pure_dicts_and_lists_of_blocks(plain, tmp_path):
    pure = nnx.to_pure_dict(nnx.state(plain, nnx.Param))
    blocks = [pure["blocks"][i] for i in range(2)]
    check_loads(by_standard_checkpointer(tmp_path / "pure", pure), plain)
    check_loads(by_standard_checkpointer(tmp_path / "list", {**pure, "blocks": blocks}), plain)
    check_loads({**pure, "blocks": tuple(plain.blocks)}, plain)  # modules within a dict
    check_loads({**pure, "extra": None}, plain)


def test_what_is_in_the_place_of_an_array_is_named():
    with jax.set_mesh(make_mesh(2, 4)):
        layer = drawn(lambda: fa.nn.ColumnParallelLinear(8, 8, use_bias=False, rngs=nnx.Rngs(0)))
        with pytest.raises(ValueError, match=r"load: kernel.0.0 is 1.0, of type float; give an a"):
            fa.nn.load(layer, {"kernel": [[1.0] * 8] * 8})
        with pytest.raises(
            ValueError, match=r"load: blocks\.0\.kernel is 'lost', of type str; give an array"
        ):
            fa.nn.load(layer, {"blocks": [{"kernel": "lost"}]})
        many = {"kernel": np.ones((8, 8), np.float32)} | {
            f"other{i:03}": np.ones(1) for i in range(200)
        }
        with pytest.raises(
            ValueError, match=r"left over in the source: other000, .*other009 and 190 more; strict="
        ):
            fa.nn.load(layer, many)


def test_any_mapping_is_a_source_and_arrays_that_are_no_variables_are_left_alone():
    with jax.set_mesh(make_mesh(2, 4)):
        layer = drawn(lambda: fa.nn.ColumnParallelLinear(8, 8, use_bias=False, rngs=nnx.Rngs(0)))
        kernel = np.arange(64, dtype=np.float32).reshape(8, 8)
        module = nnx.Linear(8, 8, use_bias=False, rngs=nnx.Rngs(0))
        module.kernel[...] = kernel
        module.table = nnx.data(jnp.ones(3))
        inner = types.MappingProxyType({"kernel": kernel})
        for source in (inner, collections.ChainMap({}, inner), {("kernel",): kernel}, module):
            layer.kernel[...] = jnp.zeros((8, 8))
            assert fa.nn.load(layer, source).names == ("kernel",)
            np.testing.assert_array_equal(layer.kernel, kernel)
        boxed = {"kernel": nn.Partitioned(kernel, names=(None, "model")), "r": nnx.Rngs(0)}
        assert fa.nn.load(layer, boxed).names == ("kernel",)
        blocks = {1: inner, "a": inner}
        assert fa.nn.load(layer, blocks, strict=False).unexpected == ("1.kernel", "a.kernel")
