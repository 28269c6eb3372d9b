"""Checks the type of every value of a configuration, which Python does not do where a preset makes
one.

A preset is held to what the command line accepts: `steps="12"`, `steps=True` and `steps=12.5` are
refused. A number without a point may stand for a float, as it may on the command line.
"""

import dataclasses
import types
import typing
from typing import Any

from train.lifecycle.errors import InputError, cut

_NAMES = {
    int: "an integer",
    float: "a number",
    str: "a string",
    bool: "True or False",
    type(None): "None",
}


def check_types(config: object, *, where: str, prefix: str = "") -> None:
    """Checks the types of all fields of a dataclass, and of those inside it; messages begin with
    `where`.
    """
    for name, kind in typing.get_type_hints(type(config)).items():
        value = getattr(config, name)
        if not is_of_type(value, kind):
            raise InputError(f"{where}: {prefix}{name} must be {describe(kind)}: got {cut(value)}")
        if dataclasses.is_dataclass(kind):
            check_types(value, where=where, prefix=f"{prefix}{name}.")


def is_of_type(value: object, kind: Any) -> bool:
    """Says whether a value is of the type of a field, for the kinds of types that configurations
    have.
    """
    if isinstance(kind, typing.TypeAliasType):
        return is_of_type(value, kind.__value__)
    origin = typing.get_origin(kind)
    arguments = typing.get_args(kind)
    if origin is typing.Literal:
        return any(type(value) is type(choice) and value == choice for choice in arguments)
    if origin in (types.UnionType, typing.Union):
        return any(is_of_type(value, one) for one in arguments)
    if origin is tuple:
        return isinstance(value, tuple) and _elements_are_of_type(value, arguments)
    if kind is bool:
        return isinstance(value, bool)
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    return isinstance(value, kind)


def _elements_are_of_type(value: tuple[object, ...], kinds: tuple[Any, ...]) -> bool:
    if kinds[-1:] == (Ellipsis,):
        return all(is_of_type(element, kinds[0]) for element in value)
    if len(value) != len(kinds):
        return False
    return all(is_of_type(element, kind) for element, kind in zip(value, kinds, strict=True))


def describe(kind: Any) -> str:
    """Describes a type in words: "an integer", "one of silu, gelu", "a number or None"."""
    if isinstance(kind, typing.TypeAliasType):
        return describe(kind.__value__)
    origin = typing.get_origin(kind)
    arguments = typing.get_args(kind)
    if origin is typing.Literal:
        return f"one of {', '.join(map(str, arguments))}"
    if origin in (types.UnionType, typing.Union):
        return " or ".join(describe(one) for one in arguments)
    if origin is tuple:
        elements = [describe(one) for one in arguments if one is not Ellipsis]
        return (
            f"a tuple, each element {elements[0]}"
            if Ellipsis in arguments
            else f"a tuple ({', '.join(elements)})"
        )
    return _NAMES.get(kind, f"a {getattr(kind, '__name__', kind)}")
