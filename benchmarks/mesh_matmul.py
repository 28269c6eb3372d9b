"""`fa.mesh_matmul` on every backend, with the sizes of a published 2 x 2 study: predicted, and measured on TPUs.

    python benchmarks/mesh_matmul.py                            predict every backend (half a minute; no TPU)
    python benchmarks/mesh_matmul.py --write docs/kernels/mesh_matmul.md  and writes it there
    python benchmarks/mesh_matmul.py --small                    divide all sizes by 8 (seconds; no reference figures)
    python benchmarks/mesh_matmul.py --meshes [--write FILE]    predict other meshes of four and eight v5e chips

The matmul is LHS[M_X, K_Y] . RHS[K_X, N] -> O[M_X, N] with m, k, n = 16384, 16384, 8192 in bfloat16 on four v5e chips.
"Predicted" times are totals of the simulator `fa.check.play`, which executes the final instructions of all devices.
"Published" times are those that the study measured for its own kernel of that name. On a machine with four TPUs the
same command also runs the backends there and prints the measured times.
"""

import argparse
import functools

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import flaxasync as fa
from benchmarks.measure import fastest_ms
from benchmarks.table import print_table, write_between_markers
from flaxasync.check.player import Result, play
from flaxasync.kernels.engine.operands import Tiles

STUDY, SMALL = (16384, 16384, 8192), (2048, 2048, 1024)  # m, k, n
TOPOLOGY = "v5e:2x2"
PUBLISHED = {"none": 12.05, "xla_gemm": 12.5, "serial": 13.17, "fused": 12.3}  # measured by the study, in ms
MESHES = (("v5e:2x2", (4, 1)), ("v5e:2x2", (1, 4)), ("v5e:2x4", (2, 4)), ("v5e:2x4", (4, 2)))
FORMS = (("none", None), ("overlapped", 1), ("overlapped", 2))


def program(
    backend: str, mesh: Mesh, shape: tuple[int, int, int], tiles: Tiles | None = None, directions: int | None = None
) -> tuple:
    """Makes the jitted function of a backend; returns it and its abstract arguments."""
    m, k, n = shape
    arguments = tuple(
        jax.ShapeDtypeStruct(s, jnp.bfloat16, sharding=NamedSharding(mesh, spec))
        for s, spec in (((m, k), P("x", "y")), ((k, n), P("x", None)))
    )
    local = functools.partial(fa.mesh_matmul, backend=backend, tiles=tiles, directions=directions)
    return jax.jit(
        jax.shard_map(local, mesh=mesh, in_specs=(P("x", "y"), P("x", None)), out_specs=P("x", None))
    ), *arguments


def exit_copy_ms(result: Result) -> float:
    """Returns the time of the copy that XLA adds if the result of a kernel is the result of the program."""
    return sum(p.seconds for p in result.slowest.phases if p.name.startswith("copy")) * 1e3


def measured_ms(backend: str, shape: tuple[int, int, int], tiles: Tiles | None) -> float | None:
    """Returns the time of the fastest of several runs on four TPUs, or None if the machine does not have them."""
    if jax.default_backend() != "tpu" or jax.device_count() != 4:
        return None
    fn, *arguments = program(backend, fa.make_mesh((2, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2), shape, tiles)
    values = [jax.device_put(jnp.ones(a.shape, a.dtype), a.sharding) for a in arguments]
    return fastest_ms(fn, *values)


def play_meshes() -> str:
    """Simulates the backends on other meshes; returns the table."""
    rows = []
    for topology, mesh_shape in MESHES:
        mesh = fa.check.topology_mesh(topology, mesh_shape, ("x", "y"))
        for backend, directions in FORMS:
            if directions == 2 and max(mesh_shape) == 2:
                continue
            fn, *arguments = program(backend, mesh, STUDY, directions=directions)
            result = play(fn, *arguments, topology=topology)
            total, copy = result.seconds * 1e3, exit_copy_ms(result)
            rows.append(
                (
                    topology,
                    "x".join(map(str, mesh_shape)),
                    backend,
                    str(directions or "-"),
                    f"{total - copy:.2f}",
                    f"{result.exposed * 1e3:.2f}",
                    f"{result.slowest.matrix_busy / (total - copy) * 1e3:.0%}",
                )
            )
    header = ("topology", "mesh", "backend", "directions", "predicted ms", "waits for others", "of peak")
    return print_table(header, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--small", action="store_true", help="divide all sizes by 8, for which there are no reference figures"
    )
    parser.add_argument("--write", metavar="FILE", help="file in which the table between the markers is replaced")
    parser.add_argument("--meshes", action="store_true", help="predict other meshes than that of the study")
    chosen = parser.parse_args()
    if chosen.meshes:
        table = play_meshes()
        if chosen.write:
            write_between_markers(chosen.write, "mesh matmul meshes", table)
        return
    shape, tiles = (SMALL, Tiles(256, 256, 256)) if chosen.small else (STUDY, None)
    mesh = fa.check.topology_mesh(TOPOLOGY, (2, 2), ("x", "y"))
    rows = []
    for backend in ("none", "xla_gemm", "serial", "fused", "overlapped"):
        fn, *arguments = program(backend, mesh, shape, tiles)
        result = play(fn, *arguments, topology=TOPOLOGY)
        total, copy = result.seconds * 1e3, exit_copy_ms(result)
        known = None if chosen.small else PUBLISHED.get(backend)
        here = measured_ms(backend, shape, tiles)
        rows.append(
            (
                backend,
                "-" if known is None else f"{known:g}",
                f"{total:.3f}",
                "-" if known is None else f"{total / known - 1:+.1%}",
                f"{total - copy:.3f}",
                f"{result.exposed * 1e3:.3f}",
                f"{result.slowest.share_of_peak:.0%}",
                *([] if here is None else [f"{here:.3f}"]),
            )
        )
    header = (
        "backend",
        "published ms",
        "predicted ms",
        "difference",
        "without exit copy",
        "waits for others",
        "of peak",
    )
    table = print_table((*header, "measured here")[: len(rows[0])], rows)
    if chosen.write:
        write_between_markers(chosen.write, "mesh matmul", table)


if __name__ == "__main__":
    main()
