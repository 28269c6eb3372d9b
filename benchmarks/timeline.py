"""Estimated timelines: of a matmul whose time was measured, and of a tensor-parallel MLP in several forms. No TPU.

    python benchmarks/timeline.py                        prints the table of docs/check.md
    python benchmarks/timeline.py --write docs/check.md  also puts it between the markers in that file
    python benchmarks/timeline.py --pictures docs/img    also draws check_mlp.png and check_matmul.png
    python benchmarks/timeline.py --backends --write docs/async.md  instead: benchmarks/tp_mlp.py by backend

The matmul is that of the published 2x2 study on v5e (m, k, n = 16384, 16384, 8192 in bf16), which took 12.05 ms. The
MLP has batch 8, sequence 2048, width 8192 and hidden width 28672, in bf16 on v5e:2x4. Its activations are sharded over
the sequence before and after. Copies, bytes and pairs are facts of the program.
"""

import dataclasses
import functools
import pathlib
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks import tp_mlp
from benchmarks.programs import array
from benchmarks.table import command_line, print_table, write_between_markers
from flaxasync.check import (
    HLO_ONLY,
    Timeline,
    audit,
    compile_for,
    parse,
    save_picture,
    timeline,
    topology_devices,
    topology_mesh,
)
from flaxasync.check.estimate.costs import Costs
from flaxasync.hardware import chip

BATCH, SEQUENCE, MODEL, HIDDEN, RING = 8, 2048, 8192, 28672, 8
MEASURED_MS = {"2x2 jnp.matmul": "12.05"}  # published times on TPU v5e
WINDOWED_OFF = {"xla_jf_spmd_threshold_for_windowed_einsum_mib": "100000"}
POST_SPMD = {
    "xla_tpu_all_gather_collective_matmul_mode": "post_spmd",
    "xla_tpu_reduce_scatter_collective_matmul_mode": "post_spmd",
}
SPECS = P(None, "model", None), P(None, "model"), P("model", None)  # of x, and of the kernels up and down
BACKENDS = ("none", "xla", "pallas")
LARGE = 1 << 20  # bytes; smaller copies are not counted
HEADER = ("program", "ms", "ms, copies by bytes", "measured ms", "work", "exposed", "pairs with work inside",
          "temporary MiB")  # fmt: skip
BACKEND_HEADER = ("pass", "backend", "copies", "of those in flight", "transfers", "with compute inside", "stalls, ms",
                  "total, ms", "temporaries, MiB")  # fmt: skip

type Program = tuple[Callable, tuple[jax.ShapeDtypeStruct, ...]]
"""A jitted function and its abstract arguments."""


def study() -> Program:
    """Returns jnp.matmul of LHS[M_X, K_Y] . RHS[K_X, N] -> O[M_X, N] on 2x2."""
    mesh = topology_mesh("v5e:2x2", (2, 2), ("x", "y"))
    fn = jax.jit(jnp.matmul, out_shardings=NamedSharding(mesh, P("x", None)))
    return fn, (array((16384, 16384), mesh, P("x", "y")), array((16384, 8192), mesh, P("x", None)))


def mlp_arrays(mesh: Mesh) -> tuple[jax.ShapeDtypeStruct, ...]:
    shapes = ((BATCH, SEQUENCE, MODEL), (MODEL, HIDDEN), (HIDDEN, MODEL))
    return tuple(array(shape, mesh, spec) for shape, spec in zip(shapes, SPECS, strict=True))


def automatic_mlp() -> Program:
    """Returns the MLP as XLA partitions it."""
    mesh = topology_mesh("v5e:2x4", (RING,), ("model",))
    sequence = NamedSharding(mesh, SPECS[0])
    return jax.jit(lambda x, up, down: jax.nn.relu(x @ up) @ down, out_shardings=sequence), mlp_arrays(mesh)


