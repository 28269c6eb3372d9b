"""Ring permutes as start/done kernel pairs, in correct forms and in each wrong form, for the tests of the audit.

Each form is a function of one local shard, for a ring on the mesh axis "x". The kernels are written here again, apart
from the package's own transports, so that the tests of the audit do not depend on what they help to prove.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

HOPS = 8
DMA = pltpu.SemaphoreType.DMA
SEMAPHORE = pl.BlockSpec(memory_space=pltpu.SEMAPHORE)
START = pltpu.CompilerParams(collective_id=0, has_side_effects=True)
DONE = pltpu.CompilerParams(has_side_effects=True)


def _send(x_ref, y_ref, send_sem, recv_sem):
    size, me = lax.axis_size("x"), lax.axis_index("x")
    left, right = lax.rem(me - 1 + size, size), lax.rem(me + 1, size)
    barrier = pltpu.get_barrier_semaphore()
    pl.semaphore_signal(barrier, device_id={"x": left})
    pl.semaphore_wait(barrier, 1)
    pltpu.make_async_remote_copy(x_ref, y_ref, send_sem, recv_sem, device_id={"x": right}).start()


def _wait(x_ref, y_ref, send_sem, recv_sem):
    pltpu.make_async_copy(x_ref, x_ref, send_sem).wait()
    pltpu.make_async_copy(y_ref, y_ref, recv_sem).wait()


def _space(memory):
    return pl.BlockSpec(memory_space=pltpu.HBM if memory == "hbm" else pl.ANY)


def _out(x, memory):
    return pltpu.HBM(x.shape, x.dtype) if memory == "hbm" else jax.ShapeDtypeStruct(x.shape, x.dtype)


def start(x, memory="hbm"):
    """Starts a permute of a value. Returns two semaphores (sent, received), the source, and the buffer in flight."""
    space = _space(memory)
    return pl.pallas_call(
        lambda x, ss, rs, _, y: _send(x, y, ss, rs),
        out_shape=(DMA(()), DMA(()), _out(x, memory), _out(x, memory)),
        in_specs=[space],
        out_specs=(SEMAPHORE, SEMAPHORE, space, space),
        input_output_aliases={0: 2},
        compiler_params=START,
        name="permute_start",
    )(x)


def start_unpinned(x):
    """Starts in a wrong way: the source is not aliased through the start, so nothing keeps it alive meanwhile."""
    space = _space("hbm")
    return pl.pallas_call(
        lambda x, ss, rs, y: _send(x, y, ss, rs),
        out_shape=(DMA(()), DMA(()), _out(x, "hbm")),
        in_specs=[space],
        out_specs=(SEMAPHORE, SEMAPHORE, space),
        compiler_params=START,
        name="permute_start",
    )(x)


def done(future, memory="hbm"):
    ss, rs, x, y = future
    space = _space(memory)
    return pl.pallas_call(
        lambda x, y, ss, rs, _: _wait(x, y, ss, rs),
        out_shape=_out(y, memory),
        in_specs=[space, space, SEMAPHORE, SEMAPHORE],
        out_specs=space,
        input_output_aliases={1: 0},
        compiler_params=DONE,
        name="permute_done",
    )(x, y, ss, rs)


def done_unpinned(future):
    ss, rs, y = future
    space = _space("hbm")
    return pl.pallas_call(
        lambda y, ss, rs, _: _wait(y, y, ss, rs),
        out_shape=_out(y, "hbm"),
        in_specs=[space, SEMAPHORE, SEMAPHORE],
        out_specs=space,
        input_output_aliases={0: 0},
        compiler_params=DONE,
        name="permute_done",
    )(y, ss, rs)


def start_stateful(x_ref, y_ref):
    """Starts a permute between Refs.

    A pallas_call cannot close over Refs that are held to HBM, so small buffers go to vector memory.
    """
    return pl.pallas_call(
        lambda ss, rs: _send(x_ref, y_ref, ss, rs),
        out_shape=(DMA(()), DMA(())),
        out_specs=(SEMAPHORE, SEMAPHORE),
        compiler_params=START,
        name="permute_start",
    )()


def done_stateful(ss, rs, x_ref, y_ref):
    pl.pallas_call(
        lambda ss, rs: _wait(x_ref, y_ref, ss, rs),
        out_shape=(),
        in_specs=[SEMAPHORE, SEMAPHORE],
        compiler_params=DONE,
        name="permute_done",
    )(ss, rs)


def to_hbm(x):
    return pltpu.with_memory_space_constraint(x, pltpu.HBM)


# The correct forms.


def value(x, *, unroll=2, hops=HOPS):
    """The staggered loop of value futures, unrolled by two, with its buffers in HBM."""
    return done(lax.fori_loop(0, hops, lambda _, f: start(done(f)), start(to_hbm(x)), unroll=unroll))


def value_with_compute(x):
    """The staggered loop with a matmul on the block in hand while the next one travels."""

    def step(_, carry):
        future, summed = carry
        y = done(future)
        future = start(y)
        ss, rs, y, flying = future
        return (ss, rs, y, flying), summed + jnp.dot(y, y[:1024], preferred_element_type=jnp.float32)

    future, summed = lax.fori_loop(0, HOPS, step, (start(to_hbm(x)), jnp.zeros(x.shape, jnp.float32)), unroll=2)
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

    def begin(i):
        spec = pltpu.PrefetchScalarGridSpec(num_scalar_prefetch=1, in_specs=[], out_specs=(SEMAPHORE, SEMAPHORE))
        return pl.pallas_call(
            lambda i, ss, rs: _send(slots.at[i[0]], slots.at[1 - i[0]], ss, rs),
            grid_spec=spec, out_shape=(DMA(()), DMA(())), compiler_params=START, name="permute_start",
        )(i[None])  # fmt: skip

    def end(i, ss, rs):
        spec = pltpu.PrefetchScalarGridSpec(num_scalar_prefetch=1, in_specs=[SEMAPHORE, SEMAPHORE], out_specs=())
        pl.pallas_call(
            lambda i, ss, rs: _wait(slots.at[i[0]], slots.at[1 - i[0]], ss, rs),
            grid_spec=spec, out_shape=(), compiler_params=DONE, name="permute_done",
        )(i[None], ss, rs)  # fmt: skip

    def step(i, sems):
        end(i % 2, *sems)
        return begin((i + 1) % 2)

    end(jnp.int32(0), *lax.fori_loop(0, HOPS, step, begin(jnp.int32(0))))
    return jax.freeze(slots)[1]


# The wrong forms.

staggered_unroll_1 = functools.partial(value, unroll=1)


def any_outputs(x):
    """Outputs in pl.ANY: the compiler puts buffers that another chip writes into vector memory."""
    return done(lax.fori_loop(0, HOPS, lambda _, f: start(done(f, "any"), "any"), start(x, "any"), unroll=2), "any")


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
    """The source is freed at the start, while it is still being sent."""
    x = to_hbm(x * 2)
    future = start_unpinned(x)
    y = done_unpinned(future)
    return y + 1


def forgotten(x):
    """A start without a done."""
    return start(to_hbm(x))[2]
