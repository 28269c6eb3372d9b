"""Which meshes fit the memory, each with its best form, and what a run says about its own one.

`rank` orders all meshes of some devices by prediction. Nothing is compiled for them.
"""

import contextlib
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

import jax

from flaxasync import mesh as ambient_mesh
from flaxasync.hardware import Chip, Gpu
from flaxasync.mesh import mesh_report
from train.config import Config, replace_options
from train.dry_run.forms import (
    Compile,
    choose,
    choose_on_gpus,
    fastest,
    figures_of,
    has_room,
    needed_by,
    predicted_forms,
    reason_for,
    seconds_of,
    with_form,
)
from train.dry_run.prediction import Prediction, predict
from train.lifecycle.errors import InputError
from train.metrics.output import gib, print_line, say, time_text
from train.step.mesh import AXES, FSDP, check_fits_mesh, mesh_shape

MUCH = 1.1  # a mesh is named instead of that of a run if it is predicted to be as many times faster
RUNNERS_UP = 5  # meshes that `--mesh auto` names beside the one that it takes


def choose_and_say(
    config: Config, mesh: jax.sharding.Mesh, compiled: Compile | None = None
) -> Config:
    """Chooses the form for a mesh, which is set, and prints on TPUs what was chosen, and instead of
    what. Where no time is predicted, XLA hides what it can, and nothing is computed again.

    `compiled` is that of `choose`.
    """
    chip = ambient_mesh.chip()
    gpu = ambient_mesh.gpu()
    if gpu is not None and compiled is not None:
        choice = choose_on_gpus(config, gpu, mesh.shape, compiled)
        if choice.chosen:
            say(f"chosen     {choice.chosen}; a run on GPUs has to be given these options")
        return choice.config
    if chip is None:
        return with_form(config, config.model.remat or "none", config.model.fsdp_overlap or "xla")
    across_slices = [axis.name for axis in mesh_report(mesh) if axis.across_slices]
    linked = FSDP not in across_slices
    choice = choose(config, chip, mesh.shape, linked=linked, compiled=compiled)
    instead = [choice.instead]
    if not across_slices:
        now = predict(choice.config, chip, mesh.shape).seconds
        instead.append(faster_mesh(config, chip, mesh.shape, now))
    if ambient_mesh.platform() == "tpu":
        if choice.chosen:
            say(f"chosen     {choice.chosen}")
        for text in filter(None, instead):
            say(f"instead    {text}")
    return choice.config


def faster_mesh(config: Config, chip: Chip, mesh: Mapping[str, int], now: float) -> str:
    """Says which mesh of as many chips is predicted to be much faster than `now` seconds a step; ""
    if none is.
    """
    best = rank(config, chip, math.prod(mesh.values()))[0]
    if not best.fits or MUCH * best.seconds > now or best.mesh == dict(mesh):
        return ""
    figures = f"{time_text(best.seconds)} in {gib(best.needed)}"
    return (
        f"{best.options} would take {figures}, where this mesh takes {time_text(now)}; --mesh auto "
        "takes the fastest"
    )


def best_mesh(config: Config, chip: Chip, devices: int) -> Config:
    """Returns a configuration whose mesh is the fastest that fits some devices, by prediction, and
    prints its sizes and those that come next.
    """
    best, *others = rank(config, chip, devices)
    reason = reason_for(best, 1 + len(others), "meshes")
    print_line(f"mesh       {best.mesh_options} (auto: {reason})")
    for other in filter(_fits, others[:RUNNERS_UP]):
        figures = figures_of(other, other.available)
        print_line(f"           then {_named(other.sizes)} with {other.form}: {figures}")
    return with_mesh(config, tuple(best.sizes.values()))


def rank(config: Config, chip: Chip, devices: int) -> list[Prediction]:
    """Returns all meshes of some devices that the run divides over: those that fit by time, then
    the others by memory.

    Each takes the fastest of the trusted forms that fits with room to spare, or that which needs
    the least memory.
    """
    predictions = []
    refusal = ""
    divisors = [size for size in range(1, devices + 1) if devices % size == 0]
    for sizes in itertools.product(divisors, repeat=len(AXES)):
        if math.prod(sizes) != devices:
            continue
        shape = mesh_shape(with_mesh(config, sizes).mesh, devices)
        try:
            check_fits_mesh(config, shape)
        except InputError as error:
            named = _named(dict(zip(AXES, sizes, strict=True)))
            refusal = f"{named} is refused because {error}"
        else:
            predictions.append(fastest(predicted_forms(config, chip, shape), chip))
    if not predictions:
        raise InputError(f"no mesh of {devices} devices divides the model and the batch; {refusal}")
    fitting = sorted((one for one in predictions if one.fits), key=seconds_of)
    return fitting + sorted((one for one in predictions if not one.fits), key=needed_by)


def what_fits(config: Config, chip: Chip | Gpu, mesh: Mapping[str, int]) -> str:
    """Says which form on this mesh, and which mesh, need less than a step that does not fit, by
    prediction.
    """
    if isinstance(chip, Gpu):
        return "Use a smaller data.batch_size, bfloat16 parameters, or more GPUs for mesh.fsdp"
    free = with_form(config, None, None)
    refused = predict(config, chip, mesh).needed
    here = fastest(predicted_forms(free, chip, mesh), chip)
    texts = []
    if here.needed < refused and has_room(here):
        texts.append(f"{here.form} ({gib(here.needed)})")
    for one in rank(free, chip, math.prod(mesh.values())):
        if one.mesh != here.mesh and one.needed < refused and has_room(one):
            texts.append(f"{one.options} ({gib(one.needed)})")
            break
    nothing = (
        "no form on any mesh; use a smaller data.batch_size, bfloat16 parameters or more chips"
    )
    return f"Predicted to fit into {gib(chip.hbm_bytes)}: {', or '.join(texts) or nothing}"


@contextlib.contextmanager
def explains_lack(config: Config, mesh: jax.sharding.Mesh) -> Iterator[None]:
    """Adds to the first line of the error of a compiler that runs out of memory what would fit; a
    mesh is set.
    """
    try:
        yield
    except RuntimeError as error:
        chip = ambient_mesh.chip()
        first_line = str(error).partition("\n")[0]
        if chip is None or "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise RuntimeError(f"{first_line}. {what_fits(config, chip, mesh.shape)}") from error


def with_mesh(config: Config, sizes: Sequence[int]) -> Config:
    return replace_options(
        config, {f"mesh.{name}": size for name, size in zip(AXES, sizes, strict=True)}
    )


def _fits(one: Prediction) -> bool:
    return one.fits


def _named(sizes: Mapping[str, int]) -> str:
    return f"{' x '.join(sizes)} = {' x '.join(map(str, sizes.values()))}"
