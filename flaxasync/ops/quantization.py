"""Quantised operands of matmuls: 8-bit values beside the scales that they are multiplied with.

```
x  [..., m, k]  ->  values [..., m, k] in 8 bits, scales [..., m]     one scale for each row of x
w  [k, n]       ->  values [k, n] in 8 bits,      scales [n]          one scale for each column of w

x @ w  =  (values of x @ values of w) * scales of x * scales of w     int8 sums in int32, fp8 sums in float32
```

A scale is the largest magnitude of its row or column on this device, divided by the largest number
of the 8-bit type. A row of zeros has the scale 1. A row with an infinity or a NaN has that as its
scale, so its products are not finite.

The gradients are those of the product of the values that were rounded (straight-through: the
rounding counts as the identity): dx = dy @ w.T and dw = x.T @ dy with x and w as values * scales,
in the dtype of the operands. With `Quantization.backward` the products of dx are quantised too, and
those of dw are not; but dw of `matmul_reduce_scatter` takes the dy that travelled for dx, which is
rounded then. This is the recipe of Wortsman et al., "Stable and low-precision training for
large-scale vision-language models" (2023): errors of dw do not average out over the features,
because it sums over far more rows than the other products do over features.

`Quantization.weights` quantises the products of dw as well. They sum over rows, so a scale of a row
cannot wait until after the sum. The operand that travels, x or dy, keeps its 8-bit values. Its
scales are multiplied into the other one, which is quantised again with a scale for each column
(`weight_operands`).
"""

import dataclasses
import math
from typing import Any, Literal, cast, get_args

import jax
import jax.numpy as jnp
from jax import Array, lax

from flaxasync.hardware import Chip
from flaxasync.mesh import UnsupportedError, vary_like
from flaxasync.ops.saved import first_only

type Operand = Array | Quantized

Kind = Literal["int8", "fp8"]
Rounding = Literal["stochastic", "nearest"]
Scale = Literal["vector", "tensor"]

MAX_INT8_PRODUCTS = (2**31 - 1) // 127**2  # the most int8 products whose sum cannot leave int32


@dataclasses.dataclass(frozen=True)
class Quantization:
    """How the matmuls of an op or a layer are quantised. A string, "int8" or "fp8", stands for its
    `forward` alone.

    Attributes:
      forward: The type of both operands: "int8", or "fp8" for float8_e4m3fn.
      backward: The type in which cotangents travel and are multiplied for dx: "int8", or "fp8" for
        float8_e5m2, with weights in float8_e4m3fn. None, the default, for the dtype of the
        operands.
      rounding: How cotangents are rounded with `backward`. "stochastic" rounds up with the
        probability that makes the expected value right. The bits come from the values and their
        positions, so equal steps round equally.
      scale: "vector" for a scale of each row of x and each column of w; "tensor" for one of each
        array on a device. The cotangents of several products of one x are joined for dx, and then
        share one scale for each row.
      weights: The type in which dw is multiplied: None, the default, for the dtype of the operands,
        or the type that `forward` and `backward` have.
    """

    forward: Kind
    backward: Kind | None = None
    rounding: Rounding = "stochastic"
    scale: Scale = "vector"
    weights: Kind | None = None

    def __post_init__(self) -> None:
        kinds = get_args(Kind)
        allowed = {
            "forward": kinds,
            "backward": (None, *kinds),
            "weights": (None, *kinds),
            "rounding": get_args(Rounding),
            "scale": get_args(Scale),
        }
        for name, values in allowed.items():
            if getattr(self, name) not in values:
                choices = ", ".join(map(repr, values))
                raise ValueError(
                    f"Quantization needs {name} to be one of {choices}: got {getattr(self, name)!r}"
                )
        if self.weights is not None and not self.weights == self.backward == self.forward:
            raise ValueError(
                "Quantization needs weights to be None, or the type of both forward and backward: "
                f"got {self.weights!r}, {self.forward!r} and {self.backward!r}"
            )

    @property
    def kinds(self) -> frozenset[Kind]:
        """The types of the products."""
        return frozenset(kind for kind in (self.forward, self.backward) if kind is not None)


def quantization_of(caller: str, given: "Quantization | str | None") -> Quantization | None:
    """Returns what an option `quantization` stands for. Raises ValueError, which begins with the
    caller's name.
    """
    if given is None or isinstance(given, Quantization):
        return given
    if given not in get_args(Kind):
        raise ValueError(
            f"{caller} needs quantization to be None, 'int8', 'fp8' or a flaxasync.Quantization: "
            f"got {given!r}"
        )
    return Quantization(cast(Kind, given))


