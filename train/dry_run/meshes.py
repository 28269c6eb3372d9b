"""Which meshes fit the memory, each with its best form, and what a run says about its own form.

`rank` orders all meshes of some devices by prediction. Nothing is compiled for them.
"""

import contextlib
import itertools
import math
from collections.abc import Iterator, Mapping

import jax

from flaxasync import mesh as ambient_mesh
from flaxasync.hardware import Chip, Gpu
from flaxasync.mesh import mesh_report
from train.config import Config, replace_options
from train.dry_run.forms import (
    Compile,
    choose,
    fastest,
    figures_of,
    needed_by,
    predicted_forms,
    reason_for,
    seconds_of,
)
from train.dry_run.prediction import Prediction, form_options, mesh_options, predict, with_form
from train.lifecycle.errors import InputError, first_line
from train.metrics.output import gib, print_line, say
from train.step.mesh import AXES, FSDP, check_fits_mesh

RUNNERS_UP = 5  # meshes that `--mesh auto` names beside the one that it takes


def choose_and_say(
    config: Config, mesh: jax.sharding.Mesh, compiled: Compile | None = None
) -> Config:
    """Chooses the form for a mesh, which is set, and prints what was chosen, and instead of what.
    Where no time is predicted, XLA hides what it can, and nothing is computed again.

    `compiled` is that of `choose`.
    """
    chip = ambient_mesh.chip() or ambient_mesh.gpu()
    if chip is None or (isinstance(chip, Gpu) and compiled is None):
        return with_form(config, config.model.remat or "none", config.model.fsdp_overlap or "xla")
    linked = FSDP not in [axis.name for axis in mesh_report(mesh) if axis.across_slices]
    choice = choose(config, chip, mesh.shape, linked=linked, compiled=compiled)
    for name, text in (("chosen", choice.chosen), ("instead", choice.instead)):
        if text:
            say(f"{name:<10} {text}")
    return choice.config


def best_mesh(config: Config, chip: Chip, devices: int) -> Config:
    """Returns a configuration whose mesh is the fastest that fits some devices, by prediction, and
    prints its sizes and those that come next.
    """
    best, *others = rank(config, chip, devices)
    reason = reason_for(best, 1 + len(others), "meshes")
    print_line(f"mesh       {mesh_options(best.sizes)} (auto: {reason})")
    for other in others[:RUNNERS_UP]:
        if other.fits:
            figures = figures_of(other, other.available)
            form = form_options(other.config)
            print_line(f"           then {_named(other.sizes)} with {form}: {figures}")
    return with_mesh(config, best.sizes)


def rank(config: Config, chip: Chip, devices: int) -> list[Prediction]:
    """Returns all meshes of some devices that the run divides over: those that fit by time, then
    the others by memory.

    Each takes the fastest of the trusted forms that fits with room to spare, or that which needs
    the least memory.
    """
    predictions = []
    refusal = ""
    divisors = [size for size in range(1, devices + 1) if devices % size == 0]
    for numbers in itertools.product(divisors, repeat=len(AXES)):
        if math.prod(numbers) != devices:
            continue
        sizes = dict(zip(AXES, numbers, strict=True))
        try:
            check_fits_mesh(config, sizes)
        except InputError as error:
            refusal = f"{_named(sizes)} is refused because {error}"
        else:
            predictions.append(fastest(predicted_forms(config, chip, sizes), chip))
    if not predictions:
        raise InputError(f"no mesh of {devices} devices divides the model and the batch; {refusal}")
    fitting = [one for one in predictions if one.fits]
    others = [one for one in predictions if not one.fits]
    return sorted(fitting, key=seconds_of) + sorted(others, key=needed_by)


def what_fits(config: Config, chip: Chip | Gpu, mesh: Mapping[str, int]) -> str:
    """Says which mesh and which form need less than a step that does not fit, by prediction: the
    fastest ones.
    """
    if isinstance(chip, Gpu):
        return "Use a smaller data.batch_size, bfloat16 parameters, or more GPUs for mesh.fsdp"
    refused = predict(config, chip, mesh).needed
    for one in rank(with_form(config, None, None), chip, math.prod(mesh.values())):
        if one.has_room and one.needed < refused:
            options = f"{mesh_options(one.sizes)} {form_options(one.config)}"
            return f"Predicted to fit into {gib(chip.hbm_bytes)}: {options} ({gib(one.needed)})"
    return (
        "Nothing is predicted to fit on any mesh: use a smaller data.batch_size, bfloat16 "
        "parameters or more chips"
    )


@contextlib.contextmanager
def explains_lack(config: Config, mesh: jax.sharding.Mesh) -> Iterator[None]:
    """Adds to the first line of the error of a compiler that runs out of memory what would fit; a
    mesh is set.
    """
    try:
        yield
    except RuntimeError as error:
        chip = ambient_mesh.chip()
        if chip is None or "RESOURCE_EXHAUSTED" not in str(error):
            raise
        advice = what_fits(config, chip, mesh.shape)
        raise RuntimeError(f"{first_line(error)}. {advice}") from error


def with_mesh(config: Config, sizes: Mapping[str, int]) -> Config:
    """Returns a configuration with these sizes of the axes."""
    return replace_options(config, {f"mesh.{name}": size for name, size in sizes.items()})


def _named(sizes: Mapping[str, int]) -> str:
    return f"{' x '.join(sizes)} = {' x '.join(map(str, sizes.values()))}"
