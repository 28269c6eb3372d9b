"""Whatever `jax.jit`, `nnx.jit` and `functools.partial` give is compiled with its arguments, none
as a constant.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import flaxasync as fa
from flaxasync.check import compile_for, play
from flaxasync.check.compile.function_call import FunctionCall


class Tied(nnx.Module):
    """A product with a kernel [16, 16] and its transpose: one parameter under two names."""

    def __init__(self):
        self.up = nnx.Linear(16, 16, use_bias=False, rngs=nnx.Rngs(0))
        self.down = self.up

    def __call__(self, x):
        return self.down(jax.nn.relu(self.up(x)))

    @nnx.jit
    def with_nnx(self, x):
        return self(x)

    @jax.jit
    def with_jax(self, x):
        return self(x)


def apply(model, x):
    return model(x)


def scaled(x, times, *, mode):
    return x * times if mode == "times" else x


def forms(model, x):
    """Returns calls of one function, in all the forms in which a user may hold it: functions and
    their arguments.
    """
    return {
        "nnx.jit": (nnx.jit(apply), model, x),
        "nnx.jit of a variable": (
            nnx.jit(lambda kernel, x: jax.nn.relu(x @ kernel) @ kernel),
            model.up.kernel,
            x,
        ),
        "jax.jit": (
            jax.jit(lambda kernel, x: jax.nn.relu(x @ kernel) @ kernel),
            model.up.kernel.get_value(),
            x,
        ),
        "a plain function": (apply, model, x),
        "a partial of nnx.jit": (functools.partial(nnx.jit(apply), model), x),
        "a partial of a partial": (
            functools.partial(functools.partial(nnx.jit(apply)), model, x=x),
        ),
        "a method of nnx.jit": (model.with_nnx, x),
        "a method": (model.__call__, x),
        "a module": (model, x),
    }


@pytest.mark.parametrize("form", forms(nnx.eval_shape(Tied), None))
def test_every_form_has_the_module_as_its_argument(form):
    model, x = Tied(), np.ones((8, 16), np.float32)
    fn, *args = forms(model, x)[form]
    call = FunctionCall.of(fn, tuple(args), {}).map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
    )
    lowered = call.lower()
    inputs = jax.tree.leaves(lowered.in_avals)
    # the tied kernel is one argument
    assert sorted(aval.shape for aval in inputs) == [(8, 16), (16, 16)]
    assert lowered.as_text().count("stablehlo.dot_general") == 2
    assert isinstance(model.up.kernel[...], jax.Array)  # the caller's module is as it was


def test_an_abstract_module_is_an_argument_as_well():
    abstract, x = nnx.eval_shape(Tied), jax.ShapeDtypeStruct((8, 16), jnp.float32)
    lowered = FunctionCall.of(nnx.jit(apply), (abstract,), {"x": x}).map(lambda leaf: leaf).lower()
    assert sorted(aval.shape for aval in jax.tree.leaves(lowered.in_avals)) == [(8, 16), (16, 16)]


def test_static_arguments_and_keywords_stay_as_they_are():
    static = jax.jit(scaled, static_argnums=1, static_argnames="mode")
    x = jax.ShapeDtypeStruct((8,), jnp.float32)
    for times, mode, products in ((3, "times", 1), (3, "keep", 0)):
        program = compile_for("v5e:1x1", static, x, times, mode=mode)
        assert program.as_text().count(" multiply(") == products
    bound = functools.partial(nnx.jit(scaled, static_argnames=("times", "mode")), mode="times")
    assert compile_for("v5e:1x1", bound, x, times=3).as_text().count(" multiply(") == 1
    assert (
        "f32[8]"
        in compile_for(
            "v5e:1x1", jax.jit(scaled, static_argnames="mode"), x, 3.0, mode="times"
        ).as_text()
    )


@pytest.mark.slow
def test_a_training_step_of_modules_is_compiled_for_a_topology():
    """Model and optimizer on CPU devices move to the topology, with their shardings."""

    def step(model, optimizer, x):
        grads = nnx.grad(lambda model: jnp.sum(model(x) ** 2))(model)
        optimizer.update(model, grads)

    with jax.set_mesh(jax.make_mesh((2, 2), ("data", "model"), devices=jax.devices()[:4])):
        model = fa.nn.ParallelMLP(16, 64, gated=False, backend="xla", rngs=nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
        x = jax.device_put(np.ones((4, 8, 16), np.float32), P("data", "model", None))
        program = compile_for("v5e:2x2", nnx.jit(step), model, optimizer, x)
    assert program.axes == {"data": 2, "model": 2}
    assert "collective-permute" in program.as_text()
    assert "f32[16,32]" in program.as_text()  # the kernel of a device
    assert "f32[16,64]" not in program.as_text()


@pytest.mark.slow
def test_play_takes_what_compile_for_takes():
    x = jax.ShapeDtypeStruct((256, 512), jnp.float32)
    static = jax.jit(scaled, static_argnums=1, static_argnames="mode")
    assert play(static, x, 3, mode="times", topology="v5e:1x1").seconds > 0
    model = nnx.Linear(512, 256, rngs=nnx.Rngs(0))
    by_nnx = play(nnx.jit(apply), model, x, topology="v5e:1x1")
    assert (
        play(functools.partial(nnx.jit(apply), model), x, topology="v5e:1x1").seconds
        == by_nnx.seconds
    )
    assert by_nnx.seconds > play(jax.jit(jnp.sum), model.bias[...], topology="v5e:1x1").seconds


def test_what_is_no_function_is_refused():
    with pytest.raises(TypeError, match="compile_for compiles a function: got int"):
        compile_for("v5e:1x1", 3)
    bound = nnx.jit_partial(apply, nnx.Linear(16, 16, rngs=nnx.Rngs(0)), graph=False)
    with pytest.raises(
        TypeError,
        match=r"nnx.jit_partial has bound .* give it nnx.jit\(fun\), or functools.partial",
    ):
        compile_for("v5e:1x1", bound, np.ones((8, 16), np.float32))