def check_chip(caller: str, quantization: Quantization | None, chip: Chip | None) -> None:
    """Raises NotImplementedError for a type of products for which the chip table has no rate.

    A chip that the table lacks, such as a CPU, is None, and takes every type.
    """
    if quantization is None or chip is None:
        return
    for kind in sorted(quantization.kinds):
        if chip.rate(kind) is None:
            has = [f"quantization={other!r}" for other in get_args(Kind) if chip.rate(other)]
            raise UnsupportedError(
                f"{caller} got quantization in {kind}, for which a {chip.name} has no rate of its "
                f"own; use {' or '.join([*has, 'quantization=None'])}"
            )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Quantized:
    """An operand in 8 bits; see the head of this file.

    `weight` is there if the weight was quantised before the op: an array of w's shape whose values
    nobody reads, and whose cotangent is dw. What is saved for the backward pass has () in its
    place.
    """

    values: Array
    scales: Array
    # of the operand that this stands for
    dtype: jnp.dtype = dataclasses.field(metadata={"static": True})
    weight: Any = None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    @property
    def ndim(self) -> int:
        return self.values.ndim

    @property
    def size(self) -> int:
        return self.values.size


def quantize(
    x: Array,
    kind: Kind,
    contracted: int | tuple[int, ...],
    *,
    scale: Scale = "vector",
    rounding: Rounding | None = None,
    over: tuple[str, ...] = (),
    most: Array | None = None,
) -> Quantized:
    """Quantises an operand of which a product contracts the dimension `contracted`, or several.

    Args:
      most: The largest magnitudes over what is contracted, if they are known.
      rounding: None for an operand of the forward pass, whose type is float8_e4m3fn if it is no
        integer. Otherwise it is a cotangent, of type float8_e5m2, and this says how it is rounded.
      over: Mesh axes that split the contracted dimension, whose devices use one scale together.
    """
    if isinstance(contracted, int):
        count = x.shape[contracted]
    else:
        count = math.prod(x.shape[dim] for dim in contracted)
    if kind == "int8" and count > MAX_INT8_PRODUCTS:
        if isinstance(contracted, int):
            what = "features on a device"
            instead = "quantization=None, or a larger axis"
        else:
            what = "rows in dw"
            instead = "a Quantization without weights, or fewer rows in a microbatch"
        raise UnsupportedError(
            f"int8 products are summed in int32, which holds {MAX_INT8_PRODUCTS} of them: got "
            f"{count} {what}; use {instead}"
        )
    wide = jnp.dtype(jnp.float64 if x.dtype == jnp.float64 else jnp.float32)
    if kind == "int8":
        type_ = jnp.int8
        largest = 127.0
    else:
        type_ = jnp.float8_e4m3fn if rounding is None else jnp.float8_e5m2
        largest = float(jnp.finfo(type_).max)
    values = x.astype(wide)
    if most is None:
        most = jnp.max(jnp.abs(values), contracted, initial=0)
    else:
        most = most.astype(wide)
    if scale == "tensor":
        most = jnp.broadcast_to(jnp.max(most, initial=0), most.shape)
    if over:
        most = lax.pmax(most, over)
    scales = most * jnp.asarray(1 / largest, wide)  # NaN stays NaN
    scales = jnp.where(most == 0, 1, scales)
    ratio = values / jnp.expand_dims(scales, contracted)
    # an infinity divided by an infinite scale
    ratio = jnp.where(jnp.isnan(ratio), jnp.sign(values), ratio)
    if kind == "int8":
        if rounding == "stochastic":
            ratio = jnp.floor(ratio + _uniform(values))
        else:
            ratio = jnp.round(ratio)
    elif rounding == "stochastic":
        ratio = _round_to_two_bits(ratio.astype(jnp.float32), _bits(values))
    return Quantized(jnp.clip(ratio, -largest, largest).astype(type_), scales, x.dtype)


def dequantize(x: Operand, contracted: int = -1) -> Array:
    """Returns values * scales in the dtype of the operand; an array as it is."""
    if not isinstance(x, Quantized):
        return x
    return (x.values.astype(x.scales.dtype) * jnp.expand_dims(x.scales, contracted)).astype(x.dtype)


def values_of(x: Operand) -> Array:
    """Returns the 8-bit values of an operand that is quantised; an array as it is."""
    if isinstance(x, Quantized):
        return x.values
    return x


def forward_operands(
    quantization: Quantization | None,
    xs: tuple[Operand, ...],
    ws: tuple[Operand, ...],
    *,
    over: tuple[str, ...] = (),
    most: Array | None = None,
) -> tuple[tuple[Operand, ...], tuple[Operand, ...]]:
    """Returns what is multiplied, and saved, in the forward pass. What is quantised already stays
    as it is.

    `over` are mesh axes that split what the products contract; their devices use one scale
    together. `most` are the largest magnitudes of the rows of the only x, if they are known.
    """
    if quantization is None:
        return xs, ws
    kind = quantization.forward
    scale = quantization.scale

    def quantized(x: Operand, contracted: int, most: Array | None = None) -> Quantized:
        if isinstance(x, Quantized):
            if isinstance(x.weight, Array):
                # JAX drops a call without used results
                _, scales = _first_derivative_only(x.weight, x.scales)
                return dataclasses.replace(x, scales=scales, weight=())
            return x
        return quantize(
            _first_derivative_only(x)[0], kind, contracted, scale=scale, over=over, most=most
        )

    return tuple(quantized(x, -1, most) for x in xs), tuple(quantized(w, 0) for w in ws)


