"""`fa.mesh_matmul` on every backend, with the sizes of a published 2 x 2 study.

    python benchmarks/mesh_matmul.py [--write docs/kernels/mesh_matmul.md]     a minute; no TPU

The matmul is LHS[M_X, K_Y] . RHS[K_X, N] -> O[M_X, N] in bfloat16 on four v5e chips. "Published" times are those that
the study measured for its own kernel of that name.
"""

import functools
from typing import Literal

import jax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import flaxasync as fa
from benchmarks.programs import array, play_program, seconds_without_exit_copies
from benchmarks.table import command_line, print_table, write_between_markers
from flaxasync.kernels.engine.operands import Tiles

type Directions = Literal[1, 2] | None
STUDY = (16384, 16384, 8192)  # m, k, n
TOPOLOGY = "v5e:2x2"
PUBLISHED = {"none": 12.05, "xla_gemm": 12.5, "serial": 13.17, "fused": 12.3}  # measured by the study, in ms
BACKENDS = ("none", "xla_gemm", "serial", "fused", "overlapped")
MESHES = (("v5e:2x2", (4, 1)), ("v5e:2x2", (1, 4)), ("v5e:2x4", (2, 4)), ("v5e:2x4", (4, 2)))
FORMS: tuple[tuple[str, Directions], ...] = (("none", None), ("overlapped", 1), ("overlapped", 2))  # on other meshes
HEADER = ("backend", "published ms", "predicted ms", "difference", "without exit copy", "waits for others", "of peak")


def program(
    backend: str | None, mesh: Mesh, shape: tuple[int, ...], tiles: Tiles | None = None, directions: Directions = None
) -> tuple:
    """Makes the jitted function of a backend; returns it and its abstract arguments."""
    m, k, n = shape
    local = functools.partial(fa.mesh_matmul, backend=backend, tiles=tiles, directions=directions)
    fn = jax.shard_map(local, mesh=mesh, in_specs=(P("x", "y"), P("x", None)), out_specs=P("x", None))
    return jax.jit(fn), array((m, k), mesh, P("x", "y")), array((k, n), mesh, P("x", None))


def row(backend: str) -> tuple[str, ...]:
    """Simulates a backend on the mesh of the study."""
    fn, *arguments = program(backend, fa.check.topology_mesh(TOPOLOGY, (2, 2), ("x", "y")), STUDY)
    result, compiled = play_program(TOPOLOGY, fn, *arguments)
    total, known = result.seconds * 1e3, PUBLISHED.get(backend)
    published, error = ("-", "-") if known is None else (f"{known:g}", f"{total / known - 1:+.1%}")
    times = (f"{seconds * 1e3:.3f}" for seconds in (seconds_without_exit_copies(result, compiled), result.exposed))
    return backend, published, f"{total:.3f}", error, *times, f"{result.slowest.share_of_peak:.0%}"


def mesh_row(topology: str, mesh_shape: tuple[int, int], backend: str, directions: Directions) -> tuple[str, ...]:
    mesh = fa.check.topology_mesh(topology, mesh_shape, ("x", "y"))
    fn, *arguments = program(backend, mesh, STUDY, directions=directions)
    result, compiled = play_program(topology, fn, *arguments)
    total, size = seconds_without_exit_copies(result, compiled) * 1e3, "x".join(map(str, mesh_shape))
    share = f"{result.slowest.matrix_busy / total * 1e3:.0%}"
    return topology, size, backend, str(directions or "-"), f"{total:.2f}", f"{result.exposed * 1e3:.2f}", share


def main() -> None:
    chosen = command_line(__doc__).parse_args()
    write_between_markers(chosen.write, "mesh matmul", print_table(HEADER, [row(backend) for backend in BACKENDS]))
    header = ("topology", "mesh", "backend", "directions", "predicted ms", "waits for others", "of peak")
    rows = [mesh_row(*mesh, *form) for mesh in MESHES for form in FORMS]
    write_between_markers(chosen.write, "mesh matmul meshes", print_table(header, rows))


if __name__ == "__main__":
    main()
