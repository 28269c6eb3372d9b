"""A mesh of simulated TPUs: CPU devices, JAX's TPU interpret mode with race detection, the memory
sizes of a v5e.
"""

import contextlib
import io

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import dispatch
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AbstractDevice, Mesh, NamedSharding

from flaxasync.verify import measure
from tests.simulator.split_pairs import quick_callbacks


@contextlib.contextmanager
def simulated(shape, names, mode="on_wait", *, races=True, cores=1):
    """The ambient mesh is one of simulated TPUs: of v5e, or of v5p if they have two cores.

    A race raises, if `races`, and a semaphore that is left over. The simulator gives step c of a
    grid of cores to core c, as libtpu does, because its seed of 0 leaves two steps in order.
    """
    mesh = Mesh(np.array(jax.devices()[: int(np.prod(shape))]).reshape(shape), names)
    params = pltpu.InterpretParams(
        dma_execution_mode=mode,
        detect_races=races,
        on_race="raise",
        vector_clock_size=1024,
        num_cores_or_threads=cores,
        random_seed=0,
    )
    jax.clear_caches()
    pltpu.reset_tpu_interpret_mode_state()
    with (
        contextlib.ExitStack() as after,
        # what is left over is printed, not raised
        contextlib.redirect_stdout(io.StringIO()) as printed,
        measure.simulated(mesh),
        pltpu.force_tpu_interpret_mode(params),
        quick_callbacks(),
        of_two_cores(mesh) if cores > 1 else contextlib.nullcontext(),
    ):
        # or else a later test would raise the error of this program
        after.callback(dispatch.runtime_tokens.clear)
        yield mesh
        jax.effects_barrier()
        assert "non-zero count" not in printed.getvalue(), printed.getvalue()


def of_two_cores(mesh):
    device = AbstractDevice(device_kind="TPU v5p", num_cores=2, platform="tpu")
    return jax.sharding.use_abstract_mesh(mesh.abstract_mesh.update(abstract_device=device))


def run(fn, operands, in_specs, out_specs, *, shape, names=("ring",), mode="on_wait", cores=1):
    """Runs a function of the operands' shards on simulated TPUs; returns float32 values. Each
    operand has a spec.
    """
    with simulated(shape, names, mode, cores=cores) as mesh:
        placed = [
            jax.tree.map(lambda a, spec=spec: jax.device_put(a, NamedSharding(mesh, spec)), operand)
            for operand, spec in zip(operands, in_specs, strict=True)
        ]
        results = jax.jit(jax.shard_map(fn, in_specs=in_specs, out_specs=out_specs))(*placed)
        return as_float32(results)


def arranged(mesh, shapes, specs):
    """Returns bfloat16 arguments of these global shapes, to compile for a mesh of a topology."""
    shardings = [NamedSharding(mesh, spec) for spec in specs]
    return [
        jax.ShapeDtypeStruct(s, jnp.bfloat16, sharding=on)
        for s, on in zip(shapes, shardings, strict=True)
    ]


def draw(shape, dtype="float32", seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(jnp.dtype(dtype))


def as_float32(arrays):
    return jax.tree.map(lambda a: np.asarray(a, np.float32), arrays)


def assert_close(got, want, dtype="float32"):
    """In float32 the order of additions differs; in bfloat16 results are rounded, and sums where
    they travel.
    """
    tolerance = {"float32": 1e-5, "bfloat16": 1e-2}[dtype]
    np.testing.assert_allclose(got, want, rtol=0, atol=tolerance * np.abs(want).max())
