"""Ring permutes as start/done kernel pairs, in correct forms and in each wrong form, for the tests
of the audit.

Each form is a function of one local shard, for a ring on the mesh axis "x". The calls of kernels
are written here again, apart from the package's own transports, so that the tests of the audit do
not depend on what they help to prove. Only the bodies of the kernels, which the audit does not see,
are those of the package.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from flaxasync.transport import pallas

HOPS = 8
SEMAPHORES = (pltpu.SemaphoreType.DMA(()), pltpu.SemaphoreType.DMA(()))  # sent, received
SPECS = (pl.BlockSpec(memory_space=pltpu.SEMAPHORE),) * 2
START = {
    "compiler_params": pltpu.CompilerParams(collective_id=0, has_side_effects=True),
    "name": "permute_start",
}
DONE = {"compiler_params": pltpu.CompilerParams(has_side_effects=True), "name": "permute_done"}

_send, _wait = pallas.permute("x", 1, collective_id=0).start_body, pallas.wait_sent_and_received


def start(x, memory=pltpu.HBM):
    """Starts a permute of a value. Returns two semaphores (sent, received), the source, and the
    buffer in flight.
    """
    space, out = pl.BlockSpec(memory_space=memory), memory(x.shape, x.dtype)
    return pl.pallas_call(
        lambda x, ss, rs, _, y: _send(x, y, ss, rs),
        out_shape=(*SEMAPHORES, out, out), in_specs=[space], out_specs=(*SPECS, space, space),
        input_output_aliases={0: 2}, **START,
    )(x)  # fmt: skip


def done(future, memory=pltpu.HBM):
    ss, rs, x, y = future
    space, out = pl.BlockSpec(memory_space=memory), memory(y.shape, y.dtype)
    return pl.pallas_call(
        lambda x, y, ss, rs, _: _wait(x, y, ss, rs),
        out_shape=out,
        in_specs=[space, space, *SPECS],
        out_specs=space,
        input_output_aliases={1: 0},
        **DONE,
    )(x, y, ss, rs)


def start_stateful(x_ref, y_ref):
    """Starts a permute between Refs.

    A pallas_call cannot close over Refs that are held to HBM, so small buffers go to vector memory.
    """
    kernel = functools.partial(_send, x_ref, y_ref)
    return pl.pallas_call(kernel, out_shape=SEMAPHORES, out_specs=SPECS, **START)()


def done_stateful(ss, rs, x_ref, y_ref):
    pl.pallas_call(functools.partial(_wait, x_ref, y_ref), out_shape=(), in_specs=SPECS, **DONE)(
        ss, rs
    )


def to_hbm(x):
    return pltpu.with_memory_space_constraint(x, pltpu.HBM)


# The correct forms.


def value(x, *, unroll=2, hops=HOPS):
    """The staggered loop of value futures, unrolled by two, with its buffers in HBM."""
    return done(
        lax.fori_loop(0, hops, lambda _, f: start(done(f)), start(to_hbm(x)), unroll=unroll)
    )


def value_with_compute(x):
    """The staggered loop with a matmul on the block in hand while the next one travels."""

    def step(_, carry):
        future, summed = carry
        ss, rs, y, flying = start(done(future))
        return (ss, rs, y, flying), summed + jnp.dot(
            y, y[:1024], preferred_element_type=jnp.float32
        )

    future, summed = lax.fori_loop(
        0, HOPS, step, (start(to_hbm(x)), jnp.zeros(x.shape, jnp.float32)), unroll=2
    )
    return done(future) + summed.astype(x.dtype)


def stateful(x):
    """Two Refs that swap their roles within the body of the loop."""
    x_ref, y_ref = jax.new_ref(x), jax.new_ref(jnp.zeros_like(x))

    def step(_, sems):
        done_stateful(*sems, x_ref, y_ref)
        sems = start_stateful(y_ref, x_ref)
        done_stateful(*sems, y_ref, x_ref)
        return start_stateful(x_ref, y_ref)

    sems = lax.fori_loop(0, HOPS // 2, step, start_stateful(x_ref, y_ref))
    done_stateful(*sems, x_ref, y_ref)
    return jax.freeze(y_ref)


def two_slots(x):
    """One Ref with two slots, the slot chosen by a prefetched scalar."""
    slots = jax.new_ref(jnp.stack([x, jnp.zeros_like(x)]))

    def call(do, i, operands, results, kind):
        in_specs, out_specs = SPECS[: len(operands)], SPECS[: len(results)]
        grid = pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1, in_specs=in_specs, out_specs=out_specs
        )
        return pl.pallas_call(
            lambda i, ss, rs: do(slots.at[i[0]], slots.at[1 - i[0]], ss, rs),
            grid_spec=grid,
            out_shape=results,
            **kind,
        )(i[None], *operands)

    def step(i, sems):
        call(_wait, i % 2, sems, (), DONE)
        return call(_send, (i + 1) % 2, (), SEMAPHORES, START)

    sems = lax.fori_loop(0, HOPS, step, call(_send, jnp.int32(0), (), SEMAPHORES, START))
    call(_wait, jnp.int32(0), sems, (), DONE)
    return jax.freeze(slots)[1]


# The wrong forms.

staggered_unroll_1 = functools.partial(value, unroll=1)


def any_outputs(x):
    """Outputs in pl.ANY: the compiler puts buffers that another chip writes into vector memory."""
    return done(
        lax.fori_loop(
            0, HOPS, lambda _, f: start(done(f, pl.ANY), pl.ANY), start(x, pl.ANY), unroll=2
        ),
        pl.ANY,
    )


def unthreaded(x):
    """A stateful pair in a loop that carries nothing, so nothing depends on the pair."""
    x_ref, y_ref = jax.new_ref(x), jax.new_ref(jnp.zeros_like(x))

    def step(_, nothing):
        done_stateful(*start_stateful(x_ref, y_ref), x_ref, y_ref)
        return nothing

    lax.fori_loop(0, HOPS, step, 0)
    return x + 1


def read_in_flight(x):
    """Reads the destination before its done."""
    future = start(to_hbm(x))
    early = future[3] * 2
    return done(future) + early


def freed_in_flight(x):
    """The source is not aliased through the start, so it is freed while it is still being sent."""
    x, space, out = to_hbm(x * 2), pl.BlockSpec(memory_space=pltpu.HBM), pltpu.HBM(x.shape, x.dtype)
    ss, rs, y = pl.pallas_call(
        lambda x, ss, rs, y: _send(x, y, ss, rs),
        out_shape=(*SEMAPHORES, out), in_specs=[space], out_specs=(*SPECS, space), **START,
    )(x)  # fmt: skip
    y = pl.pallas_call(
        lambda ss, rs, y, _: _wait(y, y, ss, rs),
        out_shape=out,
        in_specs=(*SPECS, space),
        out_specs=space,
        input_output_aliases={2: 0},
        **DONE,
    )(ss, rs, y)
    return y + 1


def forgotten(x):
    """A start without a done."""
    return start(to_hbm(x))[2]
