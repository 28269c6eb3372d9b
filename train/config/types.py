"""Checks the type of every value of a configuration, which Python does not do where a preset makes
one.

A preset is held to what the command line accepts: `steps="12"`, `steps=True` and `steps=12.5` are
refused. A number without a point may stand for a float, as it may on the command line.
"""

import dataclasses
import types
import typing
from typing import Any

import typeguard

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
    """Says whether a value is of the type of a field. For Python, a bool is an integer, too; here
    it is none.
    """
    if kind is not bool and _has_bool(value):
        return False
    try:
        typeguard.check_type(
            value, kind, collection_check_strategy=typeguard.CollectionCheckStrategy.ALL_ITEMS
        )
    except typeguard.TypeCheckError:
        return False
    return True


def _has_bool(value: object) -> bool:
    if isinstance(value, tuple):
        return any(map(_has_bool, value))
    return isinstance(value, bool)


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
