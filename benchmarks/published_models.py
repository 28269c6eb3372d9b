"""Our step of published models, on the published mesh and batch, beside what was measured.

    python benchmarks/published_models.py --programs DIR --write docs/scaling.md   takes an hour
    python benchmarks/published_models.py --programs DIR --only v5p:4x4x4

The steps are those of recipes.py whose matmuls are split over chips. Ours is that of `train/run.py
--dry-run`, in the form that a run chooses by itself, with simulated kernels; *automatic* is the
published program as it is simulated here. DIR keeps the reports of dry runs, and the programs of
recipes.py. Delete a report to make it again.
"""

import dataclasses
import functools
import os
import pathlib

import jax

from benchmarks import recipes
from benchmarks.dry_runs import kept_report
from benchmarks.recipes import RECIPES, Recipe
from benchmarks.table import write_rows
from configs.llama_8b import llama_8b
from train.config import Config
from train.metrics.output import gib

HEADER = (
    "model",
    "chips",
    "fsdp x model",
    "form",
    "memory",
    "measured s",
    "automatic s",
    "flaxasync s",
    "faster than measured",
    "than automatic",
    "MFU",
)


def config_of(recipe: Recipe, folder: pathlib.Path) -> Config:
    """Returns the run of a published model; its dry run needs no data."""
    base = llama_8b()
    model = dataclasses.replace(
        base.model,
        vocab_size=recipe.vocabulary,
        layers=recipe.layers,
        width=recipe.width,
        heads=recipe.heads,
        kv_heads=recipe.kv_heads,
        head_dim=recipe.head_dim,
        mlp_width=recipe.mlp_width,
    )
    fsdp = recipe.chips // recipe.tensor
    return dataclasses.replace(
        base,
        workdir=str(folder),
        mesh=dataclasses.replace(base.mesh, data=1, fsdp=fsdp, model=recipe.tensor),
        model=model,
        data=dataclasses.replace(
            base.data,
            sequence_length=recipe.length,
            batch_size=recipe.sequences * recipe.chips,
        ),
    )


def row(recipe: Recipe, programs: pathlib.Path) -> tuple[str, ...]:
    config_in = functools.partial(config_of, recipe)
    report = kept_report(programs, recipe.name, recipe.topology, config_in)
    seconds = report["estimated_step_seconds"]
    form = report["form"]
    automatic = recipes.predicted(recipe, programs).simulated.seconds
    return (
        recipe.name,
        recipe.topology,
        f"{report['mesh']['fsdp']} x {report['mesh']['model']}",
        f"{form['remat']}, {form['fsdp_overlap']}",
        gib(report["bytes_needed"]),
        f"{recipe.seconds:.2f}",
        f"{automatic:.2f}",
        f"{seconds:.2f}",
        f"{recipe.seconds / seconds:.2f} x",
        f"{automatic / seconds:.2f} x",
        f"{report['estimated_mfu']:.1%}",
    )


if __name__ == "__main__":
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    jax.config.update("jax_platforms", "cpu")
    cases = [recipe for recipe in RECIPES if recipe.tensor > 1]
    write_rows(__doc__, "published models", HEADER, cases, row)
