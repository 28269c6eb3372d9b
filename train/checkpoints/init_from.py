"""The parameters of another run as the parameters of step 0, for fine-tuning; nothing else of that run is taken."""

import contextlib
import json
from typing import Any

import jax
import jax.numpy as jnp
from etils import epath

from train.checkpoints.manager import Checkpoints
from train.checkpoints.record import architecture, check_architecture
from train.config import Config
from train.lifecycle.errors import InputError
from train.step.trainer import Trainer

_MAY_DIFFER = frozenset({"model.param_dtype", "optimizer.master_copies"})  # how parameters are stored


def load_parameters(
    location: epath.PathLike, config: Config, trainer: Trainer, *, step: int | None = None, evaluated: bool = False
) -> tuple[Any, epath.Path, str]:
    """Reads the parameters of a checkpoint, whose architecture must be that of the configuration.

    `location` is the workdir of a run or of an import, a folder of checkpoints, or one of its checkpoints; without a
    `step` the newest one is read. `evaluated` takes the running mean of the parameters, if the checkpoint has one.

    Returns the parameters, the folder of the checkpoint, and which part of it they are: "params", or "ema".
    """
    folder, named = _find(epath.Path(location).expanduser())
    with Checkpoints(folder, read_only=True) as checkpoints:
        step = checkpoints.choose(named if step is None else step)
        record = checkpoints.record(step)
        saved, now = record.architecture, architecture(config)
        check_architecture(saved, now | {name: saved[name] for name in _MAY_DIFFER}, where=str(checkpoints.path(step)))
        part = "ema" if evaluated and "ema" in record.parts else "params"
        in_float32 = part == "ema" or saved["optimizer.master_copies"]
        dtype = jnp.dtype("float32" if in_float32 else saved["model.param_dtype"])
        abstract = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=leaf.sharding),
            trainer.abstract_state().params,
        )
        return checkpoints.read_arrays(step, {part: abstract}, record)[part], checkpoints.path(step), part


def _find(path: epath.Path) -> tuple[epath.Path, int | None]:
    """Returns the folder of checkpoints and the step that a path names; None is the newest one."""
    if path.name.isdigit() and (path / "state").is_dir():
        return path.parent, int(path.name)
    folders = [path / "checkpoints", path / "imported", path]
    with contextlib.suppress(OSError, ValueError, KeyError):  # the run may keep its checkpoints in another folder
        if elsewhere := json.loads((path / "config.json").read_text())["checkpoint"]["folder"]:
            folders.insert(0, epath.Path(elsewhere))
    for folder in folders:
        if folder.is_dir() and any((child / "state").is_dir() for child in folder.iterdir() if child.name.isdigit()):
            return folder, None
    raise InputError(f"init_from must be the workdir of a run or one of its checkpoints: there is none in {path}")
