"""The public op of a mixture of experts: its checks, and what executes it.
`flaxasync.nn.ParallelMoE` is the layer.
"""

import functools
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from flaxasync import mesh
from flaxasync.kernels.add_rows import check_add_rows
from flaxasync.kernels.engine.operands import LANES
from flaxasync.kernels.grouped_blocks import check_grouped
from flaxasync.mesh import UnsupportedError, mapped_axis_size, vary_alike
from flaxasync.ops import trust
from flaxasync.ops.choose import (
    Directions,
    cannot_serve,
    check_kernel,
    check_mapped,
    decide,
    is_default,
)
from flaxasync.ops.experts.assignments import capacity_of_half
from flaxasync.ops.experts.exchange import Exchange
from flaxasync.ops.experts.local import Experts
from flaxasync.ops.experts.products import Grouped, OneTile, Products, Weights
from flaxasync.ops.experts.ring import block_shifts, multiply
from flaxasync.ops.matmul.activation import Activation
from flaxasync.ops.matmul.products import accumulator_dtype
from flaxasync.ring import Ring, split_rows


def expert_mlp(
    x: Float[Array, "*batch n d"],
    ids: Int[Array, "*batch n k"],
    weights: Float[Array, "*batch n k"],
    gate: Float[Array, "e d f"] | None,
    up: Float[Array, "e d f"],
    down: Float[Array, "e f d"],
    axis_name: str,
    *,
    activation: Activation = jax.nn.silu,
    split: Literal["experts", "hidden"] = "experts",
    capacity: int | None = None,
    backend: str | None = None,
    directions: Directions = None,
    unroll: int = 2,
    kernel: str | None = None,
    precision: lax.PrecisionLike = None,
) -> Float[Array, "*batch n d"]:
    """Applies to each row the experts that it chose, wherever they are, while rows travel.

    ```
    x        [..., n, D]    this device's rows                        (R devices on axis_name)
    ids      [..., n, k]    the experts of each row, 0 .. E - 1
    weights  [..., n, k]    their weights
    gate, up [e, D, F]      this device's experts, e = E / R; or a part of the hidden features of all
    down     [e, F, D]
    y        [..., n, D]    sum over k of weights * (act(x @ gate) * (x @ up)) @ down
    ```

    No row is dropped, unless `capacity` says so, and no buffer is larger for it: a device
    multiplies the rows that chose its experts some at a time, as many as there are. A routing that
    is not balanced takes as long as the device needs that has most to do. Saved for the backward
    pass are the operands; rows travel again.

    Args:
      ids: The experts that each row chose, all different. A row with a number out of range becomes
        NaN.
      weights: Those of the experts in the sum. The computation is in the dtype of x, and sums are
        in float32.
      gate: None for act(x @ up) @ down.
      axis_name: The mesh axis over which rows and experts are split.
      activation: An elementwise function.
      split: What the devices share out: "experts", e = E / R on each, in order; or "hidden", F / R
        features of every expert on each, for fewer experts than devices.
      capacity: The most of this device's rows that an expert takes: half of it, rounded up, of each
        half of the rows, of which it leaves out the last ones that chose it. None for all rows.
      backend: What moves the rows: "none" (one all-gather, and one reduce-scatter); "xla", "pallas"
        or "stateful", rings as in `flaxasync.all_gather_matmul`; or "exchange", by which a row
        travels only to devices that have an expert it chose, and one sum back from each, in buffers
        for all rows unless there is a capacity. None stands for the trusted backend that
        `flaxasync.plan` predicts to be fastest on the TPUs of the mesh, and for "none" on other
        devices.
      kernel: What multiplies the rows: "grouped" (Pallas kernels; TPU; needs a gate, float32 or
        bfloat16, and features in multiples of 128), or "reference" (JAX's products, one tile of
        rows of one expert at a time). None stands for "grouped" where that can serve and was
        verified (`flaxasync.ops.trust`), and for "reference" elsewhere.
      directions, unroll, precision: As in `flaxasync.all_gather_matmul`.

    Returns:
      y, in the dtype of x.

    Raises:
      ValueError: No `shard_map` maps `axis_name`; shapes or dtypes do not match; a row has more
        choices than there are experts; the capacity is less than 1; the backend is unknown.
      NotImplementedError: The backend cannot serve this call; a second derivative is asked for.
    """
    op = "expert_mlp"
    size = mapped_axis_size(op, axis_name)
    columns = (up,) if gate is None else (up, gate)
    count = up.shape[0] * (size if split == "experts" else 1)
    _check(op, x, ids, weights, columns, down, split, capacity, count)
    shapes = [x.shape, ids.shape, weights.shape, *(w.shape for w in (*columns, down))]
    execution = decide(
        op,
        backend,
        ring=size,
        shapes=shapes,
        itemsize=x.dtype.itemsize,
        directions=directions,
        unroll=unroll,
        split=split,
        capacity=capacity,
        check=functools.partial(_check_backend, op, split),
    )
    x, ids, weights, kernels = vary_alike((x, ids, weights, Weights(columns, down)), axis_name)
    if not x.size or not ids.size:
        return jnp.zeros_like(x)
    rows = x.reshape(-1, x.shape[-1])
    ids = ids.reshape(-1, ids.shape[-1])
    weights = weights.astype(accumulator_dtype(x)).reshape(ids.shape)
    known = (ids >= 0) & (ids < count)
    ids = jnp.where(known, ids, 0).astype(jnp.int32)
    weights = jnp.where(known, weights, jnp.nan)
    ring: Ring | Exchange = execution.ring(axis_name)
    if execution.backend == "exchange":
        ring = Exchange(axis_name, direct=capacity is None and mesh.platform() == "tpu")
    n = rows.shape[0]
    blocks = len(block_shifts(ring, n))  # 2 half-blocks, or 1 whole block
    kernels = jax.tree.map(lambda kernel: kernel.astype(x.dtype), kernels)
    tile_rows = _tile_rows(ids.size // count // blocks)
    products: Products = OneTile(activation, precision)
    # of how many devices the rows are multiplied in one call, at most
    if isinstance(ring, Exchange):
        together = 2
    elif ring.transport is None:
        together = size
    else:
        together = 1
    # all numbers of rows to which one call adds
    held = {together * n, *(half for _, half in split_rows(n, blocks))}
    if _takes_kernels(op, kernel, rows, kernels, precision, held):
        products = Grouped(activation)
        tile_rows = max(tile_rows, LANES)
    if capacity is None:
        of_half = None
    else:
        of_half = capacity_of_half(capacity)
    mean = -(-ids.size // (count * blocks))
    experts = Experts(
        axis_name,
        split,
        count,
        mean,
        tile_rows,
        parts=2 // blocks,
        capacity=of_half,
        products=products,
    )
    return multiply(experts, ring, rows, ids, weights, kernels).reshape(x.shape)


def _check_backend(op: str, split: str, backend: str) -> None:
    if backend == "exchange" and split == "hidden":
        limit = (
            "sends rows to the devices that have their experts: got split='hidden', where all "
            "devices have a part"
        )
        raise cannot_serve(op, backend, f"{limit} of every expert", "use backend='xla'")


def _takes_kernels(
    op: str,
    kernel: str | None,
    x: Array,
    weights: Weights,
    precision: lax.PrecisionLike,
    held: set[int],
) -> bool:
    """Says whether Pallas kernels multiply, which are given as many rows as any of `held`."""
    if kernel not in (None, "reference", "grouped"):
        raise ValueError(
            f"{op} got kernel={kernel!r}: it must be 'reference', 'grouped' or None to choose"
        )
    if kernel == "reference" or (kernel is None and mesh.platform() != "tpu"):
        return False
    try:
        check_kernel(f"{op} with kernel='grouped'", "kernel='reference'")
        lacking = None
        if len(weights.columns) == 1:
            lacking = "a gate"
        elif not is_default(precision):
            lacking = "the default precision alone"
        if lacking is not None:
            raise UnsupportedError(
                f"{op} with kernel='grouped' takes {lacking}; use kernel='reference'"
            )
        check_grouped(op, x.dtype, x.shape[1], weights.down.shape[1])
        for count in held:
            check_add_rows(op, x.dtype, count, LANES, x.shape[1])
    except UnsupportedError:
        if kernel is not None:
            raise
        return False
    if kernel is not None or trust.is_trusted("expert_products", "grouped", mesh.chip_name(), 1):
        return True
    trust.announce("expert_products", "grouped", "reference", mesh.chip_name(), 1)
    return False


def _tile_rows(mean: int) -> int:
    """Returns the rows of a tile, a power of 2, for experts that get `mean` rows of a block."""
    return min(512, max(8, 1 << (mean - 1).bit_length() if mean > 1 else 8))


def _check(
    op: str,
    x: Array,
    ids: Array,
    weights: Array,
    columns: tuple[Array, ...],
    down: Array,
    split: str,
    capacity: int | None,
    count: int,
) -> None:
    for operand in (x, ids, weights, *columns, down):
        check_mapped(op, operand)
    if split not in ("experts", "hidden"):
        raise ValueError(f"{op} got split={split!r}: it must be 'experts' or 'hidden'")
    if x.ndim < 2 or ids.shape != weights.shape or ids.shape[:-1] != x.shape[:-1]:
        raise ValueError(
            f"{op} needs x [..., n, D], and ids and weights [..., n, k] of the same rows: got "
            f"{list(x.shape)}, {list(ids.shape)} and {list(weights.shape)}"
        )
    e, d, f = columns[0].shape if columns[0].ndim == 3 else (0, 0, 0)
    fits = d == x.shape[-1] and all(w.shape == (e, d, f) for w in columns)
    if not fits or down.shape != (e, f, d):
        raise ValueError(
            f"{op} needs gate and up [e, D, F] and down [e, F, D] for x {list(x.shape)}: got "
            f"{', '.join(str(list(w.shape)) for w in (*columns[1:], columns[0], down))}"
        )
    if not jnp.issubdtype(ids.dtype, jnp.integer):
        raise ValueError(f"{op} needs integer ids: got {ids.dtype}")
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(
            f"{op} computes in the dtype of x: got {x.dtype}; cast x to a floating one"
        )
    if ids.shape[-1] > count:
        raise ValueError(
            f"{op} lets a row choose each expert once: got {ids.shape[-1]} choices among {count} "
            "experts; use fewer"
        )
    if capacity is not None and capacity < 1:
        raise ValueError(
            f"{op} needs a capacity of 1 row or more: got {capacity}; use None to drop nothing"
        )
