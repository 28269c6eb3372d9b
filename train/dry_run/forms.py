"""Which form of a step a run takes where its configuration leaves that open.

A form is a value of `model.remat` and one of `model.fsdp_overlap`, and whether products keep the
rows that they gather (`model.gathered_mib`). `choose` takes the form that is predicted to be the
fastest of those that fit and are trusted. Where others are predicted to be about as fast, it
compiles some of them and takes the fastest by the estimates of their programs.
"""

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import get_args

from flaxasync.hardware import Chip, Gpu
from flaxasync.ops import trust
from models.config import FsdpOverlap, Remat
from train.config import Config, replace_options
from train.dry_run.device_share import DeviceShare
from train.dry_run.prediction import Prediction, predict
from train.lifecycle.errors import InputError, as_input_errors
from train.metrics.output import gib, say, time_text
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
ROOM = 0.95  # share of the memory that a form may need if there is one that needs less
CLOSE = 1.15  # how many times as long a form that is compiled may be predicted to take
MOST_COMPILED = 3  # forms, because one may take minutes
DIRECT = "prefetch_pallas"


@dataclasses.dataclass(frozen=True)
class Estimate:
    """What the compiled program of a form takes."""

    seconds: float  # infinity if there is no estimate
    needed: int  # bytes of a device, as the compiler counts them


type Compile = Callable[[Config], Estimate | None]
"""Compiles a form; None if the compiler refuses it, mostly because it does not fit the memory."""


@dataclasses.dataclass(frozen=True)
class Choice:
    """A configuration whose form is complete."""

    config: Config
    chosen: str = ""  # which form was taken, and why; "" where the configuration names all of it
    instead: str = ""  # which form would be faster, and why it is not taken; "" if there is none


