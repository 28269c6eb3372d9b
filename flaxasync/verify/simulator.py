"""Runs the TPU kernels of a case on CPU devices, in JAX's interpret mode for TPUs, with race detection.

It replaces two private functions of JAX 0.12: the interpreter does not know barriers by tag, nor the types of manual
axes within its own loops.
"""

import contextlib
import functools
import zlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import jax
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AbstractDevice, Mesh

DEVICE = AbstractDevice(device_kind="TPU v5e", num_cores=1, platform="tpu")


@contextlib.contextmanager
def simulated(mesh: Mesh) -> Iterator[None]:
    """Makes the devices of a mesh pass for TPUs of kind v5e. A race between transfers raises."""
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call as stock

    params = pltpu.InterpretParams(dma_execution_mode="on_wait", detect_races=True, on_race="raise")
    interpret = functools.partial(_with_barrier, stock.interpret_pallas_call)
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)  # compiling takes longer than running
    try:
        with (
            mock.patch.object(stock, "interpret_pallas_call", interpret),
            jax.sharding.use_abstract_mesh(mesh.abstract_mesh.update(abstract_device=DEVICE)),
            pltpu.force_tpu_interpret_mode(params),
        ):
            yield
            jax.effects_barrier()
    finally:
        jax.config.update("jax_disable_most_optimizations", before)
        pltpu.reset_tpu_interpret_mode_state()
        jax.clear_caches()


def _with_barrier(
    original: Any, *args: Any, jaxpr: Any, compiler_params: Any, name: str | None = None, **rest: Any
) -> Any:
    from jax._src import config

    compiler_params = compiler_params or pltpu.CompilerParams()
    if compiler_params.collective_id is None and _has_barrier(jaxpr):
        number = zlib.crc32(str(jaxpr.debug_info.func_name).encode()) % 97
        compiler_params = compiler_params.replace(collective_id=number)
    with config._check_vma(False):
        return original(*args, jaxpr=jaxpr, compiler_params=compiler_params, name=name, **rest)


def _has_barrier(jaxpr: Any) -> bool:
    from jax._src import core
    from jax._src.pallas.mosaic import primitives

    return any(
        e.primitive is primitives.get_barrier_semaphore_p or any(map(_has_barrier, core.jaxprs_in_params(e.params)))
        for e in jaxpr.eqns
    )
