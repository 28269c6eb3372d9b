"""The loss of a vocabulary-parallel output layer, whose logits are never in memory at once."""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax
from jax.typing import DTypeLike
from jaxtyping import Float, Int

from flaxasync.mesh import cast_to_varying, mesh_axis_size
from flaxasync.nn.embed import VocabParallelEmbed
from flaxasync.nn.linear import ColumnParallelLinear, with_dtype
from flaxasync.nn.options import Settings
from flaxasync.nn.placement import on_all_devices, place, place_tokens
from flaxasync.nn.shards import Call, Linear, Part
from flaxasync.nn.uneven_shares import Shares
from flaxasync.ops.linear_cross_entropy import BlockLoss
from flaxasync.ops.linear_cross_entropy import linear_cross_entropy as sum_of_losses
from flaxasync.ops.matmul.products import accumulator_dtype
from flaxasync.ops.vocabulary import LossOptions

_NAME = "linear_cross_entropy"


def linear_cross_entropy(
    x: Float[Array, "*batch s d"],
    output: ColumnParallelLinear | VocabParallelEmbed | Float[Array, "d v"],
    targets: Int[Array, "*batch s"],
    *,
    weights: Float[Array, "*batch s"] | None = None,
    axis_name: str = "model",
    ignore: int | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    logit_softcap: float | None = None,
    block_rows: int = 3072,
) -> Float[Array, ""]:
    """Computes the mean cross-entropy of `output(x)`, in nats a row, a block of rows at a time.

    It is the mean of `softmax_cross_entropy(output(x), targets)`, but no logits are kept for the
    backward pass, and only those of one block are in memory. The logits of 4 x 3 x 8192 rows and
    128,256 entries, split over 4 devices, are 12.6 GB on each in float32; those of a block are 0.4
    GB. The gradients are computed with the loss, so nothing is computed twice. They exist from
    there on: that of x, and that of the kernel, in float32 while it is summed.

    ```python
    loss = fa.nn.linear_cross_entropy(hidden, model.output, targets)
    ```

    Args:
      x: [..., s, D], sharded by rows over the axis, or the same on all of its devices.
      output: What makes the logits: a `ColumnParallelLinear` without a bias, a
        `VocabParallelEmbed`, whose `attend` makes them, or a kernel [D, V], which the axis splits
        by columns, and which is cast to the dtype of x. Inside `jax.shard_map` it is this device's
        columns. The layer's `precision` counts, its `backend` does not.
      targets: [..., s], 0 .. V-1, the same on all devices of the axis.
      weights: [..., s], of the rows in the mean, not differentiated; None for ones. If they are all
        0, so is the loss.
      axis_name: The mesh axis that splits the vocabulary; that of `output` where this is a layer.
      ignore, label_smoothing, z_loss: As in `softmax_cross_entropy`. Rows that are ignored do not
        count in the mean.
      logit_softcap: Logits l become c * tanh(l / c) with this c; None for as they are.
      block_rows: The most rows of a block, of all sequences and all devices of the axis together,
        but at least one of each. Each block moves the gradient of the kernel through memory: with
        the default, XLA's products on v6e still hide that.

    Returns:
      A scalar, the same on all devices; float32, or float64 for float64 operands.

    Raises:
      NotImplementedError: The layer has a bias, a `dot_general` of its own or a quantization, or is
        another one, as an adapter is.
      ValueError: No mesh is set, it lacks the axis, the shapes do not match, targets are not
        integers, or block_rows is not positive.
    """
    linear, part, settings, features = _parameters(output, axis_name, x.dtype)
    if not jnp.issubdtype(targets.dtype, jnp.integer):
        raise ValueError(
            f"{_NAME} needs targets of an integer dtype: got {targets.dtype}; cast them"
        )
    if block_rows < 1:
        raise ValueError(f"{_NAME} needs block_rows to be 1 or more: got {block_rows}")
    placement = place(_NAME, x, settings.axis_name, settings.in_spec, "rows", features)
    place_tokens(_NAME, targets, settings.axis_name, None)
    shape = (*x.shape[:-2], placement.all_rows(x))
    for name, array in (("targets", targets), ("weights", targets if weights is None else weights)):
        if array.shape != shape:
            raise ValueError(
                f"{_NAME} needs one element of {name} a row of x: got {list(array.shape)} for x "
                f"{list(x.shape)}; needed {list(shape)}"
            )
    if weights is None:
        weights = jnp.ones(targets.shape, jnp.float32)
    else:
        weights = lax.stop_gradient(weights)
    if ignore is not None:
        weights = jnp.where(targets == ignore, jnp.zeros((), weights.dtype), weights)
    shares = part.shares
    options = LossOptions(ignore, label_smoothing, z_loss, None if shares.whole else shares.size)
    call = Call(with_dtype(settings, x, linear[0]), (part,), placement.rows_sharded)
    loss = BlockLoss(
        settings.axis_name,
        placement.rows_sharded,
        options,
        logit_softcap,
        block_rows,
        settings.precision,
    )
    tokens = placement.token_spec()
    in_specs = placement.in_spec, call.specs[0], tokens, tokens
    return placement.run(_mean, (call, loss), (x, linear, targets, weights), in_specs, jax.P())


def _mean(
    static: tuple[Call, BlockLoss], x: Array, linear: Linear, targets: Array, weights: Array
) -> Array:
    call, loss = static
    ((kernel, _),) = call.take(x, (linear,))
    x = x.astype(call.settings.dtype)
    weights = weights.astype(accumulator_dtype(x))
    total = sum_of_losses(loss, x, kernel.T if call.parts[0].dim == 0 else kernel, targets, weights)
    axes = jax.typeof(total).mat.varying | jax.typeof(weights).mat.varying
    total, weight = (
        lax.psum(cast_to_varying(one, axes), tuple(sorted(axes)))
        for one in (total, jnp.sum(weights))
    )
    return total / jnp.where(weight == 0, 1, weight)


def _parameters(
    output: ColumnParallelLinear | VocabParallelEmbed | Array, axis_name: str, dtype: DTypeLike
) -> tuple[Linear, Part, Settings, int]:
    """Returns the kernel, how it is stored, the settings of what makes logits, and the features of
    its input.
    """
    if isinstance(output, VocabParallelEmbed):
        settings = dataclasses.replace(output.settings, in_spec=None)  # it is that of ids
        return (output.parameters()[0], None), output.part, settings, output.features
    if isinstance(output, ColumnParallelLinear):
        kernel, bias = output.parameters()
        has = {
            "a bias": bias is not None,
            "a dot_general of its own": output.dot_general is not lax.dot_general,
            "a quantization": output.settings.quantization is not None,
        }
        if what := next((name for name, is_so in has.items() if is_so), None):
            raise NotImplementedError(
                f"{_NAME} multiplies with the kernel alone, and the layer has {what}: leave it "
                "out, or use softmax_cross_entropy(output(x), targets)"
            )
        return (kernel, None), output.part, output.settings, output.in_features
    if isinstance(output, nnx.Module):
        raise NotImplementedError(
            f"{_NAME} takes a ColumnParallelLinear, a VocabParallelEmbed or a kernel: got "
            f"{type(output).__name__}; use softmax_cross_entropy(output(x), targets)"
        )
    columns = on_all_devices(_NAME, axis_name, output.shape[1])
    shares = Shares.equal(columns, mesh_axis_size(_NAME, axis_name))
    part = Part(shares.spec(axis_name, output.shape, 1), None, shares)
    return (output, None), part, Settings(axis_name=axis_name, dtype=dtype), output.shape[0]
