"""Compute while a block travels: values and gradients on the default backend, then programs of
every backend.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import flaxasync as fa
from flaxasync import check
from flaxasync.hardware import chip
from flaxasync.transport.schedule import tie

ROWS = 2048
PRODUCT = 2 * ROWS**3 / chip("v5e").flops  # seconds of one product at the peak rate


def on_four(fn, *args):
    """Runs a function of blocks on four CPU devices."""
    with jax.set_mesh(jax.make_mesh((4,), ("x",), devices=jax.devices()[:4])):
        return jax.jit(jax.shard_map(fn, in_specs=P("x"), out_specs=P("x")))(
            *(jax.device_put(a, P("x")) for a in args)
        )


@pytest.mark.parametrize("shift", [1, -1, 2, 5])
def test_ppermute_brings_the_block_of_the_device_shift_before(shift):
    y = on_four(lambda x: fa.ppermute(x, "x", shift), jnp.arange(4))
    np.testing.assert_array_equal(y, np.roll(np.arange(4), shift))


def test_a_window_has_gradients_and_sends_what_the_start_was_given():
    def window(x, weight):
        x, future = fa.ppermute_start(x, "x")
        x, z = fa.while_travelling(x, jnp.multiply, x, weight)
        return fa.ppermute_done(2 * x, future) + z

    def gradient(x, weight):
        return jax.vjp(lambda x: window(x, weight), x)[1](weight + 1)[0]

    x, weight = jnp.arange(1.0, 5), jnp.arange(4.0)
    y, dx = on_four(window, x, weight), on_four(gradient, x, weight)
    np.testing.assert_array_equal(y, np.roll(x, 1) + x * weight)
    np.testing.assert_array_equal(dx, np.roll(weight + 1, -1) + weight * (weight + 1))


def test_arrays_in_the_memory_of_the_host_go_past_a_barrier():
    """libtpu refuses them there."""
    x, there = jnp.arange(4.0), jax.device_put(jnp.arange(3.0), jax.memory.Space.Host)
    program = str(jax.make_jaxpr(lambda *xs: tie(*xs, 1))(x, there))
    (barrier,) = (line for line in program.splitlines() if "optimization_barrier" in line)
    assert (barrier.count("f32[4]"), barrier.count("host")) == (1, 0)
    assert tie(x, {"there": there})[1]["there"] is there


def one_window(backend):
    def f(x, w):
        x, future = fa.ppermute_start(x, "x", backend=backend)
        x, z = fa.while_travelling(x, jnp.dot, x, w)
        return fa.ppermute_done(x, future), z

    return f


def staggered(x, w):
    """Sums partial products as a reduce-scatter does; the future passes from turn to turn of a
    loop.
    """

    def turn(hop, carry):
        x, addend = fa.while_travelling(carry[0], jnp.dot, first + hop.astype(first.dtype), w)
        return fa.ppermute_start(fa.ppermute_done(x, carry[1]) + addend, "x")

    first = x
    return fa.ppermute_done(*lax.fori_loop(0, 6, turn, fa.ppermute_start(x, "x"), unroll=2))


def tied_by_hand(x, w):
    """What `while_travelling` around a permute of XLA once was: the permute waits for the
    product.
    """
    x, z = lax.optimization_barrier((x, jnp.dot(x, w)))
    return lax.ppermute(x, "x", [(i, (i + 1) % 4) for i in range(4)]), z


def audited(f, dtype=jnp.bfloat16):
    """Returns the audit of a function of this device's x and of w, both [2048, 2048], for
    v5e:2x2.
    """
    mesh = check.topology_mesh("v5e:2x2", (4,), ("x",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        x = jax.ShapeDtypeStruct((4 * ROWS, ROWS), dtype, sharding=NamedSharding(mesh, P("x")))
        w = jax.ShapeDtypeStruct((ROWS, ROWS), dtype, sharding=NamedSharding(mesh, P()))
        mapped = jax.shard_map(f, in_specs=(P("x"), P()), out_specs=P("x"), check_vma=False)
        return check.audit(
            check.compile_for("v5e:2x2", jax.jit(mapped), x, w, compiler_options=check.HLO_ONLY)
        )


def transfer_of(report):
    (transfer,) = [pair for pair in report.pairs if pair.communicates]
    return transfer


@pytest.mark.parametrize(
    ("backend", "dtype"),
    [
        (None, jnp.bfloat16),
        ("pallas", jnp.float32),
        pytest.param("xla", jnp.float32, marks=pytest.mark.slow),
    ],
)
def test_the_product_is_computed_while_the_block_travels(backend, dtype):
    report = audited(one_window(backend), dtype)
    assert "empty-window" not in report.codes(), str(report)
    assert transfer_of(report).inside > PRODUCT, str(report)


def test_a_loop_that_carries_a_future_has_a_product_in_every_turn():
    turns = [pair for pair in audited(staggered).pairs if pair.communicates and pair.runs == 3]
    assert len(turns) == 2  # in one body
    assert all(pair.inside > PRODUCT for pair in turns)


@pytest.mark.slow
def test_the_audit_says_to_remove_a_barrier_that_ties_the_sent_block():
    report = audited(tied_by_hand)
    (found,) = [f for f in report.findings if f.code == "empty-window"]
    assert found.remedy.startswith(
        "remove the jax.lax.optimization_barrier that makes what is sent wait for fusion"
    )
    assert found.gain == pytest.approx(95e-6, rel=0.05)
    without = audited(
        lambda x, w: (lax.ppermute(x, "x", [(i, (i + 1) % 4) for i in range(4)]), jnp.dot(x, w))
    )
    assert transfer_of(report).exposed - transfer_of(without).exposed == pytest.approx(
        found.gain, rel=0.05
    )


@pytest.mark.slow
def test_work_that_xla_moved_into_another_transfer_is_not_blamed_on_a_barrier():
    def merged(x, w):
        """Nothing ties the products, so XLA computes two of them beside one permute."""

        def turn(hop, x):
            return ppermute(x) + jnp.dot(first + hop.astype(first.dtype), w)

        first = x
        return lax.fori_loop(0, 6, turn, x, unroll=2)

    def ppermute(x):
        return lax.ppermute(x, "x", [(i, (i + 1) % 4) for i in range(4)])

    (found,) = [f for f in audited(merged).findings if f.code == "empty-window"]
    assert found.remedy == check.CODES["empty-window"].remedy
