"""How XLA's own estimates of its fusions compare with their simulation, in a tensor-parallel MLP
with every backend.

    python benchmarks/player_layers.py [--write docs/player.md]

The MLP is that of benchmarks/tp_mlp.py, forward. Nothing here ran on a TPU: every time is a
prediction.
"""

import dataclasses

import jax

from benchmarks import tp_mlp
from benchmarks.programs import play_program
from benchmarks.table import command_line, print_table, write_between_markers
from flaxasync.check import CompiledProgram, parse, topology_devices
from flaxasync.check.player import Result, played_chip
from flaxasync.check.player.result import Phase

PROGRAMS = (
    *(
        (topology, backend)
        for topology in ("v5e:2x2", "v5e:2x4")
        for backend in ("none", "xla", "pallas")
    ),
    ("v5e:2x4", "automatic"),
)
KINDS = {  # the kinds of fusions that XLA writes itself
    "matmul": "matmul fusions, matrix unit busy for 90 % or more",
    "passes": "passes over HBM",
    "within VMEM": "passes within VMEM",
}


@dataclasses.dataclass(frozen=True)
class Estimated:
    """A simulated fusion, and the compiler's own estimate of it, in seconds for all of its
    executions.
    """

    phase: Phase
    estimate: float

    @property
    def ratio(self) -> float:
        return self.phase.seconds / self.estimate

    @property
    def kind(self) -> str:
        """One of KINDS; "" for a small matmul, or one that waits for HBM."""
        if self.phase.matrix_busy:
            return "matmul" if self.phase.matrix_busy > 0.9 * self.phase.seconds else ""
        return "passes" if any("hbm" in kind for kind in self.phase.bytes) else "within VMEM"


def estimated(result: Result, program: CompiledProgram) -> list[Estimated]:
    """Returns the fusions of the slowest device that the compiler has estimated, in the order in
    which they ran.
    """
    clock = played_chip(result.topology).clock
    cycles = {
        i.name: i.estimated_cycles
        for computation in parse(program.text).computations.values()
        for i in computation.instructions
        if i.opcode == "fusion" and i.estimated_cycles
    }
    return [
        Estimated(p, p.runs * cycles[p.name] / clock)
        for p in result.slowest.phases
        if p.name in cycles
    ]


def main() -> None:
    chosen = command_line(__doc__).parse_args()
    found: list[Estimated] = []
    for topology, variant in PROGRAMS:
        mesh = tp_mlp.ring(topology_devices(topology), variant)
        with jax.set_mesh(mesh):
            fn, arguments = tp_mlp.program(variant, tp_mlp.Shape(), mesh, backward=False)
            found += estimated(*play_program(topology, fn, *arguments))
    rows = []
    for kind, label in KINDS.items():
        ratios = sorted(e.ratio for e in found if e.kind == kind)
        quarters = [
            f"{ratios[round(share * (len(ratios) - 1))]:.2f}" for share in (0, 0.25, 0.5, 0.75, 1)
        ]
        rows.append((label, str(len(ratios)), *quarters))
    header = (
        "what XLA wrote",
        "how many",
        "least",
        "a quarter below",
        "median",
        "a quarter above",
        "most",
    )
    write_between_markers(chosen.write, "player estimates", print_table(header, rows))


if __name__ == "__main__":
    main()
