"""Which mesh, and what binds, from 8 to 512 chips? Steps of an 8B and a 70B decoder, predicted.

    python benchmarks/scaling.py [--write docs/scaling.md]      half a minute, no TPU

The mesh of a row is the best of all grids of data x fsdp x context x model by
`train.dry_run.prediction`, each with its best form: it is what `--mesh auto` takes, if `verify`
passed. These predictions are made of the sizes of model and mesh alone. Nothing has run on a TPU.
"""

import dataclasses
import math
import pathlib

from benchmarks.table import command_line, print_table, write_between_markers
from flaxasync.check.units import time_text
from flaxasync.hardware import CHIPS, Chip
from flaxasync.ops.trust import trusting
from train.config import Config
from train.config.command import load_preset
from train.dry_run.meshes import rank
from train.dry_run.prediction import Prediction
from train.metrics.output import gib
from train.step.products import model_flops_per_token

CONFIGS = pathlib.Path(__file__).parent.parent / "configs"
PRESETS = ("llama_8b", "llama_70b")
# A slice of v5e or v6e has 256 chips at most.
CHIP_COUNTS = {"v5e": (8, 16, 64, 256), "v6e": (8, 16, 64, 256), "v5p": (8, 16, 64, 512)}
SEQUENCE = 8192
# for each chip
SEQUENCES = {
    "llama_8b": {"v5e": 1, "v6e": 3, "v5p": 2},
    "llama_70b": {"v5e": 1, "v6e": 1, "v5p": 1},
}
MEMORY = "memory:"  # what binds where nothing fits
HEADER = (
    "model",
    "chips",
    "data x fsdp x context x model",
    "remat",
    "fsdp overlap",
    "memory",
    "step",
    "tokens/s a chip",
    "MFU",
    "exposed",
    "what binds",
)


def run(preset: str, chip: str, chips: int) -> Config:
    config = load_preset(CONFIGS / f"{preset}.py")
    data = dataclasses.replace(
        config.data,
        batch_size=chips * SEQUENCES[preset][chip],
        sequence_length=SEQUENCE,
        microbatches=1,
    )
    return dataclasses.replace(config, data=data)


def predicted(preset: str, chip: str, chips: int) -> tuple[str, ...]:
    with trusting("predicted"):
        best = rank(run(preset, chip, chips), CHIPS[chip], chips)[0]
    what = (preset, f"{chips} {chip}")
    model = best.config.model
    form = (mesh_text(best), str(model.remat), str(model.fsdp_overlap), gib(best.needed))
    if not best.fits:
        limit = f"{MEMORY} a {chip} has {gib(best.available)}"
        return (*what, *form, "-", "-", "-", "-", limit)
    speed = SEQUENCES[preset][chip] * SEQUENCE / best.seconds
    return (
        *what,
        *form,
        time_text(best.seconds),
        f"{speed:,.0f}",
        f"{mfu(best, CHIPS[chip]):.1%}",
        f"{best.exposed / best.seconds:.1%}",
        what_binds(best),
    )


def mfu(prediction: Prediction, chip: Chip) -> float:
    """Returns the model FLOPs utilization of a predicted step, 0 to 1."""
    data = prediction.config.data
    tokens = data.batch_size * data.sequence_length
    flops = tokens * model_flops_per_token(prediction.config.model, data.sequence_length)
    return flops / (prediction.seconds * math.prod(prediction.sizes.values()) * chip.flops)


def what_binds(prediction: Prediction) -> str:
    """Returns what takes most of the time beside the work: the name of a wait; "matmuls" if waits
    are below 5 %.
    """
    if prediction.exposed < 0.05 * prediction.seconds:
        return "matmuls"
    return max(prediction.waits, key=prediction.waits.__getitem__)


def mesh_text(prediction: Prediction) -> str:
    return "x".join(map(str, prediction.sizes.values()))


def main() -> None:
    chosen = command_line(__doc__).parse_args()
    rows = []
    for preset in PRESETS:
        for chip in CHIP_COUNTS:
            rows += with_one_that_does_not_fit(
                [predicted(preset, chip, n) for n in CHIP_COUNTS[chip]]
            )
    write_between_markers(chosen.write, "predicted", print_table(HEADER, rows))


def with_one_that_does_not_fit(rows: list[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Leaves out what does not fit on fewer chips than another row of which that is true."""
    refused = [row for row in rows if row[-1].startswith(MEMORY)]
    return refused[-1:] + [row for row in rows if row not in refused]


if __name__ == "__main__":
    main()
