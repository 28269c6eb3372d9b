"""Attention over a sequence that is split over a mesh axis, or whole: the op, its checks, its backend and its kernel.

For use inside `jax.shard_map`, on local shards; `flaxasync.nn` has the modules. What it is made of is in
`flaxasync.attention`: layouts, the product of two blocks, the passes and their rules.
"""

import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from flaxasync import mesh, transport
from flaxasync.attention.flash_grid import LANES
from flaxasync.attention.flash_kernel import Flash, unsupported
from flaxasync.mesh import cast_to_varying, mapped_axis_size
from flaxasync.ops.attention import vjp as rules
from flaxasync.ops.attention.blocks import BlockKernel, Reference, Scores
from flaxasync.ops.attention.layouts import AttentionLayout, Mask, Sequence, check_layout
from flaxasync.ops.attention.ring import Op
from flaxasync.ops.plan import plan
from flaxasync.ring import Ring

BACKENDS = ("xla", "pallas", "stateful", "gather")
KERNELS = ("reference", "flash")


def ring_attention(
    q: Float[Array, "b s h d"],
    k: Float[Array, "b s n d"],
    v: Float[Array, "b s n d"],
    axis_name: str | None,
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
    precision: jax.lax.PrecisionLike = None,
) -> Float[Array, "b s h d"]:
    """Exact attention of this device's queries to the keys of all devices, each block as it arrives.

    ```
    q     [b, s, h, d]     this device's rows of a sequence of R*s        (R devices on axis_name)
    k, v  [b, s, n, d]     this device's rows; h/n heads share each of n
    o     [b, s, h, d]     this device's rows

    forward   o = softmax(scale * q @ all_gather(k).T + mask) @ all_gather(v)      k and v travel, as one block
              dq                                                                   k and v travel again
              dk, dv                                                               sums that travel with their k and v
    ```

    The softmax is kept as a running maximum and sum in float32 (float64 where q is). Saved for the backward pass are q,
    k, v, o and the log-sum-exp of this device's rows; nothing gathered, and no scores. Blocks that no row attends to
    cost no compute. The gradient of a ring has no gradient: a second derivative is refused.

    Without an axis this is attention of the rows of one device, by the same kernels: nothing travels.

    Args:
      q: queries.
      k: keys.
      v: values.
      axis_name: the mesh axis that the sequence is split over; None where this device has all of it.
      causal: whether a row attends to itself and earlier rows only.
      layout: which rows this device holds: "contiguous", or "zigzag", which shares causal work out equally; then all
        arrays are in the order of `flaxasync.sequence_order`.
      scale: of the scores; by default 1 / sqrt(d).
      segment_ids: rows attend only to rows of the same id: for documents packed into one sequence. They travel with k
        and v.
      window: a row attends only to rows fewer than so many rows away, itself included. Blocks further away cost no
        compute, and in a contiguous causal layout they do not travel.
      backend: "xla" (a ring of `lax.ppermute`), "pallas" or "stateful" (the same ring on Pallas DMAs, with futures or
        with Refs; TPU), "gather" (all-gather k and v once), or None: what `flaxasync.plan` predicts to be fastest.
      kernel: what multiplies two blocks: "flash" (a Pallas kernel; TPU; no second derivative), "reference" (JAX, on
        every device), an object of your own (`ops.attention.blocks.BlockKernel`), or None: "flash" where it can
        serve, on a mesh of TPUs whose axes are all mapped; else "reference".
      directions: 1, or 2 to send half of every block each way; by default 2 on rings of three or more TPUs.
      unroll: ring steps in one loop body.
      precision: of the matmuls, as in `lax.dot_general`. They accumulate in float32.

    Returns:
      o, of q's dtype.

    Raises:
      ValueError: no `shard_map` maps `axis_name`; shapes or dtypes do not match; heads or rows that do not divide; an
        unknown layout, backend or kernel.
      NotImplementedError: the backend or the kernel cannot run this; a second derivative.

    Source: Liu et al., "Ring Attention with Blockwise Transformers for Near-Infinite Context" (2023).
    """
    size = 1 if axis_name is None else mapped_axis_size("ring_attention", axis_name)
    _check_operands(q, k, v, segment_ids)
    check_layout("ring_attention", layout)
    if window is not None and window < 1:
        raise ValueError(f"ring_attention needs window to be 1 or more rows, or None: got {window}")
    if directions not in (None, 1, 2):
        raise ValueError(f"ring_attention needs directions to be 1, 2 or None: got {directions!r}")
    if unroll < 1:
        raise ValueError(f"ring_attention needs unroll to be 1 or more: got {unroll}")
    if layout == "zigzag" and q.shape[1] % 2:
        raise ValueError(
            "ring_attention with layout='zigzag' holds two equal chunks of the sequence on every device: got "
            f"{q.shape[1]} rows a device, needed an even number; pad the sequence to a multiple of {2 * size} rows"
        )
    sequence = Sequence(layout, Mask(causal, window), q.shape[1], size)
    scores = Scores(sequence.mask, 1 / math.sqrt(q.shape[-1]) if scale is None else scale, precision)
    chunk = sequence.rows // sequence.chunks
    if directions is None:
        halves = size > 2 and mesh.platform() == "tpu" and chunk % (2 * LANES) == 0
        directions = 2 if halves else 1
    _check_backend(backend)
    ring = None
    if axis_name is not None:
        ring = Ring(axis_name, _choose_transport(backend, q, k, sequence), directions, unroll)
    if sequence.hops == 0:
        ring, directions = None, 1
    op = Op(ring, sequence, scores, _choose_kernel(kernel, q.dtype, q.shape[-1], chunk, chunk // directions))

    operands = [q, k, v] if segment_ids is None else [q, k, v, segment_ids]
    axes = frozenset(() if axis_name is None else (axis_name,))
    axes = axes.union(*(jax.typeof(operand).mat.varying for operand in operands))
    q, k, v, *ids = (cast_to_varying(operand, axes) for operand in operands)
    kv = jnp.stack([k, v]).transpose(0, 1, 3, 2, 4)
    return rules.ring_attention(op, rules.grouped(q, k.shape[2]), kv, ids[0].astype(jnp.int32) if ids else None)


def _check_backend(backend: str | None) -> None:
    if backend is not None and backend not in BACKENDS:
        raise ValueError(
            f"ring_attention got backend={backend!r}: it must be one of {', '.join(BACKENDS)}, or None to choose"
        )


def _choose_transport(backend: str | None, q: Array, k: Array, sequence: Sequence) -> Any:
    """The transport of a backend's name; None for "gather"."""
    if backend is None:
        backend = _planned(q, k, sequence)
    return None if backend == "gather" else transport.get(backend, "ring_attention")


def _planned(q: Array, k: Array, sequence: Sequence) -> str:
    """What `plan` chooses for the chip of the ambient mesh; "xla" where that is none of its chips."""
    chip = mesh.chip()
    if chip is None:
        return "xla"
    options = {"causal": sequence.mask.causal, "window": sequence.mask.window, "itemsize": q.dtype.itemsize}
    choice = plan("ring_attention", q.shape, k.shape, chip=chip, ring=sequence.size, layout=sequence.layout, **options)
    return choice.backend


def _choose_kernel(
    kernel: str | BlockKernel | None, dtype: jnp.dtype, head_size: int, q_rows: int, k_rows: int
) -> BlockKernel:
    """The block kernel of a name; None chooses."""
    if kernel is not None and not isinstance(kernel, str):
        return kernel
    if kernel not in (None, *KERNELS):
        raise ValueError(
            f"ring_attention got kernel={kernel!r}: it must be one of {', '.join(KERNELS)}, a BlockKernel, or None to "
            "choose"
        )
    lacking = unsupported(dtype, head_size, q_rows, k_rows)
    if kernel == "flash":
        mesh.check_tpu("ring_attention with kernel='flash'", "kernel='reference'")
        if lacking is not None:
            raise NotImplementedError(f"ring_attention with kernel='flash' takes {lacking}; use kernel='reference'")
        if not mesh.all_axes_mapped():
            raise NotImplementedError(
                "ring_attention with kernel='flash' needs every mesh axis of more than one device to be mapped by "
                "shard_map: XLA cannot part a Pallas kernel; leave axis_names out of jax.shard_map, or use "
                "kernel='reference'"
            )
    serves = lacking is None and mesh.platform() == "tpu" and mesh.all_axes_mapped()
    return Flash() if kernel == "flash" or (kernel is None and serves) else Reference()


def _check_operands(q: Array, k: Array, v: Array, segment_ids: Array | None) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim != 4:
            raise ValueError(f"ring_attention needs {name} of [batch, rows, heads, head size]: got {list(x.shape)}")
    if k.shape != v.shape:
        raise ValueError(
            f"ring_attention sends k and v as one block of one shape: got {list(k.shape)} and {list(v.shape)}"
        )
    if (q.shape[0], q.shape[1], q.shape[3]) != (k.shape[0], k.shape[1], k.shape[3]):
        raise ValueError(
            "ring_attention needs q and k of one batch, one share of rows and one head size: got "
            f"q {list(q.shape)} and k {list(k.shape)}; lay both out alike"
        )
    if q.shape[2] % k.shape[2]:
        raise ValueError(
            "ring_attention shares each key-value head among equally many heads: got "
            f"{q.shape[2]} heads and {k.shape[2]} key-value heads; use a multiple"
        )
    dtypes = {x.dtype for x in (q, k, v)}
    if len(dtypes) > 1 or q.dtype not in (jnp.float64, jnp.float32, jnp.bfloat16, jnp.float16):
        raise ValueError(
            "ring_attention needs q, k and v of one dtype, float64, float32, bfloat16 or float16: got "
            f"{', '.join(sorted(map(str, dtypes)))}; cast them before the call"
        )
    if segment_ids is not None:
        if segment_ids.shape != q.shape[:2]:
            raise ValueError(
                f"ring_attention needs one segment id a row, {list(q.shape[:2])}: got {list(segment_ids.shape)}"
            )
        if not jnp.issubdtype(segment_ids.dtype, jnp.integer):
            raise ValueError(f"ring_attention needs segment ids of an integer dtype: got {segment_ids.dtype}")
    for x in (q, k, v):
        if any(entry is not None for entry in jax.typeof(x).sharding.spec):
            raise ValueError(
                "ring_attention needs every axis that shards its operands to be mapped by shard_map: got an operand "
                f"still sharded {jax.typeof(x).sharding.spec}; leave axis_names out of jax.shard_map, or add them"
            )
