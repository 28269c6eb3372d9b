"""Self-attention over a sequence that is split over a mesh axis: every device has all heads, and rows of its own."""

import functools
from typing import Any, Unpack

from flax import nnx
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from flaxasync.nn.attention_call import Inputs
from flaxasync.nn.context import make_context
from flaxasync.nn.fully_sharded import stored_spec
from flaxasync.nn.heads import HeadAttention, ScoreOptions
from flaxasync.nn.options import LinearOptions, LinearSettings, settings_of
from flaxasync.nn.self_attention import SelfAttention
from flaxasync.ops.attention.layouts import AttentionLayout, check_sequence_rows


class RingSelfAttention(SelfAttention):
    """Multi-head self-attention whose keys and values travel between devices that each hold rows of the sequence.

    ```
    x        [b, s, features]              sharded by rows over axis_name, as is everything below
    q        [b, s, heads, head_dim]
    k, v     [b, s, kv_heads, head_dim]
    y        [b, s, features]
    ```

    This is `flaxasync.ring_attention` between four `nnx.Linear`: `query`, `key`, `value` and `out`, whose parameters
    are the same on all devices. Only keys and values cross the axis. To split the heads too, over another axis, use
    `ParallelSelfAttention` with `context_axis`.

    Args:
      features: The features of input and output.
      heads: The query heads; a multiple of `kv_heads`.
      kv_heads: The key-value heads, each shared by heads / kv_heads query heads. By default heads.
      head_dim: The features of a head; by default features / heads.
      causal: Whether a row attends only to itself and to earlier rows.
      layout: The order of the rows: "contiguous" or "zigzag"; see `flaxasync.ring_attention`. The input is in the order
        of `flaxasync.sequence_order`.
      window: A row attends only to rows fewer than `window` positions away; None for any distance.
      rope_theta: The base of the rotary position embedding; None for none.
      rngs: The random streams; the layer draws from `params`.
      **options: See `flaxasync.nn.LinearOptions`. `axis_name`, which splits the sequence, is "context" by default;
        `use_bias` is False by default; `backend` is that of `flaxasync.ring_attention`. If you give `in_spec`,
        its rows dimension must name `axis_name`.

    Raises:
      TypeError: A keyword is unknown.
      ValueError: No mesh is set, it lacks the axis, or the heads do not divide by each other.
    """

    def __init__(
        self,
        features: int,
        heads: int,
        *,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        causal: bool = True,
        layout: AttentionLayout = "contiguous",
        window: int | None = None,
        rope_theta: float | None = 10_000.0,
        rngs: nnx.Rngs,
        **options: Unpack[LinearOptions],
    ):
        layer, kv_heads = "RingSelfAttention", heads if kv_heads is None else kv_heads
        options.setdefault("axis_name", "context")
        options.setdefault("use_bias", False)
        self.settings = settings = settings_of(LinearSettings, layer, options)
        attention = HeadAttention.of(
            layer, features, heads, kv_heads, head_dim, causal=causal, window=window, rope_theta=rope_theta,
            context=make_context(layer, settings.axis_name, layout, settings.backend), options=ScoreOptions(),
            precision=settings.precision,
        )  # fmt: skip
        linear = functools.partial(
            nnx.Linear, use_bias=settings.use_bias, param_dtype=settings.param_dtype,
            kernel_init=settings.kernel_init, bias_init=settings.bias_init, rngs=rngs,
        )  # fmt: skip

        def make(in_features: int, out_features: int) -> nnx.Linear:
            metadata: dict[str, Any] = {}
            for name, shape in (("kernel", (in_features, out_features)), ("bias", (out_features,))):
                given = dict(getattr(settings, f"{name}_metadata"))
                if settings.fsdp_axis is not None or "out_sharding" in given:
                    spec = stored_spec(
                        layer, name, shape, P(), settings.axis_name, settings.fsdp_axis, given.get("out_sharding")
                    )
                    given["out_sharding"] = tuple(spec)
                metadata[f"{name}_metadata"] = given
            return linear(in_features, out_features, **metadata)

        self._build((features, features, features), heads, kv_heads, attention, make, make, rngs)

    def __call__(self, x: Float[Array, "b s d"], segment_ids: Int[Array, "b s"] | None = None) -> Float[Array, "b s d"]:
        """Applies the layer.

        Args:
          x: The input, sharded by rows.
          segment_ids: The segment of each row; a row attends only to rows of the same segment.

        Raises:
          ValueError: No mesh is set, it lacks the axis, x has other features or dimensions, is not sharded by rows over
            the axis, or has rows that cannot be shared out equally.
        """
        context = self.attention.context
        assert context is not None
        placement = self._place(x, segment_ids, self.settings.in_spec)
        if (not placement.rows_sharded and placement.size > 1) or placement.rows:
            raise ValueError(
                f"RingSelfAttention needs its input's rows sharded over {placement.axis_name!r} alone: got "
                f"{placement.in_spec}; reshard it with jax.reshard, or use ParallelSelfAttention for rows on two axes"
            )
        rows = x.shape[1] * (placement.size if placement.manual else 1)
        check_sequence_rows("RingSelfAttention", context.layout, rows, placement.size)
        return self._attend(
            x,
            Inputs(segment_ids=segment_ids),
            placement,
            P(*placement.in_spec[:2]),
            rows_sharded=False,
            out_layout=None,
        )
