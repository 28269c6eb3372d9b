"""Tests of train/config: presets, the command line, and the input that is refused."""

import dataclasses
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from models.config import check_fits
from tests.train.runs import SCRIPT
from train import export_checkpoint, import_checkpoint, sample
from train.config import flatten
from train.config.check import check
from train.config.command import DEFAULT_PRESET, load_config, load_preset, parse
from train.lifecycle.errors import InputError

PRESETS = sorted(path for path in DEFAULT_PRESET.parent.glob("*.py") if path.name != "__init__.py")


def test_options_replace_single_fields_of_the_preset(preset):
    assert parse([]).config == load_preset(DEFAULT_PRESET)
    before = load_preset(preset())
    options = ["--steps", "7", "--model.kv_heads", "2", "--data.path", "None", "--backend", "none"]
    assert parse([str(preset()), *options]).config == dataclasses.replace(
        before,
        steps=7,
        backend="none",
        model=dataclasses.replace(before.model, kv_heads=2),
        data=dataclasses.replace(before.data, path=None),
    )


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.stem)
def test_every_preset_is_valid_and_fits_its_mesh(path):
    config = load_preset(path)
    check(config)
    shape = {
        "data": max(1, config.mesh.data),
        "context": config.mesh.context,
        "model": config.mesh.model,
    }
    check_fits(config.model, sequence_length=config.data.sequence_length, mesh_shape=shape)


def test_help_explains_every_field_with_its_unit(capsys):
    with pytest.raises(SystemExit) as exit_info:
        parse(["--help"])
    assert exit_info.value.code == 0
    shown = re.sub(r"[│\s]+", " ", capsys.readouterr().out)
    for name, default in flatten(dataclasses.asdict(load_preset(DEFAULT_PRESET))):
        described = re.search(rf"--{re.escape(name)} (.*?)\(default: (.*?)\)", shown)
        assert described, f"--help does not have {name}"
        assert len(described[1].split()) >= 3, f"--help does not explain {name}: {described[1]}"
        if (
            isinstance(default, (int, float))
            and not isinstance(default, bool)
            and not name.startswith("model.")
        ):
            assert re.search(r"\([^)]+\)", described[1]), f"{name} has no unit: {described[1]}"


