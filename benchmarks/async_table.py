"""The transfers of a tensor-parallel MLP in its compiled TPU program, by backend. No TPU is needed.

    python benchmarks/async_table.py [--write docs/async.md]

The MLP is x -> silu(x w1) w2 in bfloat16, with batch 8, sequence 2048, width 8192 and hidden width 28672, on v5e:2x4.
Its sequence is sharded before and after. Copies, bytes and pairs are facts of the program; times are estimates of
`flaxasync.check`.
"""

import argparse
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from table import print_table, write_between_markers

import flaxasync as fa
from flaxasync.check.estimate.costs import Costs
from flaxasync.hardware import chip

TOPOLOGY, AXIS = "v5e:2x4", "model"
BATCH, ROWS, WIDTH, HIDDEN = 8, 2048, 8192, 28672
BACKENDS = ("none", "xla", "pallas")
LARGE = 1 << 20  # bytes; smaller copies are not counted
HEADER = [
    "pass", "backend", "copies", "of those in flight", "transfers", "with compute inside", "stalls, ms", "total, ms",
    "temporaries, MiB",
]  # fmt: skip


def mlp(x: jax.Array, w1: jax.Array, w2: jax.Array, *, backend: str) -> jax.Array:
    """The MLP on local shards: x [b, s/R, d], w1 [d, f/R], w2 [f/R, d]."""
    hidden = jax.nn.silu(fa.all_gather_matmul(x, w1, AXIS, backend=backend))
    return fa.matmul_reduce_scatter(hidden, w2, AXIS, backend=backend)


def compile_mlp(backend: str, *, backward: bool) -> Any:
    """Compiles the forward pass, or the computation of y, dx, dw1 and dw2 for a given dy."""
    mesh = fa.check.topology_mesh(TOPOLOGY, (8,), (AXIS,), axis_types=(jax.sharding.AxisType.Explicit,))
    rows, columns, down = P(None, AXIS, None), P(None, AXIS), P(AXIS, None)
    specs = (rows, columns, down)

    def struct(shape: tuple[int, ...], spec: P) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))

    x, w1, w2 = (
        struct(s, p) for s, p in zip(((BATCH, ROWS, WIDTH), (WIDTH, HIDDEN), (HIDDEN, WIDTH)), specs, strict=True)
    )
    with jax.set_mesh(mesh):
        forward = jax.shard_map(functools.partial(mlp, backend=backend), in_specs=specs, out_specs=rows)
        if not backward:
            return fa.check.compile_for(TOPOLOGY, jax.jit(forward), x, w1, w2)

        def both(x: jax.Array, w1: jax.Array, w2: jax.Array, dy: jax.Array) -> Any:
            y, vjp = jax.vjp(forward, x, w1, w2)
            return y, vjp(dy)

        return fa.check.compile_for(TOPOLOGY, jax.jit(both), x, w1, w2, x)


def row(name: str, backend: str, program: Any) -> list[str]:
    """Returns what `flaxasync.check` reads from a program. An operation in a loop counts in every iteration."""
    module = fa.check.parse(program.as_text())
    audit, time = fa.check.audit(module, chip="v5e"), fa.check.timeline(module, chip="v5e")
    runs = Costs(module, chip("v5e")).executions()
    copies = sum(
        count
        for computation, count in runs.items()
        for i in module.computations[computation].instructions
        if i.opcode == "copy" and i.shape.bytes >= LARGE
    )
    in_flight = sum(f.count for f in audit.findings if f.code == "in-flight-copied")
    transfers = [p for p in audit.pairs if p.communicates]
    held = sum(f.count for f in audit.findings if f.code == "synchronous-collective")
    hidden = sum(p.runs for p in transfers if p.overlapped)
    return [
        name, backend, str(copies), str(in_flight), str(sum(p.runs for p in transfers) + held), str(hidden),
        f"{time.exposed * 1e3:.2f}", f"{time.seconds * 1e3:.2f}",
        f"{program.bytes_by_kind['temporaries'] / 2**20:,.0f}",
    ]  # fmt: skip


def main() -> None:
    """Prints the table; with --write also puts it between the markers of a file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", metavar="FILE", help="a Markdown file with the marker lines of this table")
    options = parser.parse_args()
    rows = [
        row(name, backend, compile_mlp(backend, backward=backward))
        for name, backward in (("forward", False), ("forward + backward", True))
        for backend in BACKENDS
    ]
    table = print_table(HEADER, rows)
    if options.write:
        write_between_markers(options.write, "async table", table)


if __name__ == "__main__":
    main()
