"""The names of what collective matmuls compute forward, and a policy of `jax.checkpoint` that keeps it.

A policy sees a collective matmul as one operation that is no `dot_general`, because it has a VJP rule of its own. So
JAX's policies for matmuls compute it again, and its transfers with it. The rules therefore name their results with
`jax.ad_checkpoint.checkpoint_name`, which changes nothing under any policy that does not ask for these names.
"""

from typing import Any

import jax

PRODUCT = "flaxasync_product"
"""The result of a collective matmul: y of `all_gather_matmul`, `matmul_reduce_scatter` and `matmul_all_reduce`."""
GATHERED = "flaxasync_gathered"
"""The all_gather(x) that `all_gather_matmul` keeps for its weight gradient, where `gathered_bytes` allows it."""

_policy = jax.checkpoint_policies.save_from_both_policies(
    jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    jax.checkpoint_policies.save_only_these_names(PRODUCT, GATHERED),
)


def save_matmuls(primitive: Any, *operands: Any, **parameters: Any) -> Any:
    """Policy of `jax.checkpoint` that keeps the results of matmuls, those of collective matmuls included.

    It is `jax.checkpoint_policies.dots_with_no_batch_dims_saveable`, and keeps what the ops of this package return as
    well, with the rows that `gathered_bytes` lets `all_gather_matmul` keep. So the backward pass repeats neither their
    products nor the transfers of their forward pass. Attention and the gathers of fully sharded kernels are repeated.

    ```
    jax.checkpoint(layer, policy=fa.save_matmuls)
    ```

    Args:
      primitive: The operation whose result may be kept.
      *operands: The types of its operands.
      **parameters: Its parameters.

    Returns:
      Whether the result is kept.
    """
    return _policy(primitive, *operands, **parameters)
