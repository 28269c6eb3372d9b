"""`MeshLinear`: `nnx.Linear` on two mesh axes, of which one splits the rows of its input and the
other the features.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, TypedDict, Unpack

import jax
from flax import nnx
from flax.typing import Initializer, PromoteDtypeFn
from jax import Array, lax
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from jaxtyping import Float

from flaxasync.mesh import cast_to_varying, mesh_axis_size
from flaxasync.nn import shards
from flaxasync.nn.linear import DenseLayer, with_dtype
from flaxasync.nn.options import fixed_setting, settings_of
from flaxasync.nn.out_sharding import OutSharding, output_spec, shard_output
from flaxasync.nn.placement import check_divides, place
from flaxasync.nn.shards import Call, Linear
from flaxasync.nn.uneven_shares import Shares
from flaxasync.ops.mesh_matmul import mesh_matmul


class MeshLinearOptions(TypedDict, total=False):
    """Keywords of `MeshLinear`, which mean what they mean in `flaxasync.nn.LinearOptions`.

    `backend` is one of `flaxasync.mesh_matmul`. Under Auto axes an `in_spec` of None, the default,
    stands for rows that are sharded over the first axis of the layer, features over the second, and
    the leading dimension over all others.
    """

    use_bias: bool
    dtype: DTypeLike | None
    param_dtype: DTypeLike
    precision: lax.PrecisionLike
    backend: str | None
    in_spec: P | None
    kernel_init: Initializer
    bias_init: Initializer
    kernel_metadata: Mapping[str, Any]
    bias_metadata: Mapping[str, Any]
    promote_dtype: PromoteDtypeFn


class MeshLinear(DenseLayer):
    """A Dense layer on a mesh of X x Y devices, whose input is sharded by rows and by features.

    ```
    x       [..., m, in]     rows over x, features over y: [..., m/X, in/Y] a device
    kernel  [in, out]        rows over x, the same in all mesh columns: [in/X, out] a device; the bias is whole
    y       [..., m, out]    rows over x, the same in all mesh columns

    forward  y        = x @ kernel + bias              summed over y
    backward dx       = dy @ kernel.T
             dkernel  = x.T @ dy                       summed over x, and over the axes that shard the batch
    ```

    This is `flaxasync.mesh_matmul`, whose gradients overlap their transfers on every backend. The
    next layer of this kind takes its input by `jax.reshard(y, P(..., "x", "y"))`, which moves
    nothing; its gradient is gathered over y.

    Args:
      in_features: The features of the input; a multiple of both axes.
      axis_names: (x, y), the mesh axes of rows and of features.
      **options: See `flaxasync.nn.MeshLinearOptions`.

    Raises:
      ValueError: No mesh is set, or the mesh lacks an axis; an axis does not divide in_features.
    """

    dim = 0
    dot_general, preferred_element_type = map(
        fixed_setting, ("dot_general", "preferred_element_type")
    )

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        axis_names: tuple[str, str] = ("x", "y"),
        rngs: nnx.Rngs,
        **options: Unpack[MeshLinearOptions],
    ):
        settings = settings_of("MeshLinear", options, MeshLinearOptions.__annotations__)
        if len(set(axis_names)) != 2:
            raise ValueError(
                "MeshLinear needs the names of two mesh axes, of rows and features: got "
                f"{axis_names!r}"
            )
        for name in axis_names:
            check_divides("MeshLinear", name, in_features=in_features)
        self.axis_names = rows_axis, _ = (axis_names[0], axis_names[1])
        settings = dataclasses.replace(settings, axis_name=rows_axis)
        shares = Shares.equal(in_features, mesh_axis_size("MeshLinear", rows_axis))
        needed = P(rows_axis, None), P(None)
        self._add_parameters(
            "MeshLinear", (in_features, out_features), shares, needed, settings, rngs
        )

    def __call__(
        self, inputs: Float[Array, "*batch m in"], out_sharding: OutSharding = None
    ) -> Float[Array, "*batch m out"]:
        """Applies the layer. `out_sharding` says how the output is to be sharded, if not as the
        layer documents.

        Raises:
          ValueError: The input has other features, is sharded as this layer does not take it, or
            has rows that the axis of rows does not divide.
        """
        rows_axis, features_axis = self.axis_names
        linear = self.parameters()
        placement = place(
            "MeshLinear",
            inputs,
            features_axis,
            self.settings.in_spec,
            "features",
            self.in_features,
            rows_axis,
        )
        spec = output_spec("MeshLinear", out_sharding, features_axis)
        call = Call(with_dtype(self.settings, inputs, *linear), (self.part,), True)
        static = (call, self.axis_names)
        in_specs = (placement.in_spec, call.specs)
        y = placement.run(_apply, static, (inputs, (linear,)), in_specs, placement.spec())
        return shard_output(y, spec)


def _apply(static: tuple[Call, tuple[str, str]], x: Array, linears: tuple[Linear]) -> Array:
    """Returns this device's rows of the output; leading dimensions are merged with the rows."""
    call, axis_names = static
    ((kernel, bias),), settings = call.take(x, linears), call.settings
    rows = x.reshape(-1, x.shape[-1]).astype(settings.dtype)
    # The op sums the gradient of the kernel over the mesh row, so the kernel is not cast to vary
    # along it.
    kernel = cast_to_varying(kernel, jax.typeof(x).mat.varying - {axis_names[1]}).astype(
        settings.dtype
    )
    y = mesh_matmul(
        rows, kernel, axis_names, backend=settings.backend, precision=settings.precision
    )
    return shards.finish(y.reshape(*x.shape[:-1], kernel.shape[1]), bias, settings)
