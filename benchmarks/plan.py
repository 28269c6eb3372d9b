"""Does `fa.plan` choose well? It chooses for a grid of shapes, chips and rings; a sample of it is
compiled and played.

    python benchmarks/plan.py --programs DIR [--count 5] [--write docs/plan.md]

It takes an hour. --count gives a smaller sample, and DIR keeps each play, so that none is repeated.

Each case is one op, alone or with its gradients, as a jitted program. Its time is that of the
played program, without the copy that XLA adds where a kernel ends a program
(docs/kernels/mesh_matmul.md). Each ring of a mesh has a w of its own, because the gradient of a
shared w would be summed over "data", which is not part of the op. The constants of the model are
fitted to this sample and to those of earlier seeds. XLA's own collectives are compiled as
synchronous ones, because XLA splits the asynchronous all-gather of more than two devices into steps
inside matmuls, which read tables that the player lacks. `plan` is asked about rings along a line of
chips, but those are not played.
"""

import collections
import dataclasses
import functools
import itertools
import pathlib
import random

import jax
from jax.sharding import PartitionSpec as P

import flaxasync as fa
from benchmarks.programs import array, kept_seconds, with_gradients
from benchmarks.table import command_line, print_table, write_between_markers
from flaxasync.ops.plan import Plan

OPS = ("all_gather_matmul", "matmul_reduce_scatter")
MESHES = {  # topology, and shape of ("data", "model"); the ring lies on "model"
    "v5e:2x2 ring 4": ("v5e:2x2", (1, 4)),
    "v5e:2x2 ring 2": ("v5e:2x2", (2, 2)),
    "v5e:2x4 ring 8": ("v5e:2x4", (1, 8)),
    "v5e:2x4 ring 4": ("v5e:2x4", (2, 4)),
    "v6e:2x2 ring 4": ("v6e:2x2", (1, 4)),
    "v6e:2x4 ring 8": ("v6e:2x4", (1, 8)),
}
# no closed rings of chips, which alone the player's model of XLA's gathers knows
LINES = {"v5e:2x4 ring 4"}
ROWS = (128, 512, 2048)
# (features, hidden features)
SIDES = ((1024, 512), (2048, 2048), (4096, 1024), (8192, 3584), (4096, 4096))
BACKENDS = ("none", "xla", "pallas", "fused")
COUNT = 30
SEED = 4
FIRST_UNSEEN = 3  # from this seed on, a sample has no case of those of smaller seeds
ALLOWED = 0.05


@dataclasses.dataclass(frozen=True)
class Case:
    """One op at one shape; the sizes are those of one device.

    all_gather_matmul is [rows, features] @ [features, hidden], and matmul_reduce_scatter is
    [ring * rows, hidden] @ [hidden, features].
    """

    op: str
    mesh: str  # a key of MESHES
    rows: int
    features: int
    hidden: int
    backward: bool  # whether both gradients are computed, too

    @property
    def ring(self) -> int:
        return MESHES[self.mesh][1][1]

    @property
    def shapes(self) -> tuple[tuple[int, int], ...]:
        """The shapes of x, w and y on one device."""
        if self.op == "all_gather_matmul":
            return (
                (self.rows, self.features),
                (self.features, self.hidden),
                (self.ring * self.rows, self.hidden),
            )
        return (
            (self.ring * self.rows, self.hidden),
            (self.hidden, self.features),
            (self.rows, self.features),
        )

    def plan(self) -> Plan:
        return fa.plan(
            self.op,
            *self.shapes[:2],
            chip=MESHES[self.mesh][0],
            ring=self.ring,
            backward=self.backward,
        )


def grid() -> list[Case]:
    return [
        Case(op, mesh, rows, *sides, backward)
        for op, mesh, rows, sides, backward in itertools.product(
            OPS, MESHES, ROWS, SIDES, (False, True)
        )
    ]


