"""Which rows of a sequence each device of a ring holds, and which of their products with other rows
attention needs.

A sequence of R*s rows lies on R devices, s rows on each. With causal attention a row needs all rows
before it, so the order in which rows are laid out decides how the work is shared:

```
contiguous   device i holds rows i*s .. (i+1)*s           the last device has R blocks to multiply, the first has one
zigzag       device i holds chunks i and 2R-1-i of 2R     every device has two products of chunks in every hop
```

Everything here is arithmetic on positions, for Python ints and traced ones alike.

Source of the zigzag layout: Brandon et al., "Striped Attention" (2023), balances with stripes;
Llama 3 (Grattafiori et al., 2024, section 3.3.2) balances with pairs of chunks, as this module
does.
"""

import dataclasses
from typing import Any, Literal, get_args

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import PyTree

from flaxasync.kernels.attention_block import Mask, Product
from flaxasync.ring import Index

type AttentionLayout = Literal["contiguous", "zigzag"]
LAYOUTS: tuple[str, ...] = get_args(AttentionLayout.__value__)


@dataclasses.dataclass(frozen=True)
class Sequence:
    """How a sequence lies on a ring."""

    layout: AttentionLayout  # the order of the rows; see the head of this file
    mask: Mask  # which rows attend to which
    rows: int  # s, the rows of a device
    size: int  # R, the devices of the ring

    @property
    def chunks(self) -> int:
        """How many chunks of consecutive positions a device holds; without a mask, positions do not
        matter.
        """
        if self.layout == "zigzag" and self.mask.by_position:
            return 2
        return 1

    @property
    def hops(self) -> int:
        """How many hops in one direction bring every device all rows that its own rows attend
        to.
        """
        window = self.mask.window
        if self.layout == "contiguous" and self.mask.causal and window is not None:
            return min(self.size - 1, -(-(window - 1) // self.rows))
        return self.size - 1

    @property
    def one_way(self) -> bool:
        """Whether all rows that a device needs lie only a few devices before it, so that rows
        travel forward only.
        """
        return self.hops < self.size - 1

    def start(self, device: Index, chunk: PyTree) -> Any:
        """Returns the position of the first row of a device's chunk."""
        if self.chunks == 1:
            return device * self.rows
        return (device + chunk * (2 * self.size - 1 - 2 * device)) * (self.rows // 2)

    def products(
        self, device: Index, owner: Index, *, own: bool, offset: int = 0, count: int | None = None
    ) -> list[Product]:
        """Returns the products of a device's queries with `count` rows, from `offset` on, of each
        chunk of `owner`.

        `own` says whether the two are the same device. By default, all rows of the owner's chunks
        are used.
        """
        q_rows = self.rows // self.chunks
        if count is None:
            k_rows = q_rows
        else:
            k_rows = count

        def product(q: Any, k: Any, *, masked: bool, known: bool) -> Product:
            q_start = self.start(device, q)
            k_start = self.start(owner, k) + offset
            if known:
                needed = None
            else:
                needed = self.mask.reaches(q_start, q_rows, k_start, k_rows)
            return Product(q, q_rows, q_start, k, k_rows, k_start, masked, needed)

        windowed = self.mask.window is not None
        if not self.mask.by_position:
            return [product(0, 0, masked=False, known=True)]
        if self.chunks == 1:
            return [product(0, 0, masked=own or windowed, known=own and not windowed)]
        if not self.mask.causal:
            return [product(q, k, masked=True, known=False) for q in (0, 1) for k in (0, 1)]
        # A first chunk never attends to a second one, and a second one always attends to a first
        # one.
        late_early = product(1, 0, masked=windowed, known=not windowed)
        if own:
            return [late_early, *(product(c, c, masked=True, known=not windowed) for c in (0, 1))]
        # Both chunks need the first chunk of an earlier owner, and the second chunk needs both
        # chunks of a later owner: two products either way, without a branch.
        which = (
            jnp.where(owner < device, 0, 1)
            if not isinstance(owner, int | np.integer)
            else int(owner > device)
        )
        return [late_early, product(which, which, masked=windowed, known=not windowed)]


def sequence_order(layout: AttentionLayout, rows: int, devices: int) -> np.ndarray:
    """Returns the order in which a sequence is laid out, so that equal shares of it are the
    devices' rows.

    `x[:, sequence_order("zigzag", rows, devices)]` is what a model is given; `np.argsort` of the
    order leads back.

    Args:
      layout: "zigzag", or "contiguous", which leaves the sequence as it is.
      rows: The rows of the whole sequence.
      devices: The devices of the ring.

    Returns:
      int [rows]: for each row of the layout, its position in the sequence.

    Raises:
      ValueError: The layout is unknown, or the rows cannot be shared out equally.

    >>> sequence_order("zigzag", 8, 2).tolist()
    [0, 1, 6, 7, 2, 3, 4, 5]
    """
    check_sequence_layout("sequence_order", layout)
    check_sequence_rows("sequence_order", layout, rows, devices)
    order = np.arange(rows)
    if layout == "contiguous":
        return order
    chunks = order.reshape(2 * devices, -1)
    return np.concatenate(
        [chunks[[device, 2 * devices - 1 - device]].reshape(-1) for device in range(devices)]
    )


def positions(layout: AttentionLayout, rows: int, axis_name: str) -> Array:
    """Returns the positions of this device's `rows` rows, [rows]. For use inside `jax.shard_map`."""
    device = lax.axis_index(axis_name)
    size = lax.axis_size(axis_name)
    row = jnp.arange(rows)
    if layout == "contiguous":
        return device * rows + row
    half = rows // 2
    return jnp.where(row < half, device * half + row, (2 * size - 1 - device) * half + (row - half))


def check_sequence_layout(caller: str, layout: str) -> None:
    """Raises ValueError for an unknown layout of a sequence."""
    if layout not in LAYOUTS:
        raise ValueError(
            f"{caller} got layout={layout!r}: it must be one of {', '.join(map(repr, LAYOUTS))}"
        )


def check_segments(caller: str, segment_ids: Array | None, shape: tuple[int, ...]) -> None:
    """Raises ValueError for segment ids that are not one integer for each row of inputs of this
    shape.
    """
    if segment_ids is None:
        return
    if segment_ids.shape != shape[:2]:
        raise ValueError(
            f"{caller} needs one segment id a row, {list(shape[:2])}: got {list(segment_ids.shape)}"
        )
    if not jnp.issubdtype(segment_ids.dtype, jnp.integer):
        raise ValueError(
            f"{caller} needs segment ids of an integer dtype: got {segment_ids.dtype}; cast them"
        )


def check_sequence_rows(caller: str, layout: str, rows: int, devices: int) -> None:
    """Raises ValueError if the `rows` rows of a sequence cannot be shared out equally over a
    ring.
    """
    shares = devices * (2 if layout == "zigzag" else 1)
    if rows % shares:
        raise ValueError(
            f"{caller} with layout={layout!r} gives each of {devices} devices "
            f"{'two equal chunks' if layout == 'zigzag' else 'an equal share'} of the sequence: "
            f"got {rows} rows, needed a multiple of {shares}; pad the sequence to "
            f"{-(-rows // shares) * shares}, with a segment id of its own for the padding"
        )
