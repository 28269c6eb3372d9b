"""The parallel MLP against three nnx.Linear layers."""

import jax
import pytest
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import flaxasync as fa
from tests.nn.conftest import drawn, ones, permutes

pytestmark = pytest.mark.usefixtures("quick_compile")

ROWS, SAME = P("data", "model", None), P("data", None, None)


class PlainMLP(nnx.Module):
    """The same MLP of plain layers, with the same names."""

    def __init__(self, features, hidden, *, gated, use_bias, rngs):
        options = {"use_bias": use_bias, "rngs": rngs}
        self.up = nnx.Linear(features, hidden, **options)
        self.gate = nnx.Linear(features, hidden, **options) if gated else None
        self.down = nnx.Linear(hidden, features, **options)

    def __call__(self, x):
        if self.gate is None:
            return self.down(jax.nn.silu(self.up(x)))
        return self.down(jax.nn.silu(self.gate(x)) * self.up(x))


def pair(size, *, gated=True, use_bias=False, **options):
    plain = drawn(lambda: PlainMLP(8, 6 * size, gated=gated, use_bias=use_bias, rngs=nnx.Rngs(0)))

    def make(dtype):
        return fa.nn.ParallelMLP(8, 6 * size, gated=gated, use_bias=use_bias, dtype=dtype, rngs=nnx.Rngs(0), **options)

    return make, plain


@pytest.mark.parametrize(("size", "gated"), [(1, True), (2, False), (3, True), (5, False), (8, True)])
def test_parity_on_every_ring(parity, size, gated):
    make, plain = pair(size, gated=gated, use_bias=not gated)
    parity(make, plain, (3, 3 * size, 8), size=size)


@pytest.mark.parametrize(("axis_type", "backend", "dtype"), [
    (AxisType.Explicit, "xla", "float32"), (AxisType.Explicit, "none", "bfloat16"),
    (AxisType.Auto, "xla", "bfloat16"), (AxisType.Auto, "none", "float32"),
])  # fmt: skip
def test_parity_on_a_sub_axis(parity, axis_type, backend, dtype):
    make, plain = pair(4, backend=backend, use_bias=True)
    parity(make, plain, (2, 8, 8), size=4, data=2, axis_type=axis_type, dtype=dtype)


def test_an_input_that_is_the_same_on_all_devices_gives_such_an_output(parity):
    make, plain = pair(4, use_bias=True)
    parity(make, plain, (2, 7, 8), size=4, x_spec=SAME, y_spec=SAME)


@pytest.mark.parametrize("gated", [True, False])
def test_only_products_of_the_hidden_features_are_saved(mesh_of, gated):
    """The products of gate and up are saved; the activation and its parts are not."""
    hidden = 24
    with jax.set_mesh(mesh_of(1, 4)):
        mlp = drawn(lambda: fa.nn.ParallelMLP(8, hidden, gated=gated, rngs=nnx.Rngs(0)))
        graph, state = nnx.split(mlp)
        x = ones((3, 8, 8), ROWS)
        vjp = jax.eval_shape(lambda state, x: jax.vjp(lambda *a: nnx.merge(graph, a[0])(a[1]), state, x)[1], state, x)
    sizes = [leaf.size for leaf in jax.tree.leaves(vjp)]
    assert sizes.count(3 * 8 * hidden) == (2 if gated else 1)
    assert max(sizes) == 3 * 8 * hidden


@pytest.mark.optimized
def test_a_ring_whose_result_is_saved_is_not_run_again(mesh_of):
    """The backward pass computes h again, not y: R - 1 permutes each for x, y, dy and dx. XLA merges the trips of x."""
    with jax.set_mesh(mesh_of(1, 4)):
        mlp = drawn(lambda: fa.nn.ParallelMLP(8, 16, backend="xla", rngs=nnx.Rngs(0)))
        assert permutes(mlp, ones((2, 8, 8), ROWS)) == 4 * 3


@pytest.mark.optimized
def test_gate_and_up_share_one_trip(mesh_of):
    """With and without a gate the forward pass has as many permutes: R - 1 for x and R - 1 for y."""
    for gated in (True, False):
        with jax.set_mesh(mesh_of(1, 4)):
            mlp = drawn(lambda: fa.nn.ParallelMLP(8, 16, gated=gated, backend="xla", rngs=nnx.Rngs(0)))
            graph, state = nnx.split(mlp)
            x = ones((2, 8, 8), ROWS)
            text = jax.jit(lambda state, x: nnx.merge(graph, state)(x)).lower(state, x).compile().as_text()
        assert text.count(" collective-permute(") == 6


def test_hidden_features_that_do_not_divide(mesh_of):
    with jax.set_mesh(mesh_of(1, 4)), pytest.raises(ValueError, match="out_features=10 on 4 devices; use 8 or 12"):
        fa.nn.ParallelMLP(8, 10, rngs=nnx.Rngs(0))


def test_a_wrong_feature_size(mesh_of):
    with jax.set_mesh(mesh_of(1, 4)):
        mlp = drawn(lambda: fa.nn.ParallelMLP(8, 16, rngs=nnx.Rngs(0)))
        with pytest.raises(ValueError, match="ParallelMLP was built for 8 input features"):
            mlp(ones((2, 4, 12), ROWS))
