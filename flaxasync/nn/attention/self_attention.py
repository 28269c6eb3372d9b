"""Tensor-parallel self-attention: its heads are split over a mesh axis, and its sequence may be split over another."""

from typing import Unpack

from flax import nnx
from jaxtyping import Array, Float, Int

from flaxasync.nn.attention.cache import attend_cached
from flaxasync.nn.attention.heads import Inputs
from flaxasync.nn.attention.layer import ParallelAttention
from flaxasync.nn.attention.options import ParallelAttentionOptions


class ParallelSelfAttention(ParallelAttention):
    """Multi-head self-attention with heads split over a mesh axis and grouped key-value heads.

    ```
    x        [b, s, features]              sharded by rows over axis_name, or the same on all of its devices
    q        [b, s, heads, head_dim]       a share of the heads on each device, all rows
    k, v     [b, s, kv_heads, head_dim]    likewise
    y        [b, s, features]              sharded as x is
    ```

    Query, key and value share one gather of x; the output projection is row-parallel. The parameters are those of
    `ParallelAttention`.

    With `context_axis` the sequence is split over a second axis, and each device has its heads of its rows: x is
    sharded by rows over (context_axis, axis_name), and keys and values travel along context_axis as in
    `flaxasync.ring_attention`. Without it, rows are positions 0 .. s - 1.

    Arguments and errors are those of `ParallelAttention`, whose `kv_features` and `out_features` this layer lacks. By
    default it is causal, has rotary positions of base 10,000, and no biases (`use_bias=False`). A call raises
    NotImplementedError for what the form with `exchange_heads=True` lacks.
    """

    def __init__(
        self,
        features: int,
        heads: int | None = None,
        *,
        num_heads: int | None = None,
        causal: bool = True,
        rope_theta: float | None = 10_000.0,
        rngs: nnx.Rngs,
        **options: Unpack[ParallelAttentionOptions],
    ):
        options.setdefault("use_bias", False)
        super().__init__(
            features, heads, num_heads=num_heads, causal=causal, rope_theta=rope_theta, rngs=rngs, **options
        )

    def __call__(  # type: ignore[override]
        self,
        x: Float[Array, "b s d"],
        segment_ids: Int[Array, "b s"] | None = None,
        *,
        mask: Array | None = None,
        bias: Array | None = None,
        deterministic: bool | None = None,
        rngs: nnx.Rngs | nnx.RngStream | None = None,
        decode: bool = False,
    ) -> Float[Array, "b s d"]:
        """Applies the layer.

        Args:
          x: The input of queries, keys and values, [b, s, features].
          segment_ids: The segment of each row, [b, s]; a row attends only to rows of the same segment.
          mask: True where a row attends to another; broadcasts to [b, heads, s, s].
          bias: Added to the scores; broadcasts to [b, heads, s, s].
          deterministic: Whether nothing is dropped; by default what the layer was built with.
          rngs: What the dropout is drawn from; by default a stream of the layer's own.
          decode: Whether the rows are added to the cache that `init_cache` made; see `ParallelAttention`. A split
            sequence is not split then: every device of `context_axis` has all rows.

        Raises:
          ValueError: No mesh is set, it lacks an axis, x has other features or dimensions, has rows that are not on the
            axes where they belong, or rows that cannot be shared out equally; a mask or a bias does not fit.
          NotImplementedError: A mask, a bias or dropout is given where sequences are split.
        """
        inputs = Inputs(segment_ids=segment_ids, mask=mask, bias=bias)
        if decode:
            return attend_cached(self, x, inputs)
        return self._attend(x, inputs._replace(dropout_key=self._dropout_key(deterministic, rngs)))
