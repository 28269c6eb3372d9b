"""Which of JAX's own asynchronous collectives are asynchronous in the compiled program, by chip. No TPU is needed.

    python benchmarks/async_starts.py [--chip v5e ...] [--write docs/async.md]

Each program starts one collective, multiplies two matrices that have nothing to do with it, and takes the result of the
collective. `fa.check.audit` then says what became of it. The programs are compiled in a child process, so a crash of
the compiler is an entry of the table. `jax.lax.psum_scatter_start` is public; the other functions are private to JAX.
"""

import datetime
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

MESSAGE = 160  # characters of an error that are shown
AXIS, ROWS, WIDTH = "x", 1024, 2048
TOPOLOGIES = {"v5e": "v5e:2x4", "v6e": "v6e:2x4", "v5p": "v5p:2x2x2", "tpu7x": "tpu7x:2x2x1"}  # eight devices each
_OFFLOAD = ("all_gather", "reduce_scatter", "all_reduce")
OPTIONS: dict[str, Mapping[str, str]] = {
    **{chip: {} for chip in TOPOLOGIES},
    "v6e, offload": {f"xla_tpu_enable_sparse_core_collective_offload_{name}": "true" for name in _OFFLOAD},
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
    "psum_scatter_start, float32": lambda x, size: lax.psum_scatter_start(x.astype("float32"), AXIS, tiled=True),
    "psum_scatter_start, float32 of a bfloat16 product": lambda x, size: lax.psum_scatter_start(
        (x @ x.T).astype("float32"), AXIS, tiled=True
    ),
    "psum_start": lambda x, size: parallel.psum_start(x, AXIS),
    "psum_start, float32": lambda x, size: parallel.psum_start(x.astype("float32"), AXIS),
    "all_to_all_start": lambda x, size: parallel.all_to_all_start(x.reshape(size, -1, WIDTH), AXIS, 0, 0),
    "all_to_all_start, tiled": lambda x, size: parallel.all_to_all_start(x, AXIS, 0, 0, tiled=True),
}


def outcome(case: str, column: str) -> tuple[str, str]:
    """Compiles one program. Returns what became of the collective, and why if the compiler did not accept it."""
    topology = TOPOLOGIES[column.partition(",")[0]]
    size = check.topology_size(topology)
    mesh = check.topology_mesh(topology, (size,), (AXIS,))

    def body(x: jax.Array, lhs: jax.Array, rhs: jax.Array) -> tuple[jax.Array, jax.Array]:
        future = CASES[case](x, size)
        product = lhs @ rhs
        return future.done(), product

    out = P() if case.startswith("psum_start") else P(AXIS)
    fn = jax.shard_map(body, mesh=mesh, in_specs=(P(AXIS), P(AXIS), P()), out_specs=(out, P(AXIS)))
    x, rhs = array((ROWS * size, WIDTH), mesh, P(AXIS)), array((WIDTH, WIDTH), mesh, P())
    options = {**check.HLO_ONLY, **OPTIONS[column]}
    try:
        program = check.compile_for(topology, jax.jit(fn), x, x, rhs, compiler_options=options)
    except (RuntimeError, NotImplementedError, ValueError) as error:
        message = next((line for line in str(error).splitlines() if line), type(error).__name__)
        return ("crash" if "compiler died" in message else "refused"), message[:MESSAGE]
    report = check.audit(program)
    transfers = [p for p in report.pairs if p.communicates]
    if not transfers:
        return "synchronous", ""
    if not all(p.overlapped for p in transfers):
        return "start and done, nothing between", ""
    offloaded = any(op.thread == "sparsecore" for op in check.async_operations(check.parse(program.as_text())))
    return ("SparseCore" if offloaded else "asynchronous"), ""


def table(columns: Iterable[str]) -> tuple[list[str], list[list[str]], list[str]]:
    """Returns the header, the rows, and a line for each reason for which the compiler did not accept a program."""
    columns = tuple(columns)
    rows: list[list[str]] = []
    reasons: dict[str, list[str]] = {}
    for case in CASES:
        name, comma, detail = case.partition(",")
        row = [f"`{name}`{comma}{detail}"]
        for column in columns:
            result, why = outcome(case, column)
            row.append(result)
            if why:
                reasons.setdefault(f"{row[0]}: {why}", []).append(column)
        rows.append(row)
    header = ["start", *columns]
    return header, rows, [f"* {why} ({'; '.join(where)})" for why, where in reasons.items()]


def versions() -> str:
    """Returns the versions of what the table depends on."""
    return ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("jax", "jaxlib", "libtpu"))


def main() -> None:
    """Prints the table; with --write also puts it between the markers of a file."""
    parser = command_line(__doc__)
    parser.add_argument("--chip", action="append", choices=list(OPTIONS), help="only this column; may be repeated")
    chosen = parser.parse_args()
    if chosen.write and chosen.chip:
        parser.error("--write needs all columns, so it cannot be combined with --chip")
    header, rows, reasons = table(chosen.chip or OPTIONS)
    text = print_table(header, rows)
    made = f"Made on {datetime.datetime.now(tz=datetime.UTC):%Y-%m-%d} with {versions()}."
    notes = "\n".join(["Why the compiler, or JAX, did not accept a program:", "", *reasons]) if reasons else ""
    print(f"\n{made}\n\n{notes}")
    write_between_markers(chosen.write, "async starts", f"{made}\n\n{text}\n\n{notes}".rstrip())


if __name__ == "__main__":
    main()
