"""Runs start/done pairs on simulated TPUs: CPU devices that share memory, with race detection.

JAX's own TPU interpret mode forgets a kernel's memory and semaphores when the kernel ends. Here they last for a
`session`, so that a transfer may be started by one kernel and waited for by another. It covers what pairs are made of:
kernels without a grid, on whole arrays in HBM or VMEM, scalars in SMEM and DMA semaphores that pass in and out.

Between start and done an array in flight has no value: the program is handed NaN (or the largest integer) for what is
being written. The done finds the memory by its semaphores. What XLA does to a buffer in flight (copy, move, free)
cannot be seen here; that is read from compiled programs.

It stands on private functions of one JAX version, and says so where they have changed.
"""

import contextlib
import dataclasses
import functools
import threading
import time
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax._src import callback, config, dispatch, effects
from jax._src import core as jax_core
from jax._src.interpreters import mlir
from jax._src.pallas import core as pallas_core
from jax._src.pallas.mosaic import primitives as mosaic_primitives
from jax._src.pallas.mosaic.interpret import interpret_pallas_call as stock
from jax.experimental.pallas import tpu as pltpu

from flaxasync import mesh as ambient_mesh

if jax.__version_info__[:2] != (0, 12):
    raise ImportError(f"the simulator of pairs knows the interpret mode of jax 0.12: this is {jax.__version__}")


@dataclasses.dataclass
class Report:
    """What a session found. It is complete once the session has ended."""

    races: bool = False
    early_writes: int = 0  # DMAs to a device that had not entered the kernel
    leftover_semaphores: int = 0
    pending_dmas: int = 0

    def problems(self) -> set[str]:
        """Returns the names of the checks that failed."""
        return {field.name for field in dataclasses.fields(self) if getattr(self, field.name)}


@dataclasses.dataclass
class _Session:
    """What lasts from kernel to kernel, beside the shared memory of JAX's interpreter."""

    report: Report
    delayed: dict[int, float]
    lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)
    held: dict[tuple[int, int], list[int]] = dataclasses.field(default_factory=dict)  # (device, semaphore) -> buffers
    written: dict[tuple[int, int], list] = dataclasses.field(default_factory=dict)  # (device, buffer) -> ranges
    barriers: dict[Any, int] = dataclasses.field(default_factory=dict)


_session: _Session | None = None


@contextlib.contextmanager
def session(*, mode, delayed=None):
    """Simulates TPUs for what is traced and run inside, on a mesh of CPU devices; yields a Report.

    Args:
      mode: "eager": a DMA moves its bytes when it is started; "on_wait": when somebody waits for it.
      delayed: seconds that a device sleeps before each start, by its number.
    """
    global _session
    report = Report()
    params = pltpu.InterpretParams(dma_execution_mode=mode, detect_races=True, on_race="warn")
    replaced = stock.interpret_pallas_call, stock.dma_start
    jax.clear_caches()
    stock.reset_tpu_interpret_mode_state()
    _session = _Session(report, delayed or {})
    stock.interpret_pallas_call, stock.dma_start = _interpret_pair, functools.partial(_dma_start, replaced[1])
    # A kernel has no effects on a TPU, but here it has callbacks. jax.checkpoint must accept both.
    allowed = effects.remat_allowed_effects._effect_types
    added = {callback.IOEffect, callback.OrderedIOEffect} - allowed
    allowed |= added
    try:
        with (
            pltpu.force_tpu_interpret_mode(params),
            quick_callbacks(),
            mock.patch.object(ambient_mesh, "platform", return_value="tpu"),
        ):
            yield report
            jax.effects_barrier()
        memory = stock._shared_memory
        if memory is not None:
            report.races = bool(stock.races.races_found)
            devices = range(memory.num_devices)
            report.leftover_semaphores = sum(len(memory.get_sempahores_with_nonzero_count(d)) for d in devices)
            report.pending_dmas = len(_pending(memory))
    except BaseException:
        dispatch.runtime_tokens.clear()
        raise
    finally:
        stock.interpret_pallas_call, stock.dma_start = replaced
        allowed -= added
        _session = None
        stock.reset_tpu_interpret_mode_state()
        jax.clear_caches()


@contextlib.contextmanager
def quick_callbacks():
    """Compiles unoptimised, and hands callbacks numpy arrays.

    In these programs it takes longer to optimise what stands between the callbacks than to run it. JAX would turn the
    arguments of a callback into arrays on a device, whose values the simulators read at once; this would take most of
    the time of a callback.
    """
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    try:
        with mock.patch.object(callback, "io_callback_impl", _call_with_numpy):
            yield
    finally:
        jax.config.update("jax_disable_most_optimizations", before)


def _call_with_numpy(*args, callback, **_):
    # These are copies: the arguments are memory of the program, which reuses it when the callback returns.
    return jax.tree.map(np.asarray, callback(*map(np.array, args)))


