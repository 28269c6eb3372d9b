"""Layers as their users meet them: called outside of jax.jit, displayed by the tools of Flax, and
read.

A second call outside of jit compiles nothing, and transformations work as within.
"""

import pathlib
import traceback

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax
from jax.experimental import pallas as pl
from jax.sharding import AxisType

import flaxasync as fa
from flaxasync import mesh as ambient_mesh
from flaxasync.nn import shards
from flaxasync.nn.placement import ambient_state
from flaxasync.ops import trust
from tests.nn.conftest import (
    COLUMNS,
    ROWS,
    TOKENS,
    assert_parameters_close,
    drawn,
    make_mesh,
    ones,
)

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


@pytest.mark.parametrize(
    "kind",
    [
        "column",
        "embed",
        *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("row", "mlp", "attention")),
    ],
)
def test_a_second_call_compiles_nothing(compilations, kind):
    with jax.set_mesh(make_mesh(2, 4)):
        layer, x = example(kind)
        layer(x)
        assert compilations() > 0
        y = x + 0
        compilations()
        layer(y)
        assert compilations() == 0


def a_loss():
    logits = np.arange(4 * 8 * 16, dtype=np.float32).reshape(4, 8, 16) % 7
    targets = np.zeros((4, 8), np.int32)
    return fa.nn.softmax_cross_entropy(
        jax.device_put(logits, COLUMNS), jax.device_put(targets, TOKENS)
    )


def of_a_layer(kind):
    def run():
        layer, x = example(kind)
        return layer(x)

    return run


@pytest.mark.parametrize("run", [
    pytest.param(of_a_layer("embed"), id="embed"),
    pytest.param(a_loss, id="loss", marks=pytest.mark.slow),
    pytest.param(of_a_layer("mlp"), id="mlp", marks=pytest.mark.slow),
])  # fmt: skip
def test_a_second_mesh_and_other_types_of_axes_get_programs_of_their_own(run):
    """An eager call keeps its program, which is that of one mesh: one of the same sizes can have
    other axis types.
    """
    results = []
    for sizes, axis_type in [
        ((2, 4), AxisType.Explicit),
        ((2, 4), AxisType.Auto),
        ((2, 2), AxisType.Explicit),
        ((4, 2), AxisType.Auto),
        ((2, 4), AxisType.Explicit),
    ]:
        with jax.set_mesh(make_mesh(*sizes, axis_type)):
            results.append(np.asarray(run()))
    for result in results[1:]:
        np.testing.assert_allclose(result, results[0], rtol=1e-5, atol=1e-6)


def test_the_key_of_a_program_names_what_is_trusted(monkeypatch):
    with jax.set_mesh(make_mesh(2, 4)):
        monkeypatch.delenv(trust.VARIABLE, raising=False)
        states = [ambient_state()]
        for mode in ("predicted", "verified"):
            with trust.trusting(mode):
                states.append(ambient_state())
        monkeypatch.setenv(trust.VARIABLE, "all")
        states.append(ambient_state())
    assert len(set(states)) == 4


def test_a_second_gradient_compiles_nothing(compilations):
    with jax.set_mesh(make_mesh(2, 4)):
        layer, x = example("mlp")
        for _ in range(2):
            compilations()
            nnx.grad(lambda layer, x: jnp.sum(layer(x)))(layer, x)
        assert compilations() == 0


def test_forward_mode_is_refused_by_its_reason():
    with jax.set_mesh(make_mesh(2, 4)):
        layer, x = example("column")
        with pytest.raises(
            TypeError, match="can't apply forward-mode autodiff \\(jvp\\) to a custom_vjp function"
        ):
            jax.jvp(layer, (x,), (x,))


@pytest.mark.parametrize(
    "kind",
    [
        "column",
        *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("mlp", "attention", "embed")),
    ],
)
def test_vmap_over_a_sharded_batch(kind):
    """The values and gradients are those of a call on the whole batch."""
    with jax.set_mesh(make_mesh(2, 4)):
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


@pytest.mark.parametrize("kind", [pytest.param("mlp", marks=pytest.mark.slow), "embed"])
def test_a_layer_is_displayed_and_a_table_leaves_its_class_as_it_was(capsys, kind):
    with jax.set_mesh(make_mesh(2, 4)):
        layer, x = example(kind)
        nnx.display(layer)
        assert type(layer).__name__ in capsys.readouterr().out
        before = {name: getattr(type(layer), name) for name in dir(type(layer))}
        table = nnx.tabulate(layer, x, console_kwargs={"width": 160})
        after = {name: getattr(type(layer), name) for name in before}
        assert {name for name in before if after[name] != before[name]} <= {
            "__annotations__",
            "__dict__",
        }
        assert layer(x).shape == (4, 8, 16)
    assert type(layer).__name__ in table


