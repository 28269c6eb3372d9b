"""Estimated timelines: of a matmul whose time was measured, and of a tensor-parallel MLP in several
forms. No TPU.

    python benchmarks/timeline.py [--write docs/check.md] [--pictures docs/img]

The matmul is that of the published 2x2 study on v5e (m, k, n = 16384, 16384, 8192 in bf16), which
took 12.05 ms. The MLP is that of benchmarks/tp_mlp.py on v5e:2x4. Copies, bytes and pairs are facts
of the program, times are estimates.
"""

import dataclasses
import pathlib
from typing import Any

import jax

from benchmarks import player_kernels, tp_mlp
from benchmarks.table import command_line, print_table, write_between_markers
from flaxasync import check

SHAPE = tp_mlp.Shape()
MEASURED_MS = {"2x2 jnp.matmul": "12.05"}  # published times on TPU v5e
WINDOWED_OFF = {"xla_jf_spmd_threshold_for_windowed_einsum_mib": "100000"}
POST_SPMD = {
    "xla_tpu_all_gather_collective_matmul_mode": "post_spmd",
    "xla_tpu_reduce_scatter_collective_matmul_mode": "post_spmd",
}
# the variant of benchmarks/tp_mlp.py, and options of the compiler
MLPS: dict[str, tuple[str, dict[str, str]]] = {
    "XLA default": ("automatic", {}),
    "XLA, windowed einsum off": ("automatic", WINDOWED_OFF),
    "XLA, post_spmd collective matmul": ("automatic", POST_SPMD),
    "flaxasync, backend none": ("none", {}),
    "flaxasync, backend xla": ("xla", {}),
    "flaxasync, backend pallas": ("pallas", {}),
}
HEADER = (
    "program",
    "ms",
    "ms, copies by bytes",
    "measured ms",
    "work",
    "exposed",
    "pairs with work inside",
    "temporary MiB",
)


def study() -> tuple[Any, tuple[jax.ShapeDtypeStruct, ...]]:
    """Returns jnp.matmul of LHS[M_X, K_Y] . RHS[K_X, N] -> O[M_X, N] on 2x2, and its arguments."""
    fn, *arguments = player_kernels.program(
        "xla", check.topology_mesh("v5e:2x2", (2, 2), ("x", "y"))
    )
    return fn, tuple(arguments)


def compile_mlp(variant: str, options: dict[str, str]) -> check.CompiledProgram:
    mesh = tp_mlp.ring(check.topology_devices("v5e:2x4"), variant)
    with jax.set_mesh(mesh):
        fn, arguments = tp_mlp.program(variant, SHAPE, mesh, backward=False)
        return check.compile_for(
            "v5e:2x4", fn, *arguments, compiler_options={**check.HLO_ONLY, **options}
        )


@dataclasses.dataclass(frozen=True)
class Row:
    name: str
    best: check.Timeline
    by_bytes: check.Timeline  # with copies timed by the bytes that they move
    # transfers between devices with work inside, "n of m"; a transfer in a loop counts once
    pairs: str
    temporaries: int  # bytes on one device

    def cells(self) -> tuple[str, ...]:
        seconds = self.best.seconds, self.by_bytes.seconds, self.best.compute, self.best.exposed
        best, by_bytes, work, exposed = (f"{each * 1e3:.2f}" for each in seconds)
        measured = MEASURED_MS.get(self.name, "-")
        return (
            self.name,
            best,
            by_bytes,
            measured,
            work,
            exposed,
            self.pairs,
            str(self.temporaries >> 20),
        )


def run(name: str) -> Row:
    if name in MLPS:
        program = compile_mlp(*MLPS[name])
    else:
        fn, arguments = study()
        program = check.compile_for("v5e:2x2", fn, *arguments, compiler_options=check.HLO_ONLY)
    pairs = [p for p in check.audit(program).pairs if p.communicates]
    inside = f"{sum(p.overlapped for p in pairs)} of {len(pairs)}"
    temporaries = program.bytes_by_kind["temporaries"]
    return Row(
        name, check.timeline(program), check.timeline(program, copies="bytes"), inside, temporaries
    )


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument(
        "--pictures",
        type=pathlib.Path,
        metavar="DIR",
        help="draw check_matmul.png and check_mlp.png",
    )
    chosen = parser.parse_args()
    rows = {name: run(name) for name in (*MEASURED_MS, *MLPS)}
    write_between_markers(
        chosen.write, "timeline", print_table(HEADER, [row.cells() for row in rows.values()])
    )
    if chosen.pictures:
        (measured,) = MEASURED_MS
        check.save_picture(
            [rows[measured].best], chosen.pictures / "check_matmul.png", titles=[measured]
        )
        drawn = ["XLA, windowed einsum off", "XLA default", "flaxasync, backend xla"]
        titles = [f"MLP, {name}" for name in drawn]
        check.save_picture(
            [rows[name].best for name in drawn], chosen.pictures / "check_mlp.png", titles=titles
        )


if __name__ == "__main__":
    main()
