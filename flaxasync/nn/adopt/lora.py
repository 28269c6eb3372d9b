"""Low-rank adaptation of parallel Dense layers: `nnx.LoRA` whose two factors lie as the layer that they adapt."""

import dataclasses
from typing import Any

import jax
from flax import nnx
from jax import lax
from jaxtyping import Array, Float

from flaxasync.nn.linear import ColumnParallelLinear, RowParallelLinear, multiply, with_dtype


class ParallelLoRA(nnx.LoRA):
    """A parallel Dense layer and a product of low rank that is added to it.

    ```
    lora_a  [in, rank]     for a row-parallel layer sharded by rows, else the same on all devices
    lora_b  [rank, out]    for a column-parallel layer sharded by columns, else the same on all devices

    y = base(x) + x @ lora_a @ lora_b          rank features a row travel beside those of base
    ```

    The parameters have the type, names and global shapes of those of `nnx.LoRA`, so that
    `nnx.grad(loss, argnums=nnx.DiffState(0, nnx.LoRAParam))` and `nnx.Optimizer(..., wrt=nnx.LoRAParam)` train them
    alone, and checkpoints load. `nnx.LoRA` itself, around a column-parallel layer whose input is sharded by rows, adds
    arrays that are sharded in different ways, which Explicit axes refuse. `parallelize` turns it into this layer.
    `ParallelMLP`, `ColumnParallelProjections` and the attention layers do not call their projections, so they refuse
    one that was adapted.

    Args:
      base: The layer that is adapted. Its output is that of `nnx.Linear`, so `pad` is not supported.

    Raises:
      ValueError: base is no parallel Dense layer, or pads.
    """

    def __init__(self, base: ColumnParallelLinear | RowParallelLinear, rank: int, *, rngs: nnx.Rngs):
        if not isinstance(base, ColumnParallelLinear | RowParallelLinear):
            raise ValueError(
                f"ParallelLoRA adapts ColumnParallelLinear and RowParallelLinear: got {type(base).__name__}; for "
                "others use nnx.LoRA"
            )
        if not base.shares.whole:
            raise ValueError(
                f"ParallelLoRA got a {type(base).__name__} that pads its output, which ParallelLoRA lacks; use "
                "features that the axis divides"
            )
        settings = base.settings
        column = isinstance(base, ColumnParallelLinear)
        super().__init__(
            base.in_features,
            rank,
            base.out_features,
            base_module=base,
            dtype=settings.dtype,
            param_dtype=settings.param_dtype,
            a_metadata={"out_sharding": (None if column else settings.axis_name, None)},
            b_metadata={"out_sharding": (None, settings.axis_name if column else None)},
            rngs=rngs,
        )

    def __call__(self, x: Float[Array, "*batch s in"], **kwargs: Any) -> Float[Array, "*batch s out"]:
        """Applies the layer. Errors are those of the layer that is adapted."""
        base = self.base_module
        assert isinstance(base, ColumnParallelLinear | RowParallelLinear)
        a, b = self.lora_a[...], self.lora_b[...]
        plain = dataclasses.replace(base.settings, dot_general=lax.dot_general, preferred_element_type=None)
        settings = with_dtype(plain, x, a, b)
        x = x.astype(settings.dtype)
        y = base(x, **kwargs)  # of the x that was promoted with the factors, as nnx.LoRA does it
        if base.split == "out_features":
            low_rank = multiply("ParallelLoRA", x @ a.astype(x.dtype), b, settings, base.split, base.layout)
        else:
            hidden = multiply("ParallelLoRA", x, a, settings, base.split, base.layout)
            low_rank = hidden @ b.astype(hidden.dtype)
        with jax.numpy_dtype_promotion("standard"):  # the layer may prefer another dtype
            return y + low_rank
