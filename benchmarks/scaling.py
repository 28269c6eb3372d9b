"""Which mesh, and what binds, from 8 to 512 chips? Steps of an 8B and a 70B decoder, predicted.

    python benchmarks/scaling.py [--write docs/scaling.md]      half a minute, no TPU

A step has one sequence for each chip. The mesh of a row is the best of all grids of data x fsdp x
context x model by `train.dry_run.prediction`, whose predictions are made of the sizes of model and
mesh alone. Nothing has run on a TPU.
"""

import dataclasses
import pathlib

from benchmarks.table import command_line, print_table, write_between_markers
from flaxasync.hardware import CHIPS
from train.config import Config
from train.config.command import load_preset
from train.dry_run.forms import rank
from train.dry_run.prediction import Prediction
from train.metrics.output import gib, time_text

CONFIGS = pathlib.Path(__file__).parent.parent / "configs"
PRESETS = ("llama_8b", "llama_70b")
# A slice of v5e or v6e has 256 chips at most.
CHIP_COUNTS = {"v5e": (8, 16, 64, 256), "v6e": (8, 16, 64, 256), "v5p": (8, 16, 64, 512)}
SEQUENCE = {"v5e": 4096, "v6e": 4096, "v5p": 8192}
HEADER = (
    "model",
    "chips",
    "data x fsdp x context x model",
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
        config.data, batch_size=chips, sequence_length=SEQUENCE[chip], microbatches=1
    )
    model = dataclasses.replace(config.model, remat="layer", fsdp_overlap="xla")
    return dataclasses.replace(config, data=data, model=model)


def predicted(preset: str, chip: str, chips: int) -> tuple[str, ...]:
    best = rank(run(preset, chip, chips), CHIPS[chip], chips)[0]
    mesh = mesh_text(best)
    if not best.fits:
        limit = f"memory: a {chip} has {gib(best.available)}"
        return (preset, f"{chips} {chip}", mesh, gib(best.needed), "-", "-", "-", "-", limit)
    speed = SEQUENCE[chip] / best.seconds
    return (
        preset,
        f"{chips} {chip}",
        mesh,
        gib(best.needed),
        time_text(best.seconds),
        f"{speed:,.0f}",
        f"{best.mfu:.1%}",
        f"{best.exposed / best.seconds:.1%}",
        best.binds,
    )


def mesh_text(prediction: Prediction) -> str:
    return "x".join(map(str, prediction.sizes.values()))


def main() -> None:
    chosen = command_line(__doc__).parse_args()
    rows = [
        predicted(preset, chip, n)
        for preset in PRESETS
        for chip in CHIP_COUNTS
        for n in CHIP_COUNTS[chip]
    ]
    write_between_markers(chosen.write, "predicted", print_table(HEADER, rows))


if __name__ == "__main__":
    main()