def ring_mlp(unroll: int) -> Program:
    """Returns the MLP as two rings of lax.ppermute.

    Each block is sent as two half-blocks, one in each direction. With unroll=0 every step is written out.
    """
    mesh = topology_mesh("v5e:2x4", (RING,), ("model",))
    local = functools.partial(_ring_mlp, unroll)
    return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=SPECS, out_specs=SPECS[0], check_vma=False)), mlp_arrays(
        mesh
    )


def _ring_mlp(unroll: int, x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    """Returns [b, s, d] for x [b, s, d]: gathers while it multiplies by `up`, and scatters the products with `down`."""
    me, half = lax.axis_index("model"), x.shape[1] // 2
    right = [(i, (i + 1) % RING) for i in range(RING)]
    left = [(i, (i - 1) % RING) for i in range(RING)]
    blocks = jnp.zeros((BATCH, RING, 2, half, up.shape[1]), x.dtype)

    def put(blocks: jax.Array, rows: jax.Array, owner: jax.Array, half_block: int) -> jax.Array:
        value = jax.nn.relu(rows @ up)[:, None, None]
        return lax.dynamic_update_slice(blocks, value, (0, owner, half_block, 0, 0))

    def gather_step(i: jax.Array, carry: tuple) -> tuple:
        ahead, back, blocks = carry
        next_ahead = lax.ppermute(ahead, "model", right)
        next_back = lax.ppermute(back, "model", left)
        blocks = put(blocks, ahead, lax.rem(me - i + RING, RING), 0)
        blocks = put(blocks, back, lax.rem(me + i, RING), 1)
        return next_ahead, next_back, blocks

    ahead, back, blocks = _loop(gather_step, (x[:, :half], x[:, half:], blocks), unroll)
    blocks = put(blocks, ahead, lax.rem(me + 1, RING), 0)
    blocks = put(blocks, back, lax.rem(me - 1 + RING, RING), 1)

    def product_of(owner: jax.Array, half_block: int) -> jax.Array:
        rows = lax.dynamic_slice(blocks, (0, owner, half_block, 0, 0), (BATCH, 1, 1, half, up.shape[1]))
        return jnp.dot(rows[:, 0, 0], down, preferred_element_type=jnp.float32).astype(x.dtype)

    def scatter_step(i: jax.Array, carry: tuple) -> tuple:
        ahead, back = carry
        ahead = lax.ppermute(ahead, "model", right) + product_of(lax.rem(me - 2 - i + 2 * RING, RING), 0)
        back = lax.ppermute(back, "model", left) + product_of(lax.rem(me + 2 + i, RING), 1)
        return ahead, back

    begin = product_of(lax.rem(me - 1 + RING, RING), 0), product_of(lax.rem(me + 1, RING), 1)
    return jnp.concatenate(_loop(scatter_step, begin, unroll), axis=1)


def _loop(step: Callable, carry: tuple, unroll: int) -> tuple:
    if unroll:
        return lax.fori_loop(0, RING - 1, step, carry, unroll=unroll)
    for i in range(RING - 1):
        carry = step(jnp.int32(i), carry)
    return carry


VARIANTS: dict[str, tuple[Callable[[], Program], str, dict[str, str]]] = {  # program, topology, options
    "2x2 jnp.matmul": (study, "v5e:2x2", {}),
    "XLA default": (automatic_mlp, "v5e:2x4", {}),
    "XLA, windowed einsum off": (automatic_mlp, "v5e:2x4", WINDOWED_OFF),
    "XLA, post_spmd collective matmul": (automatic_mlp, "v5e:2x4", POST_SPMD),
    "ring by hand, unroll=1": (functools.partial(ring_mlp, 1), "v5e:2x4", {}),
    "ring by hand, unroll=2": (functools.partial(ring_mlp, 2), "v5e:2x4", {}),
    "ring by hand, every step written out": (functools.partial(ring_mlp, 0), "v5e:2x4", {}),
}


@dataclasses.dataclass(frozen=True)
class Row:
    """What one variant compiles to.

    Attributes:
      name: The name of the variant.
      best: The timeline.
      by_bytes: The timeline with copies timed by the bytes that they move.
      pairs: Transfers between devices, as "n of m" with work inside. A transfer in a loop counts once.
      temporaries: Bytes on one device.
    """

    name: str
    best: Timeline
    by_bytes: Timeline
    pairs: str
    temporaries: int

    def cells(self) -> tuple[str, ...]:
        return (
            self.name,
            f"{self.best.seconds * 1e3:.2f}",
            f"{self.by_bytes.seconds * 1e3:.2f}",
            MEASURED_MS.get(self.name, "-"),
            f"{self.best.compute * 1e3:.2f}",
            f"{self.best.exposed * 1e3:.2f}",
            self.pairs,
            str(self.temporaries >> 20),
        )


def run(name: str) -> Row:
    """Compiles one variant and estimates its time."""
    make, topology, options = VARIANTS[name]
    fn, arrays = make()
    program = compile_for(topology, fn, *arrays, compiler_options={**HLO_ONLY, **options})
    pairs = [p for p in audit(program).pairs if p.communicates]
    inside = f"{sum(p.overlapped for p in pairs)} of {len(pairs)}"
    temporaries = program.bytes_by_kind["temporaries"]
    return Row(name, timeline(program), timeline(program, copies="bytes"), inside, temporaries)


def backend_row(backend: str, *, backward: bool) -> list[str]:
    """Returns what `flaxasync.check` reads from a program. An operation in a loop counts in every iteration."""
    mesh = tp_mlp.ring(topology_devices("v5e:2x4"), backend)
    with jax.set_mesh(mesh):
        fn, arguments = tp_mlp.program(backend, tp_mlp.Shape(), mesh, backward=backward)
        program = compile_for("v5e:2x4", fn, *arguments)
    module = parse(program.as_text())
    report, time = audit(module, chip="v5e"), timeline(module, chip="v5e")
    copies = 0
    for computation, runs in Costs(module, chip("v5e")).executions().items():
        instructions = module.computations[computation].instructions
        copies += runs * sum(i.opcode == "copy" and i.shape.bytes >= LARGE for i in instructions)
    found = {code: sum(f.count for f in report.findings if f.code == code) for code in report.codes()}
    transfers = [p for p in report.pairs if p.communicates]
    return [
        "gradients" if backward else "forward",
        backend,
        str(copies),
        str(found.get("in-flight-copied", 0)),
        str(sum(p.runs for p in transfers) + found.get("synchronous-collective", 0)),
        str(sum(p.runs for p in transfers if p.overlapped)),
        f"{time.exposed * 1e3:.2f}",
        f"{time.seconds * 1e3:.2f}",
        f"{program.bytes_by_kind['temporaries'] / 2**20:,.0f}",
    ]


def main() -> None:
    """Prints the table; writes it and draws the pictures if asked to."""
    parser = command_line(__doc__)
    parser.add_argument("--backends", action="store_true", help="the table of the MLP of flaxasync by backend")
    parser.add_argument("--pictures", type=pathlib.Path, metavar="DIR", help="draw check_matmul.png and check_mlp.png")
    chosen = parser.parse_args()
    if chosen.backends:
        cells = [backend_row(backend, backward=backward) for backward in (False, True) for backend in BACKENDS]
        write_between_markers(chosen.write, "async table", print_table(BACKEND_HEADER, cells))
        return
    rows = [run(name) for name in VARIANTS]
    write_between_markers(chosen.write, "timeline", print_table(HEADER, [row.cells() for row in rows]))
    if chosen.pictures:
        by_name = {row.name: row.best for row in rows}
        save_picture([rows[0].best], chosen.pictures / "check_matmul.png", titles=["2x2 jnp.matmul"])
        drawn = ["XLA, windowed einsum off", "XLA default", "ring by hand, unroll=2"]
        titles = [f"MLP, {name}" for name in drawn]
        save_picture([by_name[name] for name in drawn], chosen.pictures / "check_mlp.png", titles=titles)


if __name__ == "__main__":
    main()
