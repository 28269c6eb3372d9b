"""Links between ring neighbours on the chip network, in the order of `jax.make_mesh` and in that of `fa.make_mesh`.

    python benchmarks/device_order.py [--write docs/tpu.md]

A cell lists the links per hop of each mesh axis, for the ring with the longest hop. No TPU is needed: libtpu describes
the chips.
"""

from collections.abc import Callable

import jax

import flaxasync as fa
from benchmarks.table import command_line, print_table, write_between_markers
from flaxasync.check import topology_devices

MESHES = [
    ("v5e:2x2", (2, 2)), ("v5e:2x4", (8,)), ("v5e:2x4", (2, 4)), ("v6e:2x4", (8,)), ("v5p:2x2x2", (2, 4)),
    ("v5e:4x4", (2, 8)), ("v5e:4x4", (4, 4)), ("v5p:4x4x4", (8, 8)),
]  # fmt: skip
NAMES = ("data", "model")


def hops(make: Callable, topology: str, shape: tuple[int, ...]) -> str:
    """Returns the hops of each axis of the mesh that `make` makes, or that it refuses to make one."""
    try:
        mesh = make(shape, NAMES[-len(shape) :], devices=topology_devices(topology))
    except NotImplementedError:
        return "refused"
    return "; ".join(str(axis).replace(", links per hop", "") for axis in fa.mesh_report(mesh))


def main() -> None:
    chosen = command_line(__doc__).parse_args()
    rows = []
    for topology, shape in MESHES:
        rows.append((topology, str(shape), *(hops(make, topology, shape) for make in (jax.make_mesh, fa.make_mesh))))
    table = print_table(("chips", "mesh", "`jax.make_mesh`", "`fa.make_mesh`"), rows)
    write_between_markers(chosen.write, "device order", table)


if __name__ == "__main__":
    main()