def backward_operands(
    quantization: Quantization | None,
    dys: tuple[Array, ...],
    ws: tuple[Operand, ...],
    most: Array | None = None,
) -> tuple[tuple[Operand, ...], tuple[Operand, ...]]:
    """Returns what is multiplied for dx: dys, and the ws of the forward pass, as dy @ w.T contracts
    them.

    `most` are the largest magnitudes in each row of all dys together, if they are known.
    """
    whole = tuple(dequantize(w, 0) for w in ws)
    if quantization is None or quantization.backward is None:
        return dys, whole
    kind = quantization.backward
    scale = quantization.scale
    servable = kind != "int8" or sum(dy.shape[-1] for dy in dys) <= MAX_INT8_PRODUCTS
    # one longer product, whose sum is not stored between its parts
    if len(dys) == len(whole) > 1 and servable:
        dys = (lax.concatenate(dys, dys[0].ndim - 1),)
        whole = (lax.concatenate(whole, 1),)
    if len(dys) != 1:
        most = None
    dys_8 = tuple(
        quantize(dy, kind, -1, scale=scale, rounding=quantization.rounding, most=most) for dy in dys
    )
    return dys_8, tuple(quantize(w, kind, 1, scale=scale) for w in whole)


def weight_operands(
    quantization: Quantization | None,
    travelled: Operand,
    others: tuple[Operand, ...],
    *,
    products: Literal["backward", "weights"] = "weights",
    axis_name: str | None = None,
    others_are_cotangents: bool = False,
) -> tuple[Operand, tuple[Operand, ...]]:
    """Returns what is multiplied for the products travelled.T @ other over all rows, of all
    devices.

    They are arrays, or both have 8-bit values with a scale for each *column*. If only `others` are
    arrays, `travelled` travels as it is given, and is dequantised where it arrives.

    Args:
      products: Which products these are: "weights", or "backward" where w travelled, and dx is a
        sum over its rows.
      travelled: [..., rows, k], whose scales are those of rows if it is quantised.
      others: [..., rows, n]: all rows, those of `travelled` before it travels over `axis_name` as
        well.
      others_are_cotangents: Whether `others` are cotangents; otherwise `travelled` is one.
    """
    whole = tuple(dequantize(other) for other in others)
    kind = getattr(quantization, products, None)
    if (
        quantization is None
        or not isinstance(travelled, Quantized)
        or kind != quantization.forward  # of which `travelled` has its values
    ):
        if axis_name is None:  # it is here, and travels no more
            travelled = dequantize(travelled)
        return travelled, whole
    of_rows = travelled.scales
    rows = tuple(range(whole[0].ndim - 1))
    if axis_name is not None:
        of_rows = lax.all_gather(of_rows, axis_name, axis=of_rows.ndim - 1, tiled=True)
    ones = vary_like(jnp.ones(travelled.shape[-1], of_rows.dtype), of_rows)

    def rescaled(other: Array) -> Quantized:
        made = quantize(
            other.astype(of_rows.dtype) * of_rows[..., None],
            kind,
            rows,
            scale=quantization.scale,
            rounding=quantization.rounding if others_are_cotangents else None,
        )
        return dataclasses.replace(made, dtype=other.dtype)

    return Quantized(travelled.values, ones, travelled.dtype), tuple(map(rescaled, whole))


def cotangents(ws: tuple[Operand, ...], dws: tuple[Array, ...]) -> tuple[Operand, ...]:
    """Returns the cotangents of the weights that an op was given, of which `ws` were saved."""
    none: Any = None  # integers and scales have no cotangent
    found: list[Operand] = list(dws)
    for number, w in enumerate(ws):
        if isinstance(w, Quantized) and w.weight is not None:
            found[number] = dataclasses.replace(w, values=none, scales=none, weight=dws[number])
    return tuple(found)


_first_derivative_only = first_only(
    "a quantised product",
    "the gradient of its rounding is not that of the values",
    "use quantization=None",
)


def _bits(x: Array) -> Array:
    """Returns 32 bits for each element, which depend on its value and its position, mixed as a hash
    mixes them.

    The multipliers are those of Wellons' hash function "lowbias32".
    """
    bits = lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)
    bits ^= lax.broadcasted_iota(jnp.uint32, (x.size,), 0).reshape(x.shape) * jnp.uint32(0x9E3779B9)
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        bits = (bits ^ (bits >> shift)) * jnp.uint32(factor)
    return bits ^ (bits >> 16)


def _uniform(x: Array) -> Array:
    """Returns a number of 0 or more and less than 1 for each element."""
    return (_bits(x) >> 8).astype(x.dtype) * jnp.asarray(2**-24, x.dtype)


def _round_to_two_bits(x: Array, bits: Array) -> Array:
    """Rounds float32 stochastically to a mantissa of two bits, that of float8_e5m2."""
    dropped = jnp.uint32(2**21 - 1)
    sum_ = lax.bitcast_convert_type(x, jnp.uint32) + (bits & dropped)
    return lax.bitcast_convert_type(sum_ & ~dropped, jnp.float32)
