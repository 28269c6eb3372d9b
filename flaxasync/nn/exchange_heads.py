"""The self-attention layers in the form in which weights and heads travel; `flaxasync.ops.attention.exchanged`."""

from collections.abc import Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import Array, lax

from flaxasync import mesh
from flaxasync.mesh import UnsupportedError, cast_to_varying
from flaxasync.nn import shards
from flaxasync.nn.attention_call import Call
from flaxasync.ops import trust
from flaxasync.ops.attention.exchanged import ExchangedAttention, exchanged_attention
from flaxasync.ops.costs.exchanged import WORTH, Block, times_as_fast
from flaxasync.ops.matmul.api import executor_for_weights
from flaxasync.ops.matmul.products import row_major
from flaxasync.transport.direct import LANES, in_whole_tiles

type Exchange = Literal["xla", "direct"]  # by XLA's all-to-all, or by copies from every device to every other one


def choose(
    call: Call, x: Array, linears: tuple[shards.Linear, ...], others: Mapping[str, Array | None]
) -> Exchange | None:
    """Says what exchanges the heads of a call, inside shard_map; None where rows travel.

    Args:
      call: What is static in the call.
      x: This device's rows of each sequence, or all rows, [b, s, k].
      linears: The kernels and biases of query, key, value and output that this device has.
      others: The inputs that this form lacks, by name, as far as they are given.

    Raises:
      NotImplementedError: Heads must travel, and cannot.
    """
    size, settings = lax.axis_size(call.settings.axis_name), call.settings
    if call.exchange_heads is False or size == 1 or x.size == 0:
        return None
    given = [name for name, other in others.items() if other is not None]
    lacks = {
        ", ".join(given): bool(given),
        "an input that every device has whole": not call.rows_sharded[0] or call.out_layout != "sequence",
        "split sequences": call.attention.context is not None,
        "dot_general, and a wider preferred_element_type": shards.multiplies_locally(settings),
    }
    if lacking := [what for what, is_so in lacks.items() if is_so]:
        if call.exchange_heads:
            raise UnsupportedError(
                f"an attention layer with exchange_heads=True lacks {lacking[0]}: use exchange_heads=None or False"
            )
        return None
    (*inputs, (out, _)), dtype = linears, jnp.dtype(settings.dtype)
    block = Block(x.shape[0], x.shape[1], x.shape[2], sum(w.shape[1] for w, _ in inputs), out.shape[0])
    copied = all(
        in_whole_tiles(jax.ShapeDtypeStruct((features, block.rows), dtype), 0) for features in (block.inputs, block.out)
    )
    direct = mesh.platform() == "tpu" and copied and block.rows % LANES == 0 and settings.backend not in trust.PLAIN
    if call.exchange_heads:
        return "direct" if direct else "xla"
    chip = mesh.chip()
    if chip is None or not direct:
        return None
    faster = times_as_fast(block, chip, size, dtype.itemsize, settings.gathered_bytes)
    if faster < WORTH:
        return None
    if not trust.is_trusted("all_to_all", "pallas", chip.name, size):
        trust.announce("all_to_all", "pallas", "rows that travel", chip.name, size, faster=faster)
        return None
    return "direct"


def run(
    call: Call,
    exchange: Exchange,
    x: Array,
    linears: tuple[shards.Linear, ...],
    norms: tuple[Array | None, Array | None],
    ids: Array | None,
) -> Array:
    """Applies a layer to this device's rows, inside shard_map.

    Args:
      call: What is static in the call.
      exchange: What exchanges the heads.
      x: This device's rows of each sequence, [b, s / R, k].
      linears: The kernels and biases of query, key, value and output that this device has.
      norms: The scales of the norms of queries and of keys.
      ids: The segment of each row, [b, s]; None for one segment.
    """
    settings, axis_name = call.settings, call.settings.axis_name
    (*inputs, (out, out_bias)), dtype = linears, settings.dtype
    size, rows = lax.axis_size(axis_name), x.shape[1]
    x = x.astype(dtype)
    w, out = jnp.concatenate([shards.cast(w, x, dtype).T for w, _ in inputs]), shards.cast(out, x, dtype)
    widths = [w.shape[1] for w, _ in inputs]
    biases = tuple(None if bias is None else shards.cast(bias, x, dtype) for _, bias in inputs)
    scales = tuple(None if scale is None else cast_to_varying(scale, jax.typeof(x).mat.varying) for scale in norms)

    def attend(z: Array, constants: Any, shared: Any) -> Array:
        (tables, segments), (biases, scales) = constants, shared
        projected = lax.split(row_major(z.transpose(0, 2, 1)).reshape(1, size * rows, -1), widths, 2)
        q, k, v = (y if bias is None else y + bias for y, bias in zip(projected, biases, strict=True))
        heads = call.attention.attend(q, k, v, segments, norms=scales, tables=tables)
        return row_major(heads.reshape(size, rows, -1)).transpose(0, 2, 1)

    projections, output = (
        executor_for_weights(
            "ParallelSelfAttention", y, x.shape[0] * rows, axis_name, backend=settings.backend,
            precision=settings.precision,
        )
        for y in (w, out)
    )  # fmt: skip
    kept = size * w.size * w.dtype.itemsize <= settings.gathered_bytes
    block = ExchangedAttention(projections, output, attend, direct=exchange == "direct", keep=kept)
    tables = call.attention.rotary_tables(x, size * rows)
    constants = tuple((tables, None if ids is None else ids[i : i + 1]) for i in range(x.shape[0]))
    ys = exchanged_attention(block, tuple(x), w, out, constants, (biases, scales))
    return shards.finish(jnp.stack(ys), out_bias, settings)