def choose(
    config: Config,
    chip: Chip,
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
    found = predicted_forms(config, chip, mesh, linked=linked)
    best = fastest(found, chip)
    reason = reason_for(best, len(found), "forms")
    close = []
    if compiled is not None:
        keeping = _keeping_rows(config, best, chip, mesh)
        offloading = _offloading(config, chip, mesh, linked=linked)
        close = _close(best, [*found, *keeping, *offloading], chip)
    if compiled is not None and close not in ([], [best]):
        best, reason = _fastest_compiled(config, _trusted(found, chip), close, compiled)
    chosen = f"{best.form} ({reason})"
    instead = ""
    # Trusted forms with room were compiled, or need more memory than one that was refused.
    trusted = _trusted(found, chip)
    faster = [
        one
        for one in found
        if one.seconds < best.seconds and not (one in trusted and has_room(one))
    ]
    verifiable = [one for one in faster if has_room(one)]
    if faster:
        other = min(verifiable or faster, key=seconds_of)
        why = f"it needs {gib(other.needed)}"
        if verifiable:
            why = f"it did not pass {trust.COMMAND!r}"
        instead = f"{other.form} would take {time_text(other.seconds)}, but {why}"
    return Choice(_taking(config, best), chosen, instead)


def choose_on_gpus(config: Config, gpu: Gpu, mesh: Mapping[str, int], compiled: Compile) -> Choice:
    """Chooses what `model.remat` and `model.fsdp_overlap` leave open on GPUs, of which no form is
    predicted: for each overlap the first form that fits is compiled, from that which computes
    nothing again on, and the fastest is taken.
    """
    if None not in (config.model.remat, config.model.fsdp_overlap):
        return Choice(config)
    remats = ON_GPUS
    if config.model.remat is not None:
        remats = (config.model.remat,)
    overlaps: tuple[FsdpOverlap, ...] = ("xla",)
    if config.model.fsdp_overlap is not None:
        overlaps = (config.model.fsdp_overlap,)
    elif mesh.get(FSDP, 1) > 1:
        overlaps = ("xla", "prefetch")
    found: list[tuple[Estimate, Config]] = []
    for overlap in overlaps:
        for remat in remats:
            tried = with_form(config, remat, overlap)
            estimate = compiled(tried)
            if estimate is not None and estimate.needed <= ROOM * gpu.hbm_bytes:
                figures = figures_of(estimate, round(gpu.hbm_bytes))
                say(f"compared   {_options_of(tried)}: {figures}")
                found.append((estimate, tried))
                break
    if not found:
        return Choice(with_form(config, remats[-1], overlaps[0]))
    estimate, best = min(found, key=lambda pair: pair[0].seconds)
    why = f"the fastest of {len(found)} that fit: {figures_of(estimate, round(gpu.hbm_bytes))}"
    return Choice(best, f"{_options_of(best)} ({why})")


def _options_of(config: Config) -> str:
    return f"--model.remat {config.model.remat} --model.fsdp_overlap {config.model.fsdp_overlap}"


def with_form(config: Config, remat: Remat | None, overlap: FsdpOverlap | None) -> Config:
    return replace_options(config, {"model.remat": remat, "model.fsdp_overlap": overlap})


def _taking(config: Config, form: Prediction) -> Config:
    """Returns the configuration with a form that was predicted for it."""
    named = with_form(config, form.remat, form.overlap)
    return replace_options(named, {"model.gathered_mib": form.gathered_mib})


def predicted_forms(
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


def _offloading(
    config: Config, chip: Chip, mesh: Mapping[str, int], *, linked: bool
) -> list[Prediction]:
    """Predicts the forms that use the memory of the host, if `model.remat` is left open and the
    rate of that memory is known.
    """
    if config.model.remat is not None or not chip.host_bandwidth:
        return []
    found = []
    for remat in OFFLOADING:
        named = with_form(config, remat, config.model.fsdp_overlap)
        found += predicted_forms(named, chip, mesh, linked=linked)
    return found


def _keeping_rows(
    config: Config, form: Prediction, chip: Chip, mesh: Mapping[str, int]
) -> list[Prediction]:
    """Predicts a form whose products keep the rows that they gather, if that is left open and
    predicted to gain.
    """
    if config.model.gathered_mib is not None:
        return []
    rows = DeviceShare.of(config, mesh).bytes_of_rows
    keeping = dataclasses.replace(form, gathered_mib=math.ceil(rows / 2**20))
    kept = predict(_taking(config, keeping), chip, mesh)
    if kept.seconds < form.seconds:
        return [kept]
    return []


def fastest(forms: Sequence[Prediction], chip: Chip) -> Prediction:
    """Returns the fastest trusted form that leaves some memory, or that which needs the least.

    Predictions of memory are only good to a few percent, and a step that is refused takes the place
    of a slower one.
    """
    trusted = _trusted(forms, chip)
    least = min(trusted, key=needed_by)
    if not least.fits:
        return least
    return min([*filter(has_room, trusted), least], key=seconds_of)


def _trusted(forms: Sequence[Prediction], chip: Chip) -> Sequence[Prediction]:
    """Returns the trusted forms, or all of them if none is, because one that was named is taken."""

    def is_trusted(one: Prediction) -> bool:
        return one.overlap != DIRECT or trust.is_trusted(
            "prefetch", "pallas", chip.name, one.mesh[FSDP]
        )

    return [one for one in forms if is_trusted(one)] or forms


def _close(best: Prediction, forms: Sequence[Prediction], chip: Chip) -> list[Prediction]:
    """Returns the trusted forms with room that are predicted to be about as fast as the best one,
    or faster. The best one comes first, if it has room.
    """
    close = [
        one
        for one in sorted(_trusted(forms, chip), key=seconds_of)
        if has_room(one) and one != best and one.seconds <= CLOSE * best.seconds
    ]
    if has_room(best):
        close = [best, *close]
    return close[:MOST_COMPILED]


def _fastest_compiled(
    config: Config, forms: Sequence[Prediction], close: Sequence[Prediction], compiled: Compile
) -> tuple[Prediction, str]:
    """Compiles some forms, and returns the fastest one that leaves some memory, and why.

    If none does, it is the one predicted to be the fastest of those that need less memory, or else
    the one that needs the least.
    """
    estimates = []
    for one in close:
        estimate = compiled(_taking(config, one))
        if estimate is None:
            say(f"compared   {one.form}: the compiler refuses it")
            continue
        say(f"compared   {one.form}: {figures_of(estimate, one.available)}")
        if estimate.needed <= ROOM * one.available:
            estimates.append((estimate, one))
    if not estimates:
        why = f"as none of {len(close)} compiled ones leaves memory"
        refused = min(one.needed for one in close)
        smaller = [one for one in forms if has_room(one) and one.needed < refused]
        if smaller:
            return min(smaller, key=seconds_of), f"the fastest of those that need less, {why}"
        return min(forms, key=needed_by), f"the smallest, {why}"
    if any(math.isinf(estimate.seconds) for estimate, _ in estimates):
        best = min((one for _, one in estimates), key=seconds_of)
        return best, f"the fastest of {len(close)} compiled, by prediction: one has no estimate"
    estimate, best = min(estimates, key=lambda pair: pair[0].seconds)
    figures = figures_of(estimate, best.available)
    return best, f"the fastest of {len(close)} compiled: {figures}"


def reason_for(best: Prediction, count: int, kind: str) -> str:
    """Says why one of so many forms or meshes is taken."""
    why = f"the fastest of {count} {kind} that fits"
    if not best.fits:
        why = f"the smallest of {count} {kind}, none fits"
    return f"{why}, by prediction: {figures_of(best, best.available)}"


def figures_of(one: Prediction | Estimate, available: int) -> str:
    return f"{time_text(one.seconds)} in {gib(one.needed)} of {gib(available)}"


def seconds_of(one: Prediction) -> float:
    return one.seconds


def needed_by(one: Prediction) -> int:
    return one.needed


def has_room(one: Prediction) -> bool:
    return one.needed <= ROOM * one.available
