"""The self-attention layers in the form in which weights and heads travel; `flaxasync.ops.attention.exchanged`."""

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from flaxasync.mesh import cast_to_varying
from flaxasync.nn import shards
from flaxasync.ops.attention.exchanged import ExchangedAttention, exchanged_attention
from flaxasync.ops.matmul.api import executor_for_weights
from flaxasync.ops.matmul.products import row_major

if TYPE_CHECKING:
    from flaxasync.nn.self_attention import Call


def run(
    call: "Call",
    x: Array,
    linears: tuple[shards.Linear, ...],
    norms: tuple[Array | None, Array | None],
    ids: Array | None,
) -> Array:
    """Applies a layer to this device's rows, inside shard_map.

    Args:
      call: What is static in the call.
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

    executors = (
        executor_for_weights(
            "ParallelSelfAttention", y, x.shape[0] * rows, axis_name, backend=settings.backend,
            precision=settings.precision,
        )
        for y in (w, out)
    )  # fmt: skip
    kept = size * w.size * w.dtype.itemsize <= settings.gathered_bytes
    block = ExchangedAttention(*executors, attend, direct=call.exchange == "direct", keep=kept)
    tables = call.attention.rotary_tables(x, size * rows)
    constants = tuple((tables, None if ids is None else ids[i : i + 1]) for i in range(x.shape[0]))
    ys = exchanged_attention(block, tuple(x), w, out, constants, (biases, scales))
    return shards.finish(jnp.stack(ys), out_bias, settings)
