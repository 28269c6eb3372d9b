"""Links between ring neighbours on the chip network, in the order of `jax.make_mesh` and in that of `fa.make_mesh`.

    python benchmarks/device_order.py                        print the table
    python benchmarks/device_order.py --write docs/tpu.md    also write it between the markers of that file

A cell lists the links per hop of each mesh axis, for the ring with the longest hop. No TPU is needed: libtpu describes
the chips.
"""

import argparse
from collections.abc import Callable

import jax

import flaxasync as fa
from benchmarks.table import print_table, write_between_markers
from flaxasync.check import topology_devices

MESHES = [
    ("v5e:2x2", (2, 2)),
    ("v5e:2x4", (8,)),
    ("v5e:2x4", (2, 4)),
    ("v6e:2x4", (8,)),
    ("v5p:2x2x2", (2, 4)),
    ("v5e:4x4", (2, 8)),
    ("v5e:4x4", (4, 4)),
    ("v5p:4x4x4", (8, 8)),
]
NAMES = ("data", "model")


def hops(make: Callable, topology: str, shape: tuple[int, ...]) -> str:
    """Returns the hops of each axis of the mesh that `make` makes, or that it refuses to make one."""
    try:
        mesh = make(shape, NAMES[-len(shape) :], devices=topology_devices(topology))
    except NotImplementedError:
        return "refused"
    return "; ".join(str(axis).replace(", links per hop", "") for axis in fa.mesh_report(mesh))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", metavar="FILE", help="file in which the table between the markers is replaced")
    chosen = parser.parse_args()
    rows = [
        (topology, str(shape), hops(jax.make_mesh, topology, shape), hops(fa.make_mesh, topology, shape))
        for topology, shape in MESHES
    ]
    text = print_table(("chips", "mesh", "`jax.make_mesh`", "`fa.make_mesh`"), rows)
    if chosen.write:
        write_between_markers(chosen.write, "device order", text)


if __name__ == "__main__":
    main()
