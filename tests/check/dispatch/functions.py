"""Functions that differ in what may hold the host, and what is expected of each.

All of them do the same matmuls, which take about 100 ms on two CPU cores.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.experimental import io_callback

SIZE, TRIPS = 1024, 6
SCALAR = jax.ShapeDtypeStruct((), jnp.float32)


def step(x):
    return jnp.tanh(x @ x * 1e-2)


def work(x):
    for _ in range(TRIPS):
        x = step(x)
    return x


def printing(x):
    y = work(x)
    jax.debug.print("{}", y[0, 0])
    return y


def pure_callback(x):
    y = work(x)
    return y + jax.pure_callback(lambda value: value, SCALAR, y[0, 0])


def ordered_io(x):
    y = work(x)
    return y + io_callback(lambda value: value, SCALAR, y[0, 0], ordered=True)


def callback_that_jax_removes(x):
    y = work(x)
    jax.pure_callback(lambda value: value, SCALAR, y[0, 0])
    return y


def callback_that_xla_removes(x):
    y = work(x)
    n = jax.pure_callback(
        lambda value: value, jax.ShapeDtypeStruct((), jnp.int32), y[0, 0].astype(jnp.int32)
    )
    return y + (n * 0).astype(jnp.float32)


def cond(x):
    return lax.cond(x[0, 0] > 0, work, lambda x: x, x)


def cond_after_work(x):
    y = work(x)
    return lax.cond(y[0, 0] > 0, step, lambda x: x, y)


def static_loop(x):
    return lax.fori_loop(0, TRIPS, lambda _, c: step(c), x)


def dynamic_while(x):
    return lax.while_loop(
        lambda s: (s[0] < TRIPS) & (s[1][0, 0] < 1e9), lambda s: (s[0] + 1, step(s[1])), (0, x)
    )[1]


def lbfgs(x):
    """Six steps of L-BFGS on a quadratic function; its line search is a loop without a trip count
    in another loop.
    """
    solver = optax.lbfgs(memory_size=4)

    def value(w):
        return jnp.mean(jnp.square(x @ w * 1e-2 - 1))

    def turn(_, carry):
        w, state = carry
        loss, gradient = optax.value_and_grad_from_state(value)(w, state=state)
        updates, state = solver.update(
            gradient, state, w, value=loss, grad=gradient, value_fn=value
        )
        return optax.apply_updates(w, updates), state

    w = jnp.zeros_like(x)
    with jax.numpy_dtype_promotion("standard"):
        return lax.fori_loop(0, TRIPS, turn, (w, solver.init(w)))[0]


@dataclasses.dataclass(frozen=True)
class Row:
    """A function, and what is expected of it on one CPU device."""

    fn: Callable
    waits: bool = False  # whether a call of it holds the host
    unordered: bool = False  # whether it has unordered effects
    ordered: int = 0  # the number of its ordered effects
    callbacks: str = ""  # the name of the callback in its text; "" if there is none
    loops: int = 0  # the number of its loops without a known trip count
    branches: int = 0
    late: int = 0  # the number of its branches whose index is computed by work
    slow: bool = False  # whether `make test` leaves it out, for it differs little from another row


TABLE = [
    Row(work),
    Row(printing, waits=True, unordered=True, callbacks="jax.debug.print"),
    Row(pure_callback, waits=True, callbacks="jax.pure_callback", slow=True),
    Row(ordered_io, waits=True, ordered=1, callbacks="io_callback"),
    Row(callback_that_jax_removes, slow=True),
    Row(callback_that_xla_removes, waits=True),
    Row(cond, branches=1, slow=True),
    Row(cond_after_work, branches=1, late=1, slow=True),
    Row(static_loop, slow=True),
    Row(dynamic_while, loops=1),
]
