"""The keywords that layers share, as type checkers read them (PEP 692), their defaults, and what is
refused.
"""

import dataclasses
import operator
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypedDict

import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn.dtypes import promote_dtype
from flax.typing import DotGeneralT, Initializer, PromoteDtypeFn
from jax import lax
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from flaxasync.ops.plan import check_gathered_bytes
from flaxasync.ops.quantization import Quantization, quantization_of


class LayerOptions(TypedDict, total=False):
    """Keywords of every layer. An unknown one is a TypeError. A layer is built, and called, on the
    ambient mesh.

    Every layer draws its parameters from the stream `params` of `rngs`. It raises ValueError where
    no mesh is set, or where the mesh lacks an axis that the layer names.

    Attributes:
      axis_name: The axis that splits the layer, of the mesh of `jax.set_mesh`; "model" by default.
      fsdp_axis: A mesh axis over which the parameters are stored sharded as well, one of those that
        split the batch; None, the default, for none. The layer gathers them, in the dtype of the
        computation or, with a `quantization`, kernels in 8 bits, and their gradients are scattered
        as they are summed; see `flaxasync.nn.fully_sharded`.
      dtype: The dtype of the computation; by default the common type of the input and the
        parameters.
      param_dtype: The dtype of the parameters; float32 by default.
      precision: The precision of the matmuls, as in `lax.dot_general`.
      backend: What executes the layer's collective ops; see `flaxasync.all_gather_matmul`. An op of
        the layer that lacks the backend chooses for itself, and where nothing travels, because
        every device has all rows already, the backend makes no difference; one that is unknown, or
        that the devices lack, is an error all the same. None, the default, lets every op choose.
      in_spec: How the input is sharded, under Auto axes. By default the leading dimension is
        sharded over all other axes, and over `axis_name` the dimension that the layer documents.
        Under Explicit axes the type of the input says it.
      promote_dtype: Says the dtype of the computation from the input and the parameters, as in
        `nnx.Linear` and `nnx.Embed`.
    """

    axis_name: str
    fsdp_axis: str | None
    dtype: DTypeLike | None
    param_dtype: DTypeLike
    precision: lax.PrecisionLike
    backend: str | None
    in_spec: PartitionSpec | None
    promote_dtype: PromoteDtypeFn


class LinearOptions(LayerOptions, total=False):
    """Keywords of layers that are made of Dense layers.

    Attributes:
      use_bias: Whether the Dense layers have biases.
      kernel_init: The initializer of the kernels; that of `nnx.Linear` by default.
      bias_init: The initializer of the biases; zeros by default.
      kernel_metadata: Metadata of the kernels. An `out_sharding` in it, such as ("fsdp", "model"),
        may name axes beside `axis_name`, also by logical names with rules, as Flax has them. It
        replaces `fsdp_axis`: the kernels are stored sharded over these axes. Write it for one
        orientation; the layer swaps the two entries for a kernel whose other dimension `axis_name`
        splits. `nnx.with_partitioning` around `kernel_init` does the same.
      bias_metadata: Metadata of the biases, likewise.
      dot_general: What multiplies the rows with the part of a kernel that a device holds;
        `lax.dot_general` by default. It is called, and differentiated, as that of `nnx.Linear`. It
        is a pure, hashable function of its operands: it is compiled, so state that it reads stays
        as it was, and an `nnx.Module` is refused. Rows are gathered before the product and summed
        after it, without overlap: another `backend` than "none" is refused.
      gathered_bytes: The most bytes of gathered rows that each column-parallel product of the layer
        may keep for the backward pass; 0, the default, for none. See `flaxasync.all_gather_matmul`.
        Layers that gather no rows make no use of it. With a `dot_general` of one's own, or a
        `preferred_element_type` wider than the computation, gathered rows are always kept.
      quantization: "int8", "fp8" or a `flaxasync.Quantization`, in which rows and kernels of the
        layer are multiplied and travel, with their overlap; None, the default, for the dtype of the
        computation. See docs/quantization.md.
      preferred_element_type: The dtype of the output; that of the computation by default. If this
        type is wider than that of the computation, products and sums use it, too, and nothing
        overlaps, as with a `dot_general`.
    """

    use_bias: bool
    kernel_init: Initializer
    bias_init: Initializer
    kernel_metadata: Mapping[str, Any]
    bias_metadata: Mapping[str, Any]
    dot_general: DotGeneralT
    gathered_bytes: int
    quantization: Quantization | str | None
    preferred_element_type: DTypeLike | None


