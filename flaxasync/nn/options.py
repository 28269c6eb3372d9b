"""The keywords that the layers share, and their defaults.

`LayerOptions` and `LinearOptions` name and document the keywords; type checkers and editors read them from the layers'
signatures (PEP 692). `LayerSettings` and `LinearSettings` are what a layer keeps of them. A new keyword is one line in
each of the two.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, TypedDict

import jax.numpy as jnp
from flax import nnx
from flax.typing import Initializer
from jax import lax
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

default_kernel_init = nnx.initializers.lecun_normal()  # as nnx.Linear
default_bias_init = nnx.initializers.zeros_init()


class LayerOptions(TypedDict, total=False):
    """Keywords of every layer.

    Attributes:
      axis_name: The mesh axis that splits the layer; "model" by default. The mesh is the ambient one, of
        `jax.set_mesh`.
      dtype: The dtype of the computation; by default the common type of the input and the parameters.
      param_dtype: The dtype of the parameters; float32 by default.
      precision: The precision of the matmuls, as in `lax.dot_general`.
      backend: What executes the layer's collective ops; see `flaxasync.all_gather_matmul`. An op of the layer that
        lacks the backend chooses for itself. None, the default, lets every op choose.
      in_spec: How the input is sharded, under Auto axes. By default the leading dimension is sharded over all other
        axes, and over `axis_name` the dimension that the layer documents. Under Explicit axes the type of the input
        says it.
    """

    axis_name: str
    dtype: DTypeLike | None
    param_dtype: DTypeLike
    precision: lax.PrecisionLike
    backend: str | None
    in_spec: PartitionSpec | None


class LinearOptions(LayerOptions, total=False):
    """Keywords of layers that are made of Dense layers.

    Attributes:
      use_bias: Whether the Dense layers have biases.
      kernel_init: The initializer of the kernels; that of `nnx.Linear` by default.
      bias_init: The initializer of the biases; zeros by default.
    """

    use_bias: bool
    kernel_init: Initializer
    bias_init: Initializer


@dataclasses.dataclass(frozen=True)
class LayerSettings:
    """The values of `LayerOptions` in a layer."""

    axis_name: str = "model"
    dtype: DTypeLike | None = None
    param_dtype: DTypeLike = jnp.float32
    precision: lax.PrecisionLike = None
    backend: str | None = None
    in_spec: PartitionSpec | None = None


@dataclasses.dataclass(frozen=True)
class LinearSettings(LayerSettings):
    """The values of `LinearOptions` in a layer. Layers that differ in initializers alone compare equal."""

    use_bias: bool = True
    kernel_init: Initializer = dataclasses.field(default=default_kernel_init, compare=False)
    bias_init: Initializer = dataclasses.field(default=default_bias_init, compare=False)


def settings_of[S: LayerSettings](kind: type[S], layer: str, options: Mapping[str, Any]) -> S:
    """Returns the settings of a layer: the options that it was given, and the defaults of the others.

    Raises:
      TypeError: The layer has no keyword of this name. The message begins with `layer`.
    """
    known = [field.name for field in dataclasses.fields(kind)]
    for name in options:
        if name not in known:
            raise TypeError(
                f"{layer} got an unexpected keyword argument {name!r}; the keywords that layers share are "
                f"{', '.join(known)}"
            )
    return kind(**options)
