"""Writes the parameters of a run for `transformers`: `python train/export_checkpoint.py WORKDIR FOLDER`.

FOLDER gets config.json, safetensors files and, if the run began with an import, the tokenizer of that.
"""

import dataclasses
import json
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

if __name__ == "__main__":  # `models`, `configs` and `train` are beside the folder of this script, installed or not
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from train.config import Config, MeshConfig
from train.config.command import load_config, parse_as
from train.lifecycle.errors import InputError, as_input_errors, exit_code
from train.metrics.output import percent_printer, print_line

_ONE_CPU = MeshConfig(data=1, model=1, platform="cpu", cpu_devices=1)


@dataclasses.dataclass(frozen=True)
class Command:
    """Exports a checkpoint of a run as a folder that `transformers` loads."""

    workdir: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="WORKDIR")]
    """Folder of a run or of an import."""
    folder: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="FOLDER")]
    """Folder to write; it must not exist, or be empty."""
    step: int | None = None
    """Step of the checkpoint; None for the newest one."""
    parameters: Literal["evaluated", "trained"] = "evaluated"
    """The parameters that validation uses, a running mean if there is one, or those that training goes on with."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """The dtype in the files; None for that of the parameters in the checkpoint, where a running mean is float32."""
    mesh: MeshConfig = _ONE_CPU
    """The devices that the parameters are restored onto."""


def main(arguments: Sequence[str]) -> int:
    """Runs a command line and returns the exit code."""
    return exit_code(
        lambda: _export(parse_as(Command, arguments, prog="train/export_checkpoint.py")),
        outcome="Nothing was exported",
        memory_advice="On a larger --mesh.model or --mesh.fsdp each device holds less of the parameters",
    )


def _export(command: Command) -> None:
    config = dataclasses.replace(load_config(command.workdir), mesh=command.mesh)
    if command.folder.exists() and (not command.folder.is_dir() or any(command.folder.iterdir())):
        raise InputError(f"FOLDER must not exist, or be an empty folder: {command.folder}")

    import jax

    from models.families import write_config
    from train.checkpoints.manager import load_parameters
    from train.step.mesh import open_model_mesh
    from train.step.trainer import Trainer

    with as_input_errors(NotImplementedError):
        write_config(config.model, length=1)
    mesh = open_model_mesh(config)
    with jax.set_mesh(mesh):
        trainer, evaluated = Trainer(config, mesh), command.parameters == "evaluated"
        params, path, part = load_parameters(command.workdir, config, trainer, step=command.step, evaluated=evaluated)
        try:
            command.folder.parent.mkdir(parents=True, exist_ok=True)
            temporary = tempfile.TemporaryDirectory(dir=command.folder.parent, prefix=".export-")
        except OSError as error:
            raise InputError(f"FOLDER must be one that can be made: {command.folder}: {error.strerror}") from error
        with temporary as place:
            _write(command, config, params, filled := Path(place, "export"))
            filled.rename(command.folder)  # so that FOLDER is never half filled
    which = "the running mean of the parameters" if part == "ema" else "the parameters"
    print_line(f"exported   {which} of {path} as {command.folder}")


def _write(command: Command, config: Config, params: Any, folder: Path) -> None:
    """Makes a folder and writes the files of an export into it."""
    import jax.numpy as jnp

    from models.hugging_face import export_parameters

    kept = command.workdir / "hugging_face"
    before = json.loads((kept / "config.json").read_text()) if kept.is_dir() else {}
    length = max(before.get("max_position_embeddings", 0), config.data.sequence_length)
    dtype = command.dtype and jnp.dtype(command.dtype)
    folder.mkdir()
    report = percent_printer("exported")
    written = export_parameters(folder, config.model, params, length=length, dtype=dtype, report=report)
    for file in kept.glob("*"):
        shutil.copy2(file, folder / file.name)
    # Keys of the imported file that say nothing of the architecture, such as the ids of special tokens, are kept.
    kept_keys = {key: value for key, value in before.items() if key not in ("torch_dtype", "rope_scaling")}
    (folder / "config.json").write_text(json.dumps(kept_keys | written, indent=2) + "\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
