"""Which form of a step a run takes where its configuration leaves that open.

A form is a value of `model.remat` and one of `model.fsdp_overlap`, and whether products keep the
rows that they gather (`model.gathered_mib`). On TPUs it is the one predicted to be the fastest of
those that fit and are trusted. Where others are predicted to be about as fast, some are compiled,
and the fastest one by the estimates of their programs is taken. On GPUs, of which no form is
predicted, estimates alone decide.
"""

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from flaxasync.check.units import time_text
from flaxasync.hardware import Chip, Gpu
from flaxasync.ops import trust
from models.config import FsdpOverlap, Remat
from train.config import Config, replace_options
from train.dry_run.device_share import DeviceShare
from train.dry_run.prediction import ROOM, Prediction, form_options, predict, with_form
from train.lifecycle.errors import InputError, as_input_errors
from train.metrics.output import gib, say
from train.step.mesh import FSDP, check_fits_mesh

AUTOMATIC: tuple[Remat, ...] = (
    "none",
    "cheap",
    "dots",
    "operands",
    "mlp",
    "attention",
    "layer",
)
"""What a run chooses from by predictions."""
ON_GPUS: tuple[Remat, ...] = ("none", "cheap", "dots", "layer")
"""What a dry run for GPUs compiles until one fits."""
OFFLOADING: tuple[Remat, ...] = ("offload", "offload_most")
"""What it takes only if the compiled program is the fastest: around the transfers to the host, XLA
was seen to copy the stacks of all layers.
"""
CLOSE = 1.15  # how many times as long a form that is compiled may be predicted to take
MOST_COMPILED = 3  # forms, because one may take minutes
DIRECT: FsdpOverlap = "prefetch_pallas"


@dataclasses.dataclass(frozen=True)
class Estimate:
    """What the compiled program of a form takes."""

    seconds: float  # infinity if there is no estimate
    needed: int  # bytes of a device, as the compiler counts them


type Compile = Callable[[Sequence[Config]], Iterable[Estimate | None]]
"""Compiles forms one after the other; None if the compiler refuses one, mostly because it does not
fit the memory.
"""


@dataclasses.dataclass(frozen=True)
class Choice:
    """A configuration whose form is complete."""

    config: Config
    chosen: str = ""  # which form was taken, and why; "" where the configuration names all of it
    instead: str = ""  # which form would be faster, and why it is not taken; "" if there is none


def choose(
    config: Config,
    chip: Chip | Gpu,
    mesh: Mapping[str, int],
    *,
    linked: bool = True,
    compiled: Compile | None = None,
) -> Choice:
    """Chooses what `model.remat` and `model.fsdp_overlap` leave open, for a mesh that the run
    divides over.

    `linked` says whether links connect the devices of fsdp, which go across slices otherwise.
    `compiled` compares forms that are predicted to be about as fast; without it the prediction
    decides.
    """
    if None not in (config.model.remat, config.model.fsdp_overlap):
        return Choice(config)
    if isinstance(chip, Gpu):
        assert compiled is not None
        return _choose_on_gpus(config, chip, mesh, compiled)
    found = predicted_forms(config, chip, mesh, linked=linked)
    predicted = fastest(found, chip)
    best = predicted.config
    why = reason_for(predicted, len(found), "forms")
    if compiled is not None:
        close = _close(predicted, found, config, chip, linked=linked)
        if close not in ([], [predicted]):
            fitting = list(_fitting([one.config for one in close], chip, compiled))
            smaller = _smaller_than(close, _trusted(found, chip), chip)
            best, why = _fastest(fitting, len(close), smaller, chip)
    instead = _instead(predict(best, chip, mesh), found, chip)
    return Choice(best, f"{form_options(best)} ({why})", instead)


def _instead(taken: Prediction, found: Sequence[Prediction], chip: Chip) -> str:
    """Says which form is predicted to be faster than the one that is taken, and what it lacks."""
    trusted = _trusted(found, chip)
    faster = [
        one
        for one in found
        # Trusted forms with room were compiled, or need more memory than one that was refused.
        if one.seconds < taken.seconds and not (one.has_room and one in trusted)
    ]
    if not faster:
        return ""
    other = min([one for one in faster if one.has_room] or faster, key=seconds_of)
    why_not = f"it needs {gib(other.needed)}"
    if other.has_room:
        why_not = f"it did not pass {trust.COMMAND!r}"
    seconds = time_text(other.seconds)
    return f"{form_options(other.config)} would take {seconds}, but {why_not}"


def _smaller_than(close: Sequence[Prediction], trusted: Sequence[Prediction], chip: Chip) -> Config:
    """Returns what is taken where no compiled form leaves memory: the fastest of the trusted ones
    that need less than all of them.
    """
    least = min(map(needed_by, close))
    smaller = [one for one in trusted if one.needed < least]
    return fastest(smaller or [min(trusted, key=needed_by)], chip).config


def _choose_on_gpus(config: Config, gpu: Gpu, mesh: Mapping[str, int], compiled: Compile) -> Choice:
    """Chooses the fastest of the forms that fit.

    For each overlap, forms are compiled until one fits; the first one computes nothing again.
    """
    remats = _open(config.model.remat, ON_GPUS)
    possible: tuple[FsdpOverlap, ...] = ("xla",)
    if mesh.get(FSDP, 1) > 1:
        possible = ("xla", "prefetch")
    overlaps = _open(config.model.fsdp_overlap, possible)
    fitting: list[tuple[Estimate, Config]] = []
    for overlap in overlaps:
        forms = [with_form(config, remat, overlap) for remat in remats]
        fitting += itertools.islice(_fitting(forms, gpu, compiled), 1)
    smallest = with_form(config, remats[-1], overlaps[0])
    best, why = _fastest(fitting, len(overlaps), smallest, gpu)
    given = "a run on GPUs has to be given these options"
    return Choice(best, f"{form_options(best)} ({why}); {given}")


