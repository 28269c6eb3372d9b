"""`all_gather_matmul` as one fused kernel, compared with XLA, predicted without a TPU.

    python benchmarks/all_gather_matmul.py [--write docs/kernels/all_gather_matmul.md]    minutes; no TPU

The matmuls on v6e are those on which a public all-gather-matmul kernel was compared with XLA. Those
on v5e are the up projection of a tensor-parallel MLP and the matmul of its backward pass, dy @ w.T,
which also returns the gathered dy. All are in bfloat16 on a ring of 8.

The columns "public kernel" and "its XLA" are earlier results of the same simulator for that kernel
and for XLA's program beside it. A star marks a program that had to be compiled with synchronous
collectives, a dash one that the simulator refuses.
"""

from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import flaxasync as fa
from benchmarks.programs import array, play_or_synchronize
from benchmarks.table import command_line, print_table, write_between_markers
from flaxasync import hardware
from flaxasync.check import topology_devices, topology_size
from flaxasync.check.player import Result
from flaxasync.check.player.errors import PlayerError
from flaxasync.kernels.all_gather_matmul import all_gather_matmul

# batches, rows per device, k, columns per device, whether y = x @ w.T
Shape = tuple[int, int, int, int, bool]
SHAPES: list[Shape] = [
    (1, 256, 5120, 6400, False),
    (1, 256, 8192, 7168, False),
    (1, 512, 5120, 6400, False),
    (8, 256, 8192, 3584, False),
    (8, 512, 8192, 3584, False),
    (8, 256, 4096, 3584, False),
    (8, 256, 8192, 3584, True),
]
TOPOLOGIES = ["v6e:2x4"] * 3 + ["v5e:2x4"] * 4
# public kernel and its XLA, in ms
KNOWN = ["0.225, 0.399", "0.417, 0.464", "0.437, 0.467", "-", "-", "-", "-"]
HEADER = (
    "topology",
    "m, k, n",
    "public kernel, its XLA: ms",
    "XLA played ms",
    "fused played ms",
    "kernel alone",
    "of it waits",
    "of peak",
)


def program(
    backend: str, topology: str, shape: Shape, mesh: Mesh | None = None, directions: int = 2
) -> tuple:
    """Makes the jitted function of a backend, "xla" or "fused"; returns it and its abstract
    arguments.
    """
    batch, m, k, n, transposed = shape
    mesh = ring(topology_devices(topology)) if mesh is None else mesh
    rows = P(None, "model", None)
    columns = P("model", None) if transposed else P(None, "model")
    out = P(None, None, "model")
    x = array((batch, mesh.size * m, k), mesh, rows)
    w = array((mesh.size * n, k) if transposed else (k, mesh.size * n), mesh, columns)
    if backend == "xla":

        def product(x: jax.Array, w: jax.Array) -> jax.Array:
            return x @ (w.T if transposed else w)

        return jax.jit(product, out_shardings=NamedSharding(mesh, out)), x, w

    def local(x: jax.Array, w: jax.Array) -> Any:
        (y,), gathered = all_gather_matmul(
            x, (w,), "model", transposed=transposed, keep_gathered=transposed, directions=directions
        )
        return (y, gathered) if transposed else y

    specs = (out, rows) if transposed else out
    return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(rows, columns), out_specs=specs)), x, w


def ring(devices: list) -> Mesh:
    return fa.make_mesh((len(devices),), ("model",), devices=devices, axis_types=(AxisType.Auto,))


def played(backend: str, topology: str, shape: Shape) -> tuple[Result | None, str]:
    """Simulates a backend; returns the result and its time in ms, or prints why the simulator
    refuses the program.
    """
    try:
        result, _, mark = play_or_synchronize(topology, *program(backend, topology, shape))
    except PlayerError as error:
        print(f"{backend}, {topology}, {shape}: {str(error).splitlines()[0][:300]}\n")
        return None, "-"
    return result, f"{result.seconds * 1e3:.3f}{mark and f' {mark}'}"


def row(topology: str, shape: Shape, known: str) -> tuple[str, ...]:
    batch, m, k, n, transposed = shape
    size = topology_size(topology)
    (_, xla), (fused, total) = (played(backend, topology, shape) for backend in ("xla", "fused"))
    kernel_cells = ["-"] * 3
    if fused:
        kernel = fused.slowest.phase("all_gather_matmul")
        peak = 2 * batch * size * m * k * n / hardware.chip(topology).flops
        waits = sum(kernel.waits.values())
        kernel_cells = [
            f"{kernel.seconds * 1e3:.3f}",
            f"{waits * 1e3:.3f}",
            f"{peak / kernel.seconds:.1%}",
        ]
    name = f"{batch} x {size * m}, {k}, {size * n}" + (", w.T" if transposed else "")
    return topology, name, known, xla, total, *kernel_cells


def main() -> None:
    chosen = command_line(__doc__).parse_args()
    rows = [row(*case) for case in zip(TOPOLOGIES, SHAPES, KNOWN, strict=True)]
    write_between_markers(chosen.write, "all gather matmul", print_table(HEADER, rows))


if __name__ == "__main__":
    main()
