"""Tensor-parallel attention of one input to another: its heads are split over a mesh axis."""

import math
from typing import Any, Unpack

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from flaxasync.mesh import mesh_axis_size
from flaxasync.nn.attention.base import (
    AttentionLayer,
    attend_cached,
    check_whole_rows,
    place_input,
    run,
    scores_array,
)
from flaxasync.nn.attention.heads import (
    AttentionOptions,
    HeadAttention,
    Inputs,
    ParallelAttentionOptions,
)
from flaxasync.nn.attention.protocol import check_qkv_sharding, refuse
from flaxasync.nn.linear import ColumnParallelLinear, RowParallelLinear
from flaxasync.nn.options import settings_of
from flaxasync.nn.out_sharding import OutSharding, output_spec, shard_output
from flaxasync.nn.placement import Placement, place
from flaxasync.nn.uneven_shares import head_shares
from flaxasync.ops import choose
from flaxasync.ops.attention.layouts import check_sequence_rows


class ParallelAttention(AttentionLayer):
    """Multi-head attention with heads split over a mesh axis: the parallel
    `nnx.MultiHeadAttention`.

    ```
    inputs_q      [b, s, features]              sharded by rows over axis_name, or the same on all of its devices
    inputs_k, _v  [b, t, kv_features]           likewise; by default inputs_q
    q             [b, s, heads, head_dim]       a share of the heads on each device, all rows
    k, v          [b, t, kv_heads, head_dim]    likewise
    y             [b, s, out_features]          sharded as inputs_q is
    ```

    Projections of one input share one gather of it. The parameters are those of four `nnx.Linear`:
    `query`, `key`, `value` and `out`, of which the first three have heads * head_dim output
    features.

    The axis need not divide the heads. Where it does not, some devices compute with heads of zeros,
    and where there are fewer key-value heads than devices, several devices compute with the same;
    an all-to-all fetches these parameters in every call. Their shapes are those of the dense model
    all the same.

    Args:
      features: The features of the input of queries.
      heads: The query heads; a multiple of `kv_heads`.
      num_heads: The same, under the name in `nnx.MultiHeadAttention`.
      kv_features: The features of the inputs of keys and values; by default features.
      out_features: The features of the output; by default features.
      causal: Whether a row attends only to itself and to earlier rows.
      rope_theta: The base of the rotary position embedding; None for none.
      rngs: The random streams, from whose `dropout` a layer that drops draws, too.
      **options: See `flaxasync.nn.LinearOptions` and `flaxasync.nn.AttentionOptions`. If you give
        `in_spec`, its rows dimension names `axis_name`, or no axis where every device has all rows.

    Raises:
      ValueError: The heads do not divide by each other, or an option does not go with another.
      NotImplementedError: An option needs all scores of a row, and sequences are split.
    """

    def __init__(
        self,
        features: int,
        heads: int | None = None,
        *,
        num_heads: int | None = None,
        kv_features: int | None = None,
        out_features: int | None = None,
        causal: bool = False,
        rope_theta: float | None = None,
        rngs: nnx.Rngs,
        **options: Unpack[ParallelAttentionOptions],
    ):
        layer = type(self).__name__
        linear = dict[str, Any](options)
        if (heads is None) == (num_heads is None):
            raise ValueError(
                f"{layer} needs heads, or num_heads, which means the same: got {heads} and "
                f"{num_heads}"
            )
        if heads is None:
            heads = num_heads
        assert heads is not None
        given = {
            name: linear.pop(name) for name in AttentionOptions.__annotations__ if name in linear
        }
        self.settings = settings_of(layer, linear)
        if given.get("context_backend") is None:
            given["context_backend"] = choose.if_available("ring_attention", self.settings.backend)
        elif given.get("context_axis") is None:
            # it does nothing, and must exist
            choose.check_backend("ring_attention", given["context_backend"])
        self.attention = attention = HeadAttention.of(
            layer,
            features,
            heads,
            causal=causal,
            rope_theta=rope_theta,
            precision=self.settings.precision,
            **given,
        )
        self.rngs = rngs.dropout.fork() if attention.dropout_rate else nnx.data(None)
        devices = mesh_axis_size(layer, self.settings.axis_name)
        q_shares, kv_shares = head_shares(heads, attention.kv_heads, attention.head_dim, devices)
        if kv_features is None:
            kv_features = features
        q_width = heads * attention.head_dim
        kv_width = attention.kv_heads * attention.head_dim
        self.query = ColumnParallelLinear(features, q_width, shares=q_shares, rngs=rngs, **linear)
        self.key = ColumnParallelLinear(
            kv_features, kv_width, shares=kv_shares, rngs=rngs, **linear
        )
        self.value = ColumnParallelLinear(
            kv_features, kv_width, shares=kv_shares, rngs=rngs, **linear
        )
        self.out = RowParallelLinear(
            q_width, out_features or features, shares=q_shares, rngs=rngs, **linear
        )
        self._add_norms(rngs)

    def __call__(
        self,
        inputs_q: Float[Array, "b s d"],
        inputs_k: Float[Array, "b t e"] | None = None,
        inputs_v: Float[Array, "b t e"] | None = None,
        *,
        mask: Array | None = None,
        bias: Array | None = None,
        deterministic: bool | None = None,
        rngs: nnx.Rngs | nnx.RngStream | None = None,
        sow_weights: bool = False,
        decode: bool | None = None,
        is_causal: bool = False,
        out_sharding: OutSharding = None,
        qkv_sharding: OutSharding = None,
        input_positions: Array | None = None,
    ) -> Float[Array, "b s out"]:
        """Applies the layer.

        Args:
          inputs_q, inputs_k: The inputs of queries and of keys; the same by default.
          inputs_v: The input of values; by default inputs_k.
          mask: True where a row attends to another; broadcasts to [b, heads, s, t].
          bias: Added to the scores; broadcasts to [b, heads, s, t].
          deterministic: Whether nothing is dropped; by default the attribute `deterministic`, which
            `nnx.view`, `nnx.Module.eval` and the option set.
          rngs: What the dropout is drawn from; by default a stream of the layer's own.
          decode: Whether the rows are added to the cache that `init_cache` made, and attend to
            themselves and to the rows before them; by default the attribute `decode`. A mask then
            broadcasts to [b, 1, s, length]. More rows than the cache has room for overwrite the
            last ones.
          is_causal: Whether a row attends only to itself and to earlier rows in this call, though
            the layer was built without `causal`. A call that decodes makes no use of it.
          sow_weights: Must be False, because no device has the weights of all heads.
          out_sharding: How the output is to be sharded, if not as inputs_q is.
          qkv_sharding: How queries, keys and values are sharded: P(batch, None, axis_name, None),
            or None.
          input_positions: Must be None. Rows are positions 0 .. s - 1; rotary positions are
            relative, so that rows of packed sequences need no others.

        Raises:
          ValueError: An input has other features, dimensions or rows, a batch of its own, or rows
            that are not on the axes where they belong; a mask or a bias does not fit; the layer
            drops and has nothing to draw from.
          NotImplementedError: `sow_weights` is True, or input_positions are given; inputs_k, a mask
            or a bias is given where sequences are split; `qkv_sharding` is another one.
        """
        layer = type(self).__name__
        refuse(layer, "leave it out", sow_weights=sow_weights, input_positions=input_positions)
        if inputs_v is not None and inputs_k is None:
            raise ValueError(f"{layer} got inputs_v without inputs_k; give both, or inputs_k alone")
        inputs = Inputs(inputs_k, inputs_v, mask=mask, bias=bias)
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

    def init_cache(self, input_shape: tuple[int, ...], dtype: DTypeLike = jnp.float32) -> None:
        """Makes an empty cache of keys and values in `dtype`, as
        `nnx.MultiHeadAttention.init_cache`.

        `input_shape` is that of the longest input that is decoded, [b, length, features]. A stack
        of layers, as `nnx.vmap` makes it, has its size before b.
        """
        shares = self.key.shares
        *stack, batch, length, _ = input_shape
        axis_name = self.settings.axis_name
        mesh = jax.sharding.get_abstract_mesh()
        shape = (*stack, batch, length, shares.devices * shares.local, self.head_dim)
        others = [
            name for name in mesh.axis_names if name not in (axis_name, self.attention.context_axis)
        ]
        if batch % math.prod(mesh.shape[name] for name in others):
            others = []  # they do not divide the batch, which every device then has whole
        spec = (*(None,) * len(stack), tuple(others) or None, None, axis_name, None)
        self.cached_key = nnx.Cache(jnp.zeros(shape, dtype), out_sharding=spec)
        self.cached_value = nnx.Cache(jnp.zeros(shape, dtype), out_sharding=spec)
        self.cache_index = nnx.Cache(jnp.zeros(tuple(stack), jnp.int32))

    def _attend(
        self,
        x: Array,
        inputs: Inputs[Array],
        *,
        decode: bool | None,
        deterministic: bool | None,
        rngs: nnx.Rngs | nnx.RngStream | None,
        is_causal: bool,
        out_sharding: OutSharding,
        qkv_sharding: OutSharding,
    ) -> Array:
        layer = type(self).__name__
        attention = self.attention
        spec = output_spec(layer, out_sharding, self.settings.axis_name)
        if self.decodes(decode):
            return shard_output(attend_cached(self, x, inputs, qkv_sharding), spec)
        dropout_key = self._dropout_key(deterministic, rngs)
        placement = place_input(self, x, inputs.segment_ids, attention.context_axis)
        check_qkv_sharding(layer, qkv_sharding, placement, splits_heads=True)
        if attention.context_axis is not None:
            _check_split_sequence(layer, x, inputs, placement, attention)
        else:
            check_whole_rows(layer, placement)
        kv_placement = self._place_keys(x, inputs, placement)
        if inputs.inputs_k is None:
            keys = x
        else:
            keys = inputs.inputs_k
        shape = x.shape[0], attention.heads, placement.all_rows(x), kv_placement.all_rows(keys)
        mask = scores_array(layer, "mask", inputs.mask, shape)
        bias = scores_array(layer, "bias", inputs.bias, shape)
        checked = inputs._replace(mask=mask, bias=bias, dropout_key=dropout_key)
        y = run(self, x, checked, placement, kv_placement, is_causal=is_causal)
        return shard_output(y, spec)

    def _place_keys(self, x: Array, inputs: Inputs[Array], placement: Placement) -> Placement:
        """Reads how the inputs of keys and values are sharded, and checks them."""
        layer = type(self).__name__
        features = self.key.in_features
        if inputs.inputs_k is None:
            if features != self.query.in_features:
                raise ValueError(
                    f"{layer} was built for {features} features of keys and values, and "
                    f"{self.query.in_features} of queries: give inputs_k"
                )
            return placement
        k = inputs.inputs_k
        if inputs.inputs_v is None:
            v = inputs.inputs_k
        else:
            v = inputs.inputs_v
        keys, values = (
            place(layer, z, self.settings.axis_name, None, "rows", features) for z in (k, v)
        )
        fits = all(z.ndim == 3 and z.shape[:2] == (x.shape[0], k.shape[1]) for z in (k, v))
        if not fits or keys != values or keys.batch != placement.batch or keys.rows:
            raise ValueError(
                f"{layer} needs inputs_k and inputs_v [{x.shape[0]}, rows, features] of one length "
                f"that are sharded alike, with the batch sharded as {placement.in_spec[0]}: got "
                f"{list(k.shape)} sharded {keys.in_spec} and {list(v.shape)} sharded "
                f"{values.in_spec}; reshard them with jax.reshard"
            )
        return keys

    def _dropout_key(
        self, deterministic: bool | None, rngs: nnx.Rngs | nnx.RngStream | None
    ) -> Array | None:
        """Returns the raw data of a key, or None where nothing is dropped."""
        if deterministic is None:
            deterministic = self.deterministic
        if deterministic or not self.attention.dropout_rate:
            return None
        if rngs is None:
            stream = self.rngs
        else:
            stream = rngs
        if stream is None:
            raise ValueError(
                f"{type(self).__name__} drops with dropout_rate={self.dropout_rate} and has no "
                "stream to draw from: give the call rngs, or deterministic=True"
            )
        return jax.random.key_data(stream.dropout() if isinstance(stream, nnx.Rngs) else stream())


def _check_split_sequence(
    layer: str, x: Array, inputs: Inputs[Array], placement: Placement, attention: HeadAttention
) -> None:
    """Refuses rows that are not on both axes or cannot be shared out equally, and inputs that need
    all keys.
    """
    context_axis = attention.context_axis
    assert context_axis is not None
    size = mesh_axis_size(layer, context_axis)
    if placement.manual:
        rows: tuple[str, ...] = (context_axis,) if context_axis in jax.typeof(x).mat.varying else ()
    else:
        rows = placement.rows
        check_sequence_rows(layer, attention.context_layout, x.shape[1], size)
    if size > 1 and rows != (context_axis,):
        raise ValueError(
            f"{layer} with context_axis={context_axis!r} needs its input's rows sharded over "
            f"{(context_axis, placement.axis_name)}, or over {context_axis!r} alone: got "
            f"{placement.in_spec}; reshard it with jax.reshard"
        )
    for name, given in (
        ("inputs_k", inputs.inputs_k),
        ("a mask", inputs.mask),
        ("a bias", inputs.bias),
    ):
        if given is not None:
            raise NotImplementedError(
                f"{layer} over a split sequence lacks {name}: leave context_axis out; causal, "
                "window and segment_ids say without it what attends to what"
            )
