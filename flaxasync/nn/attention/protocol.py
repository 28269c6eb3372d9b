"""What the attention layers have of `nnx.MultiHeadAttention` beside its call: attributes,
`nnx.view`, refusals.

`nnx.Module.set_attributes` and `nnx.view` pass over a module that lacks what they set, without a
word as soon as another module has it. So a layer has every attribute of its counterpart, and one
that cannot be set says so.
"""

from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from flaxasync.nn.attention.heads import HeadAttention
from flaxasync.nn.linear import DenseLayer
from flaxasync.nn.options import ConfiguredProducts, fixed, fixed_setting, lacking, option
from flaxasync.nn.out_sharding import OutSharding
from flaxasync.nn.placement import Placement, entries_of, spec_of


class LikeMultiHeadAttention(ConfiguredProducts):
    """The attributes and views of `nnx.MultiHeadAttention`, under its names."""

    attention: HeadAttention
    query: DenseLayer
    key: DenseLayer
    out: DenseLayer
    # whether nothing is dropped, if a call does not say it; None for False
    deterministic: bool | None
    # whether rows are added to the cache, if a call does not say it; None for False
    decode: bool | None
    cached_key: nnx.Cache | None

    heads = fixed("heads", "attention.heads")
    kv_heads = fixed("kv_heads", "attention.kv_heads")
    head_dim = fixed("head_dim", "attention.head_dim")
    num_heads = fixed("num_heads", "attention.heads")
    num_kv_heads = fixed("num_kv_heads", "attention.kv_heads")
    in_features = fixed("in_features", "query.in_features")
    in_kv_features = fixed("in_kv_features", "key.in_features")
    qkv_features = fixed("qkv_features", "query.out_features")
    out_features = fixed("out_features", "out.out_features")
    normalize_qk = fixed("normalize_qk", "attention.normalize_qk")
    use_bias = fixed_setting("use_bias")
    # One function for all four projections, which `promote_dtype` and `dot_general` set.
    qkv_promote_dtype = fixed("qkv_promote_dtype", "settings.promote_dtype")
    out_promote_dtype = fixed("out_promote_dtype", "settings.promote_dtype")
    qkv_dot_general = fixed("qkv_dot_general", "settings.dot_general")
    out_dot_general = fixed("out_dot_general", "settings.dot_general")
    dropout_rate = option("dropout_rate", of="attention")
    attention_fn = option("attention_fn", of="attention")
    # What the layers lack, with the value that stands for it in `nnx.MultiHeadAttention`.
    broadcast_dropout = lacking("broadcast_dropout", False)
    ln_promote_dtype = lacking("ln_promote_dtype", nnx.nn.dtypes.promote_dtype)
    qkv_dot_general_cls = lacking("qkv_dot_general_cls", None)
    out_dot_general_cls = lacking("out_dot_general_cls", None)

    @property
    def precision(self) -> Any:
        """The option `precision`, of the projections and of the attention."""
        return self.settings.precision

    @precision.setter
    def precision(self, value: object) -> None:
        name = type(self).__name__
        self.attention = self.attention.changed(name, precision=value)
        self.settings = self.settings.changed(name, precision=value)

    def init_cache(self, input_shape: tuple[int, ...], dtype: DTypeLike = jnp.float32) -> None:
        """Makes an empty cache of keys and values. Raises NotImplementedError where the layer has
        none.
        """
        raise NotImplementedError(
            f"{type(self).__name__} decodes with no cache of keys and values; decode with "
            "ParallelSelfAttention, which takes the same parameters"
        )

    def set_view(
        self,
        deterministic: bool | None = None,
        decode: bool | None = None,
        batch_size: int | tuple[int, ...] | None = None,
        max_length: int | None = None,
    ) -> None:
        """Sets what `nnx.view` is given.

        Args:
          deterministic: Whether nothing is dropped.
          decode: Whether the rows of a call are added to the cache, and attend to themselves and to
            the rows before.
          batch_size: The sequences of a new empty cache; for a stack of layers with its size
            before.
          max_length: The rows of each sequence of that cache.
        """
        if (batch_size is None) != (max_length is None):
            raise ValueError(
                f"{type(self).__name__} makes a cache of batch_size sequences of max_length rows: "
                f"got batch_size={batch_size} and max_length={max_length}; give both, or neither"
            )
        if deterministic is not None:
            self.deterministic = deterministic
        if decode is not None:
            self.decode = decode
        if batch_size is not None and max_length is not None:
            batch = (batch_size,) if isinstance(batch_size, int) else tuple(batch_size)
            self.init_cache(
                (*batch, max_length, self.query.in_features), self.settings.dtype or jnp.float32
            )

    def decodes(self, decode: bool | None) -> bool:
        """Says whether a call decodes, which its argument says, or else the attribute."""
        return bool(self.decode if decode is None else decode)


def refuse(layer: str, instead: str, **given: Any) -> None:
    """Raises NotImplementedError for keywords of `nnx.MultiHeadAttention` that a layer lacks: those
    that are not None.

    `instead` says what to do.
    """
    for name, value in given.items():
        if value is not None and value is not False:
            raise NotImplementedError(f"{layer} lacks {name} of nnx.MultiHeadAttention; {instead}")


def check_qkv_sharding(
    layer: str, qkv_sharding: OutSharding, placement: Placement, *, splits_heads: bool
) -> None:
    """Raises NotImplementedError for queries, keys and values [b, s, heads, head_dim] sharded as
    the layer does not.
    """
    if qkv_sharding is None:
        return
    if isinstance(qkv_sharding, NamedSharding):
        spec = qkv_sharding.spec
    else:
        spec = qkv_sharding
    axis = (placement.axis_name,)
    if splits_heads:
        rows = placement.rows
    else:
        rows = (*placement.rows, *axis)
    natural = [*placement.batch, rows, axis if splits_heads else (), ()]
    if not isinstance(spec, PartitionSpec) or entries_of(spec, 4) != natural:
        raise NotImplementedError(
            f"{layer} shards queries, keys and values [b, s, heads, head_dim] as "
            f"{spec_of(natural)}: got qkv_sharding={qkv_sharding}; leave it out"
        )
