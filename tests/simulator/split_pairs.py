"""Runs start/done pairs on simulated TPUs: CPU devices that share memory, with race detection.

JAX's own TPU interpret mode forgets a kernel's memory and semaphores when the kernel ends. Here
they last for a `session`, so that a transfer may be started by one kernel and waited for by
another. It covers what pairs are made of: kernels without a grid, on whole arrays in HBM or VMEM,
scalars in SMEM and DMA semaphores that pass in and out.

Between start and done an array in flight has no value: the program is handed NaN (or the largest
integer) for what is being written. The done finds the memory by its semaphores. What XLA does to a
buffer in flight (copy, move, free) cannot be seen here; that is read from compiled programs.

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
    raise ImportError(
        f"the simulator of pairs knows the interpret mode of jax 0.12: this is {jax.__version__}"
    )


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
    # (device, semaphore) -> buffers
    held: dict[tuple[int, int], list[int]] = dataclasses.field(default_factory=dict)
    # (device, buffer) -> ranges
    written: dict[tuple[int, int], list] = dataclasses.field(default_factory=dict)
    barriers: dict[Any, int] = dataclasses.field(default_factory=dict)


_session: _Session | None = None


@contextlib.contextmanager
def session(*, mode, delayed=None):
    """Simulates TPUs for what is traced and run inside, on a mesh of CPU devices; yields a Report.

    Args:
      mode: "eager": a DMA moves its bytes when it is started; "on_wait": when somebody waits for
        it.
      delayed: seconds that a device sleeps before each start, by its number.
    """
    global _session
    report = Report()
    _session = _Session(report, delayed or {})
    params = pltpu.InterpretParams(dma_execution_mode=mode, detect_races=True, on_race="warn")
    jax.clear_caches()
    stock.reset_tpu_interpret_mode_state()
    # A kernel has no effects on a TPU, but here it has callbacks. jax.checkpoint must accept both.
    allowed = effects.remat_allowed_effects
    accepted = allowed._effect_types | {callback.IOEffect, callback.OrderedIOEffect}
    try:
        with (
            mock.patch.object(stock, "interpret_pallas_call", _interpret_pair),
            mock.patch.object(stock, "dma_start", functools.partial(_dma_start, stock.dma_start)),
            mock.patch.object(allowed, "_effect_types", accepted),
            mock.patch.object(ambient_mesh, "platform", return_value="tpu"),
            pltpu.force_tpu_interpret_mode(params),
            quick_callbacks(),
        ):
            yield report
            jax.effects_barrier()
        memory = stock._shared_memory
        if memory is not None:
            report.races = bool(stock.races.races_found)
            devices = range(memory.num_devices)
            report.leftover_semaphores = sum(
                len(memory.get_sempahores_with_nonzero_count(d)) for d in devices
            )
            dmas = [
                task.__self__
                for sem in memory.sem.values()
                for queue in sem.tasks
                for task in queue
            ]
            report.pending_dmas = len(
                {id(dma) for dma in dmas if dma.state is not stock.DmaState.COMPLETED}
            )
    except BaseException:
        dispatch.runtime_tokens.clear()
        raise
    finally:
        _session = None
        stock.reset_tpu_interpret_mode_state()
        jax.clear_caches()


@contextlib.contextmanager
def quick_callbacks():
    """Compiles unoptimised, and hands callbacks numpy arrays.

    In these programs it takes longer to optimise what stands between the callbacks than to run it.
    JAX would turn the arguments of a callback into arrays on a device, whose values the simulators
    read at once; this would take most of the time of a callback.
    """
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    try:
        with mock.patch.object(callback, "io_callback_impl", _call_with_numpy):
            yield
    finally:
        jax.config.update("jax_disable_most_optimizations", before)


def _call_with_numpy(*args, callback, **_):
    # These are copies: the arguments are memory of the program, which reuses it when the callback
    # returns.
    return jax.tree.map(np.asarray, callback(*map(np.array, args)))


def _identity(name, abstract_eval):
    primitive = jax_core.Primitive(name)
    primitive.def_abstract_eval(abstract_eval)
    mlir.register_lowering(primitive, lambda context, x, **_: [x])
    return primitive


# XLA sees a semaphore as an int32; here that is the number of a simulated semaphore.
_number_of = _identity("semaphore_number", lambda x: jax_core.ShapedArray(x.shape, jnp.int32))
_anywhere = _identity("without_memory_space", lambda x: jax_core.ShapedArray(x.shape, x.dtype))
_semaphore = _identity(
    "numbered_semaphore", lambda x, *, dtype: jax_core.ShapedArray(x.shape, dtype)
)


def _is_semaphore(aval) -> bool:
    return jnp.issubdtype(aval.dtype, pallas_core.semaphore_dtype)


@dataclasses.dataclass(frozen=True)
class _Kernel:
    """What a kernel takes and returns. Arrays, scalars and semaphores have numbers, which the
    interpreter calls ids.
    """

    inputs: list  # avals: of scalars, arrays and semaphores
    outputs: list  # avals: of semaphores and arrays
    spaces: list  # of inputs, then of outputs
    aliases: dict[int, int]  # output -> input
    devices: int
    params: pltpu.InterpretParams

    @property
    def starts(self) -> bool:
        return any(map(_is_semaphore, self.outputs))

    @property
    def waits(self) -> bool:
        return any(map(_is_semaphore, self.inputs))

    def buffers(self, ids) -> list[int]:
        """Returns the numbers of the arrays that it takes, and then of those that it makes."""
        found = zip(ids, [*self.inputs, *self.outputs], self.spaces, strict=True)
        return list(
            dict.fromkeys(
                int(n) for n, aval, s in found if s != pltpu.SMEM and not _is_semaphore(aval)
            )
        )


@config._check_vma(False)  # JAX traces kernels without it too
def _interpret_pair(
    *args,
    jaxpr,
    input_output_aliases,
    grid_mapping,
    mesh,
    compiler_params,
    interpret_params,
    **_unused,
):
    """Replaces `interpret_pallas_call`: runs one kernel, whose memory and semaphores outlive it.

    One callback before the kernel and one after it do what JAX does in one callback for each
    buffer, which took most of the time.
    """
    assert not grid_mapping.grid, "the simulator of pairs runs kernels without a grid"
    assert mesh is None
    axis_sizes = jax_core.get_axis_env().axis_sizes
    axis_indices = {name: lax.axis_index(name) for name in axis_sizes}
    device = stock.interpret_utils.device_coords_to_logical_id(
        tuple(axis_indices.values()), axis_sizes, axis_indices
    )
    params = compiler_params.replace(
        collective_id=_barrier_id(jaxpr, compiler_params.collective_id)
    )
    spaces = [
        stock._forward_any_to_hbm(m.transformed_block_aval.memory_space)
        for m in grid_mapping.block_mappings
    ]
    kernel = _Kernel(
        inputs=list(map(jax.typeof, args)),
        outputs=[mapping.array_aval for mapping in grid_mapping.block_mappings_output],
        spaces=[pltpu.SMEM] * grid_mapping.num_index_operands + spaces,
        aliases={output: i for i, output in input_output_aliases},
        devices=int(np.prod(list(axis_sizes.values()))),
        params=interpret_params,
    )
    args = [_number_of.bind(a) if _is_semaphore(jax.typeof(a)) else _anywhere.bind(a) for a in args]
    if kernel.waits:  # the arrays are in flight: they keep their memory, and have no value
        args = [
            a.astype(jnp.int16)
            for a, aval in zip(args, kernel.inputs, strict=True)
            if _is_semaphore(aval)
        ]

    token = jnp.array(stock.TOP_LEVEL_TOKEN_VALUE, jnp.int32)
    numbers = [jax.ShapeDtypeStruct((), jnp.int16)] * len(kernel.spaces)
    token, ids = callback.io_callback(
        functools.partial(_enter, kernel),
        (stock.TOKEN_SHAPE_DTYPE, numbers),
        token,
        device,
        args,
        ordered=True,
    )
    context = stock.InterpretContext(
        grid_mapping=grid_mapping,
        mesh=None,
        axis_sizes=axis_sizes,
        axis_indices=axis_indices,
        device_id=device,
        local_core_id=jnp.int32(0),
        mosaic_params=params,
        interpret_params=interpret_params,
        grid_point=(),
    )
    with pallas_core.grid_env(()):
        token, _ = stock._interpret_jaxpr(jaxpr, *ids, ctx=context, token=token)
    shapes = [
        jax.ShapeDtypeStruct(a.shape, jnp.int32 if _is_semaphore(a) else a.dtype)
        for a in kernel.outputs
    ]
    _, results = callback.io_callback(
        functools.partial(_leave, kernel),
        (stock.TOKEN_SHAPE_DTYPE, shapes),
        token,
        device,
        ids,
        ordered=True,
    )
    return [
        _semaphore.bind(result, dtype=aval.dtype) if _is_semaphore(aval) else result
        for result, aval in zip(results, kernel.outputs, strict=True)
    ]


def _enter(kernel, token, device, args):
    """Allocates memory for the kernel; returns the numbers of its inputs and of its outputs."""
    stock._initialize_shared_memory(
        token, device, kernel.devices, 1, interpret_params=kernel.params
    )
    if kernel.starts:
        time.sleep(_session.delayed.get(int(device), 0))

    def allocate(space, value):
        return stock._allocate_buffer(
            token, device, None, stock.TPU_MEMORY_SPACE_IDXS[space], value
        )[1]

    count = len(kernel.inputs)
    if kernel.waits:  # for the transfer that the first semaphore counts
        with _session.lock:
            held = _session.held[int(device), int(args[0])]
        ids = [*map(np.int16, held[: count - len(args)]), *args]
    else:
        ids = [
            allocate(space, value) for space, value in zip(kernel.spaces[:count], args, strict=True)
        ]
    for i, (aval, space) in enumerate(zip(kernel.outputs, kernel.spaces[count:], strict=True)):
        if i in kernel.aliases:
            ids.append(ids[kernel.aliases[i]])
        elif _is_semaphore(aval):
            ids.append(stock._allocate_semaphores(token, device, None, aval.shape)[1])
        else:
            ids.append(allocate(space, np.full(aval.shape, _nothing(aval.dtype), aval.dtype)))
    return token, ids


def _leave(kernel, token, device, ids):
    """Records what is in flight from now on, or no longer; returns the outputs of the kernel."""
    count, device, buffers = len(kernel.inputs), int(device), kernel.buffers(ids)
    results = []
    with _session.lock:
        for number, aval in zip(ids[count:], kernel.outputs, strict=True):
            if _is_semaphore(aval):
                _session.held[device, int(number)] = buffers
        if kernel.waits:
            for buffer in buffers:
                _session.written.pop((device, buffer), None)
    for number, aval, space in zip(ids[count:], kernel.outputs, kernel.spaces[count:], strict=True):
        if _is_semaphore(aval):
            results.append(number.astype(np.int32))
        else:
            space_id = stock.TPU_MEMORY_SPACE_IDXS[space]
            results.append(_read(token, device, int(number), space=space_id, blank=kernel.starts))
    return token, results


def _barrier_id(jaxpr, collective_id):
    """Returns the number of a kernel's barrier. JAX numbers tags only when it lowers for a TPU."""
    tags = [
        e.params["tag"]
        for e in jaxpr.eqns
        if e.primitive is mosaic_primitives.get_barrier_semaphore_p
    ]
    if not tags:
        return None
    key = tags[0] if collective_id is None else collective_id
    return _session.barriers.setdefault(key, len(_session.barriers))


def _nothing(dtype):
    return jnp.nan if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo(dtype).max


def _dma_start(start, token, device, core, source_space, source, source_transforms, space, target, transforms,
               *args, **options):  # fmt: skip
    """Starts a DMA, and records what is written here: all devices run one program, and send to the
    same buffer.
    """
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
        token,
        device,
        core,
        source_space,
        source,
        source_transforms,
        space,
        target,
        transforms,
        *args,
        **options,
    )


def _read(token, device, buffer, *, space, blank):
    """Returns an output of a kernel; during a transfer, with NaN (or the largest integer) where the
    transfer writes.
    """
    if not blank:
        return stock.get(token, device, 0, space, buffer, ())[1]
    memory = stock._get_shared_memory()
    with memory.lock:
        value = memory.mem[
            stock.TPU_MEMORY_SPACE_NAMES[int(space)], buffer, device, 0
        ].content.copy()
    with _session.lock:
        for region in _session.written.get((device, buffer), ()):
            value[region] = _nothing(value.dtype)
    return value
