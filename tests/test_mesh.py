"""Tests of `make_mesh` and `mesh_report`: each axis is a ring of neighbours, and never worse than
in JAX's order.
"""

import dataclasses
import inspect
import itertools
import math
import types

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.experimental import topologies
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import flaxasync as fa
from flaxasync import hardware
from flaxasync.check.compile.topologies import TOPOLOGIES
from flaxasync.device_order import DeviceGrid, _rings, order_slices, ring_order
from flaxasync.mesh import gpus_hide_latency
from tests.kernels.conftest import arranged


@dataclasses.dataclass(frozen=True)
class Device:
    """A device of a slice, as far as its place in a mesh is concerned."""

    id: int
    coords: tuple[int, int, int]
    device_kind: str = "TPU v5 lite"
    slice_index: int = 0
    core_on_chip: int = 0
    platform: str = "tpu"


def report(topology, shape, names=("data", "model")):
    mesh = fa.make_mesh(shape, names, devices=fa.check.topology_devices(topology))
    return {axis.name: axis for axis in fa.mesh_report(mesh)}


@pytest.mark.parametrize(("topology", "shape", "data", "model"), [
    ("v5e:2x2", (2, 2), (1, 1), (1, 1)),
    ("v5e:2x4", (2, 4), (2, 2), (1, 1, 1, 1)),  # two squares
    ("v5e:4x4", (2, 8), (2, 2), (1,) * 8),  # two halves of 2x4
    ("v5e:4x4", (4, 4), (2, 2, 2, 2), (1,) * 4),  # four squares, in a square
    ("v5p:2x2x2", (2, 4), (1, 1), (1,) * 4),
    ("v5p:4x4x4", (8, 8), (1,) * 8, (1,) * 8),  # dimensions that wrap
])  # fmt: skip
def test_the_last_axis_gets_closed_rings_and_the_axis_before_it_the_shortest_hops(
    topology, shape, data, model
):
    axes = report(topology, shape)
    assert (axes["data"].hops, axes["model"].hops) == (data, model)
    assert axes["model"].closed
    assert axes["data"].closed == (max(data) == 1)


def test_the_report_reads_like_a_sentence():
    axes = report("v5e:2x4", (2, 4))
    assert str(axes["model"]) == (
        "model: closed ring, links per hop 4 x 1; 50% of the devices begin mesh_matmul without "
        "matching operands"
    )
    assert str(axes["data"]) == "data: ring, links per hop 2, 2"
    line = fa.mesh_report(
        jax.sharding.Mesh(np.array(fa.check.topology_devices("v5e:2x4")), ("x",))
    )[0]
    assert str(line) == "x: ring, links per hop 1, 2, 1, 2, 1, 2, 1, 4"


@pytest.mark.parametrize(
    ("shape", "unmatched"), [((2, 2), 0.5), ((4, 4), 0.75), ((4, 2), 1.0), ((1, 4), 0.0)]
)
def test_the_devices_that_begin_mesh_matmul_without_matching_operands(shape, unmatched):
    devices = [Device(i, (i, 0, 0)) for i in range(math.prod(shape))]
    first, last = fa.mesh_report(fa.make_mesh(shape, ("x", "y"), devices=devices))
    assert (first.unmatched, last.unmatched) == (None, unmatched)


def test_axes_are_explicit_by_default_as_in_jax():
    mesh = fa.make_mesh((2, 4), ("data", "model"))
    assert mesh == jax.make_mesh((2, 4), ("data", "model"))
    auto = fa.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    assert auto.axis_types == (AxisType.Auto,) * 2
    links, both = (
        "the devices have no coordinates",
        "50% of the devices begin mesh_matmul without matching operands",
    )
    assert [str(axis) for axis in fa.mesh_report(mesh)] == [
        f"data: {links}",
        f"model: {links}; {both}",
    ]