def sample(seed: int, count: int) -> list[Case]:
    """Returns the cases to play: no line of chips and, from seed `FIRST_UNSEEN` on, no case of an
    earlier seed.

    A smaller sample is the beginning of a larger one.
    """
    seen = {
        case
        for other in range(seed if seed >= FIRST_UNSEEN else 0)
        for case in sample(other, COUNT)
    }
    drawn = random.Random(seed).sample(grid(), 2 * max(COUNT, count))
    return [case for case in drawn if case.mesh not in LINES and case not in seen][:count]


def played_seconds(case: Case, backend: str, folder: pathlib.Path) -> float:
    """Returns the seconds of the case's played program, or those that are kept in the folder."""
    topology, (data, ring) = MESHES[case.mesh]
    mesh = fa.check.topology_mesh(topology, (data, ring), ("data", "model"))
    rows = P(("data", "model"), None)
    columns = P("data", "model")
    specs = {
        "all_gather_matmul": (rows, columns, columns),
        "matmul_reduce_scatter": (columns, rows, rows),
    }[case.op]

    def whole(shape: tuple[int, ...], spec: P) -> jax.ShapeDtypeStruct:
        counts = ({None: 1, "data": data, "model": ring}.get(axis, data * ring) for axis in spec)
        return array(
            tuple(side * count for side, count in zip(shape, counts, strict=True)), mesh, spec
        )

    op = functools.partial(getattr(fa, case.op), axis_name="model", backend=backend)
    local = jax.shard_map(op, mesh=mesh, in_specs=specs[:2], out_specs=specs[2])
    x, w, dy = (whole(shape, spec) for shape, spec in zip(case.shapes, specs, strict=True))
    if case.backward:
        fn = jax.jit(with_gradients(local))
        return kept_seconds(folder, topology, mesh, fn, x, w, dy)
    return kept_seconds(folder, topology, mesh, jax.jit(local), x, w)


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--count", type=int, default=COUNT, help="cases to play")
    parser.add_argument("--seed", type=int, default=SEED, help="of the sample")
    parser.add_argument(
        "--programs", type=pathlib.Path, required=True, metavar="DIR", help="folder of plays"
    )
    chosen = parser.parse_args()
    cases = sample(chosen.seed, chosen.count)
    # the error of a prediction, and the cells
    rows: dict[tuple[str, str], tuple[float, tuple[str, ...]]] = {}
    behind = []
    for case in sorted(cases, key=lambda c: (c.op, c.mesh, c.backward, c.rows)):
        played = {backend: played_seconds(case, backend, chosen.programs) for backend in BACKENDS}
        print(case, played, flush=True)
        planned = case.plan().seconds
        choice = min(played, key=lambda backend: planned[backend])
        behind.append(played[choice] / min(played.values()) - 1)
        error = max(abs(planned[backend] / played[backend] - 1) for backend in BACKENDS)
        if error > rows.get((case.op, case.mesh), (-1.0, ()))[0]:
            size = f"{case.rows}x{case.features}x{case.hidden}"
            gradients = "yes" if case.backward else "no"
            times = [f"{played[b] * 1e3:.3f} ({planned[b] * 1e3:.3f})" for b in BACKENDS]
            cells = (case.op, case.mesh, size, gradients, *times, choice, f"{behind[-1]:.1%}")
            rows[case.op, case.mesh] = error, cells
    columns = [f"{backend}: played (planned) ms" for backend in BACKENDS]
    header = (
        "op",
        "mesh",
        "rows x features x hidden",
        "gradients",
        *columns,
        "chosen",
        "behind the best",
    )
    table = print_table(header, [cells for _, cells in rows.values()])
    choices = collections.Counter(case.plan().backend for case in grid()).most_common()
    text = (
        f"Of {len(grid())} cases `plan` chooses {', '.join(f'{b} for {n}' for b, n in choices)}. "
        f"Of the {len(cases)} that were played, {sum(b <= ALLOWED for b in behind)} are within "
        f"{ALLOWED:.0%} of the best; the furthest is {max(behind):.1%} behind."
    )
    print(text)
    write_between_markers(chosen.write, "plan", f"{table}\n\n{text}")


if __name__ == "__main__":
    main()
