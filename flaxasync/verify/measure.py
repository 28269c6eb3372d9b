"""Compares the results of a case with its reference, and measures its time.

TPU kernels run on CPU devices in JAX's interpret mode for TPUs, with race detection. `simulated`
replaces two private functions of JAX 0.12 for that: the interpreter does not know barriers by tag,
nor the types of manual axes within its own loops.
"""

import contextlib
import functools
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import jax
import numpy as np
from jax.experimental.pallas import tpu as pltpu
from jax.extend.core import Jaxpr
from jax.sharding import AbstractDevice, Mesh
from jax.typing import ArrayLike

from flaxasync.check.trace.profile import median_seconds, read_profile
from flaxasync.verify import programs
from flaxasync.verify.cases import Case
from flaxasync.verify.verdict import CaseResult, judge

RUNS = 20
BACK_TO_BACK = 8
"""How often a program runs without a wait in between. A semaphore that a run leaves at a wrong
count, or a device that runs ahead, shows only in the next run."""
# what CPU devices pass for; only the other one has fp8
SIMULATED = "TPU v5e"
SIMULATED_FP8 = "TPU7x"


def run_case(case: Case) -> CaseResult:
    """Compares each result of `BACK_TO_BACK` runs of a case with the reference, and times it.

    Kernels run once on CPUs, in JAX's simulator of TPU kernels. CPUs have no times: devices that
    share their cores hide nothing.
    """
    mesh = programs.make_mesh(case)
    on_cpus = jax.default_backend() == "cpu"
    runs = BACK_TO_BACK
    context: contextlib.AbstractContextManager = contextlib.nullcontext()
    if on_cpus and case.is_kernel and not case.is_pair:
        runs = 1
        context = simulated(mesh, fp8=case.quantization == "fp8")
    with jax.set_mesh(mesh):
        arguments = programs.random_arguments(case, mesh)
        wanted = programs.make_reference(case)(*arguments)
        run = functools.partial(programs.make_program(case), *arguments)
        with context:
            results = [run() for _ in range(runs)]
        errors = {
            name: max(deviation(result[name], array) for result in results)
            for name, array in wanted.items()
        }
        if on_cpus:
            return judge(case, errors)
        seconds = device_seconds(run, f"jit_{programs.NAME}")
    reason = ""
    if seconds is None:
        reason = "no time: the profile of the devices does not show the program"
    return judge(case, errors, seconds, reason)


def deviation(got: ArrayLike, wanted: ArrayLike) -> float:
    """Returns the largest deviation of an array relative to its largest value; where it is not
    finite the largest number, since JSON has no infinity.
    """
    a = np.asarray(got, np.float64)
    b = np.asarray(wanted, np.float64)
    scale = max(np.abs(b).max(), np.finfo(np.float32).tiny)
    error = np.abs(a - b).max() / scale
    return float(np.nan_to_num(error, nan=sys.float_info.max))


def device_seconds(run: Callable[[], object], name: str) -> float | None:
    """Returns the median seconds of the program that `run` starts, by the device's clock; None if
    a profile does not show the name.
    """
    jax.block_until_ready(run())
    with tempfile.TemporaryDirectory(prefix="flaxasync-") as folder:
        with jax.profiler.trace(folder):
            for _ in range(RUNS):
                jax.block_until_ready(run())
        try:
            devices = read_profile(folder)
        except ValueError:
            return None
    return median_seconds(devices, name, RUNS)


@contextlib.contextmanager
def simulated(mesh: Mesh, *, fp8: bool = False) -> Iterator[None]:
    """Makes the devices of a mesh pass for TPUs, of a kind that has fp8 if asked. A race between
    transfers raises.
    """
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call as stock

    params = pltpu.InterpretParams(dma_execution_mode="on_wait", detect_races=True, on_race="raise")
    interpret = functools.partial(_with_barrier, stock.interpret_pallas_call)
    kind = SIMULATED
    if fp8:
        kind = SIMULATED_FP8
    device = AbstractDevice(device_kind=kind, num_cores=1, platform="tpu")
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)  # compiling takes longer than running
    try:
        with (
            mock.patch.object(stock, "interpret_pallas_call", interpret),
            jax.sharding.use_abstract_mesh(mesh.abstract_mesh.update(abstract_device=device)),
            pltpu.force_tpu_interpret_mode(params),
        ):
            yield
            jax.effects_barrier()
    finally:
        jax.config.update("jax_disable_most_optimizations", before)
        pltpu.reset_tpu_interpret_mode_state()
        jax.clear_caches()


def _with_barrier(
    original: Any,
    *args: Any,
    jaxpr: Jaxpr,
    compiler_params: Any,
    **rest: Any,
) -> Any:
    from jax._src import config

    compiler_params = compiler_params or pltpu.CompilerParams()
    if compiler_params.collective_id is None and _has_barrier(jaxpr):
        number = zlib.crc32(str(jaxpr.debug_info.func_name).encode()) % 97
        compiler_params = compiler_params.replace(collective_id=number)
    with config._check_vma(False):
        return original(*args, jaxpr=jaxpr, compiler_params=compiler_params, **rest)


def _has_barrier(jaxpr: Jaxpr) -> bool:
    from jax._src import core
    from jax._src.pallas.mosaic import primitives

    return any(
        e.primitive is primitives.get_barrier_semaphore_p
        or any(map(_has_barrier, core.jaxprs_in_params(e.params)))
        for e in jaxpr.eqns
    )
