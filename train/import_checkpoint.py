"""Imports other people's parameters: `python train/import_checkpoint.py FOLDER --workdir DIR`.

FOLDER has config.json and safetensors files, as `transformers` writes them. DIR becomes a workdir from which training
goes on and from which text can be sampled; see docs/checkpoints.md.

```
preset.py       the configuration; `python train/run.py DIR/preset.py --data.path TEXT` trains
imported/       the parameters, as the checkpoint of step 0
hugging_face/   config.json and the tokenizer, for train/export_checkpoint.py
tokenizer.json  the tokenizer, if FOLDER has one; without it, text is refused until --data.tokenizer names a file
```
"""

import dataclasses
import json
import pprint
import shutil
import sys
import tempfile
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

if __name__ == "__main__":  # `models`, `configs` and `train` are beside the folder of this script, installed or not
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from models.config import TransformerConfig
from models.families import Family
from train.config import Config, DataConfig, EvalConfig, MeshConfig
from train.config.check import check
from train.config.command import PRESET, parse_as
from train.lifecycle.errors import InputError, as_input_errors, exit_code
from train.metrics.output import percent_printer, print_line

IMPORTED = "imported"  # the folder of the checkpoint that an import makes
_KEPT_FOLDER, _TOKENIZER = "hugging_face", "tokenizer.json"
_UNFINISHED = ".import-"  # begins the name of the folder in which an import is prepared
_UNKNOWN_TOKENIZER = "the imported checkpoint"
_KEPT = ("config.json", "generation_config.json", "tokenizer*", "special_tokens_map.json", "vocab.json", "merges.txt")
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
class Command:
    """Imports a checkpoint of the Llama 3, Qwen 3 or Gemma families into a workdir."""

    folder: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="FOLDER")]
    """Folder with config.json and safetensors files."""
    workdir: Path
    """Folder that becomes a workdir; it must not have an import or a run."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """The dtype of activations."""
    param_dtype: Literal["float32", "bfloat16"] = "float32"
    """The dtype of the parameters."""
    mesh: MeshConfig = dataclasses.field(default_factory=MeshConfig)
    """The devices."""


def main(arguments: Sequence[str]) -> int:
    """Runs a command line and returns the exit code."""
    return exit_code(
        lambda: _import(parse_as(Command, arguments, prog="train/import_checkpoint.py")),
        outcome="Nothing was imported",
        memory_advice="--param_dtype bfloat16, or a larger --mesh.model or --mesh.fsdp, needs less on each device",
    )


def _import(command: Command) -> None:
    # The preset names paths in the workdir relative to itself; only an absolute one is never a part of other text.
    command = dataclasses.replace(command, workdir=command.workdir.absolute())
    _require_unused(command.workdir)
    from models.hugging_face import load_config

    with as_input_errors(ValueError, NotImplementedError):
        family, fields = load_config(command.folder)
    model = TransformerConfig(**fields, dtype=command.dtype, param_dtype=command.param_dtype)
    ends = _end_tokens(command.folder)
    config = Config(
        workdir=str(command.workdir),
        steps=1000,
        init_from=str(command.workdir / IMPORTED),
        mesh=command.mesh,
        model=model,
        data=DataConfig(tokenizer=_tokenizer(command, model), separator=ends[0] if ends else None),
        eval=EvalConfig(stop_tokens=tuple(ends[1:])),
    )
    check(config)
    _write(command, config, family)
    print_line(f"imported   {command.folder} as {command.workdir}")
    print_line(f"train      python train/run.py {command.workdir / PRESET} --data.path TEXT")
    print_line(f"sample     python train/sample.py {command.workdir} --prompt TEXT")
    if config.data.tokenizer == _UNKNOWN_TOKENIZER:
        print_line("tokenizer  FOLDER has no tokenizer.json: give --data.tokenizer to train, --tokenizer to sample")


def _require_unused(workdir: Path) -> None:
    names = (PRESET, "config.json", "checkpoints", IMPORTED, _KEPT_FOLDER, _TOKENIZER)
    if taken := [name for name in names if (workdir / name).exists()]:
        raise InputError(f"--workdir must have no import or run: {workdir} has {', '.join(taken)}")


def _tokenizer(command: Command, model: TransformerConfig) -> str:
    """Returns the file that the tokenizer will have, or a name that makes text be refused until a file is given."""
    file = command.folder / _TOKENIZER
    if not file.is_file():
        return _UNKNOWN_TOKENIZER
    from train.data.tokenizer import Tokenizer

    Tokenizer.open(file, vocab_size=model.vocab_size, field="FOLDER/tokenizer.json")
    return str(command.workdir / _TOKENIZER)


def _end_tokens(folder: Path) -> list[int]:
    """Returns the tokens that end a text: the first one ends documents, the others only what is sampled."""
    ends: list[int] = []
    for file in (folder / "config.json", folder / "generation_config.json"):
        try:
            given = json.loads(file.read_text()).get("eos_token_id") if file.is_file() else None
        except (ValueError, AttributeError) as error:
            raise InputError(f"{file} must be a JSON object: {error}") from error
        tokens = given if isinstance(given, list) else [] if given is None else [given]
        if not all(type(token) is int for token in tokens):
            raise InputError(f"eos_token_id of {file} must be a token or a list of tokens: got {given!r}")
        ends += [token for token in tokens if token not in ends]
    return ends


def _write(command: Command, config: Config, family: Family) -> None:
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
            params = import_parameters(command.folder, family, abstract, percent_printer("imported"))
        state = TrainState(params, None, jnp.int32(0), jax.random.key_data(jax.random.key(0)))
        for left in work.root.glob(f"{_UNFINISHED}*"):  # by an import that was killed
            shutil.rmtree(left)
        with tempfile.TemporaryDirectory(dir=work.root, prefix=_UNFINISHED) as temporary:
            place = Path(temporary)
            with Checkpoints(place / IMPORTED, keep=1) as checkpoints:
                identity = RunIdentity({}, {}, architecture(config))
                checkpoints.save(0, state, data={"sequences": 0}, tokens=0, identity=identity)
                checkpoints.wait()
            (place / _KEPT_FOLDER).mkdir()
            for pattern in _KEPT:  # for export
                for file in command.folder.glob(pattern):
                    shutil.copy2(file, place / _KEPT_FOLDER / file.name)
            if (command.folder / _TOKENIZER).is_file():
                shutil.copy2(command.folder / _TOKENIZER, place / _TOKENIZER)
            (place / PRESET).write_text(as_preset(config))
            for path in sorted(place.iterdir(), key=lambda path: path.name == PRESET):  # the preset comes last
                path.rename(work.root / path.name)


def as_preset(config: Config) -> str:
    """Returns the text of a preset file for a workdir, where paths into the workdir are relative to the file."""
    here = Path(config.workdir)

    def relative(value: Any) -> Any:
        inside = isinstance(value, str) and Path(value).is_relative_to(here)
        return f"{_HERE}/{Path(value).relative_to(here)}" if inside else value

    data = dataclasses.replace(config.data, tokenizer=relative(config.data.tokenizer))
    moved = dataclasses.replace(config, workdir=_HERE, init_from=relative(config.init_from), data=data)
    source = textwrap.indent(pprint.pformat(moved, width=110), " " * 11).lstrip()
    return _TEMPLATE + source.replace(f"'{_HERE}", "_HERE + '") + "\n"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
