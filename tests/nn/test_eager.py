"""Layers that are called outside of jax.jit: a second call compiles nothing, and transformations work as within."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import flaxasync as fa
from tests.nn.conftest import COLUMNS, ROWS, TOKENS, drawn, ones

pytestmark = pytest.mark.usefixtures("quick_compile")

LAYERS = {
    "column": (lambda: fa.nn.ColumnParallelLinear(16, 32, rngs=nnx.Rngs(0)), ROWS),
    "row": (lambda: fa.nn.RowParallelLinear(16, 32, rngs=nnx.Rngs(0)), COLUMNS),
    "mlp": (lambda: fa.nn.ParallelMLP(16, 32, rngs=nnx.Rngs(0)), ROWS),
    "attention": (lambda: fa.nn.ParallelSelfAttention(16, 4, rngs=nnx.Rngs(0)), ROWS),
    "embed": (lambda: fa.nn.VocabParallelEmbed(32, 16, rngs=nnx.Rngs(0)), TOKENS),
}


@pytest.fixture
def compilations():
    """Returns a function that counts the programs that were compiled since it was called last."""
    events = []

    def record(event, seconds, **_):
        if "backend_compile" in event:
            events.append(event)

    def count():
        found = len(events)
        events.clear()
        return found

    jax.monitoring.register_event_duration_secs_listener(record)
    yield count
    jax.monitoring.unregister_event_duration_listener(record)


def example(kind, batch=4):
    make, spec = LAYERS[kind]
    if kind == "embed":
        return drawn(make), jax.device_put(np.zeros((batch, 8), np.int32), spec)
    return drawn(make), ones((batch, 8, 16), spec)


@pytest.mark.parametrize("kind", LAYERS)
def test_a_second_call_compiles_nothing(mesh_of, compilations, kind):
    with jax.set_mesh(mesh_of(2, 4)):
        layer, x = example(kind)
        layer(x)
        assert compilations() > 0
        y = x + 0
        compilations()
        layer(y)
        assert compilations() == 0


def test_a_second_gradient_compiles_nothing(mesh_of, compilations):
    with jax.set_mesh(mesh_of(2, 4)):
        layer, x = example("mlp")
        for _ in range(2):
            compilations()
            nnx.grad(lambda layer, x: jnp.sum(layer(x)))(layer, x)
        assert compilations() == 0


def test_another_shape_or_layer_is_compiled_anew(mesh_of, compilations):
    """Negative test: the count notices a program that has to be compiled."""
    with jax.set_mesh(mesh_of(2, 4)):
        for kind, batch in [("column", 6), ("column", 2), ("row", 6)]:
            layer, x = example(kind, batch)
            compilations()
            layer(x)
            assert compilations() > 0


def test_forward_mode_is_refused_by_its_reason(mesh_of):
    with jax.set_mesh(mesh_of(2, 4)):
        layer, x = example("column")
        with pytest.raises(TypeError, match="can't apply forward-mode autodiff \\(jvp\\) to a custom_vjp function"):
            jax.jvp(layer, (x,), (x,))


@pytest.mark.parametrize(
    "kind", [kind if kind in ("mlp", "column") else pytest.param(kind, marks=pytest.mark.slow) for kind in LAYERS]
)
def test_vmap_over_a_sharded_batch(mesh_of, kind):
    """The values and gradients are those of a call on the whole batch."""
    with jax.set_mesh(mesh_of(2, 4)):
        layer, x = example(kind)
        graph, state = nnx.split(layer)
        weights = jnp.arange(4.0)[:, None, None] + 1

        def loss(state, x, *, mapped):
            layer = nnx.merge(graph, state)
            y = jax.vmap(layer)(x[:, None])[:, 0] if mapped else layer(x)
            return jnp.sum(y * weights), y

        call = jax.jit(jax.grad(loss, has_aux=True), static_argnames="mapped")
        (got, y), (want, want_y) = (call(state, x, mapped=mapped) for mapped in (True, False))
    np.testing.assert_allclose(y, want_y, rtol=1e-5, atol=1e-6)
    jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, rtol=1e-5, atol=1e-5), got, want)
