"""Reads the rules of quantisation that qwix has, and sets the option `quantization` of the layers
that they match.

`qwix.quantize_model` intercepts products where they are called. It would see those of one device's
blocks, and none of the ops of this package. qwix need not be installed: of a rule, only the
attributes are read.
"""

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax import lax

from flaxasync.nn.attention.base import AttentionLayer
from flaxasync.nn.linear import ColumnParallelLinear, RowParallelLinear
from flaxasync.nn.mlp import ParallelMLP
from flaxasync.ops.quantization import Quantization

LAYERS = (ColumnParallelLinear, RowParallelLinear, ParallelMLP, AttentionLayer)
FORWARD = {"int8": "int8", "float8_e4m3fn": "fp8"}
BACKWARD = {None: None, "int8": "int8", "float8_e5m2": "fp8"}
# Attributes of rules that say what the layers lack, and the values with which they do nothing.
IGNORED: dict[str, tuple[Any, ...]] = {
    "tile_size": (None,),
    "act_static_scale": (None, False),
    "weight_calibration_method": ("absmax",),
    "act_calibration_method": (None, "absmax"),
    "bwd_calibration_method": ("absmax",),
    "bwd_weight_grad_tile_size": (None,),
    "additional_qt_config": (None, {}),
}


def quantize(model: nnx.Module, rules: Sequence[Any]) -> dict[str, Quantization]:
    """Quantises the parallel layers of a model in place, by rules of qwix.

    ```python
    fa.nn.quantize(model, [qwix.QtRule(module_path="layers/.*", weight_qtype="int8", act_qtype="int8")])
    ```

    Args:
      model: A model with layers of this package.
      rules: `qwix.QtRule`s or `qwix.QuantizationRule`s. As in `qwix.quantize_model`, `module_path`
        is a regular expression for all of a path with slashes, and the first rule that matches a
        layer counts; one without types leaves the layer as it is. An MLP and an attention layer
        multiply for their parts, which must agree.

    Returns:
      How each layer is quantised now, by its path. Other modules are as they were.

    Raises:
      ValueError: A rule matches no layer, or parts of a layer differ; a layer has a dot_general of
        its own.
      NotImplementedError: A rule asks for what the layers lack. Nothing was changed then, as with
        all errors.
    """
    layers = {
        "/".join(map(str, path)): layer
        for path, layer in nnx.iter_modules(model)
        if isinstance(layer, LAYERS)
    }
    chosen = {path: next((rule for rule in rules if _matches(rule, path)), None) for path in layers}
    for rule in rules:
        if not any(taken is rule for taken in chosen.values()):
            paths = ", ".join(layers) or "none"
            raise ValueError(
                f"quantize got a rule for {rule.module_path!r}, which no layer takes; the layers "
                f"are {paths}"
            )
    found = {path: rule and _quantization(rule) for path, rule in chosen.items()}
    for path, quantization in found.items():
        for part in found:
            # the model itself has the path ""
            is_inside = part.startswith(f"{path}/" if path else "")
            if is_inside and found[part] != quantization:
                raise ValueError(
                    f"quantize needs one quantization for all of {path or 'the model'}: got "
                    f"{quantization} for it and {found[part]} for {part}; give a rule for {path}.*"
                )
        if quantization is not None and layers[path].settings.dot_general is not lax.dot_general:
            raise ValueError(
                f"quantize got a rule for {path}, which has a dot_general of its own: leave one out"
            )
    done = {path: quantization for path, quantization in found.items() if quantization is not None}
    for path, quantization in done.items():
        layers[path].settings = dataclasses.replace(
            layers[path].settings, quantization=quantization
        )
    return done


def _matches(rule: Any, path: str) -> bool:
    return bool(re.fullmatch(rule.module_path, path)) and (
        not rule.op_names or "dot_general" in rule.op_names
    )


def _quantization(rule: Any) -> Quantization | None:
    """Returns what a rule asks for; None for a rule without types."""
    for name, values in IGNORED.items():
        if (value := getattr(rule, name, values[0])) not in values:
            raise NotImplementedError(
                f"quantize got a rule for {rule.module_path!r} with {name}={value!r}: leave it out"
            )
    given = rule.weight_qtype, rule.act_qtype, getattr(rule, "bwd_qtype", None)
    weight, act, back = (None if kind is None else jnp.dtype(kind).name for kind in given)
    if weight is act is back is None:
        return None
    if weight != act or weight not in FORWARD or back not in BACKWARD:
        raise NotImplementedError(
            f"quantize got a rule for {rule.module_path!r} with weight_qtype={weight}, "
            f"act_qtype={act} and bwd_qtype={back}: needed one of {', '.join(FORWARD)} for both "
            "weights and activations, and None, int8 or float8_e5m2 for gradients"
        )
    if getattr(rule, "bwd_stochastic_rounding", None):
        rounding = "stochastic"
    else:
        rounding = "nearest"
    if getattr(rule, "disable_channelwise_axes", False):
        scale = "tensor"
    else:
        scale = "vector"
    return Quantization(FORWARD[weight], BACKWARD[back], rounding, scale)  # type: ignore[arg-type]
