"""What the backward pass may use: names of forward results, policies that keep them, and
derivatives that are refused.

A policy sees a collective matmul as one operation that is no `dot_general`, because it has a VJP
rule of its own. So JAX's policies for matmuls compute it again, and its transfers with it. The
rules therefore name their results with `jax.ad_checkpoint.checkpoint_name`.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import Primitive

from flaxasync.mesh import UnsupportedError

PRODUCT = "flaxasync_product"  # the result of a collective matmul
HIDDEN = "flaxasync_hidden"  # the products of an MLP that its activation takes: up and gate
# the all_gather(x) that `all_gather_matmul` keeps for its weight gradient
GATHERED = "flaxasync_gathered"
ATTENTION = "flaxasync_attention"  # the result of attention
STATISTICS = "flaxasync_statistics"  # the log-sum-exp of each row of attention
# a parameter of a fully sharded layer, as it was gathered for the layer
PARAMETER = "flaxasync_parameter"
STREAM = "flaxasync_stream"  # the input of a layer
ADDED = "flaxasync_added"  # what the attention and the MLP of a layer add to its input
# the operands of attention: heads of queries, keys and values, rotated by positions
OPERANDS = "flaxasync_operands"

_only = jax.checkpoint_policies.save_only_these_names
_matmuls = jax.checkpoint_policies.save_from_both_policies(
    jax.checkpoint_policies.dots_with_no_batch_dims_saveable, _only(PRODUCT, HIDDEN, GATHERED)
)
_costly = jax.checkpoint_policies.save_from_both_policies(
    _matmuls, _only(ATTENTION, STATISTICS, PARAMETER)
)
# Policies that keep some products, for memory that is too small for those of `save_matmuls`:
# what attention and the activation of an MLP take,
save_operands = _only(OPERANDS, HIDDEN, GATHERED)
# what that activation takes, so that products before attention are repeated, and attention is,
save_mlp = _only(HIDDEN, ADDED, GATHERED)
# and all of attention, so that the products before the activation are repeated.
save_attention = _only(OPERANDS, ATTENTION, STATISTICS, ADDED, GATHERED)
_offloading = functools.partial(
    jax.checkpoint_policies.save_and_offload_only_these_names,
    offload_src="device",
    offload_dst="pinned_host",
)
_operands = _offloading(
    names_which_can_be_saved=[ATTENTION, STATISTICS],
    names_which_can_be_offloaded=[STREAM, OPERANDS],
)
_most = _offloading(
    names_which_can_be_saved=[STATISTICS],
    names_which_can_be_offloaded=[STREAM, OPERANDS, ATTENTION],
)


def save_matmuls(primitive: Primitive, *operands: object, **parameters: object) -> Any:
    """Policy of `jax.checkpoint` that keeps the results of matmuls, those of collective matmuls
    included.

    It is `jax.checkpoint_policies.dots_with_no_batch_dims_saveable`, and keeps what the ops of this
    package return as well, with the rows that `gathered_bytes` lets `all_gather_matmul` keep. So
    the backward pass repeats neither their products nor the transfers of their forward pass.
    Attention and the gathers of fully sharded kernels are repeated. `jax.checkpoint(layer,
    policy=fa.save_matmuls)` uses it.
    """
    return _matmuls(primitive, *operands, **parameters)


def save_costly(primitive: Primitive, *operands: object, **parameters: object) -> Any:
    """Policy of `jax.checkpoint` that keeps what is costly to compute or to transfer again.

    It keeps what `save_matmuls` keeps, the results of attention, and the gathered kernels of fully
    sharded layers. The backward pass repeats what is between them: norms, rotary positions,
    activations. It is used as `save_matmuls` is.
    """
    return _costly(primitive, *operands, **parameters)


def offload_operands(primitive: Primitive, *operands: object, **parameters: object) -> Any:
    """Policy of `jax.checkpoint` that keeps the results of attention, and on the host what
    attention reads.

    Offloaded to the memory "pinned_host" are the queries, keys and values of attention, after
    rotary positions, and the layer inputs of `fa.nn.scan_with_prefetch`. All else is computed
    again, but attention is not. A layer of one's own offloads another array x by
    `checkpoint_name(x, "flaxasync_stream")`.
    """
    return _operands(primitive, *operands, **parameters)


def offload_most(primitive: Primitive, *operands: object, **parameters: object) -> Any:
    """Policy of `jax.checkpoint` that also offloads the results of attention, so that least stays
    on the device.

    More is sent than by `offload_operands`. Take it where memory is short: libtpu begins transfers
    late, and a core waits for what has not arrived.
    """
    return _most(primitive, *operands, **parameters)


def first_only(op: str, why: str, instead: str) -> Callable[..., tuple[Any, ...]]:
    """Returns the identity of operands whose second derivative does not exist: it raises
    NotImplementedError.

    The first derivative of such an op is a kernel or a ring of its own.
    """

    @jax.custom_jvp
    def identity(*operands: object) -> tuple[Any, ...]:
        return operands

    @identity.defjvp
    def refuse(primals: tuple, tangents: tuple) -> Any:
        raise UnsupportedError(f"{op} has a first derivative only: {why}; {instead}")

    return identity
