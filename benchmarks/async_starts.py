"""Which of JAX's own asynchronous collectives are asynchronous in the compiled program, by chip. No
TPU is needed.

    python benchmarks/async_starts.py [--write docs/async.md]

Each program starts one collective, multiplies two matrices that have nothing to do with it, and
takes the result of the collective. `fa.check.audit` then says what became of it. The programs are
compiled in a child process, so a crash of the compiler is an entry of the table.
`jax.lax.psum_scatter_start` is public; the other functions are private to JAX.
"""

import importlib.metadata
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
from jax import lax
from jax._src.lax import parallel  # the only home of four of the five functions
from jax.sharding import PartitionSpec as P

from benchmarks.programs import array
from benchmarks.table import command_line, print_table, write_between_markers
from flaxasync import check, ring

AXIS = "x"
ROWS = 1024
WIDTH = 2048
# eight devices each
TOPOLOGIES = {"v5e": "v5e:2x4", "v6e": "v6e:2x4", "v5p": "v5p:2x2x2", "tpu7x": "tpu7x:2x2x1"}
_OFFLOAD = ("all_gather", "reduce_scatter", "all_reduce")
OPTIONS: dict[str, Mapping[str, str]] = {
    **{chip: {} for chip in TOPOLOGIES},
    "v6e, offload": {
        f"xla_tpu_enable_sparse_core_collective_offload_{name}": "true" for name in _OFFLOAD
    },
}


def _loop(x: jax.Array, size: int) -> Any:
    """Carries the future of a permute through a loop."""

    def turn(_: int, future: Any) -> Any:
        return parallel.ppermute_start(future.done(), AXIS, ring.permutation(size, 1))

    return lax.fori_loop(0, 4, turn, parallel.ppermute_start(x, AXIS, ring.permutation(size, 1)))


# What is started, of this device's x and the number of devices: a future in JAX's sense.
CASES: dict[str, Callable[[jax.Array, int], Any]] = {
    "ppermute_start": lambda x, size: parallel.ppermute_start(x, AXIS, ring.permutation(size, 1)),
    "ppermute_start, carried by a loop": _loop,
    "all_gather_start": lambda x, size: parallel.all_gather_start(x, AXIS, tiled=True),
    "psum_scatter_start": lambda x, size: lax.psum_scatter_start(x, AXIS, tiled=True),
    "psum_scatter_start, float32": lambda x, size: lax.psum_scatter_start(
        x.astype("float32"), AXIS, tiled=True
    ),
    "psum_scatter_start, float32 of a bfloat16 product": lambda x, size: lax.psum_scatter_start(
        (x @ x.T).astype("float32"), AXIS, tiled=True
    ),
    "psum_start": lambda x, size: parallel.psum_start(x, AXIS),
    "psum_start, float32": lambda x, size: parallel.psum_start(x.astype("float32"), AXIS),
    "all_to_all_start": lambda x, size: parallel.all_to_all_start(
        x.reshape(size, -1, WIDTH), AXIS, 0, 0
    ),
    "all_to_all_start, tiled": lambda x, size: parallel.all_to_all_start(x, AXIS, 0, 0, tiled=True),
}


def outcome(case: str, column: str) -> str:
    """Compiles one program. Returns what became of the collective."""
    topology = TOPOLOGIES[column.partition(",")[0]]
    size = check.topology_size(topology)
    mesh = check.topology_mesh(topology, (size,), (AXIS,))

    def body(x: jax.Array, lhs: jax.Array, rhs: jax.Array) -> tuple[jax.Array, jax.Array]:
        future = CASES[case](x, size)
        product = lhs @ rhs
        return future.done(), product

    out = P() if case.startswith("psum_start") else P(AXIS)
    fn = jax.shard_map(body, mesh=mesh, in_specs=(P(AXIS), P(AXIS), P()), out_specs=(out, P(AXIS)))
    x = array((ROWS * size, WIDTH), mesh, P(AXIS))
    rhs = array((WIDTH, WIDTH), mesh, P())
    options = {**check.HLO_ONLY, **OPTIONS[column]}
    try:
        program = check.compile_for(topology, jax.jit(fn), x, x, rhs, compiler_options=options)
    except (RuntimeError, NotImplementedError, ValueError) as error:
        return "crash" if "compiler died" in str(error) else "refused"
    transfers = [p for p in check.audit(program).pairs if p.communicates]
    if not transfers:
        return "synchronous"
    if not all(p.overlapped for p in transfers):
        return "start and done, nothing between"
    offloaded = any(
        op.thread == "sparsecore" for op in check.async_operations(check.parse(program.as_text()))
    )
    return "SparseCore" if offloaded else "asynchronous"


def table_rows(columns: Iterable[str]) -> list[list[str]]:
    columns = tuple(columns)
    rows = []
    for case in CASES:
        name, comma, detail = case.partition(",")
        rows.append([f"`{name}`{comma}{detail}", *(outcome(case, column) for column in columns)])
    return rows


def versions() -> str:
    return ", ".join(
        f"{name} {importlib.metadata.version(name)}" for name in ("jax", "jaxlib", "libtpu")
    )


def main() -> None:
    chosen = command_line(__doc__).parse_args()
    table = print_table(["start", *OPTIONS], table_rows(OPTIONS))
    write_between_markers(chosen.write, "async starts", f"Made with {versions()}.\n\n{table}")


if __name__ == "__main__":
    main()
