"""Self-attention layers: heads are split over a mesh axis, or the rows of the sequence are, or
both.
"""

from typing import Unpack

from flax import nnx
from jaxtyping import Array, Float, Int

from flaxasync.nn.attention.base import AttentionLayer, place_input, run
from flaxasync.nn.attention.heads import HeadAttention, Inputs, ParallelAttentionOptions
from flaxasync.nn.attention.layer import ParallelAttention
from flaxasync.nn.attention.protocol import check_qkv_sharding, refuse
from flaxasync.nn.linear import WholeLinear
from flaxasync.nn.options import LinearOptions, settings_of
from flaxasync.nn.out_sharding import OutSharding, output_spec, shard_output
from flaxasync.ops.attention.layouts import AttentionLayout, check_sequence_rows


class ParallelSelfAttention(ParallelAttention):
    """`ParallelAttention` of one input, [b, s, features], as decoders have it.

    With `context_axis` the sequence is split over a second axis, and each device computes its own
    heads for its own rows: x is sharded by rows over (context_axis, axis_name), and keys and values
    travel along context_axis as in `flaxasync.ring_attention`. Without it, rows are positions 0 ..
    s - 1.

    Arguments and errors are those of `ParallelAttention`, whose `kv_features` and `out_features`
    this layer lacks. By default it is causal, has rotary positions of base 10,000, and no biases
    (`use_bias=False`). A call raises NotImplementedError for what the form with
    `exchange_heads=True` lacks.
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
            features,
            heads,
            num_heads=num_heads,
            causal=causal,
            rope_theta=rope_theta,
            rngs=rngs,
            **options,
        )

    def __call__(  # type: ignore[override]
        self,
        inputs_q: Float[Array, "b s d"],
        segment_ids: Int[Array, "b s"] | None = None,
        *,
        inputs_k: None = None,
        inputs_v: None = None,
        mask: Array | None = None,
        bias: Array | None = None,
        deterministic: bool | None = None,
        rngs: nnx.Rngs | nnx.RngStream | None = None,
        sow_weights: bool = False,
        decode: bool | None = None,
        is_causal: bool = False,
        out_sharding: OutSharding = None,
        qkv_sharding: OutSharding = None,
        input_positions: None = None,
    ) -> Float[Array, "b s d"]:
        """Applies the layer to the one input of queries, keys and values.

        `segment_ids` [b, s] names the segment of each row, and a row attends only to rows of its
        own segment. The other arguments, and errors, are those of `ParallelAttention`, which has
        inputs_k and inputs_v. With `decode` the layer does not split the sequence: every device of
        `context_axis` has all rows.
        """
        layer = type(self).__name__
        refuse(layer, "use ParallelAttention", inputs_k=inputs_k, inputs_v=inputs_v)
        refuse(layer, "leave it out", sow_weights=sow_weights, input_positions=input_positions)
        inputs = Inputs(segment_ids=segment_ids, mask=mask, bias=bias)
        return self._attend(
            inputs_q,
            inputs,
            decode=decode,
            deterministic=deterministic,
            rngs=rngs,
            is_causal=is_causal,
            out_sharding=out_sharding,
            qkv_sharding=qkv_sharding,
        )


class RingSelfAttention(AttentionLayer):
    """Multi-head self-attention whose keys and values travel between devices that each hold rows of
    the sequence.

    Its input [b, s, features], queries, keys, values and output are all sharded by rows over
    axis_name. This is `flaxasync.ring_attention` between four Dense layers, `query`, `key`, `value`
    and `out`. Their parameters are those of `nnx.Linear`, and the same on all devices. Only keys
    and values cross the axis. To split the heads too, over another axis, use
    `ParallelSelfAttention` with `context_axis`.

    Args:
      heads, causal, rope_theta: As in `ParallelAttention`.
      kv_heads, head_dim, window: As in `flaxasync.nn.AttentionOptions`.
      layout: The order of the rows: "contiguous" or "zigzag"; see `flaxasync.ring_attention`. The
        input is in the order of `flaxasync.sequence_order`.
      **options: See `flaxasync.nn.LinearOptions`. `axis_name`, which splits the sequence, is
        "context" by default; `use_bias` is False by default; `backend` is that of
        `flaxasync.ring_attention`. If you give `in_spec`, its rows dimension must name `axis_name`.

    Raises:
      ValueError: The heads do not divide by each other.
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
        self.settings = settings = settings_of("RingSelfAttention", options)
        self.attention = attention = HeadAttention.of(
            "RingSelfAttention",
            features,
            heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            causal=causal,
            window=window,
            rope_theta=rope_theta,
            precision=settings.precision,
            context_axis=settings.axis_name,
            context_layout=layout,
            context_backend=settings.backend,
        )
        q_width = heads * attention.head_dim
        kv_width = attention.kv_heads * attention.head_dim
        self.query = WholeLinear("RingSelfAttention", features, q_width, settings, rngs)
        self.key = WholeLinear("RingSelfAttention", features, kv_width, settings, rngs)
        self.value = WholeLinear("RingSelfAttention", features, kv_width, settings, rngs)
        self.out = WholeLinear("RingSelfAttention", q_width, features, settings, rngs)
        self.rngs = nnx.data(None)  # nothing is dropped
        self._add_norms(rngs)

    def __call__(
        self,
        inputs_q: Float[Array, "b s d"],
        segment_ids: Int[Array, "b s"] | None = None,
        *,
        inputs_k: None = None,
        inputs_v: None = None,
        mask: None = None,
        deterministic: bool | None = None,
        rngs: nnx.Rngs | nnx.RngStream | None = None,
        sow_weights: bool = False,
        decode: bool | None = None,
        is_causal: bool = False,
        out_sharding: OutSharding = None,
        qkv_sharding: OutSharding = None,
        input_positions: None = None,
    ) -> Float[Array, "b s d"]:
        """Applies the layer to its one input, sharded by rows. A row attends only to rows of the
        same segment.

        `is_causal`, `out_sharding` and `qkv_sharding` are those of `ParallelAttention`. The layer
        drops nothing, so `deterministic` and `rngs` say nothing.

        Raises:
          ValueError: The input has other features or dimensions, is sharded otherwise, or has rows
            that cannot be shared out equally.
          NotImplementedError: Another argument is given, or the layer is to decode.
        """
        layer = "RingSelfAttention"
        decode_in_call = self.decodes(decode) or None
        refuse(layer, "use ParallelAttention", inputs_k=inputs_k, inputs_v=inputs_v, mask=mask)
        refuse(layer, "leave it out", sow_weights=sow_weights, input_positions=input_positions)
        refuse(
            layer,
            "decode with ParallelSelfAttention, which takes the same parameters",
            decode=decode_in_call,
        )
        spec = output_spec(layer, out_sharding, self.settings.axis_name)
        x = inputs_q
        placement = place_input(self, x, segment_ids)
        check_qkv_sharding(layer, qkv_sharding, placement, splits_heads=False)
        if (not placement.rows_sharded and placement.size > 1) or placement.rows:
            raise ValueError(
                f"RingSelfAttention needs its input's rows sharded over {placement.axis_name!r} "
                f"alone: got {placement.in_spec}; reshard it with jax.reshard, or use "
                "ParallelSelfAttention for rows on two axes"
            )
        layout = self.attention.context_layout
        rows = placement.all_rows(x)
        check_sequence_rows("RingSelfAttention", layout, rows, placement.size)
        y = run(self, x, Inputs(segment_ids=segment_ids), placement, placement, is_causal=is_causal)
        return shard_output(y, spec)
