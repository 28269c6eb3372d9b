"""Our step of published models, on the published mesh and batch, beside what was measured.

    python benchmarks/published_models.py --programs DIR --write docs/scaling.md   takes an hour
    python benchmarks/published_models.py --programs DIR --only v5p:4x4x4

The steps are those of recipes.py whose matmuls are split over chips. Ours is that of `train/run.py
--dry-run`, in the form that a run chooses by itself, with simulated kernels; *automatic* is the
published program as it is simulated here. DIR keeps the reports of dry runs, and the programs of
recipes.py. Delete a report to make it again.
"""

import os
import pathlib

import jax

from benchmarks import recipes
from benchmarks.dry_runs import kept_report
from benchmarks.recipes import RECIPES, Recipe
from benchmarks.table import write_rows
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


def options_of(recipe: Recipe) -> dict[str, int]:
    """Returns what the run of a published model has in place of the options of llama_8b."""
    return {
        "mesh.data": 1,
        "mesh.fsdp": recipe.chips // recipe.tensor,
        "mesh.model": recipe.tensor,
        "model.vocab_size": recipe.vocabulary,
        "model.layers": recipe.layers,
        "model.width": recipe.width,
        "model.heads": recipe.heads,
        "model.kv_heads": recipe.kv_heads,
        "model.head_dim": recipe.head_dim,
        "model.mlp_width": recipe.mlp_width,
        "data.sequence_length": recipe.length,
        "data.batch_size": recipe.sequences * recipe.chips,
    }


def row(recipe: Recipe, programs: pathlib.Path) -> tuple[str, ...]:
    report = kept_report(programs, recipe.name, recipe.topology, options_of(recipe))
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
