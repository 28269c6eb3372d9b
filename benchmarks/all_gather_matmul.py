"""`all_gather_matmul` as one fused kernel, compared with XLA: predicted without a TPU, measured on TPUs.

    python benchmarks/all_gather_matmul.py                            predict both programs (minutes; no TPU)
    python benchmarks/all_gather_matmul.py --write docs/kernels/all_gather_matmul.md  and writes it there
    python benchmarks/all_gather_matmul.py --small                    use small sizes (seconds; no reference figures)

The matmuls on v6e are those on which a public all-gather-matmul kernel was compared with XLA. Those on v5e are the up
projection of a tensor-parallel MLP and the matmul of its backward pass, dy @ w.T, which also returns the gathered dy.
All are in bfloat16 on a ring of 8.

"Played" times are totals of the simulator `fa.check.play`, which executes the final instructions of all devices. The
columns "public kernel" and "its XLA" are earlier results of the same simulator for that kernel and for XLA's program
beside it. The simulator does not know all of XLA's asynchronous all-gathers. If it refuses XLA's default program, the
program is compiled without fusions around asynchronous collectives, which a star marks. A dash marks a program that it
refuses both ways; the reason is printed above the table. On a machine with eight TPUs the same command also runs both
programs there and prints the measured times.
"""

import argparse
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import flaxasync as fa
from benchmarks.measure import fastest_ms
from benchmarks.table import print_table, write_between_markers
from flaxasync import hardware
from flaxasync.check import topology_devices, topology_size
from flaxasync.check.player import Result, play
from flaxasync.check.player.errors import PlayerError
from flaxasync.kernels.all_gather_matmul import all_gather_matmul

Shape = tuple[int, int, int, int, bool]  # batches, rows per device, k, columns per device, whether y = x @ w.T
SHAPES: list[Shape] = [
    (1, 256, 5120, 6400, False), (1, 256, 8192, 7168, False), (1, 512, 5120, 6400, False),
    (8, 256, 8192, 3584, False), (8, 512, 8192, 3584, False), (8, 256, 4096, 3584, False), (8, 256, 8192, 3584, True),
]  # fmt: skip
TOPOLOGIES = ["v6e:2x4"] * 3 + ["v5e:2x4"] * 4
KNOWN = ["0.225, 0.399", "0.417, 0.464", "0.437, 0.467"]  # public kernel and its XLA, in ms
SMALL: Shape = (2, 64, 512, 512, False)
SYNCHRONOUS = {"xla_tpu_enable_async_collective_fusion": "false"}


def program(backend: str, topology: str, shape: Shape, mesh: Any = None, directions: int = 2) -> tuple:
    """Makes the jitted function of a backend, "xla" or "fused"; returns it and its abstract arguments."""
    batch, m, k, n, transposed = shape
    mesh = ring(topology_devices(topology)) if mesh is None else mesh
    size = mesh.size
    rows, columns = P(None, "model", None), P("model", None) if transposed else P(None, "model")
    out = P(None, None, "model")

    def arranged(shape: tuple[int, ...], spec: P) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))

    x = arranged((batch, size * m, k), rows)
    w = arranged((size * n, k) if transposed else (k, size * n), columns)
    if backend == "xla":
        product = lambda x, w: x @ (w.T if transposed else w)  # noqa: E731
        return jax.jit(product, out_shardings=NamedSharding(mesh, out)), x, w

    def local(x: jax.Array, w: jax.Array) -> Any:
        (y,), gathered = all_gather_matmul(
            x, (w,), "model", transposed=transposed, keep_gathered=transposed, directions=directions
        )
        return (y, gathered) if transposed else y

    specs = (out, rows) if transposed else out
    return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(rows, columns), out_specs=specs)), x, w


def ring(devices: list) -> Mesh:
    """Makes a mesh of one ring over all devices, present or described."""
    return fa.make_mesh((len(devices),), ("model",), devices=devices, axis_types=(AxisType.Auto,))


def measured_ms(backend: str, shape: Shape) -> float | None:
    """Returns the time of the fastest of several runs on eight TPUs, or None if the machine does not have them."""
    if jax.default_backend() != "tpu" or jax.device_count() != 8:
        return None
    fn, *arguments = program(backend, "", shape, ring(jax.devices()))
    values = [jax.device_put(jnp.ones(a.shape, a.dtype), a.sharding) for a in arguments]
    return fastest_ms(fn, *values)


def played(backend: str, topology: str, shape: Shape, options: dict[str, str] | None = None) -> Result | None:
    """Simulates the program of a backend; prints the reason and returns None if the simulator refuses it."""
    fn, *arguments = program(backend, topology, shape)
    try:
        return play(fn, *arguments, topology=topology, compiler_options=options)
    except (PlayerError, RuntimeError) as error:
        print(f"{backend}, {topology}, {shape}, {options or 'as by default'}: {str(error).splitlines()[0][:300]}\n")
        return None


def row(topology: str, shape: Shape, known: str) -> tuple[str, ...]:
    batch, m, k, n, transposed = shape
    size = topology_size(topology)
    fused, xla, star = played("fused", topology, shape), played("xla", topology, shape), ""
    if xla is None:
        xla, star = played("xla", topology, shape, SYNCHRONOUS), " *"
    ours = ["-"] * 4
    if fused:
        kernel = fused.slowest.phase("all_gather_matmul")
        peak = 2 * batch * size * m * k * n / hardware.chip(topology).flops
        ours = [
            _ms(fused.seconds),
            _ms(kernel.seconds),
            _ms(sum(kernel.waits.values())),
            f"{peak / kernel.seconds:.1%}",
        ]
    here = [measured_ms(backend, shape) for backend in ("xla", "fused")]
    return (
        topology,
        f"{batch} x {size * m}, {k}, {size * n}" + (", w.T" if transposed else ""),
        known,
        f"{_ms(xla.seconds)}{star}" if xla else "-",
        *ours,
        *([] if here[0] is None else [f"{one:.3f}" for one in here]),
    )


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--small", action="store_true", help="use small sizes, for which there are no reference figures"
    )
    parser.add_argument("--write", metavar="FILE", help="file in which the table between the markers is replaced")
    chosen = parser.parse_args()
    cases = [("v5e:2x4", SMALL)] if chosen.small else list(zip(TOPOLOGIES, SHAPES, strict=True))
    known = [] if chosen.small else KNOWN
    rows = [row(*case, known[i] if i < len(known) else "-") for i, case in enumerate(cases)]
    header = ("topology", "m, k, n", "public kernel, its XLA: ms", "XLA played ms", "fused played ms",
              "kernel alone", "of it waits", "of peak", "XLA measured", "fused measured")  # fmt: skip
    table = print_table(header[: len(rows[0])], rows)
    if chosen.write:
        write_between_markers(chosen.write, "all gather matmul", table)


if __name__ == "__main__":
    main()
