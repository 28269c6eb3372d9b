"""What the backward pass may use: names of forward results, policies that keep them, and derivatives that are refused.

A policy sees a collective matmul as one operation that is no `dot_general`, because it has a VJP rule of its own. So
JAX's policies for matmuls compute it again, and its transfers with it. The rules therefore name their results with
`jax.ad_checkpoint.checkpoint_name`.
"""

from collections.abc import Callable
from typing import Any

import jax

from flaxasync.mesh import UnsupportedError

PRODUCT = "flaxasync_product"  # the result of a collective matmul
GATHERED = "flaxasync_gathered"  # the all_gather(x) that `all_gather_matmul` keeps for its weight gradient
ATTENTION = "flaxasync_attention"  # the result of attention, and the log-sum-exp of each row
PARAMETER = "flaxasync_parameter"  # a parameter of a fully sharded layer, as it was gathered for the layer

_matmuls = jax.checkpoint_policies.save_from_both_policies(
    jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    jax.checkpoint_policies.save_only_these_names(PRODUCT, GATHERED),
)
_costly = jax.checkpoint_policies.save_from_both_policies(
    _matmuls, jax.checkpoint_policies.save_only_these_names(ATTENTION, PARAMETER)
)


def save_matmuls(primitive: Any, *operands: Any, **parameters: Any) -> Any:
    """Policy of `jax.checkpoint` that keeps the results of matmuls, those of collective matmuls included.

    It is `jax.checkpoint_policies.dots_with_no_batch_dims_saveable`, and keeps what the ops of this package return as
    well, with the rows that `gathered_bytes` lets `all_gather_matmul` keep. So the backward pass repeats neither their
    products nor the transfers of their forward pass. Attention and the gathers of fully sharded kernels are repeated.
    `jax.checkpoint(layer, policy=fa.save_matmuls)` uses it.
    """
    return _matmuls(primitive, *operands, **parameters)


def save_costly(primitive: Any, *operands: Any, **parameters: Any) -> Any:
    """Policy of `jax.checkpoint` that keeps what is costly to compute or to transfer again.

    It keeps what `save_matmuls` keeps, the results of attention, and the gathered kernels of fully sharded layers. The
    backward pass repeats what is between them: norms, rotary positions, activations. It is used as `save_matmuls` is.
    """
    return _costly(primitive, *operands, **parameters)


def first_only(op: str, why: str, instead: str) -> Callable[..., tuple[Any, ...]]:
    """Returns the identity of operands whose second derivative does not exist: it raises NotImplementedError.

    The first derivative of such an op is a kernel or a ring of its own.
    """

    @jax.custom_jvp
    def identity(*operands: Any) -> tuple[Any, ...]:
        return operands

    @identity.defjvp
    def refuse(primals: tuple, tangents: tuple) -> Any:
        raise UnsupportedError(f"{op} has a first derivative only: {why}; {instead}")

    return identity
