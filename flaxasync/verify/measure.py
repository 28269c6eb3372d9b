"""Compares the results of a case with its reference, and measures its time.

TPU kernels run on CPU devices in JAX's interpret mode for TPUs, with race detection. `simulated`
replaces two private functions of JAX 0.12 for that: the interpreter does not know barriers by tag,
nor the types of manual axes within its own loops.
"""

import contextlib
import dataclasses
import functools
import statistics
import tempfile
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest import mock

import jax
import numpy as np
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AbstractDevice, Mesh
from jax.typing import ArrayLike

from flaxasync.check.trace.profile import median_seconds, read_profile
from flaxasync.verify import programs
from flaxasync.verify.cases import Case

RUNS = 20
TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2, "attention": 1e-4}
"""The largest deviation relative to the largest value. float32 differs by the order of additions,
attention also by its softmax in base 2; bfloat16 keeps 8 bits, and partial sums travel in it."""
ROUNDING = {"int8": 0.05, "fp8": 0.2}
"""The same for plain products in 8 bits, which are compared with products that are not rounded."""
BACK_TO_BACK = 8
"""How often a program runs on its first input without a wait in between. A semaphore that a run
leaves at a wrong count, or a device that runs ahead, shows only in the next run."""
PHASES = 40  # instructions whose seconds are told, the longest first
# what CPU devices pass for; only the other one has fp8
SIMULATED = "TPU v5e"
SIMULATED_FP8 = "TPU7x"


@dataclasses.dataclass(frozen=True)
class Timing:
    """The time of a program. The fields of this class and of the next one are those of
    `verdict.CaseResult`.
    """

    seconds: float
    clock: str
    phases: dict[str, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Measurement:
    """What running a case gave."""

    errors: dict[str, float]
    tolerance: float  # the error that is allowed
    timing: Timing | None
    missing: dict[str, str] = dataclasses.field(default_factory=dict)


def run_case(case: Case, *, repeats: int) -> Measurement:
    """Runs a case on several random inputs, compares each result with the reference, and times
    it.
    """
    mesh = programs.make_mesh(case)
    program = programs.make_program(case)
    if case.simulate:
        errors = check_values(case, program, repeats=repeats, runs=1)
        return Measurement(errors, tolerance(case), timing=None)
    errors = check_values(case, program, repeats=repeats, runs=BACK_TO_BACK)
    with jax.set_mesh(mesh):
        arguments = programs.random_arguments(case, mesh, seed=0)
        timing = time_program(lambda: program(*arguments), f"jit_{programs.NAME}")
    return Measurement(errors, tolerance(case), timing)


def check_values(case: Case, program: Callable, *, repeats: int, runs: int) -> dict[str, float]:
    """Returns the largest deviation of each result from its reference, on `repeats` random inputs.

    The program runs `runs` times on the first input, without a wait.
    """
    mesh = programs.make_mesh(case)
    reference = programs.make_program(case, reference=True)
    errors: dict[str, float] = {}
    for seed in range(repeats):
        with jax.set_mesh(mesh):
            arguments = programs.random_arguments(case, mesh, seed)
            wanted = reference(*arguments)
        context: contextlib.AbstractContextManager = jax.set_mesh(mesh)
        if case.simulate:
            context = simulated(mesh, fp8=case.quantization == "fp8")
        with context:
            results = [program(*arguments)]
            if seed == 0:
                results += [program(*arguments) for _ in range(runs - 1)]
            for result in results:
                for name, error in compare_results(result, wanted).items():
                    errors[name] = max(errors.get(name, 0.0), error)
    return errors


def tolerance(case: Case) -> float:
    """Returns the deviation that is allowed, relative to the largest value."""
    if case.quantization is not None and case.plain:
        return ROUNDING[case.quantization]
    if "attention" in case.op and case.dtype == "float32":
        return TOLERANCE["attention"]
    return TOLERANCE[case.dtype]


def compare_results(
    got: Mapping[str, ArrayLike], wanted: Mapping[str, ArrayLike]
) -> dict[str, float]:
    """Returns the largest deviation of each array relative to its largest value; infinite where it
    is not finite.
    """
    errors = {}
    for name, value in wanted.items():
        a = np.asarray(got[name], np.float64)
        b = np.asarray(value, np.float64)
        scale = max(np.abs(b).max(), np.finfo(np.float32).tiny)
        error = float(np.abs(a - b).max() / scale)
        errors[name] = float(np.nan_to_num(error, nan=np.inf))
    return errors


def time_program(run: Callable[[], object], name: str, runs: int = RUNS) -> Timing:
    """Measures the program that `run` starts by the device's clock, on CPUs by the host's; a
    profile shows its name.
    """
    jax.block_until_ready(run())
    spent = []
    with tempfile.TemporaryDirectory(prefix="flaxasync-") as folder:
        on_device = jax.default_backend() != "cpu"
        with jax.profiler.trace(folder) if on_device else contextlib.nullcontext():
            for _ in range(runs):
                begin = time.perf_counter()
                jax.block_until_ready(run())
                spent.append(time.perf_counter() - begin)
        if on_device:
            with contextlib.suppress(ValueError):
                devices = read_profile(folder)
                measured = median_seconds(devices, name, runs)
                if measured is not None:
                    phases: Counter[str] = Counter()
                    for event in devices[0].events:
                        phases[event.name] += (event.end - event.start) / runs  # type: ignore[assignment]
                    return Timing(measured, "device", dict(phases.most_common(PHASES)))
    return Timing(statistics.median(spent), "host")


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
    jaxpr: Any,
    compiler_params: Any,
    name: str | None = None,
    **rest: Any,
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
        e.primitive is primitives.get_barrier_semaphore_p
        or any(map(_has_barrier, core.jaxprs_in_params(e.params)))
        for e in jaxpr.eqns
    )
