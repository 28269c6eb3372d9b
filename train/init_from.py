"""The parameters of another run as the parameters of step 0, for fine-tuning; nothing else of that run is taken."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from train.checkpoint import Checkpoints
from train.config import Config
from train.errors import InputError
from train.step import Trainer, TrainState
from train.workdir import architecture, require_same

_MAY_DIFFER = frozenset({"model.param_dtype", "optimizer.master_copies"})  # how parameters are stored


def load_first_state(config: Config, trainer: Trainer) -> tuple[TrainState, Path]:
    """Makes the state of step 0 from the parameters that `init_from` names.

    Returns:
      The state, and the folder of the checkpoint.

    Raises:
      InputError: There is no checkpoint, it is damaged, or it is of another architecture.
    """
    assert config.init_from is not None
    folder, step = _find(Path(config.init_from).expanduser())
    with Checkpoints.to_read(folder) as checkpoints:
        step = checkpoints.choose(step)
        record = checkpoints.record(step)
        saved, now = (_comparable(fields) for fields in (record.architecture, architecture(config)))
        require_same(saved, now, where=str(checkpoints.path(step)), what="another architecture")
        return trainer.start_from(checkpoints.restore_params(step, _abstract(trainer, record.architecture))), (
            checkpoints.path(step)
        )


def _find(path: Path) -> tuple[Path, int | None]:
    """Returns the folder of checkpoints and the step that a path names; None is the newest one."""
    if (path / "checkpoints").is_dir():
        path = path / "checkpoints"
    if (path / "state").is_dir() and path.name.isdigit():
        return path.parent, int(path.name)
    if path.is_dir() and any(child.name.isdigit() and (child / "state").is_dir() for child in path.iterdir()):
        return path, None
    raise InputError(f"init_from must be the workdir of a run or one of its checkpoints: there is none in {path}")


def _comparable(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if name not in _MAY_DIFFER}


def _abstract(trainer: Trainer, saved: dict[str, Any]) -> Any:
    """Returns the abstract parameters of this run, in the type in which the other one stored them."""
    dtype = "float32" if saved["optimizer.master_copies"] else saved["model.param_dtype"]
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.dtype(dtype), sharding=leaf.sharding),
        trainer.abstract_state().params,
    )