@pytest.mark.parametrize(("option", "value"), [("--model.depth", "3"), ("--steps", "many")])
def test_a_bad_command_line_exits_with_2_and_names_the_mistake(option, value, capsys):
    with pytest.raises(SystemExit) as exit_info:
        parse([str(DEFAULT_PRESET), option, value])
    assert exit_info.value.code == 2
    assert option in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "there is no file"),
        ("def f(): return (", "line 1: SyntaxError"),
        ("\n1 / 0", "line 2: ZeroDivisionError"),
        ("steps: 1", "has none"),
        ("def one(): ...\ndef two(): ...", "has one, two"),
        ("def one(): return 1", "has one, which returned int"),
        (
            "import sys\ndef one(): sys.exit(0)",
            "must be a file that runs to its end: .*, line 2: SystemExit: 0",
        ),
        ("class Odd(BaseException): ...\nraise Odd('a\\nb')", "line 2: Odd: a b$"),
        ("".join(f"def f{n}(): ...\n" for n in range(12)), "has f0, f1, .*, f9, and 2 more$"),
    ],
)
def test_a_bad_preset_is_refused(content, message, tmp_path):
    path = tmp_path / "preset.py"
    if content is not None:
        path.write_text(content)
    with pytest.raises(InputError, match=message):
        load_preset(path)


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--steps", 0, "steps must be at least 1: got 0"),
        ("--seed", -1, "seed must be at least 0: got -1"),
        ("--seed", 2**31, "seed must be at most 2147483647: got 2147483648"),
        (
            "--data.validation_fraction",
            0.0,
            "data.validation_fraction must be above 0 where eval.every is not 0",
        ),
        (
            "--optimizer.learning_rate",
            "nan",
            "optimizer.learning_rate must be at least 0 and finite: got nan",
        ),
        ("--optimizer.clip_norm", 0.0, "optimizer.clip_norm must be above 0"),
        ("--optimizer.decay_floor", 1.5, "optimizer.decay_floor must be 0 to 1"),
        ("--model.logit_softcap", 0.0, "model.logit_softcap must be above 0, or None"),
        ("--model.expert_width", 0, "model.expert_width must be above 0, or None: got 0"),
        ("--model.capacity_factor", 0.0, "model.capacity_factor must be above 0, or None"),
        (
            "--model.rope_low_frequency",
            4.0,
            "model.rope_low_frequency must be below model.rope_high_frequency=4.0",
        ),
        ("--model.rope_theta", "inf", "model.rope_theta must be above 0 and finite: got inf"),
        (
            "--optimizer.b2",
            1.0,
            "optimizer.b2 must be at least 0 and below 1: got 1.0",
        ),
        (
            "--optimizer.master_copies",
            True,
            "must be False where model.param_dtype=float32, which needs no copies",
        ),
        ("--skip.spike_factor", 0.5, "skip.spike_factor must be 0, or above 1: got 0.5"),
        (
            "--data.separator",
            256,
            "data.separator must be a token below model.vocab_size=256: got 256",
        ),
        (
            "--resume",
            "yesterday",
            "--resume must be latest, none, or the step of a checkpoint: got yesterday",
        ),
        (
            "--resume",
            "\u00b2",
            "--resume must be latest, none, or the step of a checkpoint: got \u00b2",
        ),
        (
            "--resume",
            "9" * 5000,
            "--resume must be latest, none, or the step of a checkpoint: got 9{200}[.]{3}$",
        ),
        (
            "--mesh.cpu_devices",
            10**6,
            "mesh.cpu_devices must be at most 9216, the chips of the largest TPU slice",
        ),
        (
            "--data.batch_size",
            10**11,
            "data.batch_size must be at most 2147483647, as devices count in int32",
        ),
        (
            "--data.batch_size",
            10**8,
            "data.batch_size must be at most 16777215 where data.sequence_length=128",
        ),
        ("--model.layers", 2**31, "model.layers must be at most 2147483647"),
        (
            "--workdir",
            "caf\udce9",
            r"workdir must be a text in UTF-8 without zero bytes: got 'caf.udce9'",
        ),
        ("--data.path", "a\0b", "data.path must be a text in UTF-8 without zero bytes"),
        (
            "--checkpoint.folder",
            "~nobody_has_this_name/a",
            "checkpoint.folder must be in the home folder of a user that",
        ),
        ("--workdir", "", "workdir must be a folder"),
        ("--data.path", "", "data.path must not be empty: got ''"),
        ("--compile_cache", "", "compile_cache must not be empty: got ''"),
        (
            "--workdir",
            "gs://a/run",
            "workdir must be a folder of this machine, .*--checkpoint.folder may be gs",
        ),
        (
            "--checkpoint.folder",
            "s3://a/run",
            "checkpoint.folder must be .*, or gs://bucket/folder: got 's3://a/run'",
        ),
        (
            "--checkpoint.folder",
            "gs://bucket",
            "checkpoint.folder must be .*, or gs://bucket/folder: got 'gs://buck",
        ),
        ("--init_from", "gs://bucket/run", "init_from=gs://bucket/run needs the package gcsfs"),
    ],
)
def test_a_value_out_of_range_is_refused(option, value, message, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)  # gcsfs may be installed
    with pytest.raises(InputError, match=message):
        parse([str(DEFAULT_PRESET), option, str(value)])


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("steps", "'12'", "steps must be an integer: got '12'"),
        ("steps", "True", "steps must be an integer: got True"),
        ("steps", "12.5", "steps must be an integer: got 12.5"),
        (
            "steps",
            "10**5000",
            "steps must be at most 2147483647: got a value of type int, which cannot be printed",
        ),
        ("seed", "__import__('numpy').int64(1)", "seed must be an integer"),
        ("mesh", "{'data': 2}", "mesh must be a MeshConfig: got {'data': 2}"),
        ("data", "DataConfig(batch_size=None)", "data.batch_size must be an integer: got None"),
        (
            "data",
            "DataConfig(sources=(('a', 'b'),))",
            r"data.sources must be a tuple, each element a tuple \(a string, ",
        ),
        (
            "optimizer",
            "OptimizerConfig(schedule='Cosine')",
            "optimizer.schedule must be one of cosine, linear, wsd, const",
        ),
        (
            "optimizer",
            "OptimizerConfig(clip_norm='1')",
            "optimizer.clip_norm must be a number: got '1'",
        ),
        (
            "model",
            "TransformerConfig(logit_softcap=False)",
            "model.logit_softcap must be a number or None: got False",
        ),
    ],
)
def test_a_preset_is_checked_by_types_like_the_command_line(field, value, message, tmp_path):
    path, given = tmp_path / "preset.py", {"workdir": "'run'", "steps": "3", field: value}
    fields = ", ".join(f"{name}={text}" for name, text in given.items())
    path.write_text(f"from train.config import *\ndef one(): return Config({fields})\n")
    with pytest.raises(InputError, match=message):
        parse([str(path)])