def _fitting(
    forms: Sequence[Config], chip: Chip | Gpu, compiled: Compile
) -> Iterator[tuple[Estimate, Config]]:
    """Says what compiled forms take, and yields those that leave some memory."""
    for form, estimate in zip(forms, compiled(forms), strict=True):
        figures = "the compiler refuses it"
        if estimate is not None:
            figures = figures_of(estimate, chip.hbm_bytes)
        say(f"compared   {form_options(form)}: {figures}")
        if estimate is not None and estimate.needed <= ROOM * chip.hbm_bytes:
            yield estimate, form


def _fastest(
    fitting: Sequence[tuple[Estimate, Config]], count: int, otherwise: Config, chip: Chip | Gpu
) -> tuple[Config, str]:
    """Returns the fastest of the compiled forms that fit, or the first one if one has no estimate;
    `otherwise` if there is none; and why.
    """
    if not fitting:
        return otherwise, f"one that needs less, as none of {count} compiled ones leaves memory"
    if any(math.isinf(estimate.seconds) for estimate, _ in fitting):
        _, best = fitting[0]
        return best, f"the fastest of {count} compiled, by prediction: one has no estimate"
    estimate, best = min(fitting, key=lambda pair: pair[0].seconds)
    return best, f"the fastest of {count} compiled: {figures_of(estimate, chip.hbm_bytes)}"


def _open[T](named: T | None, values: Sequence[T]) -> Sequence[T]:
    """Returns the values of an option among which a run chooses: the named one, if there is one."""
    if named is None:
        return values
    return [named]


def predicted_forms(
    config: Config,
    chip: Chip,
    mesh: Mapping[str, int],
    remats: Sequence[Remat] = AUTOMATIC,
    *,
    linked: bool = True,
) -> list[Prediction]:
    """Predicts all forms that a mesh can have, of those that the configuration leaves open; the
    simplest ones first.
    """
    # Where parameters are gathered by permutes, their blocks are cut and written: slower than XLA.
    overlaps: list[FsdpOverlap] = ["xla"]
    if mesh.get(FSDP, 1) == 1:
        overlaps.append("prefetch")
    elif linked:
        overlaps.append(DIRECT)
    found = []
    with as_input_errors(NotImplementedError):  # for a type of products that the chip lacks
        for remat, overlap in itertools.product(
            _open(config.model.remat, remats), _open(config.model.fsdp_overlap, overlaps)
        ):
            tried = with_form(config, remat, overlap)
            with contextlib.suppress(InputError):
                check_fits_mesh(tried, mesh)
                found.append(predict(tried, chip, mesh))
    return found


def fastest(forms: Sequence[Prediction], chip: Chip) -> Prediction:
    """Returns the fastest trusted form that leaves some memory, or that which needs the least.

    Predictions of memory are only good to a few percent, and a step that is refused takes the place
    of a slower one.
    """
    trusted = _trusted(forms, chip)
    with_room = [one for one in trusted if one.has_room]
    if with_room:
        return min(with_room, key=seconds_of)
    return min(trusted, key=needed_by)


def _trusted(forms: Sequence[Prediction], chip: Chip) -> Sequence[Prediction]:
    """Returns the trusted forms, or all of them if none is, because one that was named is taken."""
    trusted = [
        one
        for one in forms
        if one.config.model.fsdp_overlap != DIRECT
        or trust.is_trusted("prefetch", "pallas", chip.name, one.sizes[FSDP])
    ]
    return trusted or forms


def _close(
    best: Prediction, found: Sequence[Prediction], config: Config, chip: Chip, *, linked: bool
) -> list[Prediction]:
    """Returns the trusted forms with room that are predicted to be about as fast as the best one, or
    faster. The best one comes first, if it has room.

    Two kinds are taken only after they were compiled: the best form with products that keep the
    rows that they gather, if that is predicted to gain, and forms that use the memory of the host,
    if the rate of that memory is known.
    """
    forms = list(found)
    if config.model.gathered_mib is None:
        rows = DeviceShare.of(config, chip, best.sizes).bytes_of_rows
        keeping = replace_options(best.config, {"model.gathered_mib": math.ceil(rows / 2**20)})
        kept = predict(keeping, chip, best.sizes)
        if kept.seconds < best.seconds:
            forms.append(kept)
    if config.model.remat is None and chip.host_bandwidth:
        forms += predicted_forms(config, chip, best.sizes, OFFLOADING, linked=linked)
    others = [one for one in _trusted(forms, chip) if one != best]
    ordered = [best, *sorted(others, key=seconds_of)]
    close = [one for one in ordered if one.has_room and one.seconds <= CLOSE * best.seconds]
    return close[:MOST_COMPILED]


def reason_for(best: Prediction, count: int, kind: str) -> str:
    """Says why one of so many forms or meshes is taken."""
    why = f"the fastest of {count} {kind} that fits"
    if not best.fits:
        why = f"the smallest of {count} {kind}, none fits"
    return f"{why}, by prediction: {figures_of(best, best.available)}"


def figures_of(one: Prediction | Estimate, available: float) -> str:
    return f"{time_text(one.seconds)} in {gib(one.needed)} of {gib(available)}"


def seconds_of(one: Prediction) -> float:
    return one.seconds


def needed_by(one: Prediction) -> int:
    return one.needed
