"""How a call of an attention layer runs inside shard_map: rows of its input travel, or weights and
heads do.

The second form, which only self-attention has, is `flaxasync.ops.attention.exchanged`.
"""

import dataclasses
import functools
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from flaxasync import mesh
from flaxasync.mesh import UnsupportedError, vary_like
from flaxasync.nn import shards
from flaxasync.nn.attention.heads import HeadAttention, Inputs, Norms
from flaxasync.nn.attention.rotary import RotaryTables
from flaxasync.nn.shards import Linear
from flaxasync.ops import trust
from flaxasync.ops.attention.exchanged import (
    WORTH,
    ExchangedAttention,
    Sizes,
    exchanged_attention,
    times_as_fast,
)
from flaxasync.ops.matmul.api import Options, choose_executor
from flaxasync.ops.matmul.products import row_major
from flaxasync.ops.matmul.vjp import Executor
from flaxasync.ops.quantization import Quantized
from flaxasync.transport.direct import LANES, in_whole_tiles

# by XLA's all-to-all, or by copies from every device to every other one
type Form = Literal["xla", "direct"]


class Weights(NamedTuple):
    """The kernels and biases of a layer's projections."""

    query: Linear
    key: Linear
    value: Linear
    out: Linear


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionCall(shards.Call):
    """What is static in a call. Hashable. The parts are in the order of `Weights`."""

    attention: HeadAttention
    splits_heads: bool  # whether each device has a share of the heads, and not all of them
    # whether the layer's axis shards the rows that the projections of keys and values need
    kv_rows_sharded: bool


def project_inputs(
    call: AttentionCall, x: Array, w: Weights, inputs: Inputs[Array]
) -> tuple[Array, ...]:
    """Returns queries, keys and values. Projections of one input share one gather of it."""
    column = functools.partial(shards.column, settings=call.settings)
    if inputs.inputs_k is None:
        return column(x, (w.query, w.key, w.value), rows_sharded=call.rows_sharded)
    queries = column(x, (w.query,), rows_sharded=call.rows_sharded)
    column = functools.partial(column, rows_sharded=call.kv_rows_sharded)
    if inputs.inputs_v is None:
        return *queries, *column(inputs.inputs_k, (w.key, w.value))
    keys = column(inputs.inputs_k, (w.key,))
    return *queries, *keys, *column(inputs.inputs_v, (w.value,))


def project_output(call: AttentionCall, heads: Array, out: Linear) -> Array:
    """Returns the output of the layer from that of the heads, [b, s, h * d]."""
    if call.splits_heads:
        return shards.row(heads, out, call.settings, rows_sharded=call.rows_sharded)
    return shards.column(heads, (out,), call.settings, rows_sharded=False)[0]


def choose(call: AttentionCall, x: Array, weights: Weights, inputs: Inputs[Array]) -> Form | None:
    """Says what exchanges heads; None where rows travel. Raises NotImplementedError if heads must
    travel but cannot.
    """
    settings = call.settings
    wanted = call.attention.exchange_heads
    size = lax.axis_size(settings.axis_name)
    if wanted is False or size == 1 or x.size == 0:
        return None
    given = [
        name.replace("dropout_key", "dropout")
        for name, array in inputs._asdict().items()
        if array is not None and name != "segment_ids"
    ]
    lacks = {
        "an input that every device has whole": not call.rows_sharded,
        "split sequences": call.attention.context_axis is not None,
        "kernels that were gathered in 8 bits": any(
            isinstance(kernel, Quantized) for kernel, _ in weights
        ),
        "dot_general, and a wider preferred_element_type": shards.needs_one_product(settings),
    }
    lacking = [what for what, is_so in lacks.items() if is_so]
    if given:
        lacking = [", ".join(given), *lacking]
    if lacking:
        if wanted:
            raise UnsupportedError(
                f"an attention layer with exchange_heads=True lacks {lacking[0]}: use "
                "exchange_heads=None or False"
            )
        return None
    batch, rows, features = x.shape
    dtype = jnp.dtype(settings.dtype)
    qkv_features = sum(kernel.shape[1] for kernel, _ in weights[:3])
    out_kernel, _ = weights.out
    sizes = Sizes(batch, rows, features, qkv_features, out_kernel.shape[0])
    blocks = [jax.ShapeDtypeStruct((n, rows), dtype) for n in (sizes.inputs, sizes.out)]
    fits_tiles = rows % LANES == 0 and all(in_whole_tiles(block, 0) for block in blocks)
    direct = mesh.platform() == "tpu" and fits_tiles and settings.backend not in trust.PLAIN
    if wanted:
        if direct:
            return "direct"
        return "xla"
    chip = mesh.chip()
    if chip is None or not direct:
        return None
    faster = times_as_fast(
        sizes, chip, size, dtype.itemsize, settings.gathered_bytes, settings.quantization
    )
    if faster < WORTH:
        return None
    if trust.is_trusted("all_to_all", "pallas", chip.name, size):
        return "direct"
    trust.announce(
        "all_to_all",
        "pallas",
        "rows that travel",
        chip.name,
        size,
        faster=faster,
        naming="exchange_heads=True",
    )
    return None


