"""An embedding whose vocabulary is split over a mesh axis, and the loss that goes with it."""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Unpack

import jax
import jax.numpy as jnp
from flax import nnx
from flax.typing import Initializer
from jaxtyping import Array, Float, Int

from flaxasync.mesh import mesh_axis_size
from flaxasync.nn import shards
from flaxasync.nn.fully_sharded import StoredLayer, stored_parameter
from flaxasync.nn.linear import with_dtype
from flaxasync.nn.options import LayerOptions, settings_of
from flaxasync.nn.out_sharding import OutSharding, layout_for, output_spec, shard_output
from flaxasync.nn.placement import Layout, check_divides, check_output_layout, place, place_tokens
from flaxasync.nn.shards import Call, Linear, Part
from flaxasync.nn.uneven_shares import Shares
from flaxasync.ops import choose, vocabulary

# as nnx.Embed
default_embedding_init = nnx.initializers.variance_scaling(1.0, "fan_in", "normal", out_axis=0)


class VocabParallelEmbed(StoredLayer):
    """`nnx.Embed` with its entries split over a mesh axis.

    ```
    ids        [..., s]             the same on all devices of axis_name
    embedding  [V, features]        sharded by entries: [V/R, features] a device
    y          [..., s, features]   layout="sequence": sharded by rows; "replicated": the same on all devices
    ```

    Every device looks all rows up in its own entries, and the rows travel to their owners as
    partial sums. `attend` turns activations into logits that stay split over the vocabulary, and
    `softmax_cross_entropy` takes them like that, so no device ever holds whole logits. The
    parameter has the name and global shape of that of `nnx.Embed`.

    Args:
      num_embeddings: V, the number of entries. Where the axis does not divide it, the logits of
        `attend` have the next multiple of entries, of which the last are as low as can be,
        `softmax_cross_entropy` needs `vocab_size` for label smoothing, and the parameter, whose
        shape stays [V, features], is fetched by an all-to-all in every call.
      layout: How the rows of the output lie: "sequence" or "replicated".
      embedding_init: The initializer of the parameter.
      embedding_metadata: Metadata of the parameter, beside how it is sharded.
      **options: See `flaxasync.nn.LayerOptions`. `dtype` is that of the parameter by default;
        `in_spec` is that of ids [..., s].
    """

    names = ("embedding",)
    stored: tuple[jax.P]

    def __init__(
        self,
        num_embeddings: int,
        features: int,
        *,
        layout: Layout = "sequence",
        embedding_init: Initializer = default_embedding_init,
        embedding_metadata: Mapping[str, Any] = MappingProxyType({}),
        rngs: nnx.Rngs,
        **options: Unpack[LayerOptions],
    ):
        self.settings = settings_of("VocabParallelEmbed", options, LayerOptions.__annotations__)
        axis_name = self.settings.axis_name
        self.shares = Shares.equal(num_embeddings, mesh_axis_size("VocabParallelEmbed", axis_name))
        self.num_embeddings = num_embeddings
        self.features = features
        self.embedding_init = embedding_init
        self.layout: Layout = check_output_layout("VocabParallelEmbed", layout)
        embedding = embedding_init(
            rngs.params(), (num_embeddings, features), self.settings.param_dtype
        )
        needed = self.shares.spec(axis_name, (num_embeddings, features), 0)
        self.embedding, stored = stored_parameter(
            "VocabParallelEmbed", "embedding", embedding, self.settings, needed, embedding_metadata
        )
        self.stored = (stored,)

    @property
    def part(self) -> Part:
        """How the embedding is stored, and which part of it a device computes with."""
        return Part(self.stored[0], None, self.shares, dim=0)

    def __call__(
        self,
        inputs: Int[Array, "*batch s"],
        out_sharding: OutSharding = None,
        *,
        layout: Layout | None = None,
    ) -> Float[Array, "*batch s d"]:
        """Looks up ids. An id outside 0 .. V-1 gives a row of NaN, and has no gradient.

        `layout` says how the rows of this output lie; by default what `out_sharding` asks for, or
        else what the layer was built with.

        Raises:
          ValueError: ids are not integers, are sharded over the axis, or have rows that cannot be
            shared out equally.
        """
        ids = inputs
        axis_name = self.settings.axis_name
        if not jnp.issubdtype(ids.dtype, jnp.integer):
            raise ValueError(f"VocabParallelEmbed looks up integers: got ids of {ids.dtype}")
        spec = output_spec("VocabParallelEmbed", out_sharding, axis_name)
        if layout is None:
            layout = layout_for(spec, ids.ndim + 1, axis_name, self.layout)
        check_output_layout("VocabParallelEmbed", layout)
        placement = place_tokens("VocabParallelEmbed", ids, axis_name, self.settings.in_spec)
        placement.check_output_rows("VocabParallelEmbed", ids.shape[-1], layout)
        (table,) = self.parameters()
        backend = choose.if_available("lookup_reduce_scatter", self.settings.backend)
        call = self._call(layout == "sequence", table, backend=backend, inexact=False)
        in_specs = placement.token_spec(), call.specs[0]
        y = placement.run(_lookup, call, (ids, (table, None)), in_specs, placement.spec(layout))
        return shard_output(y, spec)

    def attend(
        self, query: Float[Array, "*batch s d"], out_sharding: OutSharding = None
    ) -> Float[Array, "*batch s v"]:
        """Returns the logits of `query` against every entry, query @ embedding.T: all rows, sharded
        by entries.

        Like the input of `ColumnParallelLinear`, it is sharded by rows over the axis, or the same
        on all of its devices.
        """
        axis_name = self.settings.axis_name
        spec = output_spec("VocabParallelEmbed.attend", out_sharding, axis_name)
        placement = place(
            "VocabParallelEmbed.attend", query, axis_name, None, "rows", self.features
        )
        (table,) = self.parameters()
        call = self._call(placement.rows_sharded, query, table, backend=self.settings.backend)
        in_specs = (placement.in_spec, call.specs[0])
        out_spec = placement.spec(features=True)
        y = placement.run(_attend, call, (query, (table, None)), in_specs, out_spec)
        return shard_output(y, spec)

    def _call(
        self, rows_sharded: bool, *arrays: Array, backend: str | None, **promotion: bool
    ) -> Call:
        """Returns what is static in a computation with these arrays, whose dtype is promoted as
        `nnx.Embed` does it.
        """
        settings = with_dtype(
            dataclasses.replace(self.settings, backend=backend), *arrays, **promotion
        )
        return Call(settings, (self.part,), rows_sharded)


