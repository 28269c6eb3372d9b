"""The form of a run: that which its workdir has, or the fastest one by the compiled programs.

Another form rounds otherwise, and forms take minutes to compare. So the workdir keeps the answer in
form.json, and a run that continues takes it from there, as long as nothing has changed that the
answer depends on. A file that cannot be read is replaced. Of several processes the first one reads
and writes the file, and all of them take its form.
"""

import json
import math
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, get_args

import jax
import numpy as np
from jax.experimental import multihost_utils

from flaxasync import check
from flaxasync import mesh as ambient_mesh
from flaxasync.check.compile.program import bytes_by_kind
from flaxasync.check.progress import progress
from flaxasync.foreign_json import JsonError, MissingJsonError, read_json
from flaxasync.ops import trust
from models.config import FsdpOverlap, Remat
from train.checkpoints.record import flat_fields
from train.config import Config, replace_options
from train.dry_run.forms import Estimate
from train.dry_run.meshes import choose_and_say
from train.dry_run.prediction import with_form
from train.lifecycle.errors import InputError, first_line
from train.lifecycle.memory import host_memory
from train.lifecycle.workdir import Workdir
from train.metrics.output import gib, say, write_atomically
from train.step.flags import in_effect
from train.step.mesh import FSDP, check_host_memory
from train.step.trainer import Trainer, backend_limits_are_input_errors

REMATS: tuple[Remat, ...] = get_args(Remat.__value__)
OVERLAPS: tuple[FsdpOverlap, ...] = get_args(FsdpOverlap.__value__)
# the options on which the answer depends
_PARTS = ("model.", "optimizer.", "xla.")
_FIELDS = (
    "backend",
    "mesh.context_layout",
    "data.batch_size",
    "data.sequence_length",
    "data.microbatches",
    "data.separator",
)
SHARE_OF_HOST = 0.8  # of the memory of a host, which steps may use together


class Form(NamedTuple):
    """How a step is computed, by fields of the model."""

    remat: Remat
    overlap: FsdpOverlap
    gathered_mib: int  # 0 for none

    def in_config(self, config: Config) -> Config:
        named = with_form(config, self.remat, self.overlap)
        return replace_options(named, {"model.gathered_mib": self.gathered_mib})


def form_of_run(config: Config, mesh: jax.sharding.Mesh, work: Workdir) -> Config:
    """Completes the form of a run on a mesh, which is set, and keeps in the workdir what was
    compared.
    """
    is_named = None not in (config.model.remat, config.model.fsdp_overlap)
    if is_named or ambient_mesh.chip() is None:
        return choose_and_say(config, mesh)
    question = _question(config, mesh)
    form = _of_first_process(_kept(work.form, question))
    if form is not None:
        named = f"--model.remat {form.remat} --model.fsdp_overlap {form.overlap}"
        rows = f"--model.gathered_mib {form.gathered_mib}"
        say(f"chosen     {named} {rows} (that of {work.form}, which this run continues)")
        return form.in_config(config)

    def estimates(forms: Sequence[Config]) -> Iterable[Estimate | None]:
        return (estimate_step(form, mesh) for form in forms)

    chosen = choose_and_say(config, mesh, estimates).model
    assert chosen.remat is not None
    assert chosen.fsdp_overlap is not None
    form = _of_first_process(Form(chosen.remat, chosen.fsdp_overlap, chosen.gathered_mib or 0))
    assert form is not None
    if jax.process_index() == 0:
        text = json.dumps({"form": form, "question": question}, indent=2)
        write_atomically(work.form, f"{text}\n")
    return form.in_config(config)


def estimate_step(config: Config, mesh: jax.sharding.Mesh) -> Estimate | None:
    """Compiles the training step of a form for the devices of a run, and estimates it; None if it
    does not fit them or their host, or cannot be compiled.
    """
    try:
        check_host_memory(config, mesh)
        with (
            backend_limits_are_input_errors(config),
            progress("compiling a form of the training step"),
        ):
            step = Trainer(config, mesh).compile_train_step()
    except (RuntimeError, InputError) as error:
        say(f"refused    {first_line(error)}")
        return None
    stats = step.memory_analysis()
    assert stats is not None
    of_host = stats.host_temp_size_in_bytes * len(mesh.local_devices)
    if of_host > SHARE_OF_HOST * host_memory():
        say(f"refused    it needs {gib(of_host)} of a host with {gib(host_memory())}")
        return None
    seconds = math.inf
    try:
        with progress("reading the compiled program"):
            seconds = check.timeline(step).seconds
    except ValueError as error:  # the prediction decides
        say(f"estimate   there is none: {error}")
    return Estimate(seconds, bytes_by_kind(stats)["total"])


def _question(config: Config, mesh: jax.sharding.Mesh) -> dict[str, Any]:
    """Returns what the answer depends on, as JSON data."""
    fields = {
        name: value
        for name, value in flat_fields(config).items()
        if name.startswith(_PARTS) or name in _FIELDS
    }
    versions = {package: version(package) for package in ("jax", "libtpu") if find_spec(package)}
    slices = {getattr(device, "slice_index", 0) for device in mesh.devices.flat}
    chip = ambient_mesh.chip_name()
    ring = mesh.shape.get(FSDP, 1)
    copies = ring > 1 and trust.is_trusted("prefetch", "pallas", chip, ring)
    return fields | {
        "mesh": dict(mesh.shape),
        "slices": len(slices),
        "chip": chip,
        "copies are trusted": copies,
        "flags": in_effect(),
        "versions": versions,
    }


def _kept(path: Path, question: dict[str, Any]) -> Form | None:
    """Returns the form that a file has for a question; None in other processes than the first."""
    if jax.process_index() != 0:
        return None
    try:
        kept = read_json(path)
    except MissingJsonError:
        return None
    except JsonError as error:
        say(f"form       it is chosen again, because {error}")
        return None
    match kept:
        case {"question": other, "form": [remat, overlap, int(mib)]} if other == question:
            if remat in REMATS and overlap in OVERLAPS and mib >= 0:
                return Form(remat, overlap, mib)
    return None


def _of_first_process(form: Form | None) -> Form | None:
    """Returns the form of the first process in all of them."""
    if jax.process_count() == 1:
        return form
    numbers = [-1, 0, 0]
    if form is not None:
        numbers = [REMATS.index(form.remat), OVERLAPS.index(form.overlap), form.gathered_mib]
    first = multihost_utils.broadcast_one_to_all(np.array(numbers, np.int32))
    remat, overlap, mib = map(int, first)
    if remat < 0:
        return None
    return Form(REMATS[remat], OVERLAPS[overlap], mib)
