"""`fa.mesh_matmul` on every backend, with the sizes of a published 2 x 2 study, and scaled to 4 x
4.

    python benchmarks/mesh_matmul.py [--write docs/kernels/mesh_matmul.md] [--meshes]     a quarter of an hour; no TPU

The matmul is LHS[M_X, K_Y] . RHS[K_X, N] -> O[M_X, N] in bfloat16 on four v5e chips. "Published"
times are those that the study measured for its own kernel of that name. `--meshes` makes the table
of other meshes alone. A last table has the layer made of the op, and its gradients, beside those
that XLA makes of `jnp.matmul`.
"""

import functools
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import flaxasync as fa
from benchmarks.programs import array, play_program, seconds_without_exit_copies, split_layer
from benchmarks.table import command_line, print_table, write_between_markers
from flaxasync.kernels.engine.operands import Tiles

type Directions = Literal[1, 2] | None
STUDY = (16384, 16384, 8192)  # m, k, n
TOPOLOGY = "v5e:2x2"
# measured by the study, in ms
PUBLISHED = {"none": 12.05, "xla_gemm": 12.5, "serial": 13.17, "fused": 12.3}
BACKENDS = ("none", "xla_gemm", "serial", "fused", "overlapped")
SCALED = (32768, 32768, 8192)  # a device of a 4 x 4 mesh multiplies as much as in the study
MESHES = (
    *(
        (topology, mesh, STUDY)
        for topology, mesh in [
            ("v5e:2x2", (4, 1)),
            ("v5e:2x2", (1, 4)),
            ("v5e:2x4", (2, 4)),
            ("v5e:2x4", (4, 2)),
            ("v5e:4x4", (4, 4)),
        ]
    ),
    ("v5e:4x4", (4, 4), SCALED),
)
# on other meshes
FORMS: tuple[tuple[str, Directions], ...] = (("none", None), ("overlapped", 1), ("overlapped", 2))
XLA = "XLA (jnp.matmul)"
LAYER_HEADER = (
    "program",
    "forward ms",
    "waits for others",
    "of peak",
    "backward ms",
    "waits for others",
    "of peak",
)
HEADER = (
    "backend",
    "published ms",
    "predicted ms",
    "difference",
    "without exit copy",
    "waits for others",
    "of peak",
)


def program(
    backend: str | None,
    mesh: Mesh,
    shape: tuple[int, ...],
    tiles: Tiles | None = None,
    directions: Directions = None,
) -> tuple:
    """Makes the jitted function of a backend; returns it and its abstract arguments."""
    m, k, n = shape
    local = functools.partial(fa.mesh_matmul, backend=backend, tiles=tiles, directions=directions)
    fn = jax.shard_map(
        local, mesh=mesh, in_specs=(P("x", "y"), P("x", None)), out_specs=P("x", None)
    )
    return jax.jit(fn), array((m, k), mesh, P("x", "y")), array((k, n), mesh, P("x", None))


def row(backend: str) -> tuple[str, ...]:
    """Simulates a backend on the mesh of the study."""
    fn, *arguments = program(backend, fa.check.topology_mesh(TOPOLOGY, (2, 2), ("x", "y")), STUDY)
    result, compiled = play_program(TOPOLOGY, fn, *arguments)
    total = result.seconds * 1e3
    known = PUBLISHED.get(backend)
    published, error = ("-", "-") if known is None else (f"{known:g}", f"{total / known - 1:+.1%}")
    times = (
        f"{seconds * 1e3:.3f}"
        for seconds in (seconds_without_exit_copies(result, compiled), result.exposed)
    )
    return backend, published, f"{total:.3f}", error, *times, f"{result.slowest.share_of_peak:.0%}"


def mesh_row(
    topology: str,
    mesh_shape: tuple[int, int],
    shape: tuple[int, ...],
    backend: str,
    directions: Directions,
) -> tuple[str, ...]:
    mesh = fa.check.topology_mesh(topology, mesh_shape, ("x", "y"))
    fn, *arguments = program(backend, mesh, shape, directions=directions)
    result, compiled = play_program(topology, fn, *arguments)
    total = seconds_without_exit_copies(result, compiled) * 1e3
    size, product = ("x".join(map(str, sides)) for sides in (mesh_shape, shape))
    share = f"{result.slowest.matrix_busy / total * 1e3:.0%}"
    return (
        product,
        topology,
        size,
        backend,
        str(directions or "-"),
        f"{total:.2f}",
        f"{result.exposed * 1e3:.2f}",
        share,
    )


def layer_row(title: str) -> tuple[str, ...]:
    """Simulates a product, and the gradients of both operands alone, of `fa.nn.MeshLinear` or of
    XLA.
    """
    mesh = fa.check.topology_mesh(TOPOLOGY, (2, 2), ("x", "y"))
    m, k, n = STUDY
    x = array((m, k), mesh, P("x", "y"))
    dy = array((m, n), mesh, P("x", None))
    with jax.set_mesh(mesh):
        if title == XLA:
            params = array((k, n), mesh, P("x", None))
            forward = jax.jit(
                lambda kernel, x: x @ kernel, out_shardings=NamedSharding(mesh, P("x", None))
            )
        else:
            make = functools.partial(fa.nn.MeshLinear, k, n, use_bias=False, backend="overlapped")
            graph, params = split_layer(lambda: make(rngs=nnx.Rngs(0)), mesh, jnp.bfloat16)
            forward = jax.jit(lambda params, x: nnx.merge(graph, params)(x))
        shardings = jax.tree.map(lambda leaf: leaf.sharding, (params, x))
        backward = jax.jit(
            lambda params, x, dy: jax.vjp(forward, params, x)[1](dy), out_shardings=shardings
        )
        results = [
            play_program(TOPOLOGY, forward, params, x)[0],
            play_program(TOPOLOGY, backward, params, x, dy)[0],
        ]
    cells = [
        (f"{r.seconds * 1e3:.3f}", f"{r.exposed * 1e3:.3f}", f"{r.slowest.share_of_peak:.0%}")
        for r in results
    ]
    return title, *cells[0], *cells[1]


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument(
        "--meshes", action="store_true", help="make the table of other meshes alone"
    )
    chosen = parser.parse_args()
    header = (
        "m x k x n",
        "topology",
        "mesh",
        "backend",
        "directions",
        "predicted ms",
        "waits for others",
        "of peak",
    )
    rows = [mesh_row(*mesh, *form) for mesh in MESHES for form in FORMS]
    write_between_markers(chosen.write, "mesh matmul meshes", print_table(header, rows))
    if chosen.meshes:
        return
    write_between_markers(
        chosen.write, "mesh matmul", print_table(HEADER, [row(backend) for backend in BACKENDS])
    )
    rows = [layer_row(title) for title in (XLA, "fa.nn.MeshLinear")]
    write_between_markers(chosen.write, "mesh matmul layer", print_table(LAYER_HEADER, rows))


if __name__ == "__main__":
    main()
