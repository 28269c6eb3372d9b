"""The parameters of another run as the parameters of step 0, for fine-tuning; nothing else of that run is taken."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from train.checkpoints.manager import Checkpoints
from train.config import Config
from train.lifecycle.errors import InputError
from train.lifecycle.workdir import architecture, require_same
from train.step.trainer import Trainer, TrainState

_MAY_DIFFER = frozenset({"model.param_dtype", "optimizer.master_copies"})  # how parameters are stored


def load_first_state(config: Config, trainer: Trainer) -> tuple[TrainState, Path]:
    """Makes the state of step 0 from the parameters that `init_from` names.

    Returns:
      The state, and the folder of the checkpoint.

    Raises:
      InputError: There is no checkpoint, it is damaged, or it is of another architecture.
    """
    assert config.init_from is not None
    params, path, _ = load_parameters(Path(config.init_from).expanduser(), config, trainer)
    return trainer.start_from(params), path


def load_parameters(
    location: Path, config: Config, trainer: Trainer, *, step: int | None = None, evaluated: bool = False
) -> tuple[Any, Path, str]:
    """Reads the parameters of a checkpoint.

    Args:
      location: The workdir of a run or of an import, or one of its checkpoints.
      config: The configuration, whose architecture must be that of the checkpoint.
      trainer: The model's functions.
      step: The step of the checkpoint; None for the one that `location` names, or the newest one.
      evaluated: Whether the running mean of the parameters is read instead, if the checkpoint has one.

    Returns:
      The parameters, the folder of the checkpoint, and which part of it they are: "params", or "ema" for their mean.

    Raises:
      InputError: There is no checkpoint, it is damaged, or it is of another architecture.
    """
    folder, named = _find(location)
    with Checkpoints.to_read(folder) as checkpoints:
        step = checkpoints.choose(named if step is None else step)
        record = checkpoints.record(step)
        saved, now = (_comparable(fields) for fields in (record.architecture, architecture(config)))
        require_same(saved, now, where=str(checkpoints.path(step)), what="another architecture")
        part = "ema" if evaluated and "ema" in record.parts else "params"
        abstract = _abstract(trainer, record.architecture, part)
        return checkpoints.restore_params(step, abstract, part=part), checkpoints.path(step), part


def _find(path: Path) -> tuple[Path, int | None]:
    """Returns the folder of checkpoints and the step that a path names; None is the newest one."""
    for name in ("checkpoints", "imported"):
        if _has_checkpoints(path / name):
            return path / name, None
    if (path / "state").is_dir() and path.name.isdigit():
        return path.parent, int(path.name)
    if _has_checkpoints(path):
        return path, None
    raise InputError(f"init_from must be the workdir of a run or one of its checkpoints: there is none in {path}")


def _has_checkpoints(path: Path) -> bool:
    return path.is_dir() and any(child.name.isdigit() and (child / "state").is_dir() for child in path.iterdir())


def _comparable(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if name not in _MAY_DIFFER}


def _abstract(trainer: Trainer, saved: dict[str, Any], part: str) -> Any:
    """Returns the abstract parameters of this run, in the type in which the other one stored them."""
    in_float32 = part == "ema" or saved["optimizer.master_copies"]
    dtype = "float32" if in_float32 else saved["model.param_dtype"]
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.dtype(dtype), sharding=leaf.sharding),
        trainer.abstract_state().params,
    )
