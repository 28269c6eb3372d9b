"""The product of a parallel layer as the `dot_general` of an `nnx.Linear`, which a model may be unable to replace."""

from collections.abc import Callable
from typing import Any, Literal

from jax import Array
from jax.typing import DTypeLike

from flaxasync.nn.checks import check_output_layout
from flaxasync.nn.linear import Split, multiply, with_dtype
from flaxasync.nn.options import LinearSettings
from flaxasync.nn.placement import Layout


def parallel_dot_general(
    split: Literal["column", "row"],
    *,
    axis_name: str = "model",
    layout: Layout = "sequence",
    backend: str | None = None,
) -> Callable[..., Array]:
    """Returns a `dot_general` for `nnx.Linear` that does the product of a column- or row-parallel layer.

    The kernel has to be sharded as that of the parallel layer:

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
    features: Split = "out_features" if split == "column" else "in_features"

    def dot_general(
        x: Array,
        kernel: Array,
        dimension_numbers: Any,
        precision: Any = None,
        preferred_element_type: DTypeLike | None = None,
        out_sharding: Any = None,
    ) -> Array:
        contracting, batch = dimension_numbers
        given = tuple(map(tuple, contracting)), tuple(map(tuple, batch))
        if kernel.ndim != 2 or given != (((x.ndim - 1,), (0,)), ((), ())):
            raise ValueError(
                "parallel_dot_general contracts the last dimension of x with the first of a kernel [in, out]: got "
                f"x {list(x.shape)}, kernel {list(kernel.shape)} and {dimension_numbers}"
            )
        if out_sharding is not None:
            raise ValueError("parallel_dot_general shards its output itself: leave out_sharding out")
        settings = LinearSettings(
            axis_name=axis_name, backend=backend, precision=precision, preferred_element_type=preferred_element_type
        )
        return multiply("parallel_dot_general", x, kernel, with_dtype(settings, x, kernel), features, layout)

    dot_general.has_collectives = True  # type: ignore[attr-defined]  # parallel layers refuse it as their own product
    return dot_general
