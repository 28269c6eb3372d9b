"""An MLP of NNX with XLA's collectives and with those of the package."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from benchmarks import tp_mlp
from benchmarks.player_layers import estimated
from benchmarks.programs import array, play_program
from flaxasync.check import topology_devices, topology_mesh, topology_size
from tests.check.player.programs import assert_times_add_up


def play_mlp(topology, backend, shape):
    mesh = tp_mlp.ring(topology_devices(topology), backend)
    with jax.set_mesh(mesh):
        fn, arguments = tp_mlp.program(backend, shape, mesh, backward=False)
        return play_program(topology, fn, *arguments)


@pytest.mark.parametrize("topology", [pytest.param("v5e:2x2", marks=pytest.mark.slow), "v5e:2x4"])
@pytest.mark.parametrize("backend", [pytest.param("none", marks=pytest.mark.slow), "xla", "pallas"])
def test_an_mlp_runs_to_the_end(topology, backend):
    shape = tp_mlp.Shape(batch=2, sequence=1024, model=512, hidden=1024)
    result, _ = play_mlp(topology, backend, shape)
    assert_times_add_up(result)
    moved = sum(size for kind, size in result.bytes.items() if "remote" in kind or "ring model" in kind)
    # Each shard of the activations visits every other device, once on the way in and once on the way out.
    assert moved == 2 * (topology_size(topology) - 1) * shape.batch * shape.sequence * shape.model * 2
    analytic = [p.name for p in result.slowest.phases if p.analytic]
    assert len(analytic) == (2 if backend == "none" else 0)
    assert all(any(name in note for note in result.notes) for name in analytic)


@pytest.mark.slow
def test_large_matmuls_of_a_layer_agree_with_the_compilers_estimate():
    """estimated_cycles is up to 9 % above the measured time of a large matmul fusion."""
    shape = tp_mlp.Shape(batch=2, sequence=2048, model=2048, hidden=8192)
    up, down = (e for e in estimated(*play_mlp("v5e:2x2", "none", shape)) if e.kind == "matmul")
    assert 0.9 < up.ratio < 1.02
    assert 0.9 < down.ratio < 1.02


def test_passes_over_hbm_take_half_of_the_compilers_estimates():
    """estimated_cycles is up to twice the measured time of a plain copy or pass."""
    mesh = topology_mesh("v5e:1x1", (1,), ("x",))
    fn = jax.jit(lambda x: jnp.tanh(x) + 1)
    (found,) = estimated(*play_program("v5e:1x1", fn, array((4096, 4096), mesh, P())))
    assert found.kind == "passes"
    assert 0.45 < found.ratio < 0.55
