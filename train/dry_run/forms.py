"""Which form of a step a run takes where its configuration leaves that open, and which meshes and
forms would fit.

A form is a value of `model.remat` and one of `model.fsdp_overlap`. `choose` takes the form that is
predicted to be the fastest of those that fit and are trusted; `rank` orders all meshes, each with
its best form.
"""

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import get_args

import jax

from flaxasync import mesh as ambient_mesh
from flaxasync.hardware import Chip
from flaxasync.mesh import mesh_report
from flaxasync.ops import trust
from models.config import FsdpOverlap, Remat
from train.config import Config, replace_options
from train.dry_run.prediction import Prediction, predict
from train.lifecycle.errors import InputError, as_input_errors
from train.metrics.output import gib, print_line, say, time_text
from train.step.mesh import AXES, FSDP, check_fits_mesh, mesh_shape

AUTOMATIC: tuple[Remat, ...] = ("none", "cheap", "dots", "layer")
"""What a run chooses from. Around the transfers to the host, XLA was seen to copy the stacks of all
layers.
"""
ROOM = 0.9  # share of the memory that a form may need if there is one that needs less
MUCH = 1.1  # a mesh is named instead of that of a run if it is predicted to be as many times faster
DIRECT = "prefetch_pallas"
RUNNERS_UP = 5  # meshes that `--mesh auto` names beside the one that it takes


@dataclasses.dataclass(frozen=True)
class Choice:
    """A configuration whose form is complete."""

    config: Config
    chosen: str = ""  # which form was taken, and why; "" where the configuration names all of it
    instead: str = ""  # which form would be faster, and why it is not taken; "" if there is none


def choose(config: Config, chip: Chip, mesh: Mapping[str, int], *, linked: bool = True) -> Choice:
    """Chooses what `model.remat` and `model.fsdp_overlap` leave open, for a mesh that the run
    divides over.

    `linked` says whether links connect the devices of fsdp, which go across slices otherwise.
    """
    if None not in (config.model.remat, config.model.fsdp_overlap):
        return Choice(config)
    found = _forms(config, chip, mesh, linked=linked)
    best = _fastest(found, chip)
    chosen = f"{best.form} ({_reason(best, len(found), 'forms')})"
    instead = ""
    faster = [one for one in found if one.seconds < best.seconds]
    verifiable = [one for one in faster if _has_room(one)]
    if faster:
        other = min(verifiable or faster, key=_seconds)
        why = f"it needs {gib(other.needed)}"
        if verifiable:
            why = f"it did not pass {trust.COMMAND!r}"
        instead = f"{other.form} would take {time_text(other.seconds)}, but {why}"
    return Choice(with_form(config, best.remat, best.overlap), chosen, instead)


def choose_and_say(config: Config, mesh: jax.sharding.Mesh) -> Config:
    """Chooses the form for a mesh, which is set, and prints on TPUs what was chosen, and instead of
    what. Where no time is predicted, XLA hides what it can, and nothing is computed again.
    """
    chip = ambient_mesh.chip()
    if chip is None:
        return with_form(config, config.model.remat or "none", config.model.fsdp_overlap or "xla")
    across_slices = [axis.name for axis in mesh_report(mesh) if axis.across_slices]
    choice = choose(config, chip, mesh.shape, linked=FSDP not in across_slices)
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
    if not best.fits or MUCH * best.seconds > now:
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
    reason = _reason(best, 1 + len(others), "meshes")
    print_line(f"mesh       {best.mesh_options} (auto: {reason})")
    for other in filter(_fits, others[:RUNNERS_UP]):
        print_line(f"           then {_named(other.sizes)} with {other.form}: {_figures(other)}")
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
            predictions.append(_fastest(_forms(config, chip, shape), chip))
    if not predictions:
        raise InputError(f"no mesh of {devices} devices divides the model and the batch; {refusal}")
    fitting = sorted((one for one in predictions if one.fits), key=_seconds)
    return fitting + sorted((one for one in predictions if not one.fits), key=_needed)


def what_fits(config: Config, chip: Chip, mesh: Mapping[str, int]) -> str:
    """Says which form on this mesh, and which mesh, need less than a step that does not fit, by
    prediction.
    """
    free = with_form(config, None, None)
    refused = predict(config, chip, mesh).needed
    here = _fastest(_forms(free, chip, mesh), chip)
    texts = []
    if here.needed < refused and _has_room(here):
        texts.append(f"{here.form} ({gib(here.needed)})")
    for one in rank(free, chip, math.prod(mesh.values())):
        if one.mesh != here.mesh and one.needed < refused and _has_room(one):
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


def with_form(config: Config, remat: Remat | None, overlap: FsdpOverlap | None) -> Config:
    return replace_options(config, {"model.remat": remat, "model.fsdp_overlap": overlap})


def _forms(
    config: Config, chip: Chip, mesh: Mapping[str, int], *, linked: bool = True
) -> list[Prediction]:
    """Predicts all forms that a mesh can have, of those that the configuration leaves open; the
    simplest ones first.
    """
    model = config.model
    remats = AUTOMATIC
    if model.remat is not None:
        remats = (model.remat,)
    overlaps: tuple[FsdpOverlap, ...] = get_args(FsdpOverlap.__value__)
    if model.fsdp_overlap is not None:
        overlaps = (model.fsdp_overlap,)
    elif not linked:
        overlaps = tuple(one for one in overlaps if one != DIRECT)
    found = []
    with as_input_errors(NotImplementedError):  # for a type of products that the chip lacks
        for remat, overlap in itertools.product(remats, overlaps):
            tried = with_form(config, remat, overlap)
            with contextlib.suppress(InputError):
                check_fits_mesh(tried, mesh)
                found.append(predict(tried, chip, mesh))
    return found


def _fastest(forms: Sequence[Prediction], chip: Chip) -> Prediction:
    """Returns the fastest trusted form that leaves some memory, or that which needs the least.

    Predictions of memory are only good to a few percent, and a step that is refused takes the place
    of a slower one.
    """

    def is_trusted(one: Prediction) -> bool:
        return one.overlap != DIRECT or trust.is_trusted(
            "prefetch", "pallas", chip.name, one.mesh[FSDP]
        )

    trusted = [one for one in forms if is_trusted(one)] or forms  # or what was named
    least = min(trusted, key=_needed)
    if not least.fits:
        return least
    return min([*filter(_has_room, trusted), least], key=_seconds)


def _reason(best: Prediction, count: int, kind: str) -> str:
    """Says why one of so many forms or meshes is taken."""
    why = f"the fastest of {count} {kind} that fits"
    if not best.fits:
        why = f"the smallest of {count} {kind}, none fits"
    return f"{why}, by prediction: {_figures(best)}"


def _figures(one: Prediction) -> str:
    return f"{time_text(one.seconds)} in {gib(one.needed)} of {gib(one.available)}"


def _named(sizes: Mapping[str, int]) -> str:
    return f"{' x '.join(sizes)} = {' x '.join(map(str, sizes.values()))}"


def _seconds(one: Prediction) -> float:
    return one.seconds


def _fits(one: Prediction) -> bool:
    return one.fits


def _needed(one: Prediction) -> int:
    return one.needed


def _has_room(one: Prediction) -> bool:
    return one.needed <= ROOM * one.available
