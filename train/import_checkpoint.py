"""Imports other people's parameters: `python train/import_checkpoint.py FOLDER --workdir DIR`.

FOLDER has config.json and safetensors files, as `transformers` writes them. DIR becomes a workdir
from which training goes on and from which text can be sampled; see docs/checkpoints.md.

```
preset.py       the configuration; `python train/run.py DIR/preset.py --data.path TEXT` trains
imported/       the parameters, as the checkpoint of step 0
hugging_face/   config.json, the tokenizer and the chat templates, for train/export_checkpoint.py
tokenizer.json  the tokenizer, if FOLDER has one; without it, text is refused until --data.tokenizer names a file
```
"""

import dataclasses
import os
import pprint
import shutil
import sys
import tempfile
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

# `models`, `configs` and `train` are beside the folder of this script, installed or not
if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from models.config import TransformerConfig
from models.families import Family
from models.foreign_folder import checked_file, require_local_folder
from models.safetensors_files import TensorFiles
from models.sizes import check_sizes
from train.config import Config, DataConfig, EvalConfig, MeshConfig
from train.config.check import check, expanded
from train.config.command import PRESET, parse_as
from train.data.end_tokens import choose_separator, read_token_files, template_files
from train.data.exported_files import KEPT
from train.lifecycle.errors import InputError, as_input_errors, exit_code
from train.metrics.output import percent_printer, print_line

if TYPE_CHECKING:
    from train.data.tokenizer import Tokenizer

IMPORTED = "imported"  # the folder of the checkpoint that an import makes
_TOKENIZER = "tokenizer.json"
_UNFINISHED = ".import-"  # begins the name of the folder in which an import is prepared
_UNKNOWN_TOKENIZER = "the imported checkpoint"
# What `save_pretrained` of `transformers` writes beside the tensors, and older versions of it
# wrote.
_KEPT_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
_HERE = "@here@"  # stands for the folder of the preset file
_TEMPLATE = '''"""The configuration of an imported checkpoint; train/run.py takes this file as its preset."""

from math import inf
from pathlib import Path

from models.config import TransformerConfig
from train.config import *

_HERE = str(Path(__file__).resolve().parent)


def imported():
    return '''


