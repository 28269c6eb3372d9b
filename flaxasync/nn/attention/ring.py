"""Self-attention over a sequence that is split over a mesh axis: every device has all heads, and rows of its own."""

from typing import Any, Unpack

from flax import nnx
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from flaxasync.nn.attention.base import AttentionLayer, place_input, run
from flaxasync.nn.attention.heads import HeadAttention, Inputs
from flaxasync.nn.fully_sharded import stored_spec
from flaxasync.nn.options import LinearOptions, LinearSettings, settings_of
from flaxasync.ops.attention.layouts import AttentionLayout, check_sequence_rows


class RingSelfAttention(AttentionLayer):
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
      kv_heads: The key-value heads; by default heads.
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
        options.setdefault("axis_name", "context")
        options.setdefault("use_bias", False)
        self.settings = settings = settings_of(LinearSettings, "RingSelfAttention", options)
        self.attention = attention = HeadAttention.of(
            "RingSelfAttention", features, heads, kv_heads=kv_heads, head_dim=head_dim, causal=causal, window=window,
            rope_theta=rope_theta, precision=settings.precision, context_axis=settings.axis_name, context_layout=layout,
            context_backend=settings.backend,
        )  # fmt: skip
        q_width, kv_width = heads * attention.head_dim, attention.kv_heads * attention.head_dim
        self.query = self._linear(features, q_width, rngs)
        self.key = self._linear(features, kv_width, rngs)
        self.value = self._linear(features, kv_width, rngs)
        self.out = self._linear(q_width, features, rngs)
        self._add_norms(rngs)

    def __call__(self, x: Float[Array, "b s d"], segment_ids: Int[Array, "b s"] | None = None) -> Float[Array, "b s d"]:
        """Applies the layer.

        Args:
          x: The input, sharded by rows.
          segment_ids: The segment of each row; a row attends only to rows of the same segment.

        Raises:
          ValueError: No mesh is set, it lacks the axis, x has other features or dimensions, is not sharded by rows over
            the axis, or has rows that cannot be shared out equally.
        """
        placement = place_input(self, x, segment_ids, self.settings.in_spec)
        if (not placement.rows_sharded and placement.size > 1) or placement.rows:
            raise ValueError(
                f"RingSelfAttention needs its input's rows sharded over {placement.axis_name!r} alone: got "
                f"{placement.in_spec}; reshard it with jax.reshard, or use ParallelSelfAttention for rows on two axes"
            )
        rows = x.shape[1] * (placement.size if placement.manual else 1)
        check_sequence_rows("RingSelfAttention", self.attention.context_layout, rows, placement.size)
        return run(self, x, Inputs(segment_ids=segment_ids), self.attention, placement, placement)

    def _linear(self, in_features: int, out_features: int, rngs: nnx.Rngs) -> nnx.Linear:
        """Returns a projection whose parameters are stored as the options say."""
        settings, metadata = self.settings, dict[str, Any]()
        for name, shape in (("kernel", (in_features, out_features)), ("bias", (out_features,))):
            given = dict(getattr(settings, f"{name}_metadata"))
            if settings.fsdp_axis is not None or "out_sharding" in given:
                annotation = given.get("out_sharding")
                spec = stored_spec(
                    "RingSelfAttention", name, shape, P(), settings.axis_name, settings.fsdp_axis, annotation
                )
                given["out_sharding"] = tuple(spec)
            metadata[f"{name}_metadata"] = given
        return nnx.Linear(
            in_features, out_features, use_bias=settings.use_bias, param_dtype=settings.param_dtype,
            kernel_init=settings.kernel_init, bias_init=settings.bias_init, rngs=rngs, **metadata,
        )  # fmt: skip
