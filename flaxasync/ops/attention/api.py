"""The public attention ops: their checks, and the choice of backend and kernel. `flaxasync.nn` has
the modules.
"""

import math
from typing import Literal

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from flaxasync import mesh
from flaxasync.kernels.attention_block import BlockKernel, Mask, Scores
from flaxasync.kernels.engine.operands import LANES
from flaxasync.kernels.flash_attention import Flash, unsupported
from flaxasync.mesh import UnsupportedError, mapped_axis_size, vary_alike
from flaxasync.ops import trust
from flaxasync.ops.attention import cudnn, vjp
from flaxasync.ops.attention.blocks import Reference
from flaxasync.ops.attention.layouts import (
    AttentionLayout,
    Sequence,
    check_segments,
    check_sequence_layout,
    check_sequence_rows,
)
from flaxasync.ops.attention.ring import Call
from flaxasync.ops.choose import check_kernel, check_mapped, decide

KERNELS = ("reference", "flash")
CUDNN = "cudnn"  # of whole sequences alone


def ring_attention(
    q: Float[Array, "b s h d"],
    k: Float[Array, "b s n d"],
    v: Float[Array, "b s n d"],
    axis_name: str,
    *,
    causal: bool = True,
    layout: AttentionLayout = "contiguous",
    scale: float | None = None,
    segment_ids: Int[Array, "b s"] | None = None,
    window: int | None = None,
    backend: str | None = None,
    kernel: str | BlockKernel | None = None,
    directions: Literal[1, 2] | None = None,
    unroll: int = 2,
    precision: lax.PrecisionLike = None,
    joined: bool = False,
) -> Float[Array, "b s h d"] | Float[Array, "b s h*d"]:
    """Computes exact attention of this device's queries to the keys of all devices, each block as
    it arrives.

    ```
    q     [b, s, h, d]     this device's rows of a sequence of R*s        (R devices on axis_name)
    k, v  [b, s, n, d]     this device's rows; h/n heads share each of n
    o     [b, s, h, d]     this device's rows

    forward   o = softmax(scale * q @ all_gather(k).T + mask) @ all_gather(v)      k and v travel, as one block
              dq                                                                   k and v travel again
              dk, dv                                                               partial sums that travel with k and v
    ```

    The softmax is kept as a running maximum and sum in float32 (float64 where q is float64). Saved
    for the backward pass are q, k, v, o and the log-sum-exp of this device's rows; nothing gathered
    and no scores are saved. Blocks that no row attends to cost no compute. The gradient of a ring
    has no gradient: a second derivative is refused.

    Args:
      axis_name: The mesh axis over which the sequence is split. For whole sequences use
        `flaxasync.attention`.
      causal: Whether a row attends only to itself and to earlier rows.
      layout: Which rows this device holds: "contiguous", or "zigzag", which shares causal work out
        equally. All arrays are then in the order of `flaxasync.sequence_order`.
      scale: The factor of the scores; by default 1 / sqrt(d).
      segment_ids: Rows attend only to rows of the same id, for documents that are packed into one
        sequence. The ids travel with k and v.
      window: A row attends only to rows fewer than `window` positions away, itself included. Blocks
        further away cost no compute, and in a contiguous causal layout they do not travel.
      backend: What moves k and v: "none" (one all-gather), or "xla",
        "pallas" or "stateful", which are rings as in `flaxasync.all_gather_matmul`. None chooses as
        there.
      kernel: What multiplies two blocks: "flash" (a Pallas kernel; TPU; no second derivative),
        "reference" (JAX, on every device), or an object of your own
        (`flaxasync.kernels.attention_block.BlockKernel`). None stands for "flash" where that can
        serve and was verified (`flaxasync.ops.trust`), on a mesh of TPUs whose axes are all mapped,
        and for "reference" elsewhere.
      directions, unroll, precision: As in `flaxasync.all_gather_matmul`.
      joined: Whether the heads of o lie side by side, [b, s, h * d], as an output projection reads
        them.

    Returns:
      o, in the dtype of q.

    Raises:
      ValueError: No `shard_map` maps `axis_name`; shapes or dtypes do not match; heads or rows do
        not divide; the layout, backend or kernel is unknown.
      NotImplementedError: The backend or the kernel cannot serve this call; a second derivative is
        asked for.

    Source: Liu et al., "Ring Attention with Blockwise Transformers for Near-Infinite Context"
    (2023).
    """
    op = "ring_attention"
    size = mapped_axis_size(op, axis_name)
    _check_operands(op, q, k, v, segment_ids, window)
    check_sequence_layout(op, layout)
    check_sequence_rows(op, layout, size * q.shape[1], size)
    sequence = Sequence(layout, Mask(causal, window), q.shape[1], size)
    chunk = sequence.rows // sequence.chunks
    execution = decide(
        op,
        backend,
        shapes=(q.shape, k.shape),
        ring=size,
        directions=directions,
        unroll=unroll,
        halves=chunk % (2 * LANES) == 0,  # the flash kernel takes whole registers only
        itemsize=q.dtype.itemsize,
        causal=causal,
        window=window,
        layout=layout,
    )
    # without hops no row needs a row of another device
    if sequence.hops:
        ring = execution.ring(axis_name)
    else:
        ring = None
    block_kernel = _choose_kernel(op, kernel, q, chunk, chunk // ring.directions if ring else chunk)
    call = Call(ring, sequence, _scores(sequence.mask, q, scale, precision), block_kernel)
    return _apply(call, q, k, v, segment_ids, {axis_name}, joined)


def attention(
    q: Float[Array, "b s h d"],
    k: Float[Array, "b s n d"],
    v: Float[Array, "b s n d"],
    *,
    causal: bool = True,
    scale: float | None = None,
    segment_ids: Int[Array, "b s"] | None = None,
    window: int | None = None,
    kernel: str | BlockKernel | None = None,
    precision: lax.PrecisionLike = None,
    joined: bool = False,
) -> Float[Array, "b s h d"] | Float[Array, "b s h*d"]:
    """Computes exact attention over whole sequences, with the kernels of `ring_attention`; nothing
    travels.

    ```
    q     [b, s, h, d]     all rows of a sequence
    k, v  [b, s, n, d]     all rows; h/n heads share each of n
    o     [b, s, h, d]     softmax(scale * q @ k.T + mask) @ v
    ```

    It works inside `jax.shard_map`, on this device's batch and heads, and outside of it. Saved for
    the backward pass are q, k, v, o and the log-sum-exp of each row.

    The arguments are those of `ring_attention`. There is one kernel more: "cudnn", by NVIDIA's
    library, in bfloat16 and float16; None stands for it on NVIDIA's GPUs where it can serve. The
    kernel "reference" has a second derivative, the others have none.

    Returns:
      o, in the dtype of q.

    Raises:
      ValueError: Shapes or dtypes do not match; heads do not divide; the kernel is unknown.
      NotImplementedError: The kernel cannot serve this call; a second derivative is asked of a
        kernel without one.
    """
    op = "attention"
    _check_operands(op, q, k, v, segment_ids, window)
    rows = q.shape[1]
    sequence = Sequence("contiguous", Mask(causal, window), rows, 1)
    scores = _scores(sequence.mask, q, scale, precision)
    if kernel in (None, CUDNN) and _takes_cudnn(kernel, q, segment_ids, scores):
        q, k, v = vary_alike((q, k, v))
        out = cudnn.attend(q, k, v, scores.mask, scores.scale)
        if joined:
            return out.reshape(*q.shape[:2], -1)
        return out
    block_kernel = _choose_kernel(op, kernel, q, rows, rows)
    call = Call(None, sequence, scores, block_kernel)
    return _apply(call, q, k, v, segment_ids, set(), joined)


def _takes_cudnn(
    kernel: str | BlockKernel | None, q: Array, segment_ids: Array | None, scores: Scores
) -> bool:
    """Says whether a call that names "cudnn", or no kernel, is one of cuDNN."""
    lacking = cudnn.unsupported(q, scores.mask, segment_ids, scores.precision)
    if kernel is None:
        return cudnn.is_known_here() and lacking is None and q.size > 0
    if not cudnn.is_here():
        lacking = f"NVIDIA's GPUs: got a mesh of {mesh.chip_name()}"
    if lacking is not None:
        raise UnsupportedError(
            f"attention with kernel='cudnn' takes {lacking}; use kernel='reference', or leave it "
            "out"
        )
    return True


def _scores(mask: Mask, q: Array, scale: float | None, precision: lax.PrecisionLike) -> Scores:
    return Scores(mask, 1 / math.sqrt(q.shape[-1]) if scale is None else scale, precision)


def _apply(
    call: Call,
    q: Array,
    k: Array,
    v: Array,
    segment_ids: Array | None,
    axes: set[str],
    joined: bool,
) -> Array:
    """Casts the operands to vary over the same mesh axes, `axes` among them, lays them out as
    blocks, and attends.
    """
    q, k, v, segment_ids = vary_alike((q, k, v, segment_ids), *axes)
    b, s, h, d = q.shape
    if not q.size:
        if joined:
            return q.reshape(b, s, h * d)
        return q
    if segment_ids is None:
        of_rows = None
    else:
        of_rows = segment_ids.astype(jnp.int32)
    if vjp.takes_whole(call, d):
        out = vjp.whole(call, d, *(x.reshape(b, s, -1) for x in (q, k, v)), of_rows)
    else:
        kv = jnp.stack([k, v]).transpose(0, 1, 3, 2, 4)
        out = vjp.attention(call, vjp.group_heads(q, k.shape[2]), kv, of_rows)
    if joined:
        return out
    return out.reshape(b, s, h, d)


def _choose_kernel(
    op: str, kernel: str | BlockKernel | None, q: Array, q_rows: int, k_rows: int
) -> BlockKernel:
    """Returns the block kernel of a name, for products of `q_rows` by `k_rows` rows; None
    chooses.
    """
    if kernel is not None and not isinstance(kernel, str):
        return kernel
    if kernel == CUDNN:
        raise UnsupportedError(
            f"{op} with kernel='cudnn' attends to whole sequences; use kernel='reference'"
        )
    known = (*KERNELS, CUDNN) if op == "attention" else KERNELS
    if kernel not in (None, *known):
        raise ValueError(
            f"{op} got kernel={kernel!r}: it must be one of {', '.join(known)}, a BlockKernel, or "
            "None to choose"
        )
    lacking = unsupported(q.dtype, q.shape[-1], q_rows, k_rows)
    if kernel == "flash":
        check_kernel(f"{op} with kernel='flash'", "kernel='reference'")
        if lacking is not None:
            raise UnsupportedError(
                f"{op} with kernel='flash' takes {lacking}; use kernel='reference'"
            )
        return Flash()
    if (
        kernel == "reference"
        or lacking is not None
        or mesh.platform() != "tpu"
        or not mesh.all_axes_mapped()
    ):
        return Reference()
    if trust.is_trusted("attention", "flash", mesh.chip_name(), 1):
        return Flash()
    trust.announce("attention", "flash", "reference", mesh.chip_name(), 1)
    return Reference()


def _check_operands(
    op: str, q: Array, k: Array, v: Array, segment_ids: Array | None, window: int | None
) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim != 4:
            raise ValueError(
                f"{op} needs {name} of [batch, rows, heads, head size]: got {list(x.shape)}"
            )
        check_mapped(op, x)
    if k.shape != v.shape:
        raise ValueError(
            f"{op} sends k and v as one block of one shape: got {list(k.shape)} and {list(v.shape)}"
        )
    if (q.shape[0], q.shape[1], q.shape[3]) != (k.shape[0], k.shape[1], k.shape[3]):
        raise ValueError(
            f"{op} needs q and k of one batch, one share of rows and one head size: got q "
            f"{list(q.shape)} and k {list(k.shape)}; lay both out alike"
        )
    if q.shape[2] % k.shape[2]:
        raise ValueError(
            f"{op} shares each key-value head among equally many heads: got {q.shape[2]} heads and "
            f"{k.shape[2]} key-value heads; use a multiple"
        )
    dtypes = {x.dtype for x in (q, k, v)}
    if len(dtypes) > 1 or q.dtype not in (jnp.float64, jnp.float32, jnp.bfloat16, jnp.float16):
        raise ValueError(
            f"{op} needs q, k and v of one dtype, float64, float32, bfloat16 or float16: got "
            f"{', '.join(sorted(map(str, dtypes)))}; cast them before the call"
        )
    check_segments(op, segment_ids, q.shape)
    if window is not None and window < 1:
        raise ValueError(f"{op} needs window to be 1 or more rows, or None: got {window}")
