"""Jitted NNX layers with XLA's collectives and with those of the package."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import flaxasync as fa
from benchmarks.player_layers import estimated
from benchmarks.programs import array, play_program, split_layer
from flaxasync.check import topology_mesh, topology_size
from tests.check.player.programs import assert_times_add_up

DEVICES = {"v5e:2x2": 4, "v5e:2x4": 8}
BATCH, ROWS, FEATURES, HIDDEN = 2, 1024, 512, 1024
ACTIVATIONS = BATCH * ROWS * FEATURES * 2  # bytes


def play_layer(topology, make, shape):
    """Simulates a layer on a ring of all devices; x [batch, rows, features] is sharded by rows."""
    mesh = topology_mesh(topology, (topology_size(topology),), ("model",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        graph, state = split_layer(make, mesh, jnp.bfloat16)
        fn = jax.jit(lambda state, x: nnx.merge(graph, state)(x))
        return play_program(topology, fn, state, array(shape, mesh, P(None, "model", None)))


@pytest.mark.parametrize("topology", [pytest.param("v5e:2x2", marks=pytest.mark.slow), "v5e:2x4"])
@pytest.mark.parametrize("backend", [pytest.param("none", marks=pytest.mark.slow), "xla", "pallas"])
def test_an_mlp_runs_to_the_end(topology, backend):
    def make():
        return fa.nn.ParallelMLP(FEATURES, HIDDEN, backend=backend, rngs=nnx.Rngs(0))

    result, _ = play_layer(topology, make, (BATCH, ROWS, FEATURES))
    assert_times_add_up(result)
    around = DEVICES[topology] - 1
    moved = sum(size for kind, size in result.bytes.items() if "remote" in kind or "ring model" in kind)
    # Each shard visits every other device, once on the way in and once on the way out.
    assert moved == 2 * around * ACTIVATIONS
    analytic = [p.name for p in result.slowest.phases if p.analytic]
    assert len(analytic) == (2 if backend == "none" else 0)
    assert all(any(name in note for note in result.notes) for name in analytic)


@pytest.mark.slow
def test_a_large_matmul_of_a_layer_agrees_with_the_compilers_estimate():
    """estimated_cycles is up to 9 % above the measured time of a large matmul fusion."""

    def make():
        return fa.nn.ColumnParallelLinear(2048, 8192, backend="none", rngs=nnx.Rngs(0))

    (matmul,) = (e for e in estimated(*play_layer("v5e:2x2", make, (2, 2048, 2048))) if e.kind == "matmul")
    assert 0.9 < matmul.ratio < 1.02


def test_passes_over_hbm_take_half_of_the_compilers_estimates():
    """estimated_cycles is up to twice the measured time of a plain copy or pass."""
    mesh = topology_mesh("v5e:1x1", (1,), ("x",))
    fn = jax.jit(lambda x: jnp.tanh(x) + 1)
    (found,) = estimated(*play_program("v5e:1x1", fn, array((4096, 4096), mesh, P())))
    assert found.kind == "passes"
    assert 0.45 < found.ratio < 0.55
