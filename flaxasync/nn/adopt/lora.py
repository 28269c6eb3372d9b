"""Low-rank adaptation of parallel Dense layers."""

import dataclasses

import jax
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from flaxasync.nn.linear import ColumnParallelLinear, RowParallelLinear, multiply, with_dtype
from flaxasync.nn.out_sharding import OutSharding, layout_for, output_spec, shard_output
from flaxasync.nn.placement import put


class ParallelLoRA(nnx.LoRA):
    """A parallel Dense layer and a product of low rank that is added to it.

    ```
    lora_a  [in, rank]     for a row-parallel layer sharded by rows, else the same on all devices
    lora_b  [rank, out]    for a column-parallel layer sharded by columns, else the same on all devices

    y = base(x) + x @ lora_a @ lora_b          rank features a row travel beside those of base
    ```

    The parameters have the type (`nnx.LoRAParam`), names and global shapes of those of `nnx.LoRA`,
    and `parallelize` turns an `nnx.LoRA` into this layer. `nnx.LoRA` itself adds arrays that are
    sharded in different ways, which Explicit axes refuse, where the input of a column-parallel
    layer is sharded by rows. `ParallelMLP`, `ColumnParallelProjections` and the attention layers do
    not call their projections, so they refuse an adapted one.

    Args:
      base: The layer that is adapted. Its output is that of `nnx.Linear`, so `pad` is not
        supported.

    Raises:
      ValueError: base is no parallel Dense layer, or pads.
    """

    base_module: ColumnParallelLinear | RowParallelLinear

    def __init__(
        self, base: ColumnParallelLinear | RowParallelLinear, rank: int, *, rngs: nnx.Rngs
    ):
        if not isinstance(base, ColumnParallelLinear | RowParallelLinear):
            raise ValueError(
                "ParallelLoRA adapts ColumnParallelLinear and RowParallelLinear: got "
                f"{type(base).__name__}; for others use nnx.LoRA"
            )
        if not base.shares.whole:
            raise ValueError(
                f"ParallelLoRA got a {type(base).__name__} that pads its output, which "
                "ParallelLoRA lacks; use features that the axis divides"
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
            promote_dtype=settings.promote_dtype,
            rngs=rngs,
            a_metadata={"out_sharding": (None if column else settings.axis_name, None)},
            b_metadata={"out_sharding": (None, settings.axis_name if column else None)},
        )
        if not nnx.using_eager_sharding():
            for factor in (self.lora_a, self.lora_b):
                factor.set_value(put(factor[...], P(*factor.get_metadata("out_sharding"))))

    def __call__(  # type: ignore[override]
        self, x: Float[Array, "*batch s in"], out_sharding: OutSharding = None
    ) -> Float[Array, "*batch s out"]:
        """Applies the layer. Errors are those of the layer that is adapted."""
        base = self.base_module
        axis_name = base.settings.axis_name
        spec = output_spec("ParallelLoRA", out_sharding, axis_name)
        layout = layout_for(spec, x.ndim, axis_name, base.layout)
        a = self.lora_a[...]
        b = self.lora_b[...]
        plain = dataclasses.replace(
            base.settings,
            dtype=self.dtype,
            promote_dtype=self.promote_dtype,
            dot_general=lax.dot_general,
            quantization=None,
            preferred_element_type=None,
        )
        settings = with_dtype(plain, x, a, b)
        # the adapted layer takes what was promoted with the factors, as in nnx.LoRA
        x = x.astype(settings.dtype)
        apply, args = base.mapped(x, layout)
        y = apply(*args)
        if base.dim == 1:
            low_rank = multiply("ParallelLoRA", x @ a.astype(x.dtype), b, settings, 1, layout)
        else:
            hidden = multiply("ParallelLoRA", x, a, settings, 0, layout)
            low_rank = hidden @ b.astype(hidden.dtype)
        with jax.numpy_dtype_promotion("standard"):  # the layer may prefer another dtype
            return shard_output(y + low_rank, spec)
