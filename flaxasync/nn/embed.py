"""An embedding whose vocabulary is split over a mesh axis, and the loss that goes with it."""

import dataclasses
from typing import Unpack

import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn.dtypes import canonicalize_dtype
from flax.typing import Initializer
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from flaxasync.nn import shards
from flaxasync.nn.options import LayerOptions, LayerSettings, settings_of
from flaxasync.nn.placement import (
    Layout,
    Placement,
    check_divides,
    check_input,
    check_output_layout,
    check_output_rows,
    place,
    place_tokens,
)
from flaxasync.ops import backends, vocabulary

default_embedding_init = nnx.initializers.variance_scaling(1.0, "fan_in", "normal", out_axis=0)  # as nnx.Embed


class VocabParallelEmbed(nnx.Module):
    """`nnx.Embed` with its entries split over a mesh axis.

    ```
    ids        [..., s]             the same on all devices of axis_name
    embedding  [V, features]        sharded by entries: [V/R, features] a device
    y          [..., s, features]   layout="sequence": sharded by rows; "replicated": the same on all devices
    ```

    Every device looks all rows up in its own entries, and the rows travel to their owners as partial sums. `attend`
    turns activations into logits that stay split over the vocabulary, and `softmax_cross_entropy` takes them like that,
    so no device ever holds whole logits. The parameter has the name and global shape of that of `nnx.Embed`.

    Args:
      num_embeddings: V, the number of entries; a multiple of the axis.
      features: The features of an entry.
      layout: How the rows of the output lie: "sequence" or "replicated".
      embedding_init: The initializer of the parameter.
      rngs: The random streams; the layer draws from `params`.
      **options: See `flaxasync.nn.LayerOptions`. `dtype` is that of the parameter by default; `in_spec` is that of ids
        [..., s].

    Raises:
      TypeError: A keyword is unknown.
      ValueError: No mesh is set, it lacks the axis, or the axis does not divide num_embeddings.
    """

    def __init__(
        self,
        num_embeddings: int,
        features: int,
        *,
        layout: Layout = "sequence",
        embedding_init: Initializer = default_embedding_init,
        rngs: nnx.Rngs,
        **options: Unpack[LayerOptions],
    ):
        self.settings = settings_of(LayerSettings, "VocabParallelEmbed", options)
        axis_name = self.settings.axis_name
        check_divides("VocabParallelEmbed", axis_name, num_embeddings=num_embeddings)
        self.num_embeddings, self.features = num_embeddings, features
        self.layout: Layout = check_output_layout("VocabParallelEmbed", layout)
        embedding = embedding_init(rngs.params(), (num_embeddings, features), self.settings.param_dtype)
        self.embedding = nnx.Param(embedding, out_sharding=(axis_name, None))

    def __call__(self, ids: Int[Array, "*batch s"]) -> Float[Array, "*batch s d"]:
        """Looks up `ids`. An id outside 0 .. V-1 gives zeros.

        Raises:
          ValueError: No mesh is set, it lacks the axis, ids are not integers, are sharded over the axis, or have rows
            that cannot be shared out equally.
        """
        if not jnp.issubdtype(ids.dtype, jnp.integer):
            raise ValueError(f"VocabParallelEmbed looks up integers: got ids of {ids.dtype}")
        axis_name = self.settings.axis_name
        placement = place_tokens("VocabParallelEmbed", ids, axis_name, self.settings.in_spec)
        check_output_rows("VocabParallelEmbed", ids.shape[-1], self.layout, placement)
        backend = backends.if_available("lookup_reduce_scatter", self.settings.backend)
        dtype = self.settings.dtype or self.embedding[...].dtype

        def apply(ids: Array, table: Array) -> Array:
            if self.layout == "sequence":
                table = shards.cast(table, ids, dtype)
                return vocabulary.lookup_reduce_scatter(ids, table, axis_name, backend=backend)
            # Cast after the look-up, so that the gradients of a frequent id are summed in the dtype of the parameter.
            rows = vocabulary.lookup(ids, shards.cast(table, ids, table.dtype), axis_name)
            return lax.psum(rows.astype(dtype), axis_name)

        return placement.run(
            apply,
            (ids, self.embedding[...]),
            (placement.token_spec(), P(axis_name, None)),
            placement.spec(self.layout),
        )

    def attend(self, x: Float[Array, "*batch s d"]) -> Float[Array, "*batch s v"]:
        """Returns the logits of `x` against every entry, x @ embedding.T: all rows, sharded by entries.

        Args:
          x: Activations, sharded by rows over the axis, or the same on all of its devices.

        Raises:
          ValueError: No mesh is set, it lacks the axis, or x has other features.
        """
        axis_name = self.settings.axis_name
        placement = place("VocabParallelEmbed.attend", x, axis_name, None, sharded="rows")
        check_input("VocabParallelEmbed.attend", x, self.features, placement)
        dtype = canonicalize_dtype(x, self.embedding[...], dtype=self.settings.dtype)
        settings = dataclasses.replace(self.settings, dtype=dtype)

        def apply(x: Array, table: Array) -> Array:
            return shards.column(x, ((table.T, None),), settings, rows_sharded=placement.rows_sharded)[0]

        return placement.run(
            apply,
            (x, self.embedding[...]),
            (placement.in_spec, P(axis_name, None)),
            placement.spec(features=True),
        )


def softmax_cross_entropy(
    logits: Float[Array, "*batch s v"], targets: Int[Array, "*batch s"], *, axis_name: str = "model"
) -> Float[Array, "*batch s"]:
    """Computes the cross-entropy of each row, in nats, from logits that are sharded by entries over `axis_name`.

    Three numbers a row cross the axis; see `flaxasync.ops.vocabulary.cross_entropy`.

    Args:
      logits: [..., s, V], sharded by entries (the last dimension).
      targets: [..., s], 0 .. V-1, the same on all devices of the axis.
      axis_name: The mesh axis that splits the vocabulary.

    Returns:
      [..., s], float32, the same on all devices of the axis.

    Raises:
      ValueError: No mesh is set, it lacks the axis, the axis does not divide V, or the shapes do not match.
    """
    placement: Placement = place("softmax_cross_entropy", logits, axis_name, None, sharded="features")
    if not placement.manual:
        check_divides("softmax_cross_entropy", axis_name, vocabulary=logits.shape[-1])
    elif placement.size > 1 and not placement.features_sharded:
        raise ValueError(
            f"softmax_cross_entropy needs logits sharded by entries over {axis_name!r}: got logits that are the "
            "same on all of its devices"
        )
    place_tokens("softmax_cross_entropy", targets, axis_name, None)
    if logits.shape[:-1] != targets.shape:
        raise ValueError(
            f"softmax_cross_entropy needs one target a row: got logits {list(logits.shape)} and targets "
            f"{list(targets.shape)}"
        )
    return placement.run(
        lambda logits, targets: vocabulary.cross_entropy(logits, targets, axis_name),
        (logits, targets),
        (placement.in_spec, placement.token_spec()),
        placement.token_spec(),
    )