def softmax_cross_entropy(
    logits: Float[Array, "*batch s v"],
    targets: Int[Array, "*batch s"],
    *,
    axis_name: str = "model",
    ignore: int | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    vocab_size: int | None = None,
) -> Float[Array, "*batch s"]:
    """Computes the cross-entropy of each row, in nats, from logits that are sharded by entries over
    `axis_name`.

    Three numbers a row cross the axis, four with label smoothing; see
    `flaxasync.ops.vocabulary.cross_entropy`.

    Args:
      logits: [..., s, V], sharded by entries (the last dimension).
      targets: [..., s], 0 .. V-1, the same on all devices of the axis. Any other target makes the
        loss of its row, and the gradient of its logits, NaN.
      axis_name: The mesh axis that splits the vocabulary.
      ignore: The target of rows whose loss is 0, such as -100 for padding, in the vocabulary or
        not; None for none.
      label_smoothing: The share of the target distribution that is spread over all entries equally.
      z_loss: The factor of log(sum(exp(logits)))**2, which is added; 0 for none.
      vocab_size: The entries that exist, where the logits have more because the axis does not
        divide the vocabulary; see `VocabParallelEmbed`. None for all.

    Returns:
      [..., s], the same on all devices of the axis; float32, or float64 for such logits.

    Raises:
      ValueError: No mesh is set, it lacks the axis, the axis does not divide V, the shapes do not
        match, targets are not integers, or vocab_size is not one of 1 .. V.
    """
    placement = place("softmax_cross_entropy", logits, axis_name, None, "features", None)
    if not placement.manual:
        check_divides("softmax_cross_entropy", axis_name, vocabulary=logits.shape[-1])
    elif placement.size > 1 and not placement.features_sharded:
        raise ValueError(
            f"softmax_cross_entropy needs logits sharded by entries over {axis_name!r}: got logits "
            "that are the same on all of its devices"
        )
    if not jnp.issubdtype(targets.dtype, jnp.integer):
        raise ValueError(
            f"softmax_cross_entropy needs targets of an integer dtype: got {targets.dtype}; cast "
            "them, and for distributions use optax.softmax_cross_entropy"
        )
    entries = logits.shape[-1] * (placement.size if placement.manual else 1)
    if vocab_size is not None and not 1 <= vocab_size <= entries:
        raise ValueError(
            f"softmax_cross_entropy needs vocab_size to be 1 .. {entries}, or None: got "
            f"{vocab_size}"
        )
    place_tokens("softmax_cross_entropy", targets, axis_name, None)
    if logits.shape[:-1] != targets.shape:
        raise ValueError(
            f"softmax_cross_entropy needs one target a row: got logits {list(logits.shape)} and "
            f"targets {list(targets.shape)}"
        )
    options = vocabulary.LossOptions(ignore, label_smoothing, z_loss, vocab_size)
    tokens = placement.token_spec()
    in_specs = (placement.in_spec, tokens)
    return placement.run(_cross_entropy, (axis_name, options), (logits, targets), in_specs, tokens)


def _lookup(call: Call, ids: Array, linear: Linear) -> Array:
    settings = call.settings
    axis_name = call.settings.axis_name
    # A sum over all devices is cast after the look-up, so that the gradients of a frequent id are
    # summed in the dtype of the parameter.
    if call.rows_sharded:
        dtype = settings.dtype
    else:
        dtype = linear[0].dtype
    ((table, _),) = call.take(ids, (linear,), dtype)
    table = shards.cast(table, ids, dtype)
    entries = call.parts[0].shares.size
    if call.rows_sharded:
        return vocabulary.lookup_reduce_scatter(
            ids, table, axis_name, entries=entries, backend=settings.backend
        )
    choose.check_backend("lookup_reduce_scatter", settings.backend)
    return vocabulary.lookup_all_reduce(
        ids, table, axis_name, entries=entries, dtype=settings.dtype
    )


def _attend(call: Call, x: Array, linear: Linear) -> Array:
    ((table, _),) = call.take(x, (linear,))
    logits = shards.column(x, ((table.T, None),), call.settings, rows_sharded=call.rows_sharded)[0]
    return call.parts[0].shares.mask_padding(logits, call.settings.axis_name)


def _cross_entropy(
    static: tuple[str, vocabulary.LossOptions], logits: Array, targets: Array
) -> Array:
    axis_name, options = static
    return vocabulary.cross_entropy(logits, targets, axis_name, options)