def test_fewer_axes_than_devices_take_the_first_devices():
    assert fa.make_mesh((4,), ("model",)) == jax.make_mesh((4,), ("model",))


def test_no_ring_lies_across_slices():
    devices = topologies.get_topology_desc("v5p:2x2x1", platform="tpu", num_slices=2).devices
    mesh = fa.make_mesh((2, 2, 2), ("data", "fsdp", "model"), devices=devices)
    assert all(len({d.slice_index for d in row}) == 1 for row in mesh.devices.reshape(2, 4))
    axes = {axis.name: axis for axis in fa.mesh_report(mesh)}
    assert axes["data"].across_slices
    assert str(axes["data"]) == "data: across slices"
    assert axes["fsdp"].closed
    assert axes["model"].closed


def test_a_part_of_a_slice_begins_anywhere():
    """As the devices of one of several processes do."""
    devices = [Device(i, (2 + i % 2, 4 + i // 2, 0)) for i in range(8)]
    (axis,) = fa.mesh_report(fa.make_mesh((8,), ("model",), devices=devices))
    assert axis.closed


def test_an_unknown_chip_is_taken_for_a_grid_that_does_not_wrap():
    devices = [Device(i, (i, 0, 0), "TPU v9") for i in range(4)]
    (axis,) = fa.mesh_report(fa.make_mesh((4,), ("model",), devices=devices))
    assert max(axis.hops) == 2


TWO_SLICES = [
    Device(4 * s + i, (i % 2, i // 2, 0), slice_index=s) for s in range(2) for i in range(4)
]


@pytest.mark.parametrize(
    ("shape", "names", "devices", "message"),
    [
        (
            (2, 4),
            ("model",),
            None,
            r"one name for each axis: got axis_sizes=\(2, 4\) and axis_names=\('model',\)",
        ),
        (
            (3, 4),
            ("data", "model"),
            None,
            r"got \(3, 4\), which is 12, and 8 devices of the platform 'cpu'. To simulate 12 "
            r"devices on the CPU, call jax.config.update\('jax_num_cpu_devices', 12\) right after "
            r"`import jax`$",
        ),
        ((4, 4), ("data", "model"), TWO_SLICES, r"got \(4, 4\), which is 16, and 8 devices$"),
        (
            (8,),
            ("model",),
            TWO_SLICES,
            "divisible by the 2 slices: got {'model': 8}; add an axis of 2",
        ),
        # the first six devices
        (
            (2, 3),
            ("data", "model"),
            TWO_SLICES,
            r"of each slice: got \[4, 2\] for a mesh {'data': 2, 'model': 3}; use all devices",
        ),
    ],
)
def test_meshes_that_do_not_fit_the_devices_are_refused(shape, names, devices, message):
    with pytest.raises(ValueError, match=message):
        fa.make_mesh(shape, names, devices=devices)


def test_it_takes_every_argument_of_jax_make_mesh():
    """Under its name, and in its position."""
    theirs, ours = (inspect.signature(make).parameters for make in (jax.make_mesh, fa.make_mesh))
    assert list(ours)[: len(theirs)] == list(theirs)
    assert [ours[name].kind for name in theirs] == [parameter.kind for parameter in theirs.values()]
    auto = (AxisType.Auto,) * 2
    for arguments, options in [
        (((2, 4), ("data", "model"), auto), {}),
        (((2, 2), ("data", "model")), {"devices": jax.devices()}),  # the first four of them
        (
            (),
            {
                "axis_sizes": (4, 2),
                "axis_names": ["data", "model"],
                "axis_types": auto,
                "devices": jax.devices(),
            },
        ),
    ]:
        assert fa.make_mesh(*arguments, **options) == jax.make_mesh(*arguments, **options)
    assert fa.make_mesh(axis_shapes=(8,), axis_names=("model",)) == fa.make_mesh((8,), ("model",))
    with pytest.raises(
        ValueError,
        match=r"one type for each axis: got axis_sizes=\(2, 4\) and axis_types=\(Auto,\)",
    ):
        fa.make_mesh((2, 4), ("data", "model"), auto[:1])
    for sizes in ({}, {"axis_sizes": (8,), "axis_shapes": (8,)}):
        with pytest.raises(
            ValueError, match="needs axis_sizes, or axis_shapes, its older name: give one"
        ):
            fa.make_mesh(axis_names=("model",), **sizes)


SMALL = [
    f"{family}:{size}"
    for family, sizes in TOPOLOGIES.items()
    for size in sizes
    if math.prod(map(int, size.split("x"))) <= 16
]
LARGE = ["v5e:4x8", "v6e:8x8", "v5p:4x4x4", "tpu7x:2x4x4"]  # each has hundreds of meshes


def shapes(devices):
    """All shapes of two and of three axes for a number of devices."""
    divisors = [d for d in range(1, devices + 1) if devices % d == 0]
    every = (shape for axes in (2, 3) for shape in itertools.product(divisors, repeat=axes))
    return [shape for shape in every if math.prod(shape) == devices]


def longest_hops(grid, mesh):
    """The longest hop of each axis of a mesh, the last axis first."""
    order = np.array([grid.position(device) for device in mesh.devices.flat]).reshape(
        *mesh.devices.shape, -1
    )
    return [int(grid.hops(order, axis).max()) for axis in reversed(range(mesh.devices.ndim))]


def has_closed_ring(grid, size):
    """Says whether the chips can be cut into boxes of `size` devices that each hold a closed ring
    of single links.

    This follows from the sides of a box alone: the cores of a chip are no distance apart; two chips
    are a ring, and so are a whole dimension that wraps and every box with an even side and a second
    side longer than one.
    """
    for box in itertools.product(*([d for d in range(1, n + 1) if n % d == 0] for n in grid.sizes)):
        if math.prod(box) != size:
            continue
        *sides, cores = box
        wide = [
            (side, n, wraps)
            for side, n, wraps in zip(sides, grid.sizes, grid.wraps, strict=False)
            if side > 1
        ]
        if not wide or (
            (len(wide) > 1 or cores > 1) and any(side % 2 == 0 for side, *_ in [*wide, (cores,)])
        ):
            return True
        if len(wide) == 1 and (wide[0][0] == 2 or (wide[0][0] == wide[0][1] and wide[0][2])):
            return True
    return False


@pytest.mark.parametrize(
    "topology", [*SMALL, *(pytest.param(name, marks=pytest.mark.slow) for name in LARGE)]
)
def test_no_mesh_is_worse_than_jax_makes_it_and_the_last_axis_is_closed_wherever_it_can_be(
    topology,
):
    devices = fa.check.topology_devices(topology)
    grid = DeviceGrid.of(devices)
    refused = 0
    for shape in shapes(len(devices)):
        names = ("a", "b", "c")[: len(shape)]
        mesh = fa.make_mesh(shape, names, devices=devices)
        assert {d.id for d in mesh.devices.flat} == {d.id for d in devices}
        ours = longest_hops(grid, mesh)
        try:
            theirs = longest_hops(grid, jax.make_mesh(shape, names, devices=devices))
        except (NotImplementedError, ValueError):
            refused += 1
        else:
            assert ours <= theirs, shape
        assert (ours[0] <= 1) == has_closed_ring(grid, shape[-1]), shape
    assert refused < len(shapes(len(devices)))


@pytest.mark.parametrize(("topologies", "wraps"), [
    (["v5p:2x2x4", "v5p:2x4x4", "tpu7x:2x2x4", "v5e:4x4"], (False, False, False)),
    (["v5p:4x4x4", "v5p:4x4x8"], (True, True, True)),
    (["v5e:8x16"], (False, True, False)),
    (["v5e:16x16"], (True, True, False)),
])  # fmt: skip
def test_the_dimensions_that_wrap(topologies, wraps):
    for topology in topologies:
        assert DeviceGrid.of(fa.check.topology_devices(topology)).wraps == (*wraps, False), topology


def test_a_part_of_a_slice_wraps_only_where_it_spans_the_slice():
    devices = fa.check.topology_devices("v5p:4x4x8")
    half = [device for device in devices if device.coords[2] < 4]
    assert DeviceGrid.of(half).wraps == (True, True, False, False)


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4).map(tuple))
def test_rings_visit_every_point_of_a_box_and_close_where_that_is_possible(box):
    closes = math.prod(box) <= 2 or (
        sum(side > 1 for side in box) > 1 and any(side % 2 == 0 for side in box)
    )
    longest = []
    for ring in _rings(box):
        assert sorted(ring) == list(itertools.product(*map(range, box)))
        steps = [
            sum(abs(a - b) for a, b in zip(p, q, strict=True))
            for p, q in zip(ring, [*ring[1:], ring[0]], strict=True)
        ]
        longest.append(max(steps))
    assert (min(longest) <= 1) == closes


def test_a_mesh_that_does_not_fit_the_grid_is_refused():
    with pytest.raises(
        ValueError, match=r"a mesh of shape \(3, 2\) needs 6 devices: got a grid of \(2, 4, 1, 1\)"
    ):
        ring_order(DeviceGrid((2, 4, 1, 1), (False,) * 4, (0,) * 4), (3, 2))


@pytest.mark.slow
def test_the_order_of_devices_decides_the_time_of_a_tensor_parallel_mlp():
    """One program, simulated on the order of `fa.make_mesh` and on that of `jax.make_mesh`."""

    def mlp(x, up, down):
        hidden = fa.all_gather_matmul(x, up, "model", backend="fused")
        return fa.matmul_reduce_scatter(hidden, down, "model", backend="fused")

    def milliseconds(make):
        mesh = make((2, 4), ("data", "model"), devices=fa.check.topology_devices("v5e:2x4"))
        specs = P("data", "model"), P(None, "model"), P("model")
        operands = arranged(mesh, [(8, 2048, 4096), (4096, 4096), (4096, 4096)], specs)
        fn = jax.jit(jax.shard_map(mlp, mesh=mesh, in_specs=specs, out_specs=specs[0]))
        with jax.set_mesh(mesh):
            return fa.check.play(fn, *operands, topology="v5e:2x4").seconds * 1e3

    assert milliseconds(fa.make_mesh) < 1.25
    assert milliseconds(jax.make_mesh) > 2.2


def test_gpus_which_have_coordinates_and_no_cores_keep_their_order():
    """The attributes are those of an NVIDIA H100 under JAX 0.12."""
    gpu = types.SimpleNamespace(
        id=0, coords=(0, 0, 0), device_kind="NVIDIA H100", slice_index=0, platform="gpu"
    )
    assert DeviceGrid.of([gpu]) is None
    # each host is a slice, and an axis may go across them
    hosts = [types.SimpleNamespace(**vars(gpu) | {"slice_index": i // 8}) for i in range(16)]
    assert order_slices(hosts, (16,), ("data",)) is None


@pytest.mark.parametrize(
    ("chip", "flags", "hides"),
    [
        ("h100", "", True),
        ("h100", "--{}=false", False),
        ("h100", "--{}=0", False),
        ("h100", "--{}=false --{}=true", True),
        ("a100", "--xla_gpu_other=true", False),
        ("a100", "--{}", True),
        ("a100", "--{}=1", True),
        ("a100", "--{}=True --{}=False", False),
    ],
)
def test_whether_gpus_hide_latency_is_what_the_last_flag_says(chip, flags, hides, monkeypatch):
    """XLA of jaxlib 0.12 reads these values so, as the options say that it dumps with a program."""
    monkeypatch.setenv("XLA_FLAGS", flags.replace("{}", hardware.SCHEDULER))
    assert gpus_hide_latency(hardware.GPUS[chip]) is hides
