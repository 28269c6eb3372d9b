"""Test parameters that form a grid, of which `make test` runs a part and `make test-slow` the
rest.
"""

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import pytest


def sparse(*axes: Iterable[Any], keep: Callable[..., bool], slow: Callable[..., bool]) -> list[Any]:
    """Returns combinations of the axes' values, and marks those that `make test` does not run as
    slow.

    Args:
      *axes: The values of each parameter.
      keep: Decides whether `make test` runs a combination, given the index of each of its values.
        Every value of every axis must occur in a combination that is kept.
      slow: Decides likewise which of the others `make test-slow` runs.
    """
    numbered = list(itertools.product(*(list(enumerate(values)) for values in axes)))
    kept = [case for case in numbered if keep(*(i for i, _ in case))]
    for axis, values in enumerate(zip(*numbered, strict=True)):
        assert {i for i, _ in values} == {case[axis][0] for case in kept}, (
            "a value occurs in no combination that is kept"
        )
    return [
        pytest.param(*(value for _, value in case), marks=[] if case in kept else pytest.mark.slow)
        for case in numbered if case in kept or slow(*(i for i, _ in case))
    ]  # fmt: skip
