"""Writes the parameters of a run for `transformers`: `python train/export_checkpoint.py WORKDIR
FOLDER`.

FOLDER gets config.json, safetensors files and the tokenizer of the run; if it began with an import,
all other files of that, too. They are prepared in a folder inside FOLDER, so that FOLDER may be a
mount point, and moved there at last.
"""

import contextlib
import dataclasses
import fcntl
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal

import tyro

# `models`, `configs` and `train` are beside the folder of this script, installed or not
if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from models.foreign_folder import require_local_folder, shown
from train.config import Config, MeshConfig
from train.config.check import expanded
from train.config.command import load_config, parse_as
from train.data.exported_files import ExportedFiles, exported_files
from train.lifecycle.errors import InputError, as_input_errors, exit_code
from train.metrics.output import percent_printer, print_line

_UNFINISHED = ".export-"  # begins the name of the folder in which an export is prepared
_OF_A_DISK = "lost+found"  # what a disk has that is empty
_ONE_CPU = MeshConfig(data=1, model=1, platform="cpu", cpu_devices=1)


@dataclasses.dataclass(frozen=True)
class ExportCommand:
    """Exports a checkpoint of a run as a folder that `transformers` loads."""

    workdir: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="WORKDIR")]
    """Folder of a run or of an import."""
    folder: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="FOLDER")]
    """Folder to write; it must not exist, or be empty, as a mount point may be."""
    step: int | None = None
    """Step of the checkpoint; None for the newest one."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """The dtype in the files; None for that of the parameters in the checkpoint."""
    mesh: MeshConfig = _ONE_CPU
    """The devices that the parameters are restored onto."""


def main(arguments: Sequence[str]) -> int:
    """Runs a command line and returns the exit code."""
    return exit_code(
        lambda: _export(parse_as(ExportCommand, arguments, prog="train/export_checkpoint.py")),
        outcome="Nothing was exported",
        memory_advice="On a larger --mesh.model or --mesh.fsdp each device holds less of the "
        "parameters",
    )


def _export(command: ExportCommand) -> None:
    with as_input_errors(ValueError):
        require_local_folder(command.folder, "FOLDER")
    workdir = Path(expanded("WORKDIR", str(command.workdir)))
    command = dataclasses.replace(command, workdir=workdir)
    config = dataclasses.replace(load_config(command.workdir), mesh=command.mesh)
    target = Path(os.path.realpath(command.folder))  # that of a link
    _require_empty(command.folder, target)

    import jax

    from models.config_json import write_config
    from train.checkpoints.manager import load_parameters
    from train.step.mesh import open_model_mesh
    from train.step.trainer import Trainer

    with as_input_errors(NotImplementedError):
        write_config(config.model, length=1)
    files = exported_files(command.workdir, config)
    mesh = open_model_mesh(config)
    with jax.set_mesh(mesh), _prepared(command.folder, target) as place:
        trainer = Trainer(config, mesh)
        params, path = load_parameters(command.workdir, config, trainer, step=command.step)
        _write(command, config, params, files, place)
    print_line(f"exported   the parameters of {path} as {command.folder}")
    print_line(f"tokenizer  {files.tokenizer}")


def _require_empty(folder: Path, target: Path) -> None:
    """Refuses a folder that holds anything but what an export that was killed has left, or what a
    disk begins with.
    """
    if not os.path.lexists(target):
        return
    try:
        names = [path.name for path in target.iterdir()]
    except OSError as error:
        raise InputError(
            f"FOLDER must not exist, or be an empty folder: {folder}: {error.strerror}"
        ) from error
    held = sorted(name for name in names if not name.startswith(_UNFINISHED) and name != _OF_A_DISK)
    if held:
        raise InputError(
            f"FOLDER must not exist, or be an empty folder: {folder} has {shown(held[0])}"
        )


@contextlib.contextmanager
def _prepared(folder: Path, target: Path) -> Iterator[Path]:
    """Gives a new folder inside the target, and moves its files into the target at the end,
    config.json last.

    If anything fails, the target is as it was.
    """
    existed = target.is_dir()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.mkdir(exist_ok=True)
        opened = os.open(target, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise InputError(
            f"FOLDER must be one that can be made: {folder}: {error.strerror}"
        ) from error
    moved: list[Path] = []
    place = None
    try:
        _remove_unfinished(opened, folder, target)
        try:
            place = Path(tempfile.mkdtemp(dir=target, prefix=_UNFINISHED))
        except OSError as error:
            raise InputError(
                f"FOLDER must be one that can be written: {folder}: {error.strerror}"
            ) from error
        yield place
        for path in sorted(place.iterdir(), key=_is_config):
            moved.append(target / path.name)
            path.rename(moved[-1])
    except BaseException:
        for path in moved:
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        raise
    finally:
        if place is not None:
            shutil.rmtree(place, ignore_errors=True)
        if not existed and not any(target.iterdir()):
            target.rmdir()
        os.close(opened)


def _remove_unfinished(opened: int, folder: Path, target: Path) -> None:
    """Locks a folder against other exports until it is closed, and removes what killed ones have
    left in it.
    """
    left = sorted(target.glob(f"{_UNFINISHED}*"))
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise InputError(
            f"FOLDER must be one that nothing else writes: another export is writing {folder}"
        ) from error
    except (
        OSError
    ) as error:  # a file system without locks, on which nothing tells whether an export is going on
        if left:
            raise InputError(
                f"FOLDER must not exist, or be an empty folder: {folder} has {left[0].name}, of an "
                "export that goes on or was killed; remove it then"
            ) from error
    for path in left:
        shutil.rmtree(path)


def _is_config(path: Path) -> bool:
    return path.name == "config.json"


def _write(
    command: ExportCommand,
    config: Config,
    params: Mapping[str, object],
    files: ExportedFiles,
    folder: Path,
) -> None:
    """Writes the files of an export into a folder."""
    import jax.numpy as jnp

    from models.hugging_face import export_parameters

    before = files.config
    length = max(files.length, config.data.sequence_length)
    dtype = command.dtype and jnp.dtype(command.dtype)
    report = percent_printer("exported")
    written = export_parameters(
        folder, config.model, params, length=length, dtype=dtype, report=report
    )
    for name, file in files.copied.items():
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copy2(file, folder / name)
    for name, content in files.written.items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n")
    # Keys of the imported file that say nothing of the architecture, such as the ids of special
    # tokens, are kept.
    kept_keys = {
        key: value for key, value in before.items() if key not in ("torch_dtype", "rope_scaling")
    }
    (folder / "config.json").write_text(json.dumps(kept_keys | written, indent=2) + "\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