def _pending(memory) -> set[int]:
    tasks = [f for s in list(memory.sem.values()) for queue in s.tasks for f in queue]
    return {id(f.__self__) for f in tasks if f.__self__.state is not stock.DmaState.COMPLETED}


def _identity(name, abstract_eval):
    primitive = jax_core.Primitive(name)
    primitive.def_abstract_eval(abstract_eval)
    mlir.register_lowering(primitive, lambda context, x, **_: [x])
    return primitive


# XLA sees a semaphore as an int32; here that is the number of a simulated semaphore.
_number_of = _identity("semaphore_number", lambda x: jax_core.ShapedArray(x.shape, jnp.int32))
_anywhere = _identity("without_memory_space", lambda x: jax_core.ShapedArray(x.shape, x.dtype))
_semaphore = _identity("numbered_semaphore", lambda x, *, dtype: jax_core.ShapedArray(x.shape, dtype))


def _is_semaphore(aval) -> bool:
    return jnp.issubdtype(aval.dtype, pallas_core.semaphore_dtype)


@config._check_vma(False)  # JAX traces kernels without it too
def _interpret_pair(
    *args, jaxpr, input_output_aliases, grid_mapping, mesh, compiler_params, interpret_params, **_unused
):
    """Replaces `interpret_pallas_call`: runs one kernel, whose memory and semaphores outlive it."""
    assert not grid_mapping.grid, "the simulator of pairs runs kernels without a grid"
    assert mesh is None
    count, inputs = grid_mapping.num_index_operands, grid_mapping.num_inputs
    aliases = {output: i - count for i, output in input_output_aliases}
    out_avals = [mapping.array_aval for mapping in grid_mapping.block_mappings_output]
    args = [_number_of.bind(a) if _is_semaphore(jax.typeof(a)) else _anywhere.bind(a) for a in args]
    scalars, arrays = args[:count], args[count:]
    given = [v.aval for v in jaxpr.invars[count : count + inputs]]
    axis_sizes = jax_core.get_axis_env().axis_sizes
    axis_indices = {name: lax.axis_index(name) for name in axis_sizes}
    device = stock.interpret_utils.device_coords_to_logical_id(tuple(axis_indices.values()), axis_sizes, axis_indices)
    params = compiler_params.replace(collective_id=_barrier_id(jaxpr, compiler_params.collective_id))
    spaces = [
        stock._forward_any_to_hbm(mapping.transformed_block_aval.memory_space)
        for mapping in grid_mapping.block_mappings
    ]

    # One callback before the kernel and one after it do what JAX does in one callback for each buffer, which took most
    # of the time.
    token = jnp.array(stock.TOP_LEVEL_TOKEN_VALUE, jnp.int32)
    plan = _Plan(spaces, given, out_avals, aliases, int(np.prod(list(axis_sizes.values()))), interpret_params)
    waits = [a.astype(jnp.int16) for a, aval in zip(arrays, given, strict=True) if _is_semaphore(aval)]
    number = jax.ShapeDtypeStruct((), jnp.int16)
    numbers = [jax.ShapeDtypeStruct(a.shape, jnp.int16) if _is_semaphore(a) else number for a in out_avals]
    token, scalar_ids, array_ids, output_ids = callback.io_callback(
        functools.partial(_enter, plan),
        (stock.TOKEN_SHAPE_DTYPE, [number] * count, [number] * sum(not _is_semaphore(a) for a in given), numbers),
        token, device, scalars, [] if waits else arrays, waits, ordered=True,
    )  # fmt: skip
    left = iter(array_ids)
    input_ids = [
        a.astype(jnp.int16) if _is_semaphore(aval) else next(left) for a, aval in zip(arrays, given, strict=True)
    ]

    context = stock.InterpretContext(
        grid_mapping=grid_mapping, mesh=None, axis_sizes=axis_sizes, axis_indices=axis_indices, device_id=device,
        local_core_id=jnp.int32(0), mosaic_params=params, interpret_params=interpret_params, grid_point=(),
    )  # fmt: skip
    with pallas_core.grid_env(()):
        token, _ = stock._interpret_jaxpr(jaxpr, *scalar_ids, *input_ids, *output_ids, ctx=context, token=token)

    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in out_avals if not _is_semaphore(a)]
    _, results = callback.io_callback(
        functools.partial(_leave, plan), (stock.TOKEN_SHAPE_DTYPE, shapes),
        token, device, array_ids, output_ids, waits, ordered=True,
    )  # fmt: skip
    left = iter(results)
    return [
        _semaphore.bind(n.astype(jnp.int32), dtype=aval.dtype) if _is_semaphore(aval) else next(left)
        for n, aval in zip(output_ids, out_avals, strict=True)
    ]


