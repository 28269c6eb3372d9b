"""An embedding whose vocabulary is split over a mesh axis, and the loss that goes with it."""

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn.dtypes import canonicalize_dtype
from flax.typing import Initializer
from jax import lax
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from flaxasync.nn import shards
from flaxasync.nn.placement import (
    Layout,
    Placement,
    check_divides,
    check_input,
    check_layout,
    check_rows,
    place,
    place_tokens,
)
from flaxasync.ops import vocabulary as vocab_parallel
from flaxasync.ops.matmul.api import choose_ring

default_embedding_init = nnx.initializers.variance_scaling(1.0, "fan_in", "normal", out_axis=0)  # as nnx.Embed


class VocabParallelEmbed(nnx.Module):
    """`nnx.Embed` with its entries split over a mesh axis.

    ```
    ids        [..., s]             the same on all devices of axis_name
    embedding  [V, features]        sharded by entries: [V/R, features] a device
    y          [..., s, features]   layout="sequence": sharded by rows; "replicated": the same on all devices
    ```

    Every device looks all rows up in its own entries, and rows travel to their owners as partial sums. `attend` turns
    activations into logits that stay split over the vocabulary, and `softmax_cross_entropy` takes them so: the logits
    are never whole on one device. The parameter has the name and global shape of `nnx.Embed`'s.

    Args:
      num_embeddings: V, the entries; a multiple of the axis.
      features: of an entry.
      layout: of the output's rows.
      axis_name: the mesh axis that splits the entries.
      dtype: of the output; by default the parameter's.
      param_dtype: of the parameter.
      precision: of the matmul in `attend`.
      embedding_init: of the parameter.
      backend: of the rings; see `flaxasync.all_gather_matmul`.
      in_spec: how ids [..., s] are sharded, under Auto axes; by default the leading dimension over the other axes.
      rngs: the random streams; draws from `params`.

    Raises:
      ValueError: no mesh is set, it lacks the axis, or num_embeddings does not divide by it.
    """

    def __init__(
        self,
        num_embeddings: int,
        features: int,
        *,
        layout: Layout = "sequence",
        axis_name: str = "model",
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        precision: jax.lax.PrecisionLike = None,
        embedding_init: Initializer = default_embedding_init,
        backend: str | None = None,
        in_spec: P | None = None,
        rngs: nnx.Rngs,
    ):
        check_divides("VocabParallelEmbed", axis_name, num_embeddings=num_embeddings)
        self.num_embeddings = num_embeddings
        self.features = features
        self.layout: Layout = check_layout("VocabParallelEmbed", layout)
        self.axis_name = axis_name
        self.dtype = dtype
        self.param_dtype = param_dtype
        self.precision = precision
        self.backend = backend
        self.in_spec = in_spec
        embedding = embedding_init(rngs.params(), (num_embeddings, features), param_dtype)
        self.embedding = nnx.Param(embedding, out_sharding=(axis_name, None))

    def __call__(self, ids: Int[Array, "*batch s"]) -> Float[Array, "*batch s d"]:
        """Looks up `ids`. An id outside 0 .. V-1 gives zeros.

        Raises:
          ValueError: no mesh is set, it lacks the axis, ids are no integers, are sharded over the axis, or have rows
            that cannot be shared out.
        """
        if not jnp.issubdtype(ids.dtype, jnp.integer):
            raise ValueError(f"VocabParallelEmbed looks up integers: got ids of {ids.dtype}")
        placement = place_tokens("VocabParallelEmbed", ids, self.axis_name, self.in_spec)
        check_rows("VocabParallelEmbed", ids.shape[-1], self.layout, placement)
        ring = choose_ring("VocabParallelEmbed", self.axis_name, placement.size, self.backend)
        dtype = self.dtype or self.embedding[...].dtype

        def apply(ids: Array, table: Array) -> Array:
            if self.layout == "sequence":
                return vocab_parallel.lookup_reduce_scatter(ids, shards.cast(table, ids, dtype), ring)
            # Cast after the look-up: the gradients of an id that occurs often are summed in the parameter's dtype.
            rows = vocab_parallel.lookup(ids, shards.cast(table, ids, table.dtype), self.axis_name)
            return lax.psum(rows.astype(dtype), self.axis_name)

        return placement.run(
            apply,
            (ids, self.embedding[...]),
            (placement.token_spec(), P(self.axis_name, None)),
            placement.spec(self.layout),
        )

    def attend(self, x: Float[Array, "*batch s d"]) -> Float[Array, "*batch s v"]:
        """Logits of `x` against every entry, x @ embedding.T: all rows, sharded by entries.

        Args:
          x: activations, sharded by rows over the axis, or the same on all of its devices.

        Raises:
          ValueError: no mesh is set, it lacks the axis, or x has other features.
        """
        placement = place("VocabParallelEmbed.attend", x, self.axis_name, None, sharded="rows")
        check_input("VocabParallelEmbed.attend", x, self.features, placement)
        dtype = canonicalize_dtype(x, self.embedding[...], dtype=self.dtype)
        options = shards.Options(self.axis_name, dtype, self.backend, self.precision)

        def apply(x: Array, table: Array) -> Array:
            return shards.column(x, ((table.T, None),), options, rows_sharded=placement.rows_sharded)[0]

        return placement.run(
            apply,
            (x, self.embedding[...]),
            (placement.in_spec, P(self.axis_name, None)),
            placement.spec(features=True),
        )


def softmax_cross_entropy(
    logits: Float[Array, "*batch s v"], targets: Int[Array, "*batch s"], *, axis_name: str = "model"
) -> Float[Array, "*batch s"]:
    """Cross-entropy of each row in nats, from logits that are sharded by entries over `axis_name`.

    Three numbers a row cross the axis; see `flaxasync.ops.vocabulary.cross_entropy`.

    Args:
      logits: [..., s, V], sharded by entries (the last dimension).
      targets: [..., s], 0 .. V-1, the same on all devices of the axis.
      axis_name: the mesh axis that splits the vocabulary.

    Returns:
      [..., s], float32, the same on all devices of the axis.

    Raises:
      ValueError: no mesh is set, it lacks the axis, V does not divide by it, or the shapes do not match.
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
        lambda logits, targets: vocab_parallel.cross_entropy(logits, targets, axis_name),
        (logits, targets),
        (placement.in_spec, placement.token_spec()),
        placement.token_spec(),
    )
