"""Orders chips so that each mesh axis is a ring of neighbours on the chip network.

Chips lie on a grid of up to three dimensions, some of which wrap: a link closes them into a ring. A
mesh axis of n devices takes a box of n chips. A ring of single links passes through all chips of a
box that has an even side and a second side longer than one, or that fills a dimension which wraps.

Which box each axis takes is searched. Every dimension of the network is factored among the axes.
The factors of one dimension are nested in every order, and an inner block is repeated either as it
is or mirrored every other time, so that the ends of neighbouring blocks meet. The best order is the
one whose last axis has the shortest longest hop, then the axis before it, and so on.

A hop between two chips is measured in links, by the shortest path. Two cores of one chip are zero
links apart.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from flaxasync.hardware import chip_of_device

type Sizes = tuple[int, ...]
type Path = tuple[tuple[int, ...], ...]  # the points of a box in the order of a ring


@dataclasses.dataclass(frozen=True)
class DeviceGrid:
    """The devices of one slice. The last dimension is that of the cores of a chip."""

    sizes: Sizes  # devices along each dimension
    wraps: tuple[bool, ...]  # whether a link closes each dimension into a ring
    origin: tuple[int, ...]  # coordinates of the first device

    @classmethod
    def of(cls, devices: Sequence[Any]) -> "DeviceGrid | None":
        """Returns the grid of the devices of one slice, or None if they have no coordinates or do
        not fill a grid.
        """
        # GPUs have coordinates, and no cores
        if not all(hasattr(device, "core_on_chip") for device in devices):
            return None
        places = {_coordinates(device) for device in devices}
        first, last = (tuple(map(end, zip(*places, strict=True))) for end in (min, max))
        sizes = tuple(stop - start + 1 for start, stop in zip(first, last, strict=True))
        if len(places) != len(devices) or math.prod(sizes) != len(devices):
            return None
        chip = chip_of_device(devices[0].device_kind)
        whole = _slice_sizes(devices[0]) or sizes
        # a part of a larger slice that does not begin at its first chip
        if chip is None or any(first):
            return cls(sizes, (False,) * len(sizes), first)
        # the whole slice
        spans = [size == full for size, full in zip(sizes[:-1], whole[:-1], strict=True)]
        closed = [a and b for a, b in zip(spans, chip.wraps(whole[:-1]), strict=True)]
        return cls(sizes, (*closed, False), first)

    def position(self, device: Any) -> tuple[int, ...]:
        """Returns the position of a device along each dimension of the grid."""
        return tuple(c - start for c, start in zip(_coordinates(device), self.origin, strict=True))

    def links(self, source: np.ndarray, target: np.ndarray) -> np.ndarray:
        """Returns the links between devices, int [...], from two arrays of coordinates, int [...,
        dimensions].
        """
        apart = np.abs(source - target)
        around = np.where(self.wraps, np.array(self.sizes) - apart, apart)
        return np.minimum(apart, around)[..., :-1].sum(-1)

    def hops(self, order: np.ndarray, axis: int) -> np.ndarray:
        """Returns the links of each hop to the next device on a mesh axis, int [rings, size].

        Args:
          order: The coordinates of the device at each position of the mesh, int [*shape,
            dimensions].
          axis: The mesh axis. The last hop of each ring leads back to its first device.
        """
        to_next = self.links(order, np.roll(order, -1, axis))
        return np.moveaxis(to_next, axis, -1).reshape(-1, order.shape[axis])


def order_slices(devices: Sequence[Any], shape: Sizes, names: Sequence[str]) -> np.ndarray | None:
    """Returns the devices of one or several slices as an array of a mesh's shape; None if a slice
    does not fill a grid.

    The first axis whose devices can be divided among the slices is divided, but never the last one.

    Args:
      devices: TPU devices, real ones or those of a topology.
      shape: The number of devices on each mesh axis.
      names: The names of the axes.

    Raises:
      ValueError: The slices differ in size, or no axis but the last one can be divided among them.
    """
    slices = slices_of(devices)
    grids = [grid for grid in map(DeviceGrid.of, slices) if grid is not None]
    if len(grids) < len(slices):
        return None
    counts = [len(one) for one in slices]
    if min(counts) < max(counts):
        raise ValueError(
            f"make_mesh needs equally many devices of each slice: got {counts} for a mesh "
            f"{dict(zip(names, shape, strict=True))}; use all devices, or pass the ones to use"
        )
    axis = _axis_across_slices(shape, names, len(slices))
    in_slice = tuple(n // len(slices) if i == axis else n for i, n in enumerate(shape))
    ordered = []
    for one, grid in zip(slices, grids, strict=True):
        at = {grid.position(device): device for device in one}
        order = ring_order(grid, in_slice)
        ordered.append(np.empty(in_slice, dtype=object))
        for index in np.ndindex(*in_slice):
            ordered[-1][index] = at[tuple(map(int, order[index]))]
    return np.concatenate(ordered, axis)


def slices_of(devices: Sequence[Any]) -> list[list[Any]]:
    """Returns the devices of each slice. Devices of topologies and of single slices may have no
    slice index.
    """
    by_slice: dict[int, list[Any]] = {}
    for device in devices:
        by_slice.setdefault(getattr(device, "slice_index", None) or 0, []).append(device)
    return [by_slice[index] for index in sorted(by_slice)]


@functools.cache
def ring_order(grid: DeviceGrid, shape: Sizes) -> np.ndarray:
    """Returns the coordinates of the device at each position of a mesh, int [*shape, dimensions].

    Args:
      grid: The devices, as many as the mesh has positions.
      shape: The number of devices on each mesh axis.

    Raises:
      ValueError: The shape does not multiply to the devices of the grid.
    """
    if math.prod(shape) != math.prod(grid.sizes):
        raise ValueError(
            f"a mesh of shape {shape} needs {math.prod(shape)} devices: got a grid of {grid.sizes}"
        )
    best: tuple[list[int], np.ndarray] | None = None
    for order in _orders(grid, shape):
        cost = _cost(grid, order, best and best[0])
        if cost is not None and (best is None or cost < best[0]):
            best = cost, order
    # the factorization that fills one dimension after the other always exists
    assert best is not None
    return best[1]


def _axis_across_slices(shape: Sizes, names: Sequence[str], slices: int) -> int:
    """Returns the first axis, the last one excepted, whose devices can be divided among the
    slices.
    """
    if slices == 1:
        return 0
    for axis, size in enumerate(shape[:-1]):
        if size % slices == 0:
            return axis
    raise ValueError(
        f"rings are kept within a slice, so an axis before {names[-1]!r} must be divisible by the "
        f"{slices} slices: got {dict(zip(names, shape, strict=True))}; add an axis of {slices}, "
        "such as 'data', in front"
    )


def _coordinates(device: Any) -> tuple[int, ...]:
    return (*device.coords, device.core_on_chip)


def _slice_sizes(device: Any) -> Sizes | None:
    """Returns the number of devices along each dimension of the whole slice of a device; None if it
    is not known.
    """
    client = getattr(device, "client", None)
    if client is None:
        return None
    number = getattr(device, "slice_index", None)
    others = [other for other in client.devices() if getattr(other, "slice_index", None) == number]
    return tuple(max(axis) - min(axis) + 1 for axis in zip(*map(_coordinates, others), strict=True))


def _cost(grid: DeviceGrid, order: np.ndarray, limit: list[int] | None) -> list[int] | None:
    """The longest hop of each axis, the last axis first, then the sum of its hops; None where it
    exceeds a limit.
    """
    cost: list[int] = []
    hops = []
    for axis in reversed(range(order.ndim - 1)):
        hops.append(grid.hops(order, axis))
        cost.append(int(hops[-1].max()))
        if limit is not None and cost > limit[: len(cost)]:
            return None
    return cost + [int(links.sum()) for links in hops]


def _orders(grid: DeviceGrid, shape: Sizes) -> Iterator[np.ndarray]:
    """Yields every order that the head of this file describes, int [*shape, dimensions]."""
    axes = range(len(shape))
    for factors in itertools.product(*(_factorizations(size, len(shape)) for size in grid.sizes)):
        boxes = [tuple(by_axis[axis] for by_axis in factors) for axis in axes]
        if any(math.prod(box) != size for box, size in zip(boxes, shape, strict=True)):
            continue
        nestings = [list(_nestings(by_axis)) for by_axis in factors]
        for paths in itertools.product(*map(_rings, boxes)):
            for nesting in itertools.product(*nestings):
                yield _place(factors, nesting, paths, shape)


@functools.cache
def _factorizations(size: int, count: int) -> tuple[Sizes, ...]:
    """All ways to write a size as a product of so many factors, in order."""
    if count == 1:
        return ((size,),)
    divisors = [d for d in range(1, size + 1) if size % d == 0]
    return tuple((d, *rest) for d in divisors for rest in _factorizations(size // d, count - 1))


def _nestings(by_axis: Sizes) -> Iterator[tuple[Sizes, bool]]:
    """The orders, outermost first, in which axes share one dimension; and whether inner blocks are
    mirrored.
    """
    sharing = [axis for axis, factor in enumerate(by_axis) if factor > 1]
    for order in itertools.permutations(sharing):
        yield order, False
        if len(sharing) > 1:
            yield order, True


def _place(
    factors: Sequence[Sizes],
    nestings: Sequence[tuple[Sizes, bool]],
    paths: Sequence[Path],
    shape: Sizes,
) -> np.ndarray:
    """The coordinates of the device at each position of the mesh, int [*shape, dimensions]."""
    order = np.zeros((*shape, len(factors)), int)
    for dimension, (by_axis, (nesting, mirrored)) in enumerate(zip(factors, nestings, strict=True)):
        value = np.zeros((1,) * len(shape), int)
        for axis in nesting:
            digit = np.array([point[dimension] for point in paths[axis]])
            digit = digit.reshape([-1 if other == axis else 1 for other in range(len(shape))])
            if mirrored:
                digit = np.where(value % 2 == 0, digit, by_axis[axis] - 1 - digit)
            value = value * by_axis[axis] + digit
        order[..., dimension] = value
    return order


@functools.cache
def _rings(box: Sizes) -> tuple[Path, ...]:
    """Rings through all points of a box: closed ones of single steps where there are any.

    They differ in the dimension along which most steps go, for dimensions that are not equally long
    in links. A line has two: from end to end, where a link may close it, and over every other point
    there and back.
    """
    wide = [dimension for dimension, size in enumerate(box) if size > 1]
    rings = []
    for order in itertools.permutations(wide):
        for path in _closed_or_open([box[dimension] for dimension in order]):
            points = []
            for steps in path:
                point = [0] * len(box)
                for dimension, step in zip(order, steps, strict=True):
                    point[dimension] = step
                points.append(tuple(point))
            rings.append(tuple(points))
    return tuple(dict.fromkeys(rings))


def _closed_or_open(sizes: Sequence[int]) -> list[Path]:
    """Rings through a box whose sides are all longer than one."""
    if not sizes:
        return [((),)]
    if len(sizes) == 1:
        line = [(step,) for step in range(sizes[0])]
        return [tuple(line), (*line[::2], *reversed(line[1::2]))]
    rows, *rest = sizes
    if rows % 2:
        # no ring closes with this side as the rows; `_rings` takes the other sides as rows, too
        return [_to_and_fro(sizes)]
    across = _to_and_fro(rest)  # the other dimensions, as one line of single steps
    comb = [(0, 0)]  # the teeth leave column 0 to the way back
    for row in range(rows):
        columns = range(1, len(across))
        comb += [(row, column) for column in (columns if row % 2 == 0 else reversed(columns))]
    comb += [(row, 0) for row in reversed(range(1, rows))]
    return [tuple((row, *across[column]) for row, column in comb)]


def _to_and_fro(sizes: Sequence[int]) -> Path:
    """A path of single steps through all points of a box, one line after the other, every second
    one backwards.
    """
    path: list[tuple[int, ...]] = [()]
    for size in reversed(sizes):
        path = [
            (n, *point) for n in range(size) for point in (path if n % 2 == 0 else reversed(path))
        ]
    return tuple(path)
