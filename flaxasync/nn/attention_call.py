"""What a call of an attention layer consists of: `Inputs`, its arrays, and `Call`, what is static in it."""

import dataclasses

from jax import Array

from flaxasync.nn import shards
from flaxasync.nn.heads import HeadAttention
from flaxasync.nn.options import LinearSettings
from flaxasync.nn.placement import Layout
from flaxasync.nn.shares import Shares


@dataclasses.dataclass(frozen=True)
class Inputs:
    """The arrays of a call beside the queries' input. Each may be None.

    Attributes:
      key: The input of keys, where it is not that of queries.
      value: The input of values, where it is not that of keys.
      segment_ids: The segment of each row, [b, s].
      mask: Booleans that broadcast to [b, heads, s, t].
      bias: Numbers that broadcast to [b, heads, s, t].
      dropout_key: A key of `jax.random`, as raw data.
    """

    key: Array | None = None
    value: Array | None = None
    segment_ids: Array | None = None
    mask: Array | None = None
    bias: Array | None = None
    dropout_key: Array | None = None


@dataclasses.dataclass(frozen=True)
class Call:
    """What is static in a call. Hashable.

    Attributes:
      settings: The settings of the projections, with the dtype of the computation.
      attention: What the heads have in common.
      rows_sharded: Whether the layer's axis shards the rows of the input of queries, and of that of keys and values.
      out_layout: The layout of a row-parallel output projection; None for one that every device has whole.
      shares: Which query heads and which key-value heads each device has; None where every device has all.
      stored: How the parameters of the four projections are stored.
      exchange_heads: Whether heads travel instead of rows; None for what is predicted to be faster.
    """

    settings: LinearSettings
    attention: HeadAttention
    rows_sharded: tuple[bool, bool]
    out_layout: Layout | None
    shares: tuple[Shares, Shares] | None
    stored: tuple[shards.Stored, ...]
    exchange_heads: bool | None = False
