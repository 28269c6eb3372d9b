"""Products for modules of one's own: several projections of one input, and the product of an `nnx.Linear`."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal, Unpack

from flax import nnx
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float

from flaxasync.nn import shards
from flaxasync.nn.checks import check_input, check_output_layout
from flaxasync.nn.linear import (
    ColumnParallelLinear,
    check_no_adapter,
    compute_settings,
    multiply_columns,
    multiply_rows,
    parameter_specs,
    parameters,
    with_dtype,
)
from flaxasync.nn.options import LinearOptions, LinearSettings
from flaxasync.nn.placement import Layout, place


class ColumnParallelProjections(nnx.Module):
    """Several column-parallel Dense layers that share one gather of their input.

    ```python
    qkv = fa.nn.ColumnParallelProjections(64, {"query": 64, "key": 32, "value": 32}, rngs=rngs)
    q, k, v = qkv(x)
    ```

    `ParallelSelfAttention` does the same for query, key and value, and `ParallelMLP` for gate and up. Each layer is an
    attribute: qkv.query is a `ColumnParallelLinear`.

    Args:
      in_features: The features of the input.
      out_features: The features of each output by its name; multiples of the axis.
      rngs: The random streams; the layers draw from `params` in the order of the names.
      **options: As in `ColumnParallelLinear`.

    Raises:
      TypeError: A keyword is unknown.
      ValueError: No mesh is set, it lacks the axis, or the axis does not divide the features of an output.
    """

    def __init__(
        self, in_features: int, out_features: Mapping[str, int], *, rngs: nnx.Rngs, **options: Unpack[LinearOptions]
    ):
        if not out_features:
            raise ValueError("ColumnParallelProjections needs one output or more, by its name: got none")
        self.names = tuple(out_features)
        for name, features in out_features.items():
            setattr(self, name, ColumnParallelLinear(in_features, features, rngs=rngs, **options))

    def __call__(self, x: Float[Array, "*batch s in"]) -> tuple[Float[Array, "*batch s out"], ...]:
        """Applies the layers, and returns their outputs in the order of their names.

        Raises:
          ValueError: No mesh is set, it lacks the axis, x has other features or is sharded by features.
        """
        linears = [getattr(self, name) for name in self.names]
        check_no_adapter("ColumnParallelProjections", *linears)
        settings = compute_settings(linears[0], x)
        placement = place("ColumnParallelProjections", x, settings.axis_name, settings.in_spec, sharded="rows")
        check_input("ColumnParallelProjections", x, linears[0].in_features, placement)
        stored = tuple(map(parameter_specs, linears))
        return placement.run(
            _project,
            _Call(settings, stored, placement.rows_sharded),
            (x, tuple(map(parameters, linears))),
            (placement.in_spec, stored),
            (placement.spec(features=True),) * len(linears),
        )


@dataclasses.dataclass(frozen=True)
class _Call:
    """What is static in a call of `ColumnParallelProjections`."""

    settings: LinearSettings  # with the dtype of the computation
    stored: tuple[shards.Stored, ...]
    rows_sharded: bool


def _project(call: _Call, x: Array, linears: tuple[shards.Linear, ...]) -> tuple[Array, ...]:
    linears = tuple(shards.gather(p, spec, x, call.settings) for p, spec in zip(linears, call.stored, strict=True))
    return shards.column(x, linears, call.settings, rows_sharded=call.rows_sharded)


def parallel_dot_general(
    split: Literal["column", "row"],
    *,
    axis_name: str = "model",
    layout: Layout = "sequence",
    backend: str | None = None,
) -> Callable[..., Array]:
    """Returns a `dot_general` for `nnx.Linear` that does the product of a column- or row-parallel layer.

    It is for models whose layers cannot be replaced. The kernel has to be sharded as that of the parallel layer:

    ```python
    nnx.Linear(
        64, 256, dot_general=fa.nn.parallel_dot_general("column"),
        kernel_metadata={"out_sharding": (None, "model")}, bias_metadata={"out_sharding": ("model",)}, rngs=rngs,
    )
    nnx.Linear(
        256, 64, dot_general=fa.nn.parallel_dot_general("row"),
        kernel_metadata={"out_sharding": ("model", None)}, rngs=rngs,
    )
    ```

    Args:
      split: "column", as `ColumnParallelLinear`, or "row", as `RowParallelLinear`.
      axis_name: The mesh axis that splits the kernel.
      layout: How the rows of the output of "row" lie: "sequence" or "replicated".
      backend: What executes the product; see `flaxasync.all_gather_matmul`.

    Raises:
      ValueError: `split` or `layout` is unknown. A call raises it for operands that are no input and kernel of
        `nnx.Linear`, or are not sharded as they have to be.
    """
    if split not in ("column", "row"):
        raise ValueError(f"parallel_dot_general got {split!r}: it must be 'column' or 'row'")
    check_output_layout("parallel_dot_general", layout)
    options = LinearSettings(axis_name=axis_name, backend=backend)

    def dot_general(
        x: Array,
        kernel: Array,
        dimension_numbers: Any,
        precision: Any = None,
        preferred_element_type: DTypeLike | None = None,
        **options_of_jax: Any,
    ) -> Array:
        contracting, batch = dimension_numbers
        given = tuple(map(tuple, contracting)), tuple(map(tuple, batch))
        if kernel.ndim != 2 or given != (((x.ndim - 1,), (0,)), ((), ())):
            raise ValueError(
                "parallel_dot_general contracts the last dimension of x with the first of a kernel [in, out]: got "
                f"x {list(x.shape)}, kernel {list(kernel.shape)} and {dimension_numbers}"
            )
        if options_of_jax.get("out_sharding") is not None:
            raise ValueError("parallel_dot_general shards its output itself: leave out_sharding out")
        settings = with_dtype(options, x, kernel)
        settings = dataclasses.replace(settings, precision=precision, preferred_element_type=preferred_element_type)
        if split == "column":
            return multiply_columns("parallel_dot_general", x, kernel, settings)
        return multiply_rows("parallel_dot_general", x, kernel, settings, layout=layout)

    dot_general.has_collectives = True  # type: ignore[attr-defined]  # parallel layers refuse it as their own product
    return dot_general
