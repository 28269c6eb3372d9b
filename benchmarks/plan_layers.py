"""Do layers choose well? A sample of attention blocks and MLPs is played as they choose, and in all
other forms.

    python benchmarks/plan_layers.py --programs DIR [--seed 1] [--write docs/plan.md]

It takes an hour. --seed draws another sample, and DIR keeps each play, so that no program is played
twice.

A case is a `ParallelSelfAttention` or a gated `ParallelMLP` in bfloat16 on a ring of all devices of
a topology: the forward pass, dx and the gradients of all parameters, as one jitted program. Its
time is that of the played program, without the copies that XLA adds where a kernel ends a program,
as in benchmarks/plan.py. XLA's own collectives are compiled as synchronous ones, for the reason
that is given there.

The layer chooses twice: with no memory for gathered rows, where it is compared with the forms that
keep nothing, and with 128 MiB, where it is compared with all. The command fails if a choice takes
more than 5 % longer than the fastest.
"""

import dataclasses
import itertools
import math
import pathlib
import random
import sys
import time
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AxisType

import flaxasync as fa
from benchmarks.plan import ALLOWED
from benchmarks.programs import kept_seconds
from benchmarks.step import layer_program
from benchmarks.table import command_line, print_table, write_between_markers
from flaxasync.ops import roofline

TOPOLOGIES = ("v5e:2x2", "v5e:2x4", "v6e:2x2", "v6e:2x4")  # a ring of all devices
LAYERS = ("attention", "MLP")
SHAPES = ((1, 2048), (2, 1024), (1, 4096), (2, 2048), (4, 1024))  # sequences, and rows of each
WIDTHS = (2048, 3072, 4096)
HEAD_DIM = 128
KV_HEADS = 8
HIDDEN = 3  # the hidden features of an MLP by its width
MEMORY = 2**27  # bytes of gathered rows
COUNT = 12
SEED = 4


@dataclasses.dataclass(frozen=True)
class Case:
    layer: str
    topology: str
    batch: int  # sequences
    rows: int  # of each sequence, on all devices together
    width: int  # features of input and output


@dataclasses.dataclass(frozen=True)
class Form:
    backend: str | None  # of all of its ops; None for what each of them chooses
    keep: bool = False  # whether what is gathered is kept; with no backend, whether it may be
    # whether weights and heads of attention travel; None for what the block chooses
    exchange: bool | None = False

    def __str__(self) -> str:
        return f"{self.backend}{' kept' if self.keep else ''}{', heads travel' if self.exchange else ''}"


FORMS = (
    Form("fused"),
    Form("fused", True),
    Form("none"),
    Form("xla"),
    Form("pallas"),
    Form("pallas", True),
)
EXCHANGED = (Form("fused", exchange=True), Form("fused", True, True))
CHOSEN = (Form(None, exchange=None), Form(None, True, None))


def sample(seed: int) -> list[Case]:
    """Draws cases that are in no sample of an earlier seed.

    The first ones are each layer on each topology; more are on topologies that are drawn, of each
    layer equally many.
    """
    seen = {case for earlier in range(seed) for case in sample(earlier)}
    drawn = random.Random(seed)
    sizes = [(*shape, width) for shape in SHAPES for width in WIDTHS]
    strata = {
        (layer, topology): [c for size in sizes if (c := Case(layer, topology, *size)) not in seen]
        for layer, topology in itertools.product(LAYERS, TOPOLOGIES)
    }
    firsts, seconds = zip(*(drawn.sample(cases, 2) for cases in strata.values()), strict=True)
    shuffled = [
        drawn.sample([c for c in seconds if c.layer == layer], len(TOPOLOGIES)) for layer in LAYERS
    ]
    in_turn = itertools.chain(*zip(*shuffled, strict=True))  # a case of each layer, in turn
    return [*firsts, *in_turn][:COUNT]


def forms(case: Case) -> tuple[Form, ...]:
    """Returns the forms to which the choice is compared. XLA merges trips: "none" and "xla" keep
    rows in any case.
    """
    return FORMS + EXCHANGED if case.layer == "attention" else FORMS


def make_layer(case: Case, form: Form) -> nnx.Module:
    options: dict[str, Any] = {
        "backend": form.backend,
        "gathered_bytes": MEMORY if form.keep else 0,
    }
    options |= {"dtype": jnp.bfloat16, "param_dtype": jnp.bfloat16, "rngs": nnx.Rngs(0)}
    if case.layer == "MLP":
        return fa.nn.ParallelMLP(case.width, HIDDEN * case.width, **options)
    return fa.nn.ParallelSelfAttention(
        case.width,
        case.width // HEAD_DIM,
        kv_heads=KV_HEADS,
        exchange_heads=form.exchange,
        **options,
    )


def played_seconds(case: Case, form: Form, folder: pathlib.Path) -> float:
    """Returns the seconds of the case's played program, or those that are kept in the folder."""
    size = fa.check.topology_size(case.topology)
    kinds = (AxisType.Explicit,) * 2
    mesh = fa.check.topology_mesh(case.topology, (1, size), ("data", "model"), axis_types=kinds)
    shape = jax.ShapeDtypeStruct((case.batch, case.rows, case.width), jnp.bfloat16)
    # A form that keeps rows does so even where that is not predicted to gain.
    least = -math.inf if form.backend and form.keep else roofline.KEEPING_GAINS
    with jax.set_mesh(mesh), mock.patch.object(roofline, "KEEPING_GAINS", least):
        fn, arguments = layer_program(lambda: make_layer(case, form), shape, mesh)
        return kept_seconds(folder, case.topology, mesh, fn, *arguments)


def behind(chosen: float, form: Form, played: dict[Form, float]) -> float:
    """Returns how much longer a choice takes than the fastest form that keeps no more than it
    may.
    """
    best = min(seconds for other, seconds in played.items() if form.keep or not other.keep)
    return max(0.0, chosen / best - 1)


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--seed", type=int, default=SEED, help="of the sample")
    parser.add_argument(
        "--programs", type=pathlib.Path, required=True, metavar="DIR", help="folder of plays"
    )
    chosen = parser.parse_args()
    cases = sample(chosen.seed)
    begin = time.perf_counter()
    rows = []
    lags = []
    for case in cases:
        played = {
            form: played_seconds(case, form, chosen.programs) for form in (*forms(case), *CHOSEN)
        }
        print(f"{case}: played after {time.perf_counter() - begin:.0f} s", flush=True)
        named = {form: played[form] for form in forms(case)}
        own = [behind(played[form], form, named) for form in CHOSEN]
        lags += own
        cells = [f"{named[form] * 1e3:.3f}" if form in named else "-" for form in FORMS + EXCHANGED]
        size = f"{case.batch}x{case.rows}x{case.width}"
        choices = [
            f"{played[form] * 1e3:.3f} ({lag:.1%})" for form, lag in zip(CHOSEN, own, strict=True)
        ]
        rows.append((case.layer, case.topology, size, *cells, *choices))
    header = (
        "layer",
        "mesh",
        "batch x rows x width",
        *map(str, FORMS + EXCHANGED),
        "chosen",
        "chosen with 128 MiB",
    )
    table = print_table(header, rows)
    within = sum(lag <= ALLOWED for lag in lags)
    text = (
        f"Of the {len(lags)} choices {within} take at most {ALLOWED:.0%} longer than the fastest "
        f"form; the furthest takes {max(lags):.1%} longer."
    )
    print(text)
    write_between_markers(chosen.write, "plan layers", f"{table}\n\n{text}")
    if within < len(lags):
        sys.exit(1)


if __name__ == "__main__":
    main()
