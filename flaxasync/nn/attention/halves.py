"""Attention on GPUs in two halves of the batch: the rows of one half travel while the other half
attends.

The projections of attention are narrow where many devices share its heads, so that a ring has
little to hide its transfers behind. `flaxasync.ops.attention.halves` hides them behind all work of
the other half.
"""

import math

from jax import Array, lax
from jax import numpy as jnp

from flaxasync import mesh
from flaxasync.hardware import Gpu
from flaxasync.mesh import vary_like
from flaxasync.nn import shards
from flaxasync.nn.attention.exchange import AttentionCall, Weights
from flaxasync.nn.attention.heads import Inputs, Norms
from flaxasync.ops.attention.halves import HalvedAttention, halved_attention
from flaxasync.ops.matmul.switch import WholeExecutor, join_columns
from flaxasync.ops.plan import Plan, plan, unknown_on_gpus
from flaxasync.ops.roofline import Shape, attention_on_gpus, hop_seconds


def are_faster(call: AttentionCall, x: Array, weights: Weights, inputs: Inputs[Array]) -> bool:
    """Says whether a call on this device's rows can take halves, and is predicted to be faster so.

    A caller who names a ring (`backend="xla"`) gets it.
    """
    gpu = mesh.gpu()
    if gpu is None or not mesh.gpus_hide_latency(gpu) or not _can_take_halves(call, x, inputs):
        return False
    settings = call.settings
    size = lax.axis_size(settings.axis_name)
    whole = _plans(call, x.shape, weights, gpu, size)
    if settings.backend is None:
        projected = sum(found.seconds[found.backend] for found in whole)
    else:
        projected = sum(found.seconds["none"] for found in whole)
    attended = _attention_seconds(call, x.shape, weights, gpu, size)
    return _seconds(call, x.shape, weights, gpu, size) < projected + attended


def _can_take_halves(call: AttentionCall, x: Array, inputs: Inputs[Array]) -> bool:
    """Says whether a call has two sequences or more, whose rows travel, and asks for nothing that
    halves lack.
    """
    settings = call.settings
    size = lax.axis_size(settings.axis_name)
    travels = call.rows_sharded and size > 1 and x.size > 0
    if not travels or x.shape[0] < 2 or call.attention.context_axis is not None:
        return False
    if settings.backend not in (None, "none") or settings.quantization is not None:
        return False
    if shards.needs_one_product(settings):
        return False
    others = inputs._replace(segment_ids=None)
    if any(array is not None for array in others):
        return False
    return unknown_on_gpus("all_gather_matmul", size, {}) is None


def _seconds(call: AttentionCall, x: Shape, weights: Weights, gpu: Gpu, size: int) -> float:
    """Predicts halves of the batch, with gradients: the transfers of one half have the work of the
    other beside them. Rows that are not kept are gathered twice.
    """
    work = transfers = 0.0
    for batch in _sizes(x[0]):
        half = (batch, *x[1:])
        costs = [found.costs["none"] for found in _plans(call, half, weights, gpu, size)]
        work += sum(cost.compute + cost.overhead for cost in costs)
        work += _attention_seconds(call, half, weights, gpu, size)
        transfers += sum(cost.exposed for cost in costs)
        if not _keeps(call, x, size):
            transfers += hop_seconds(gpu, (size - 1) * _bytes(call, half))
    beside_nothing = transfers / 2
    return work + beside_nothing + max(0.0, transfers / 2 - work / 2)


def _sizes(batch: int) -> tuple[int, int]:
    """Returns how many sequences each half has."""
    return batch // 2, batch - batch // 2


def _bytes(call: AttentionCall, x: Shape) -> int:
    """Returns the bytes of an input as it travels."""
    return math.prod(x) * jnp.dtype(call.settings.dtype).itemsize


def _keeps(call: AttentionCall, x: Shape, size: int) -> bool:
    """Says whether the rows that are gathered are kept for the backward pass."""
    return size * _bytes(call, x) <= call.settings.gathered_bytes


def _attention_seconds(
    call: AttentionCall, x: Shape, weights: Weights, gpu: Gpu, size: int
) -> float:
    """Predicts the attention of this device's heads, with gradients."""
    batch, rows, _ = x
    features = weights.out[0].shape[0]
    return attention_on_gpus(gpu, batch, size * rows, features, causal=call.attention.causal)


def _plans(
    call: AttentionCall, x: Shape, weights: Weights, gpu: Gpu, size: int
) -> tuple[Plan, Plan]:
    """Returns the plans of the projections of the inputs, and of that of the output."""
    settings = call.settings
    itemsize = jnp.dtype(settings.dtype).itemsize
    batch, rows, features = x
    kernel_of_out, _ = weights.out
    inputs = plan(
        "all_gather_matmul",
        x,
        *(kernel.shape for kernel, _ in weights[:3]),
        chip=gpu,
        ring=size,
        itemsize=itemsize,
        gathered_bytes=settings.gathered_bytes,
    )
    heads = (batch, size * rows, kernel_of_out.shape[0])
    output = plan(
        "matmul_reduce_scatter",
        heads,
        (heads[-1], features),
        chip=gpu,
        ring=size,
        itemsize=itemsize,
    )
    return inputs, output


def apply(
    call: AttentionCall, x: Array, weights: Weights, norms: Norms, segment_ids: Array | None
) -> Array:
    """Applies a layer to this device's rows [b, s / R, k], inside shard_map; the segment ids are
    [b, s].
    """
    settings = call.settings
    x, kernels = shards.operands(x, weights[:3], settings)
    size = lax.axis_size(settings.axis_name)
    sizes = _sizes(x.shape[0])
    widths = [kernel.shape[1] for kernel in kernels]
    of_inputs = tuple(bias for _, bias in weights[:3])

    # Static for the VJP rule: all arrays come as arguments.
    def attend(z: Array, of_half: Array | None, shared: tuple[tuple, Norms]) -> Array:
        biases, norms = shared
        q, k, v = (
            shards.finish(y, bias, settings)
            for y, bias in zip(lax.split(z, widths, 2), biases, strict=True)
        )
        heads = call.attention.attend(q, k, v, Inputs(segment_ids=of_half), norms)
        return heads.astype(settings.dtype)

    segments: tuple[Array | None, ...] = (None, None)
    if segment_ids is not None:
        segments = tuple(lax.split(segment_ids, sizes))
    executor = WholeExecutor(settings.axis_name, settings.precision)
    block = HalvedAttention(executor, attend, _keeps(call, x.shape, size))
    w = join_columns(kernels, False)
    kernel, bias = weights.out
    out = shards.cast(kernel, x, settings.dtype)
    shared = vary_like((of_inputs, norms), x)
    ys = halved_attention(block, tuple(lax.split(x, sizes)), w, out, segments, shared)
    return shards.finish(lax.concatenate(ys, 0), bias, settings)
