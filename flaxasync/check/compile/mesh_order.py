"""Which chip stands where in a mesh, so that neighbours on a mesh axis are neighbours on the chip network.

JAX's own order for eight devices in a row assumes chips in a grid of 4x2. On the 2x4 that libtpu describes, every
second hop of that order is two links long. Here each mesh axis takes whole dimensions of the network and visits their
chips on a closed path of single links, where such a path exists, as it does in any grid with an even side. Where the
mesh does not take whole dimensions, JAX's order is used.
"""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.experimental import mesh_utils

type Path = list[tuple[int, ...]]  # the coordinates of points, each a neighbour of the one before


def ordered_devices(devices: Sequence[Any], shape: tuple[int, ...]) -> np.ndarray:
    """Returns the devices of a topology as an array of the mesh's shape."""
    by_coords = {(*device.coords, device.core_on_chip): device for device in devices}
    sizes = [1 + max(coords[i] for coords in by_coords) for i in range(len(next(iter(by_coords))))]
    axis_of_dimension = _assign_dimensions(sizes, shape) if math.prod(sizes) == len(devices) else None
    if axis_of_dimension is None:
        return mesh_utils.create_device_mesh(shape, list(devices), allow_split_physical_axes=True)
    paths = []  # for each mesh axis: for each position on it, the coordinates in the dimensions of that axis
    for axis in range(len(shape)):
        mine = [i for i, owner in enumerate(axis_of_dimension) if owner == axis]
        paths.append([dict(zip(mine, point, strict=True)) for point in closed_path([sizes[i] for i in mine])])
    ordered = np.empty(shape, dtype=object)
    for index in np.ndindex(*shape):
        coords: dict[int, int] = {}
        for axis, position in enumerate(index):
            coords |= paths[axis][position]
        ordered[index] = by_coords[tuple(coords[i] for i in range(len(sizes)))]
    return ordered


def closed_path(sizes: Sequence[int]) -> Path:
    """Returns every point of a grid once, each one step from the one before, and the last one step from the first.

    The last step exists in a grid with at least two dimensions of more than one point, one of them of even size. In any
    other grid the path is open; a line is visited from end to end.
    """
    wide = [i for i, size in enumerate(sizes) if size > 1]
    if len(wide) < 2:
        return _with_all_dimensions([(n,) for n in range(math.prod(sizes))], wide, len(sizes))
    first, rest = wide[0], wide[1:]
    columns = _back_and_forth([sizes[i] for i in rest])  # all other dimensions, as one line
    height, width = sizes[first], len(columns)
    if height % 2 == 0:
        path: Path = _closed_path_of_rectangle(height, width)
    elif width % 2 == 0:
        path = [(row, column) for column, row in _closed_path_of_rectangle(width, height)]
    else:
        path = _back_and_forth([height, width])
    return _with_all_dimensions([(row, *columns[column]) for row, column in path], [first, *rest], len(sizes))


def _assign_dimensions(sizes: Sequence[int], shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """Returns the mesh axis that takes each dimension of the network; None if no choice fits.

    Of several choices it takes the one with most closed paths, and among equals the one that closes the last axes.
    """
    choices = []
    for axes in itertools.product(range(len(shape)), repeat=len(sizes)):
        taken = [[s for s, owner in zip(sizes, axes, strict=True) if owner == axis] for axis in range(len(shape))]
        if [math.prod(t) for t in taken] == list(shape):
            closed = [_has_closed_path(t) for t in reversed(taken)]
            choices.append((sum(closed), closed, axes))
    return max(choices)[2] if choices else None


def _has_closed_path(sizes: Sequence[int]) -> bool:
    wide = [size for size in sizes if size > 1]
    return math.prod(wide) <= 2 or (len(wide) > 1 and any(size % 2 == 0 for size in wide))


def _closed_path_of_rectangle(rows: int, columns: int) -> Path:
    """Returns a closed path of a rectangle with an even number of rows.

    It goes back and forth through all columns but the first, and comes back along the first column.
    """
    path: Path = [(0, 0)]
    for row in range(rows):
        across = range(1, columns)
        path += [(row, column) for column in (across if row % 2 == 0 else reversed(across))]
    return path + [(row, 0) for row in reversed(range(1, rows))]


def _back_and_forth(sizes: Sequence[int]) -> Path:
    """Returns an open path of a grid that turns around at the end of each line."""
    path: Path = [()]
    for size in reversed(sizes):
        longer: Path = []
        for n in range(size):
            longer += [(n, *point) for point in (path if n % 2 == 0 else reversed(path))]
        path = longer
    return path


def _with_all_dimensions(path: Path, dimensions: Sequence[int], count: int) -> Path:
    """Puts the coordinates of a path into `count` dimensions, with zero in those that the path does not have."""
    points = []
    for point in path:
        full = [0] * count
        for dimension, position in zip(dimensions, point, strict=False):
            full[dimension] = position
        points.append(tuple(full))
    return points