@pytest.mark.parametrize(
    "options", [["--data.sources", "a", "", "1"], ["--eval.sets", "a", ""]], ids=lambda it: it[0]
)
def test_a_path_of_a_source_or_of_a_set_is_not_empty(options):
    field = options[0].removeprefix("--")
    with pytest.raises(InputError, match=f"the path of a in {field} must not be empty"):
        parse([str(DEFAULT_PRESET), *options])


def test_the_workdir_may_be_in_the_home_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert parse(["--workdir=~/run"]).config.workdir == f"{tmp_path}/run"


def test_a_workdir_in_the_home_folder_is_found(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    shutil.copy(DEFAULT_PRESET, tmp_path / "preset.py")
    assert load_config(Path("~")) == load_preset(DEFAULT_PRESET)


@pytest.mark.parametrize("command", [import_checkpoint, export_checkpoint, sample])
def test_the_home_folder_of_nobody_is_refused(command, refuses, tmp_path):
    nobody = "~nobody_has_this_name/a"
    arguments = {
        import_checkpoint: [tmp_path, "--workdir", nobody],
        export_checkpoint: [nobody, tmp_path / "out"],
        sample: [nobody, "--prompt", "a"],
    }
    says = "must be in the home folder of a user that this machine has"
    refuses(command.main, says, *arguments[command])


def test_an_integer_stands_for_a_number(tmp_path):
    path = tmp_path / "preset.py"
    path.write_text(
        "from train.config import *\ndef one(): return Config('run', 3, "
        "skip=SkipConfig(spike_factor=4))\n"
    )
    assert parse([str(path)]).config.skip.spike_factor == 4


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[" * 5000 + "]" * 5000, "is nested too deeply"),
        ('{"steps": "12", "workdir": "run"}', "config.json: steps must be an integer: got '12'"),
        (
            '{"steps": 12, "workdir": "run", "mesh": [1]}',
            r"cannot be read \(MeshConfig must be an object: got \[1\]\)",
        ),
        ('{"steps": 12}', "missing 1 required positional argument: 'workdir'"),
    ],
)
def test_a_configuration_that_is_not_one_is_refused(content, message, tmp_path):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(InputError, match=message):
        load_config(tmp_path)


def test_a_relative_folder_in_a_folder_whose_name_is_no_utf8_is_refused(tmp_path, monkeypatch):
    folder = os.fsencode(tmp_path) + b"/caf\xe9"
    os.mkdir(folder)
    monkeypatch.chdir(folder)
    with pytest.raises(
        InputError,
        match=r"workdir must be in a folder whose name is text in UTF-8: got .*udce9/run'",
    ):
        parse(["--workdir", "run"])


def run_script(*options: str, python: tuple[str, ...] = ()) -> subprocess.CompletedProcess:
    """Runs the script in a process of its own, with options of its own for Python."""
    command = [sys.executable, *python, SCRIPT, *options]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.mark.parametrize(
    "options", [["--nope"], ["--steps", "0"], ["--workdir", "ftp://host/run"]], ids=str
)
def test_a_mistake_is_reported_before_jax_is_imported(options):
    """The import takes seconds; Python writes what it imports to the error stream."""
    done = run_script(*options, python=("-X", "importtime"))
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert (done.returncode, done.stdout) == (2, "")
    assert "Traceback" not in done.stderr
    assert "argparse" in imported
    assert not imported & {"jax", "flax", "optax", "orbax"}


def test_print_config_prints_what_a_preset_and_the_options_give():
    done = run_script("--print-config", "--steps", "7", "--mesh.model", "2")
    assert (done.returncode, done.stderr) == (0, "")
    fields = json.loads(done.stdout)
    assert (fields["steps"], fields["mesh"]["model"], fields["model"]["layers"]) == (7, 2, 4)


def test_the_help_of_one_section_is_shown_alone(capsys):
    with pytest.raises(SystemExit) as exit_info:
        parse(["--help", "optimizer"])
    shown = capsys.readouterr().out
    assert exit_info.value.code == 0
    assert "--optimizer.b2" in shown
    assert "--model.layers" not in shown
    with pytest.raises(
        InputError, match=r"--help takes one of the sections mesh, model, data, .*: got models"
    ):
        parse(["--help", "models"])
