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
from train.dry_run.mesh_costs import AUTOMATIC, Prediction, form_options, predict, predicted_memory
from train.lifecycle.errors import InputError, as_input_errors
from train.metrics.output import gib, print_line, say, time_text
from train.step.mesh import AXES, FSDP, check_fits_mesh, mesh_shape

ROOM = 0.9  # share of the memory that a form may need if there is one that needs less
MUCH = 1.1  # a mesh is named instead of that of a run if it is predicted to be as many times faster
DIRECT = "prefetch_pallas"


@dataclasses.dataclass(frozen=True)
class Choice:
    """A configuration whose form is complete."""

    config: Config
    chosen: str = ""  # which form was taken, and why; "" where the configuration names all of it
    instead: str = ""  # which form would be faster, and why it is not taken; "" if there is none


def choose(
    config: Config,
    chip: Chip | None,
    mesh: Mapping[str, int],
    *,
    linked: bool = True,
    memory: int | None = None,
) -> Choice:
    """Chooses what `model.remat` and `model.fsdp_overlap` leave open, for a mesh that the run
    divides over.

    `chip` is None where no time is predicted. XLA then hides what it can, and as little is computed
    again as `memory` allows, in bytes of a device; None for any. `linked` says whether links
    connect the devices of fsdp, which go across slices otherwise.
    """
    if None not in (config.model.remat, config.model.fsdp_overlap):
        return Choice(config)
    if chip is None:
        overlap = config.model.fsdp_overlap or "xla"
        remats = [config.model.remat] if config.model.remat else AUTOMATIC
        needed = {
            one: sum(predicted_memory(with_form(config, one, overlap), mesh).values())
            for one in remats
        }
        remat = next(
            (one for one in remats if memory is None or needed[one] <= ROOM * memory), remats[-1]
        )
        form = form_options(remat, overlap)
        return Choice(
            with_form(config, remat, overlap), f"{form}: no time is predicted for these devices"
        )
    found = _forms(config, chip, mesh, linked=linked)
    best = _fastest(found, chip)
    why = (
        f"the fastest of {len(found)} forms that fits"
        if best.fits
        else f"the smallest of {len(found)}, none fits"
    )
    figures = f"{time_text(best.seconds)} in {gib(best.needed)} of {gib(best.available)}"
    chosen = f"{best.form} ({why}, by prediction: {figures})"
    instead = ""
    if faster := [one for one in found if one.seconds < best.seconds]:
        # one that could be verified, if any
        other = min(faster, key=lambda one: (not _has_room(one), one.seconds))
        why = (
            f"it did not pass {trust.COMMAND!r}"
            if _has_room(other)
            else f"it needs {gib(other.needed)}"
        )
        instead = f"{other.form} would take {time_text(other.seconds)}, but {why}"
    return Choice(with_form(config, best.remat, best.overlap), chosen, instead)


def choose_and_say(config: Config, mesh: jax.sharding.Mesh) -> Config:
    """Chooses the form for a mesh, which is set, and prints on TPUs what was chosen, and instead of
    what.
    """
    chip = ambient_mesh.chip()
    memory = (
        (mesh.local_devices[0].memory_stats() or {}).get("bytes_limit") if chip is None else None
    )
    linked = chip is None or not any(
        axis.name == FSDP and axis.across_slices for axis in mesh_report(mesh)
    )
    choice = choose(config, chip, mesh.shape, linked=linked, memory=memory)
    texts = [("chosen", choice.chosen), ("instead", choice.instead)]
    if chip is not None and not any(axis.across_slices for axis in mesh_report(mesh)):
        now = predict(choice.config, chip, mesh.shape).seconds
        texts.append(("instead", faster_mesh(config, chip, mesh.shape, now)))
    for name, text in texts:
        if text and ambient_mesh.platform() == "tpu":
            say(f"{name:<10} {text}")
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
        f"{best.options} would take {figures}, where this mesh takes {time_text(now)}; --mesh "
        "auto takes the fastest"
    )


def best_mesh(config: Config, chip: Chip, devices: int) -> Config:
    """Returns a configuration whose mesh is the fastest that fits some devices, by prediction, and
    prints its sizes.
    """
    ranked = rank(config, chip, devices)
    best = ranked[0]
    sizes = " ".join(f"--mesh.{axis} {size}" for axis, size in best.sizes.items())
    why = (
        f"the fastest of {len(ranked)}"
        if best.fits
        else f"the one that needs least of {len(ranked)}, none fits"
    )
    figures = f"{time_text(best.seconds)} in {gib(best.needed)} of {gib(best.available)}"
    print_line(f"mesh       {sizes} (auto: {why}, by prediction: {figures})")
    return with_mesh(config, tuple(best.sizes.values()))


def rank(config: Config, chip: Chip, devices: int) -> list[Prediction]:
    """Returns all meshes of some devices that the run divides over: those that fit by time, then
    the others by memory.

    Each takes the fastest of the trusted forms that fits with room to spare, or that which needs
    the least memory.
    """
    predictions = []
    refusal = ""
    for sizes in grids(devices):
        shape = mesh_shape(with_mesh(config, sizes).mesh, devices)
        try:
            check_fits_mesh(config, shape)
        except InputError as error:
            refusal = (
                f"{' x '.join(AXES)} = {' x '.join(map(str, sizes))} is refused because {error}"
            )
            continue
        predictions.append(_fastest(_forms(config, chip, shape), chip))
    if not predictions:
        raise InputError(f"no mesh of {devices} devices divides the model and the batch; {refusal}")
    return sorted(
        predictions, key=lambda one: (not one.fits, one.seconds if one.fits else one.needed)
    )


def grids(devices: int) -> Iterator[tuple[int, ...]]:
    """Returns all sizes of the four axes that multiply to a number of devices."""
    divisors = [size for size in range(1, devices + 1) if devices % size == 0]
    return (
        sizes
        for sizes in itertools.product(divisors, repeat=len(AXES))
        if math.prod(sizes) == devices
    )


def what_fits(config: Config, chip: Chip, mesh: Mapping[str, int]) -> str:
    """Says which form on this mesh, and which mesh, need less than a step that does not fit, by
    prediction.
    """
    free = with_form(config, None, None)
    refused = predict(config, chip, mesh).needed
    here = _fastest(_forms(free, chip, mesh), chip)
    ranked = rank(free, chip, math.prod(mesh.values()))
    fitting = [one for one in (here, *ranked) if one.needed < min(refused, ROOM * chip.hbm_bytes)]
    texts = [f"{one.form} ({gib(one.needed)})" for one in fitting if one is here]
    texts += [f"{one.options} ({gib(one.needed)})" for one in fitting if one.mesh != here.mesh][:1]
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
    linking = (one for one in get_args(FsdpOverlap.__value__) if linked or one != DIRECT)
    overlaps = linking if model.fsdp_overlap is None else (model.fsdp_overlap,)
    remats = AUTOMATIC if model.remat is None else (model.remat,)
    found = []
    with as_input_errors(NotImplementedError):  # for a type of products that the chip lacks
        for form in itertools.product(remats, overlaps):
            with contextlib.suppress(InputError):
                check_fits_mesh(tried := with_form(config, *form), mesh)
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

    trusted = [*filter(is_trusted, forms)] or forms  # or what was named
    least = min(trusted, key=lambda one: one.needed)
    return (
        min([*filter(_has_room, trusted), least], key=lambda one: one.seconds)
        if least.fits
        else least
    )


def _has_room(one: Prediction) -> bool:
    return one.needed <= ROOM * one.available
