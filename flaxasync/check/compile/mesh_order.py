"""Which chip stands where in a mesh, so that neighbours on an axis are neighbours on the chip network.

JAX's own order for eight devices in a row assumes chips laid out 4x2: on the 2x4 that libtpu describes, every second
hop is two links long. Here each mesh axis takes whole dimensions of the network, and walks them on a closed path of
single links where one exists (any grid with an even side). Where no choice of dimensions fits, JAX's order is used.
"""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.experimental import mesh_utils


def ordered_devices(devices: Sequence[Any], shape: tuple[int, ...]) -> np.ndarray:
    """Returns the devices of a topology as an array of the mesh's shape."""
    places = {(*device.coords, device.core_on_chip): device for device in devices}
    sizes = [1 + max(place[i] for place in places) for i in range(len(next(iter(places))))]
    owners = _owners(sizes, shape) if math.prod(sizes) == len(devices) else None
    if owners is None:
        return mesh_utils.create_device_mesh(shape, list(devices), allow_split_physical_axes=True)
    walks = []
    for axis in range(len(shape)):
        mine = [i for i, owner in enumerate(owners) if owner == axis]
        walks.append([dict(zip(mine, step, strict=True)) for step in closed_walk([sizes[i] for i in mine])])
    ordered = np.empty(shape, dtype=object)
    for index in np.ndindex(*shape):
        place: dict[int, int] = {}
        for axis, position in enumerate(index):
            place |= walks[axis][position]
        ordered[index] = places[tuple(place[i] for i in range(len(sizes)))]
    return ordered


def _owners(sizes: Sequence[int], shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """Returns the mesh axis that takes each dimension: the choice with most closed rings, the last axes first."""
    choices = []
    for owners in itertools.product(range(len(shape)), repeat=len(sizes)):
        taken = [[s for s, owner in zip(sizes, owners, strict=True) if owner == axis] for axis in range(len(shape))]
        if [math.prod(t) for t in taken] == list(shape):
            closed = [_closes(t) for t in reversed(taken)]
            choices.append((sum(closed), closed, owners))
    return max(choices)[2] if choices else None


def _closes(sizes: Sequence[int]) -> bool:
    wide = [size for size in sizes if size > 1]
    return math.prod(wide) <= 2 or (len(wide) > 1 and any(size % 2 == 0 for size in wide))


def closed_walk(sizes: Sequence[int]) -> list[tuple[int, ...]]:
    """Returns every point of a grid once, each a neighbour of the one before, the last of the first where that can be.

    It can in a grid of two or more dimensions with an even side; a line is walked from end to end.
    """
    wide = [i for i, size in enumerate(sizes) if size > 1]
    if len(wide) < 2:
        return _placed([(n,) for n in range(math.prod(sizes))], wide, len(sizes))
    first, rest = wide[0], wide[1:]
    lines = _open_walk([sizes[i] for i in rest])  # the other dimensions, as one line
    rows, columns = sizes[first], len(lines)
    if rows % 2 == 0:
        walk = _comb(rows, columns)
    elif columns % 2 == 0:
        walk = [(row, column) for column, row in _comb(columns, rows)]
    else:
        walk = [(row, column) for row, column in _open_walk([rows, columns])]
    return _placed([(row, *lines[column]) for row, column in walk], [first, *rest], len(sizes))


def _comb(rows: int, columns: int) -> list[tuple[int, int]]:
    """A closed walk of a grid with an even number of rows: to and fro without the first column, and back along it."""
    walk = [(0, 0)]
    for row in range(rows):
        across = range(1, columns)
        walk += [(row, column) for column in (across if row % 2 == 0 else reversed(across))]
    return walk + [(row, 0) for row in reversed(range(1, rows))]


def _open_walk(sizes: Sequence[int]) -> list[tuple[int, ...]]:
    """A walk of a grid to and fro."""
    walk: list[tuple[int, ...]] = [()]
    for size in reversed(sizes):
        longer: list[tuple[int, ...]] = []
        for n in range(size):
            longer += [(n, *point) for point in (walk if n % 2 == 0 else reversed(walk))]
        walk = longer
    return walk


def _placed(walk: list[tuple[int, ...]], dimensions: Sequence[int], count: int) -> list[tuple[int, ...]]:
    """Puts the coordinates of a walk at their dimensions, zero elsewhere."""
    points = []
    for step in walk:
        point = [0] * count
        for dimension, position in zip(dimensions, step, strict=False):
            point[dimension] = position
        points.append(tuple(point))
    return points