def apply(
    call: AttentionCall,
    form: Form,
    x: Array,
    weights: Weights,
    norms: Norms,
    segment_ids: Array | None,
) -> Array:
    """Applies a layer to this device's rows [b, s / R, k], inside shard_map; the segment ids are
    [b, s].
    """
    settings = call.settings
    axis_name = settings.axis_name
    dtype = settings.dtype
    batch, rows, _ = x.shape
    size = lax.axis_size(axis_name)
    x = x.astype(dtype)
    qkv = weights[:3]
    w = jnp.concatenate([shards.cast(kernel, x, dtype).T for kernel, _ in qkv])
    out_kernel, out_bias = weights.out
    out = shards.cast(out_kernel, x, dtype)
    widths = [kernel.shape[1] for kernel, _ in qkv]
    qkv_biases = tuple(None if bias is None else shards.cast(bias, x, dtype) for _, bias in qkv)
    qk_norms = vary_like(norms, x)

    # Static for the VJP rule: all arrays come as arguments.
    def attend(
        z: Array, sequence: tuple[Inputs[Array], RotaryTables | None], shared: tuple[tuple, Norms]
    ) -> Array:
        inputs, tables = sequence
        biases, norms = shared
        of_all_rows = row_major(z.transpose(0, 2, 1)).reshape(1, size * rows, -1)
        projected = lax.split(of_all_rows, widths, 2)
        q, k, v = (
            y if bias is None else y + bias[None, None]
            for y, bias in zip(projected, biases, strict=True)
        )
        y = call.attention.attend(q, k, v, inputs, norms, tables)
        return row_major(y.reshape(size, rows, -1)).transpose(0, 2, 1)

    options = Options(
        settings.backend, precision=settings.precision, quantization=settings.quantization
    )

    # Weights travel as rows do in `all_gather_matmul`, and are multiplied with this device's rows.
    def executor(kernel: Array) -> Executor:
        shapes = [kernel.shape, (kernel.shape[1], batch * rows)]
        return choose_executor("all_gather_matmul", shapes, w.dtype, axis_name, size, options)[0]

    itemsize = 1 if settings.quantization else w.dtype.itemsize
    keep = size * w.size * itemsize <= settings.gathered_bytes
    block = ExchangedAttention(
        executor(w), executor(out), attend, direct=form == "direct", keep=keep
    )
    tables = call.attention.rotary_tables(x, size * rows)
    ids = [None if segment_ids is None else segment_ids[i : i + 1] for i in range(batch)]
    sequences = tuple((Inputs(segment_ids=of_sequence), tables) for of_sequence in ids)
    ys = exchanged_attention(block, tuple(x), w, out, sequences, (qkv_biases, qk_norms))
    return shards.finish(jnp.stack(ys), out_bias, settings)
