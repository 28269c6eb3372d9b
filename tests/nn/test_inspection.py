"""Tests that the tools of Flax which look into modules work on the layers, and leave them as they were."""

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import flaxasync as fa
from tests.nn.conftest import ROWS, drawn, ones

pytestmark = pytest.mark.usefixtures("quick_compile")

LAYERS = {
    "mlp": lambda: fa.nn.ParallelMLP(16, 32, rngs=nnx.Rngs(0)),
    "attention": lambda: fa.nn.ParallelSelfAttention(16, 4, rngs=nnx.Rngs(0)),
    "embed": lambda: fa.nn.VocabParallelEmbed(32, 16, rngs=nnx.Rngs(0)),
}


@pytest.mark.parametrize("kind", ["mlp", "embed", pytest.param("attention", marks=pytest.mark.slow)])
def test_a_table_of_a_layer_leaves_its_class_as_it_was(mesh_of, kind):
    with jax.set_mesh(mesh_of(2, 4)):
        layer = drawn(LAYERS[kind])
        x = jax.device_put(np.zeros((2, 8), np.int32), P("data", None)) if kind == "embed" else ones((2, 8, 16), ROWS)
        before = {name: getattr(type(layer), name) for name in dir(type(layer))}
        table = nnx.tabulate(layer, x, console_kwargs={"width": 160})
        after = {name: getattr(type(layer), name) for name in before}
        assert {name for name in before if after[name] != before[name]} <= {"__annotations__", "__dict__"}
        assert layer(x).shape == (2, 8, 16)
    assert type(layer).__name__ in table


def test_a_layer_is_displayed(mesh_of, capsys):
    with jax.set_mesh(mesh_of(2, 4)):
        nnx.display(drawn(LAYERS["mlp"]))
    assert "ColumnParallelLinear" in capsys.readouterr().out


def test_the_attributes_of_nnx_linear_and_embed_are_there(mesh_of):
    with jax.set_mesh(mesh_of(2, 4)):
        pairs = [
            (fa.nn.ColumnParallelLinear, nnx.Linear, (8, 12)),
            (fa.nn.RowParallelLinear, nnx.Linear, (8, 12)),
            (fa.nn.VocabParallelEmbed, nnx.Embed, (8, 12)),
        ]
        for ours, plain, sizes in pairs:
            layer, reference = (kind(*sizes, rngs=nnx.Rngs(0), dtype=np.float16) for kind in (ours, plain))
            for name in set(vars(reference)) - {"pytree__state", "_pytree__state", "_pytree__nodes", "rngs"}:
                value = getattr(reference, name)
                if isinstance(value, int | bool | str | type) or value is None:
                    assert getattr(layer, name) == value, (ours, name)
                else:
                    assert hasattr(layer, name), (ours, name)
