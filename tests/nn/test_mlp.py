"""The parallel MLP against three nnx.Linear layers."""

import jax
import pytest
from flax import nnx
from jax.sharding import AxisType

import flaxasync as fa
from tests.nn.conftest import ROWS, SAME, drawn, ones, permutes
from tests.nn.test_dot_general import differentiable

pytestmark = pytest.mark.usefixtures("quick_compile")


class PlainMLP(nnx.Module):
    """The same MLP of plain layers, with the same names."""

    def __init__(self, features, hidden, *, gated=True, **options):
        self.up = nnx.Linear(features, hidden, **options)
        self.gate = nnx.Linear(features, hidden, **options) if gated else None
        self.down = nnx.Linear(hidden, features, **options)

    def __call__(self, x):
        if self.gate is None:
            return self.down(jax.nn.silu(self.up(x)))
        return self.down(jax.nn.silu(self.gate(x)) * self.up(x))


def pair(size, *, backend=None, **options):
    options = {"use_bias": False} | options

    def make(dtype):
        return fa.nn.ParallelMLP(8, 6 * size, dtype=dtype, backend=backend, rngs=nnx.Rngs(0), **options)

    return make, drawn(lambda: PlainMLP(8, 6 * size, rngs=nnx.Rngs(0), **options))


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
    parity(*pair(4, use_bias=True), (2, 7, 8), size=4, x_spec=SAME, y_spec=SAME)


def test_a_product_of_the_caller(parity):
    parity(*pair(4, dot_general=differentiable), (2, 8, 8), size=4, data=2)


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
def test_gate_and_up_share_one_trip_and_no_ring_is_run_again(mesh_of):
    """R - 1 permutes each for x and y, and for dy and dx: the backward pass computes h again, not y."""
    with jax.set_mesh(mesh_of(1, 4)):
        x = ones((2, 8, 8), ROWS)
        for gated in (True, False):
            mlp = drawn(lambda gated=gated: fa.nn.ParallelMLP(8, 16, gated=gated, backend="xla", rngs=nnx.Rngs(0)))
            graph, state = nnx.split(mlp)
            text = jax.jit(lambda state, x, graph=graph: nnx.merge(graph, state)(x)).lower(state, x).compile().as_text()
            assert text.count(" collective-permute(") == 2 * 3
            assert not gated or permutes(mlp, x) == 4 * 3  # XLA merges the trips of x