class ExpertOptions(LayerOptions, total=False):
    """Keywords of a mixture of experts.

    Attributes:
      kernel_init: The initializer of each expert, and of the router; that of `nnx.Linear` by
        default.
      kernel_metadata: Metadata of the parameters. See `LinearOptions`; an `out_sharding` in it is
        not supported.
    """

    kernel_init: Initializer
    kernel_metadata: Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Settings:
    """The values of `LinearOptions` in a layer. Layers that differ in initializers alone compare
    equal.
    """

    axis_name: str = "model"
    fsdp_axis: str | None = None
    dtype: DTypeLike | None = None
    param_dtype: DTypeLike = jnp.float32
    precision: lax.PrecisionLike = None
    backend: str | None = None
    in_spec: PartitionSpec | None = None
    promote_dtype: PromoteDtypeFn = promote_dtype
    use_bias: bool = True
    kernel_init: Initializer = dataclasses.field(
        default=nnx.initializers.lecun_normal(), compare=False
    )
    bias_init: Initializer = dataclasses.field(default=nnx.initializers.zeros_init(), compare=False)
    kernel_metadata: Mapping[str, Any] = dataclasses.field(default_factory=dict, compare=False)
    bias_metadata: Mapping[str, Any] = dataclasses.field(default_factory=dict, compare=False)
    dot_general: DotGeneralT = lax.dot_general
    gathered_bytes: int = 0
    quantization: Quantization | None = None
    preferred_element_type: DTypeLike | None = None

    def of_products(self) -> dict[str, Any]:
        """Returns the keywords that all ops of Dense layers take."""
        return {
            "backend": self.backend,
            "precision": self.precision,
            "quantization": self.quantization,
        }

    def changed(self, layer: str, **changes: Any) -> "Settings":
        """Returns the settings with changes, once it is checked that they go with each other."""
        return _checked(layer, dataclasses.replace(self, **changes))


def settings_of(
    layer: str, options: Mapping[str, Any], known: Collection[str] = LinearOptions.__annotations__
) -> Settings:
    """Returns the options that a layer was given, with the defaults of the others. Messages begin
    with `layer`.
    """
    for name in options:
        if name not in known:
            raise TypeError(
                f"{layer} got an unexpected keyword argument {name!r}; the keywords that layers "
                f"share are {', '.join(known)}"
            )
    if options.get("dot_general", ...) is None:  # as `nnx.MultiHeadAttention` has it by default
        options = {name: value for name, value in options.items() if name != "dot_general"}
    return _checked(layer, Settings(**options))


def _checked(layer: str, given: Settings) -> Settings:
    """Returns the settings of a layer, once it is checked that they go with each other."""
    quantization = quantization_of(layer, given.quantization)
    settings = dataclasses.replace(given, quantization=quantization)
    _check_function(layer, "promote_dtype", settings.promote_dtype)
    _check_function(layer, "dot_general", settings.dot_general)
    check_gathered_bytes(layer, settings.gathered_bytes)
    if settings.dot_general is not lax.dot_general and quantization is not None:
        raise ValueError(
            f"{layer} got a dot_general and a quantization, which are two ways to multiply: leave "
            "one out"
        )
    if settings.dot_general is not lax.dot_general and settings.backend not in (None, "none"):
        raise NotImplementedError(
            f"{layer} with a dot_general of its own lacks backend={settings.backend!r}, whose "
            "blocks and gradients are products of lax.dot_general; use backend='none' or None, or "
            "leave dot_general out"
        )
    return settings


def _check_function(layer: str, name: str, function: object) -> None:
    """Raises ValueError for a function that is not hashable or has state: the compiled program is
    kept for it.
    """
    if isinstance(holder := getattr(function, "__self__", function), nnx.Module):
        raise ValueError(
            f"{layer} got a {name} that is the nnx.Module {type(holder).__name__}, whose state "
            "would be left out of the model and of its gradients: give it a pure function of the "
            "operands"
        )
    try:
        hash(function)
    except TypeError:
        raise ValueError(
            f"{layer} got a {name} of type {type(function).__name__}, which is not hashable: give "
            "it a function, or an object of a dataclass with frozen=True"
        ) from None


def option(name: str, *, of: str = "settings") -> property:
    """Returns a property for an option, under the name that Flax's layers give to it. The layer's
    attribute `of` has the options.

    It may be set, as `nnx.Module.set_attributes` does, and the next call computes with the new
    value.
    """

    def get(layer: Any) -> Any:
        return getattr(getattr(layer, of), name)

    def put(layer: Any, value: object) -> None:
        setattr(layer, of, getattr(layer, of).changed(type(layer).__name__, **{name: value}))

    return property(get, put, doc=f"The option `{name}`.")


class Configured(nnx.Module):
    """A layer with the options of `LayerOptions`, under the names of Flax's layers."""

    settings: Settings
    dtype = option("dtype")
    param_dtype = option("param_dtype")
    precision: Any = option("precision")
    promote_dtype = option("promote_dtype")


class ConfiguredProducts(Configured):
    """One whose products have the options of `LinearOptions`, too."""

    dot_general = option("dot_general")
    quantization = option("quantization")
    preferred_element_type = option("preferred_element_type")


def fixed(name: str, path: str) -> property:
    """Returns a property for what decides the parameters of a layer, which is at a path of the
    layer, such as "settings.use_bias". Setting it is an error, and never ignored.
    """
    return _unchangeable(name, operator.attrgetter(path))


def fixed_setting(name: str) -> property:
    """Returns a property for an option that only counts while a layer is built."""
    return fixed(name, f"settings.{name}")


def lacking(name: str, value: object) -> property:
    """Returns a property for an option of Flax's layer that a layer lacks, with the value that
    stands for it there.
    """
    return _unchangeable(name, lambda layer: value)


def _unchangeable(name: str, get: Callable[[Any], Any]) -> property:
    def put(layer: Any, value: object) -> None:
        raise AttributeError(
            f"{type(layer).__name__}.{name} is {get(layer)!r} since the layer was built, and "
            f"cannot become {value!r}: build another layer"
        )

    return property(get, put, doc=f"`{name}`, as the layer was built.")