@dataclasses.dataclass(frozen=True)
class ImportCommand:
    """Imports a checkpoint of the Llama 3, Qwen 3, Gemma or Mixtral families into a workdir."""

    folder: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="FOLDER")]
    """Folder with config.json and safetensors files."""
    workdir: Path
    """Folder that becomes a workdir; it must not have an import or a run."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """The dtype of activations."""
    param_dtype: Literal["float32", "bfloat16"] = "float32"
    """The dtype of the parameters."""
    separator: int | Literal["auto", "none"] = "auto"
    """The token that ends documents; auto for the first one that ends a text and that no chat
    template uses.
    """
    mesh: MeshConfig = dataclasses.field(default_factory=MeshConfig)
    """The devices."""


def main(arguments: Sequence[str]) -> int:
    """Runs a command line and returns the exit code."""
    return exit_code(
        lambda: _import(parse_as(ImportCommand, arguments, prog="train/import_checkpoint.py")),
        outcome="Nothing was imported",
        memory_advice="--param_dtype bfloat16, or a larger --mesh.model or --mesh.fsdp, needs less "
        "on each device",
    )


def _import(command: ImportCommand) -> None:
    with as_input_errors(ValueError):
        require_local_folder(command.folder, "FOLDER")
        require_local_folder(command.workdir, "--workdir")
    # The preset names paths in the workdir relative to itself; only an absolute one is never a part
    # of other text.
    workdir = Path(expanded("--workdir", str(command.workdir))).absolute()
    command = dataclasses.replace(command, workdir=workdir)
    _require_unused(command.workdir)
    from models.hugging_face import load_config

    with as_input_errors(ValueError, NotImplementedError):
        family, fields = load_config(command.folder)
        files = TensorFiles(command.folder)
        check_sizes(files, family, fields)
    kept = _kept_files(command.folder)
    model = TransformerConfig(**fields, dtype=command.dtype, param_dtype=command.param_dtype)
    tokenizer = _open_tokenizer(command, model, kept)
    texts = tokenizer.texts() if tokenizer else {}
    token_files = read_token_files(command.folder, vocab_size=model.vocab_size, texts=texts)
    ends = choose_separator(token_files, command.separator)
    config = Config(
        workdir=str(command.workdir),
        steps=1000,
        init_from=str(command.workdir / IMPORTED),
        mesh=command.mesh,
        model=model,
        data=DataConfig(
            tokenizer=str(command.workdir / _TOKENIZER) if tokenizer else _UNKNOWN_TOKENIZER,
            separator=ends.separator,
        ),
        eval=EvalConfig(stop_tokens=ends.stops),
    )
    check(config)
    _write(command, config, family, files, kept)
    print_line(f"imported   {command.folder} as {command.workdir}")
    if files.unused:
        print_line(f"not read   {', '.join(files.unused)}, as model.safetensors is there")
    print_line(f"separator  {ends.reason}")
    print_line(f"train      python train/run.py {command.workdir / PRESET} --data.path TEXT")
    print_line(f"sample     python train/sample.py {command.workdir} --prompt TEXT")
    if tokenizer is None:
        print_line(
            "tokenizer  FOLDER has no tokenizer.json: give --data.tokenizer to train, --tokenizer "
            "to sample"
        )


def _require_unused(workdir: Path) -> None:
    names = (PRESET, "config.json", "checkpoints", IMPORTED, KEPT, _TOKENIZER)
    if taken := [name for name in names if os.path.lexists(workdir / name)]:
        raise InputError(f"--workdir must have no import or run: {workdir} has {', '.join(taken)}")


def _kept_files(folder: Path) -> dict[str, Path]:
    """Returns the files that are kept for export, by their names; all are regular files of the
    folder.
    """
    names = [
        file.name
        for pattern in _KEPT_FILES
        for file in sorted(folder.glob(pattern))
        if not file.is_dir()
    ]
    kept = {}
    with as_input_errors(ValueError, OSError):
        for name in (*names, *template_files(folder)):
            kept[name] = checked_file(folder, name)
            if not os.access(kept[name], os.R_OK):
                raise InputError(f"{folder / name} must be readable, and is not")
    return kept


def _open_tokenizer(
    command: ImportCommand, model: TransformerConfig, kept: Mapping[str, Path]
) -> "Tokenizer | None":
    """Opens the tokenizer of the folder, which must fit the model, if it has one."""
    if _TOKENIZER not in kept:
        return None
    from train.data.tokenizer import Tokenizer

    return Tokenizer.open(
        kept[_TOKENIZER], vocab_size=model.vocab_size, field="FOLDER/tokenizer.json"
    )


def _write(
    command: ImportCommand,
    config: Config,
    family: Family,
    files: TensorFiles,
    kept: Mapping[str, Path],
) -> None:
    import jax
    import jax.numpy as jnp

    from models.hugging_face import import_parameters
    from train.checkpoints.manager import Checkpoints
    from train.checkpoints.record import RunIdentity, architecture
    from train.lifecycle.workdir import open_workdir
    from train.step.mesh import open_model_mesh
    from train.step.trainer import Trainer, TrainState

    mesh = open_model_mesh(config)
    with jax.set_mesh(mesh), open_workdir(command.workdir) as work:
        _require_unused(work.root)  # another import may have ended just before
        abstract: Any = Trainer(config, mesh).abstract_state().params
        with as_input_errors(ValueError):
            params = import_parameters(files, family, abstract, percent_printer("imported"))
        state = TrainState(params, None, jnp.int32(0))
        for left in work.root.glob(f"{_UNFINISHED}*"):  # by an import that was killed
            shutil.rmtree(left)
        with tempfile.TemporaryDirectory(dir=work.root, prefix=_UNFINISHED) as temporary:
            place = Path(temporary)
            with Checkpoints(place / IMPORTED, keep=1) as checkpoints:
                identity = RunIdentity({}, {}, architecture(config))
                checkpoints.save(0, state, data={"sequences": 0}, tokens=0, identity=identity)
                checkpoints.wait()
            for name, file in kept.items():  # for export
                target = place / KEPT / name
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file, target)
            if _TOKENIZER in kept:
                shutil.copyfile(kept[_TOKENIZER], place / _TOKENIZER)
            (place / PRESET).write_text(as_preset(config))
            # the preset comes last
            for path in sorted(place.iterdir(), key=lambda path: path.name == PRESET):
                path.rename(work.root / path.name)


def as_preset(config: Config) -> str:
    """Returns the text of a preset file for a workdir, where paths into the workdir are relative to
    the file.
    """
    here = Path(config.workdir)

    def relative(value: Any) -> Any:
        inside = isinstance(value, str) and Path(value).is_relative_to(here)
        return f"{_HERE}/{Path(value).relative_to(here)}" if inside else value

    data = dataclasses.replace(config.data, tokenizer=relative(config.data.tokenizer))
    moved = dataclasses.replace(
        config, workdir=_HERE, init_from=relative(config.init_from), data=data
    )
    source = textwrap.indent(pprint.pformat(moved, width=110), " " * 11).lstrip()
    return _TEMPLATE + source.replace(f"'{_HERE}", "_HERE + '") + "\n"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