def test_the_attributes_of_nnx_linear_and_embed_are_there():
    with jax.set_mesh(make_mesh(2, 4)):
        pairs = [
            (fa.nn.ColumnParallelLinear, nnx.Linear, (8, 12)),
            (fa.nn.RowParallelLinear, nnx.Linear, (8, 12)),
            (fa.nn.VocabParallelEmbed, nnx.Embed, (8, 12)),
        ]
        for ours, plain, sizes in pairs:
            layer, reference = (
                nnx.eval_shape(lambda kind=kind: kind(*sizes, rngs=nnx.Rngs(0), dtype=np.float16))
                for kind in (ours, plain)
            )
            for name in set(vars(reference)) - {
                "pytree__state",
                "_pytree__state",
                "_pytree__nodes",
                "rngs",
            }:
                value = getattr(reference, name)
                if isinstance(value, int | bool | str | type) or value is None:
                    assert getattr(layer, name) == value, (ours, name)
                else:
                    assert hasattr(layer, name), (ours, name)


class ReachedError(Exception):
    """The operation was reached; the message has a line for each function of the package on the
    way.
    """


def stop(*_, **__):
    package = pathlib.Path(fa.__file__).parent
    frames = [
        frame
        for frame in traceback.extract_stack()
        if pathlib.Path(frame.filename).is_relative_to(package)
    ]
    raise ReachedError("\n".join(f"{frame.filename}:{frame.name}" for frame in frames))


@pytest.mark.parametrize(("backend", "operation", "most"), [
    ("xla", (lax, "ppermute"), 9), ("fused", (pl, "pallas_call"), 7),
])  # fmt: skip
def test_from_a_layer_to_its_operation(monkeypatch, backend, operation, most):
    monkeypatch.setattr(*operation, stop)
    monkeypatch.setattr(ambient_mesh, "platform", lambda: "tpu")
    options = {"dtype": jnp.bfloat16, "backend": backend}
    with jax.set_mesh(make_mesh(2, 4)):
        layer = nnx.eval_shape(
            lambda: fa.nn.ColumnParallelLinear(1024, 2048, rngs=nnx.Rngs(0), **options)
        )
        graph, state = nnx.split(layer)
        sharding = jax.NamedSharding(jax.sharding.get_mesh(), ROWS)
        x = jax.ShapeDtypeStruct((4, 1024, 1024), jnp.bfloat16, sharding=sharding)
        with pytest.raises(ReachedError) as reached:
            jax.eval_shape(lambda state, x: nnx.merge(graph, state)(x), state, x)
    assert len(str(reached.value).splitlines()) <= most, str(reached.value)


class Tower(nnx.Module):
    """Layers that are called in a loop, or from lines of their own."""

    def __init__(self, loop):
        self.loop = loop
        self.layers = nnx.List(
            [fa.nn.ParallelMLP(16, 32, backend="xla", rngs=nnx.Rngs(i)) for i in range(3)]
        )

    def __call__(self, x):
        if self.loop:
            for layer in self.layers:
                x = layer(x)
            return x
        x = self.layers[0](x)
        x = self.layers[1](x)
        return self.layers[2](x)


@pytest.fixture
def traced(monkeypatch):
    """Returns a list to which every trace of an MLP on its shards adds an item."""
    found = []
    operands = shards.operands

    def count(*args):
        found.append(args)
        return operands(*args)

    monkeypatch.setattr(shards, "operands", count)
    return found


def gradients(tower, x):
    """Returns the traced gradients of a tower's sum."""
    graph, state = nnx.split(tower)
    return jax.make_jaxpr(
        jax.grad(lambda state, x: jnp.sum(jnp.sin(nnx.merge(graph, state)(x))), argnums=(0, 1))
    )(state, x)


def test_layers_in_a_loop_are_traced_once_and_others_by_their_lines(traced):
    """The lines of a model stand in what was traced, so two lines do not share a trace."""
    with jax.set_mesh(make_mesh(2, 4)):
        x = ones((4, 8, 16), ROWS)
        gradients(drawn(lambda: Tower(loop=True)), x)
        assert len(traced) == 1
        gradients(drawn(lambda: Tower(loop=False)), x)
        assert len(traced) == 4


def test_a_trace_is_shared_with_no_other_trace(traced):
    """What a kernel may do can change between two traces, as when it was verified."""
    with jax.set_mesh(make_mesh(2, 4)):
        tower = drawn(lambda: Tower(loop=True))
        x = ones((4, 8, 16), ROWS)
        for _ in range(2):
            gradients(tower, x)
    assert len(traced) == 2


def test_a_trace_is_not_shared_where_other_kernels_are_trusted(traced):
    with jax.set_mesh(make_mesh(2, 4)):
        layer, x = example("mlp")

        def twice(x):
            for mode in ("predicted", "verified", "verified"):
                with trust.trusting(mode):
                    x = layer(x)
            return x

        jax.make_jaxpr(twice)(x)
    assert len(traced) == 2


def test_layers_that_share_a_trace_have_gradients_of_their_own():
    """Of three layers, each with its own parameters: those of plain layers, one after the other."""
    with jax.set_mesh(make_mesh(2, 4)):
        x = jax.device_put(np.random.default_rng(0).standard_normal((4, 8, 16), np.float32), ROWS)
        got, want = (
            nnx.jit(nnx.grad(lambda tower, x: jnp.sum(jnp.sin(tower(x)))))(tower, x)
            for tower in (drawn(lambda loop=loop: Tower(loop)) for loop in (True, False))
        )
    assert_parameters_close(got, want, "float32")
