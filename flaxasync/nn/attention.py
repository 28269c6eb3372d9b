"""Tensor-parallel attention of one input to another: its heads are split over a mesh axis."""

import dataclasses
import functools
from typing import Any, Unpack

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from flaxasync.mesh import mesh_axis_size
from flaxasync.nn.attention_call import Inputs
from flaxasync.nn.cache import attend_cached, init_cache
from flaxasync.nn.checks import check_input
from flaxasync.nn.context import check_context, context_in_spec, make_context
from flaxasync.nn.heads import AttentionOptions, HeadAttention, ScoreOptions
from flaxasync.nn.linear import ColumnParallelLinear, RowParallelLinear
from flaxasync.nn.options import LinearOptions, LinearSettings, settings_of
from flaxasync.nn.placement import Placement, place
from flaxasync.nn.self_attention import SelfAttention, scores_array
from flaxasync.nn.shares import head_shares
from flaxasync.ops import execution
from flaxasync.ops.attention.layouts import AttentionLayout


class ParallelAttentionOptions(LinearOptions, AttentionOptions, total=False):
    """Keywords of `ParallelAttention` and `ParallelSelfAttention`: those of Dense layers, and those of attention."""


class ParallelAttention(SelfAttention):
    """Multi-head attention with heads split over a mesh axis: the parallel `nnx.MultiHeadAttention`.

    ```
    inputs_q      [b, s, features]              sharded by rows over axis_name, or the same on all of its devices
    inputs_k, _v  [b, t, kv_features]           likewise; by default inputs_q
    q             [b, s, heads, head_dim]       a share of the heads on each device, all rows
    k, v          [b, t, kv_heads, head_dim]    likewise
    y             [b, s, out_features]          sharded as inputs_q is
    ```

    Projections of one input share one gather of it; the output projection is row-parallel. The parameters are those of
    four `nnx.Linear`: `query`, `key`, `value` and `out`, of which the first three have heads * head_dim output
    features. `flaxasync.nn.load` reads those of `nnx.MultiHeadAttention`.

    The axis need not divide the heads. Where it does not, some devices compute with heads of zeros, and where there are
    fewer key-value heads than devices, several devices compute with the same; an all-to-all fetches these parameters in
    every call. Their shapes are those of the dense model all the same.

    Args:
      features: The features of the input of queries.
      heads: The query heads; a multiple of `kv_heads`.
      num_heads: The same, under the name in `nnx.MultiHeadAttention`.
      kv_heads: The key-value heads, each shared by heads / kv_heads query heads. By default heads.
      head_dim: The features of a head; by default features / heads.
      kv_features: The features of the inputs of keys and values; by default features.
      out_features: The features of the output; by default features.
      causal: Whether a row attends only to itself and to earlier rows.
      window: A row attends only to rows fewer than `window` positions away; None for any distance.
      rope_theta: The base of the rotary position embedding; None for none.
      context: The mesh axis that splits sequences, their layout and backend; see `ParallelSelfAttention`.
      exchange_heads: Whether weights and heads travel instead of rows; see `ParallelSelfAttention`.
      rngs: The random streams; the layer draws from `params`, and from `dropout` where it drops.
      **options: See `flaxasync.nn.LinearOptions` and `flaxasync.nn.AttentionOptions`. If you give
        `in_spec`, its rows dimension names `axis_name`, or no axis where every device has all rows.

    Raises:
      TypeError: A keyword is unknown.
      ValueError: No mesh is set, it lacks an axis, or the heads do not divide by each other.
      NotImplementedError: An option needs all scores of a row, and sequences are split.
    """

    def __init__(
        self,
        features: int,
        heads: int | None = None,
        *,
        num_heads: int | None = None,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        kv_features: int | None = None,
        out_features: int | None = None,
        causal: bool = False,
        window: int | None = None,
        rope_theta: float | None = None,
        context: tuple[str | None, AttentionLayout, str | None] = (None, "contiguous", None),
        exchange_heads: bool | None = None,
        rngs: nnx.Rngs,
        **options: Unpack[ParallelAttentionOptions],
    ):
        layer = type(self).__name__
        scores = {f.name: options.pop(f.name) for f in dataclasses.fields(ScoreOptions) if f.name in options}  # type: ignore[misc]
        linear: Any = options
        if (heads is None) == (num_heads is None):
            raise ValueError(f"{layer} needs heads, or num_heads, which means the same: got {heads} and {num_heads}")
        heads = num_heads if heads is None else heads
        assert heads is not None
        kv_heads = heads if kv_heads is None else kv_heads
        self.settings = settings_of(LinearSettings, layer, linear)
        context_axis, context_layout, context_backend = context
        split = None
        if context_axis is not None:
            backend = context_backend or execution.if_available("ring_attention", self.settings.backend)
            split = make_context(layer, context_axis, context_layout, backend)
        attention = HeadAttention.of(
            layer, features, heads, kv_heads, head_dim, causal=causal, window=window, rope_theta=rope_theta,
            context=split, options=ScoreOptions(**scores), precision=self.settings.precision,
        )  # fmt: skip
        self.exchange_heads = exchange_heads
        self.deterministic = attention.options.deterministic
        self.rngs = rngs.dropout.fork() if attention.options.dropout_rate else nnx.data(None)
        devices = mesh_axis_size(layer, self.settings.axis_name)
        self._build(
            (features, features if kv_features is None else kv_features, out_features or features),
            heads,
            kv_heads,
            attention,
            functools.partial(ColumnParallelLinear, rngs=rngs, **linear),
            functools.partial(RowParallelLinear, rngs=rngs, **linear),
            rngs,
            head_shares(heads, kv_heads, attention.head_dim, devices),
        )

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
        out_sharding: Any = None,
        qkv_sharding: Any = None,
        input_positions: Array | None = None,
    ) -> Float[Array, "b s out"]:
        """Applies the layer.

        Args:
          inputs_q: The input of queries.
          inputs_k: The input of keys; by default inputs_q.
          inputs_v: The input of values; by default inputs_k.
          mask: True where a row attends to another; broadcasts to [b, heads, s, t].
          bias: Added to the scores; broadcasts to [b, heads, s, t].
          deterministic: Whether nothing is dropped; by default what the layer was built with.
          rngs: What the dropout is drawn from; by default a stream of the layer's own.
          sow_weights: Must be False: no device has the weights of all heads.
          decode: Whether the rows are added to the cache that `init_cache` made, and attend to themselves and to the
            rows before them. A mask then broadcasts to [b, 1, s, length]. More rows than the cache has room for
            overwrite the last ones.
          is_causal: Whether a row attends only to itself and to earlier rows in this call, though the layer was built
            without `causal`.
          out_sharding: Must be None: the output is sharded as inputs_q is.
          qkv_sharding: Must be None: the heads are split over `axis_name`.
          input_positions: Must be None: a row has the position that it has in the sequence.

        Raises:
          ValueError: No mesh is set, it lacks an axis, an input has other features, dimensions or rows, a batch of its
            own, or rows that are not on the axes where they belong; a mask or a bias does not fit.
          NotImplementedError: An argument is given that must not be; inputs_k, a mask, a bias or dropout is given where
            sequences are split.
        """
        lacking = {
            "sow_weights": sow_weights or None,
            "out_sharding": out_sharding,
            "qkv_sharding": qkv_sharding,
            "input_positions": input_positions,
        }
        for name, given in lacking.items():
            if given is not None:
                raise NotImplementedError(
                    f"{type(self).__name__} lacks {name} of nnx.MultiHeadAttention; leave it out, or keep that layer"
                )
        if inputs_v is not None and inputs_k is None:
            raise ValueError(f"{type(self).__name__} got inputs_v without inputs_k; give both, or inputs_k alone")
        inputs = Inputs(inputs_k, inputs_v, mask=mask, bias=bias)
        if decode:
            return self._decode(inputs_q, inputs)
        return self._apply(inputs_q, inputs, deterministic=deterministic, rngs=rngs, is_causal=is_causal)

    def init_cache(self, input_shape: tuple[int, ...], dtype: DTypeLike = jnp.float32) -> None:
        """Makes an empty cache of keys and values, as `nnx.MultiHeadAttention.init_cache`.

        Args:
          input_shape: The shape [b, length, features] of the longest input that is decoded. A stack of layers, as
            `nnx.vmap` makes it, has its size before b.
          dtype: The dtype of the cached keys and values.
        """
        init_cache(self, input_shape, dtype)

    def _decode(self, x: Array, inputs: Inputs) -> Array:
        given = {"inputs_k": inputs.key, "bias": inputs.bias, "segment_ids": inputs.segment_ids}
        for name, array in given.items():
            if array is not None:
                raise NotImplementedError(f"{type(self).__name__} with decode=True lacks {name}; leave it out")
        placement = self._place(x, None, self.settings.in_spec)
        mask = inputs.mask
        if mask is not None and self.cached_key is not None:  # without a cache, attend_cached raises the error
            shape = x.shape[0], 1, x.shape[1], self.cached_key[...].shape[1]
            mask = scores_array(type(self).__name__, "mask", mask, shape)
        return attend_cached(self, x, placement, mask)

    def _apply(
        self,
        x: Array,
        inputs: Inputs,
        *,
        deterministic: bool | None,
        rngs: nnx.Rngs | nnx.RngStream | None,
        is_causal: bool = False,
    ) -> Array:
        layer, context = type(self).__name__, self.attention.context
        in_spec = self.settings.in_spec
        if context is not None and in_spec is None:
            in_spec = context_in_spec(x, self.settings.axis_name, context)
        placement = self._place(x, inputs.segment_ids, in_spec)
        if context is not None:
            check_context(layer, x, placement, context)
        elif placement.rows:
            raise ValueError(
                f"{layer} needs all rows of a sequence on {placement.axis_name!r}: its input's rows are "
                f"sharded over {', '.join(map(repr, placement.rows))}, too; reshard it with jax.reshard, or name that "
                "axis with context_axis"
            )
        kv_placement = self._place_other(x, inputs, placement)
        if context is not None and kv_placement is not None:
            raise NotImplementedError(
                f"{layer} over a split sequence lacks inputs_k: keys would need positions of their own; leave inputs_k "
                "out, or use context=(None, 'contiguous', None)"
            )
        rows = [z.shape[1] * (p.size if p.manual and p.rows_sharded else 1) for z, p in (
            (x, placement), (x if inputs.key is None else inputs.key, kv_placement or placement),
        )]  # fmt: skip
        shape = x.shape[0], self.heads, *rows
        mask, bias = (scores_array(layer, name, z, shape) for name, z in (("mask", inputs.mask), ("bias", inputs.bias)))
        key = self._dropout_key(deterministic, rngs)
        if context is not None and (mask is not None or bias is not None):
            raise NotImplementedError(
                f"{layer} over a split sequence lacks masks and biases: no device has all scores of a row; use "
                "causal, window and segment_ids"
            )
        inputs = dataclasses.replace(inputs, mask=mask, bias=bias, dropout_key=key)
        return self._attend(
            x,
            inputs,
            placement,
            placement.token_spec(),
            rows_sharded=placement.rows_sharded,
            out_layout="sequence" if placement.rows_sharded else "replicated",
            kv_placement=kv_placement,
            is_causal=is_causal,
        )

    def _place_other(self, x: Array, inputs: Inputs, placement: Placement) -> Placement | None:
        """Reads how the inputs of keys and values are sharded, and checks them; None where there are none."""
        if inputs.key is None:
            if self.key.in_features != self.query.in_features:
                raise ValueError(
                    f"{type(self).__name__} was built for {self.key.in_features} features of keys and values, and "
                    f"{self.query.in_features} of queries: give inputs_k"
                )
            return None
        layer = type(self).__name__
        found = []
        for z in (inputs.key, inputs.key if inputs.value is None else inputs.value):
            found.append(place(layer, z, self.settings.axis_name, None, sharded="rows"))
            check_input(layer, z, self.key.in_features, found[-1])
            if z.ndim != 3 or z.shape[:2] != (x.shape[0], inputs.key.shape[1]):
                raise ValueError(
                    f"{layer} needs inputs_k and inputs_v [{x.shape[0]}, rows, features] of one length: got "
                    f"{list(inputs.key.shape)} and {list(z.shape)}"
                )
        if found[0] != found[1] or found[0].batch != placement.batch or found[0].rows:
            raise ValueError(
                f"{layer} needs inputs_q, inputs_k and inputs_v with one sharding of the batch, and inputs_k and "
                f"inputs_v sharded alike: got {placement.in_spec}, {found[0].in_spec} and {found[1].in_spec}; reshard "
                "them with jax.reshard"
            )
        return found[0]

    def _dropout_key(self, deterministic: bool | None, rngs: nnx.Rngs | nnx.RngStream | None) -> Array | None:
        """Returns the raw data of a key, or None where nothing is dropped."""
        if deterministic is None:
            deterministic = bool(self.deterministic)
        if deterministic or not self.attention.options.dropout_rate:
            return None
        stream = rngs or self.rngs
        assert stream is not None
        return jax.random.key_data(stream.dropout() if isinstance(stream, nnx.Rngs) else stream())