@dataclasses.dataclass(frozen=True)
class _Plan:
    """What a kernel takes and returns: semaphores, and arrays in memory."""

    spaces: list  # of inputs, then of outputs
    inputs: list  # avals, like the outputs
    outputs: list
    aliases: dict[int, int]  # output -> input
    devices: int
    params: pltpu.InterpretParams

    @property
    def starts(self) -> bool:
        return any(_is_semaphore(aval) for aval in self.outputs)


def _enter(plan, token, device, scalars, values, waits):
    """Allocates memory for the kernel; returns the numbers of the scalars, the inputs and the outputs."""
    stock._initialize_shared_memory(token, device, plan.devices, 1, interpret_params=plan.params)
    if plan.starts:
        time.sleep(_session.delayed.get(int(device), 0))

    def allocate(space, value):
        return stock._allocate_buffer(token, device, None, stock.TPU_MEMORY_SPACE_IDXS[space], value)[1]

    scalar_ids = [allocate(pltpu.SMEM, value) for value in scalars]
    arrays = [i for i, aval in enumerate(plan.inputs) if not _is_semaphore(aval)]
    if waits:  # the buffers of the transfer that the first semaphore counts are in flight, and keep their memory
        with _session.lock:
            held = _session.held[int(device), int(waits[0])]
        array_ids = [np.int16(n) for n in held[: len(arrays)]]
    else:
        array_ids = [allocate(plan.spaces[i], value) for i, value in zip(arrays, values, strict=True)]
    by_input, output_ids = dict(zip(arrays, array_ids, strict=True)), []
    for i, (aval, space) in enumerate(zip(plan.outputs, plan.spaces[len(plan.inputs) :], strict=True)):
        if i in plan.aliases:
            output_ids.append(by_input[plan.aliases[i]])
        elif _is_semaphore(aval):
            output_ids.append(stock._allocate_semaphores(token, device, None, aval.shape)[1])
        else:
            output_ids.append(allocate(space, np.full(aval.shape, _nothing(aval.dtype), aval.dtype)))
    return token, scalar_ids, array_ids, output_ids


def _leave(plan, token, device, array_ids, output_ids, waits):
    """Records what is in flight from now on, or no longer; returns the outputs of the kernel."""
    outputs = list(zip(output_ids, plan.outputs, plan.spaces[len(plan.inputs) :], strict=True))
    held = [*array_ids, *(n for i, (n, aval, _) in enumerate(outputs)
                          if not _is_semaphore(aval) and i not in plan.aliases)]  # fmt: skip
    with _session.lock:
        for number in (n for n, aval, _ in outputs if _is_semaphore(aval)):
            _session.held[int(device), int(number)] = [int(b) for b in held]
        for buffer in held if waits and not plan.starts else ():
            _session.written.pop((int(device), int(buffer)), None)
    return token, [
        _read(token, device, n, space=stock.TPU_MEMORY_SPACE_IDXS[space], blank=plan.starts)
        for n, aval, space in outputs
        if not _is_semaphore(aval)
    ]


def _barrier_id(jaxpr, collective_id):
    """Returns the number of a kernel's barrier. JAX numbers tags only when it lowers for a TPU."""
    tags = [e.params["tag"] for e in jaxpr.eqns if e.primitive is mosaic_primitives.get_barrier_semaphore_p]
    if not tags:
        return None
    key = tags[0] if collective_id is None else collective_id
    return _session.barriers.setdefault(key, len(_session.barriers))


def _nothing(dtype):
    return jnp.nan if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo(dtype).max


def _dma_start(start, token, device, core, source_space, source, source_transforms, space, target, transforms,
               *args, **options):  # fmt: skip
    """Starts a DMA, and records what is written here: all devices run one program, and send to the same buffer."""
    to = int(device if args[2] is None else args[2])
    memory = stock._get_shared_memory()
    key = (stock.TPU_MEMORY_SPACE_NAMES[int(space)], int(target), to, 0)
    deadline = time.monotonic() + 5
    if key not in memory.mem:
        with _session.lock:
            _session.report.early_writes += 1
        while key not in memory.mem and time.monotonic() < deadline:
            time.sleep(0.005)
    region = stock.interpret_utils.to_range(jax.tree.map(int, transforms))
    with _session.lock:
        _session.written.setdefault((int(device), int(target)), []).append(region)
    return start(
        token, device, core, source_space, source, source_transforms, space, target, transforms, *args, **options
    )


def _read(token, device, buffer, *, space, blank):
    """Returns an output of a kernel; during a transfer, with NaN (or the largest integer) where the transfer writes."""
    device, buffer = int(device), int(buffer)
    if not blank:
        return stock.get(token, device, 0, space, buffer, ())[1]
    memory = stock._get_shared_memory()
    with memory.lock:
        value = memory.mem[stock.TPU_MEMORY_SPACE_NAMES[int(space)], buffer, device, 0].content.copy()
    with _session.lock:
        for region in _session.written.get((device, buffer), ()):
            value[region] = _nothing(value.dtype)
    return value
