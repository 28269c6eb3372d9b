"""The functions that benchmarks/dispatch.py measures. They do the same matmuls and differ in what may hold the host."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.experimental import io_callback

TRIPS = 6
LBFGS_STEPS, COLUMNS = 20, 64
SCALAR = jax.ShapeDtypeStruct((), jnp.float32)


def step(x: jax.Array) -> jax.Array:
    return jnp.tanh(x @ x * 1e-2)


def pure(x: jax.Array) -> jax.Array:
    for _ in range(TRIPS):
        x = step(x)
    return x


def debug_print(x: jax.Array) -> jax.Array:
    y = pure(x)
    jax.debug.print("{}", y[0, 0])
    return y


def debug_print_ordered(x: jax.Array) -> jax.Array:
    y = pure(x)
    jax.debug.print("{}", y[0, 0], ordered=True)
    return y


def pure_callback(x: jax.Array) -> jax.Array:
    y = pure(x)
    return y + jax.pure_callback(lambda value: value, SCALAR, y[0, 0])


def pure_callback_unused(x: jax.Array) -> jax.Array:
    y = pure(x)
    jax.pure_callback(lambda value: value, SCALAR, y[0, 0])
    return y


def pure_callback_folded(x: jax.Array) -> jax.Array:
    y = pure(x)
    n = jax.pure_callback(lambda value: value, jax.ShapeDtypeStruct((), jnp.int32), y[0, 0].astype(jnp.int32))
    return y + (n * 0).astype(jnp.float32)


def io_callback_unordered(x: jax.Array) -> jax.Array:
    y = pure(x)
    return y + io_callback(lambda value: value, SCALAR, y[0, 0])


def io_callback_ordered(x: jax.Array) -> jax.Array:
    y = pure(x)
    return y + io_callback(lambda value: value, SCALAR, y[0, 0], ordered=True)


def cond(x: jax.Array) -> jax.Array:
    return lax.cond(x[0, 0] > 0, pure, lambda x: x, x)


def scan(x: jax.Array) -> jax.Array:
    return lax.scan(lambda c, _: (step(c), None), x, length=TRIPS)[0]


def static_loop(x: jax.Array) -> jax.Array:
    return lax.fori_loop(0, TRIPS, lambda _, c: step(c), x)


def dynamic_while(x: jax.Array) -> jax.Array:
    return lax.while_loop(lambda s: (s[0] < TRIPS) & (s[1][0, 0] < 1e9), lambda s: (s[0] + 1, step(s[1])), (0, x))[1]


def lbfgs(x: jax.Array) -> jax.Array:
    """Fits COLUMNS least-squares problems with x in their matrix. Stops at a small gradient, or after LBFGS_STEPS."""
    size = x.shape[0]
    matrix = x + jnp.diag(jnp.linspace(1.0, 30.0, size))

    def loss(y: jax.Array) -> jax.Array:
        return jnp.mean((matrix @ y - 1.0) ** 2)

    solver = optax.lbfgs()
    value_and_grad = optax.value_and_grad_from_state(loss)

    def update(carry: tuple) -> tuple:
        y, state = carry
        value, grad = value_and_grad(y, state=state)
        updates, state = solver.update(grad, state, y, value=value, grad=grad, value_fn=loss)
        return optax.apply_updates(y, updates), state

    def goes_on(carry: tuple) -> jax.Array:
        state = carry[1]
        steps = optax.tree.get(state, "count")
        return (steps < LBFGS_STEPS) & ((steps == 0) | (optax.tree.norm(optax.tree.get(state, "grad")) > 1e-7))

    start = jnp.zeros((size, COLUMNS))
    return lax.while_loop(goes_on, update, (start, solver.init(start)))[0]


FUNCTIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "pure": pure,
    "jax.debug.print": debug_print,
    "jax.debug.print, ordered": debug_print_ordered,
    "jax.pure_callback": pure_callback,
    "jax.pure_callback, unused: JAX removes it": pure_callback_unused,
    "jax.pure_callback, times zero: XLA removes it": pure_callback_folded,
    "io_callback": io_callback_unordered,
    "io_callback, ordered": io_callback_ordered,
    "lax.cond": cond,
    "lax.scan": scan,
    "fori_loop, known bounds": static_loop,
    "while_loop": dynamic_while,
    "optax.lbfgs in a while_loop": lbfgs,
}
