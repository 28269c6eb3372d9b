"""Parameters of tests that are a grid: `make test` runs a share of it that has everything, `make test-all` the rest."""

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import pytest


def sparse(*axes: Iterable[Any], keep: Callable[..., bool]) -> list[Any]:
    """All combinations of the axes' values, of which those that are not kept are marked slow.

    Args:
      *axes: the values of each parameter.
      keep: says of a combination, given as the number of each value on its axis, whether `make test` runs it; every
        value of every axis must be in one that it keeps.
    """
    numbered = list(itertools.product(*(list(enumerate(values)) for values in axes)))
    kept = [case for case in numbered if keep(*(i for i, _ in case))]
    for axis, values in enumerate(zip(*numbered, strict=True)):
        assert {i for i, _ in values} == {case[axis][0] for case in kept}, "a value is in no case that is kept"
    return [
        pytest.param(*(value for _, value in case), marks=[] if case in kept else pytest.mark.slow) for case in numbered
    ]
