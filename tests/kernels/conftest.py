"""A mesh of simulated TPUs: CPU devices, JAX's TPU interpret mode with race detection, the memory sizes of a v5e."""

import contextlib
import functools
import io
import zlib
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src import config, core, dispatch
from jax._src.pallas.mosaic import primitives as mosaic_primitives
from jax._src.pallas.mosaic.interpret import interpret_pallas_call as stock
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AbstractDevice, Mesh, NamedSharding

from flaxasync.kernels.engine.matmul import MatmulTiles
from tests.simulator.split_pairs import quick_callbacks

V5E = AbstractDevice(device_kind="TPU v5e", num_cores=1, platform="tpu")


@contextlib.contextmanager
def simulated(shape, names, mode="on_wait"):
    """The ambient mesh is one of simulated TPUs. A race raises; so does a semaphore that is left over."""
    devices = np.array(jax.devices()[: int(np.prod(shape))]).reshape(shape)
    mesh = Mesh(devices, names)
    params = pltpu.InterpretParams(dma_execution_mode=mode, detect_races=True, on_race="raise", vector_clock_size=1024)
    jax.clear_caches()
    pltpu.reset_tpu_interpret_mode_state()
    original = stock.interpret_pallas_call
    with (
        contextlib.ExitStack() as after,
        contextlib.redirect_stdout(io.StringIO()) as printed,  # what is left over is printed, not raised
        mock.patch.object(stock, "interpret_pallas_call", functools.partial(_with_barrier, original)),
        jax.sharding.use_abstract_mesh(mesh.abstract_mesh.update(abstract_device=V5E)),
        pltpu.force_tpu_interpret_mode(params),
        quick_callbacks(),
    ):
        for reset in (jax.clear_caches, pltpu.reset_tpu_interpret_mode_state, dispatch.runtime_tokens.clear):
            after.callback(reset)  # also where the program failed, whose error a later test would raise again
        yield mesh
        jax.effects_barrier()
        assert "non-zero count" not in printed.getvalue(), printed.getvalue()


def run(fn, operands, in_specs, out_specs, *, shape, names=("ring",), mode="on_wait"):
    """Runs a function of the operands' shards on simulated TPUs; returns float32 values. Each operand has a spec."""
    with simulated(shape, names, mode) as mesh:
        placed = [
            jax.tree.map(lambda a, spec=spec: jax.device_put(a, NamedSharding(mesh, spec)), operand)
            for operand, spec in zip(operands, in_specs, strict=True)
        ]
        results = jax.jit(jax.shard_map(fn, in_specs=in_specs, out_specs=out_specs))(*placed)
        return as_float32(results)


def arranged(mesh, shapes, specs):
    """Returns bfloat16 arguments of these global shapes, to compile for a mesh of a topology."""
    shardings = [NamedSharding(mesh, spec) for spec in specs]
    return [jax.ShapeDtypeStruct(s, jnp.bfloat16, sharding=on) for s, on in zip(shapes, shardings, strict=True)]


def draw(shape, dtype="float32", seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(jnp.dtype(dtype))


def as_float32(arrays):
    return jax.tree.map(lambda a: np.asarray(a, np.float32), arrays)


def assert_close(got, want, dtype="float32"):
    """In float32 the order of additions differs; in bfloat16 results are rounded, and sums where they travel."""
    tolerance = {"float32": 1e-5, "bfloat16": 1e-2}[dtype]
    np.testing.assert_allclose(got, want, rtol=0, atol=tolerance * np.abs(want).max())


def _with_barrier(original, *args, jaxpr, compiler_params, name=None, **rest):
    """The interpreter does not know barriers by tag, nor the types of manual axes within its own loops."""
    compiler_params = compiler_params or pltpu.CompilerParams()
    if compiler_params.collective_id is None and _has_barrier(jaxpr):
        compiler_params = compiler_params.replace(
            collective_id=zlib.crc32(str(jaxpr.debug_info.func_name).encode()) % 97
        )
    with config._check_vma(False):
        return original(*args, jaxpr=jaxpr, compiler_params=compiler_params, name=name, **rest)


def _has_barrier(jaxpr):
    return any(
        e.primitive is mosaic_primitives.get_barrier_semaphore_p
        or any(map(_has_barrier, core.jaxprs_in_params(e.params)))
        for e in jaxpr.eqns
    )


@pytest.fixture(params=["on_wait", "eager"])
def mode(request):
    return request.param


@pytest.fixture
def w_comes_again(monkeypatch):
    """As if w did not fit in vector memory beside all other buffers."""
    monkeypatch.setattr(MatmulTiles, "keeping_w", lambda self, used_bytes, dtype: (self, used_bytes))
