"""Tests of train/import_checkpoint.py and train/export_checkpoint.py, at last with `transformers` at both ends."""

import dataclasses
import json
import logging
import os
import re
import resource
import sys

import jax
import jax.numpy as jnp
import pytest
from safetensors.numpy import load_file

from tests.models.test_hugging_face import BASE, export, random_parameters
from tests.nn.conftest import make_mesh
from tests.train.data.test_tokenizer import train_tokenizer
from tests.train.runs import lines_of
from train import export_checkpoint, import_checkpoint, run, sample
from train.checkpoints.manager import Checkpoints, load_parameters
from train.checkpoints.record import RunIdentity, architecture
from train.config.command import load_config, load_preset, parse
from train.step.mesh import make_mesh as make_training_mesh
from train.step.trainer import Trainer, TrainState

MESH = ["--mesh.platform", "auto", "--mesh.data", "2", "--mesh.model", "4"]
CONFIG = dataclasses.replace(BASE, vocab_size=300, layers=2, kv_heads=4, tie_embeddings=True, qk_norm=True)


@pytest.fixture
def folder(tmp_path, text):
    folder = tmp_path / "folder"
    export(folder, CONFIG, random_parameters(CONFIG, make_mesh(1, 1)))
    train_tokenizer(folder / "tokenizer.json", text)
    change_config(folder, eos_token_id=[1, 0], bos_token_id=0)
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 1]}')
    return folder


def change_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def run_import(folder, workdir, *options):
    return import_checkpoint.main([str(folder), "--workdir", str(workdir), *MESH, *options])


def test_an_import_is_exported_with_equal_tensors(folder, tmp_path, capsys, refuses):
    workdir, out = tmp_path / "run", tmp_path / "out"
    assert run_import(folder, workdir) == 0, capsys.readouterr().err
    assert "imported 100%" in capsys.readouterr().out
    config = load_preset(workdir / "preset.py")
    assert config == load_config(workdir)
    assert config.model == CONFIG
    assert (config.data.separator, config.eval.stop_tokens) == (1, (0, 2))
    assert config.data.tokenizer == str(workdir / "tokenizer.json")
    assert export_checkpoint.main([str(workdir), str(out), *MESH]) == 0, capsys.readouterr().err
    assert "exported 100%" in capsys.readouterr().out
    before, after = (load_file(place / "model.safetensors") for place in (folder, out))
    assert before.keys() == after.keys()
    assert all((before[name] == after[name]).all() for name in before)
    assert (out / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()
    given, written = (json.loads((place / "config.json").read_text()) for place in (folder, out))
    assert {name for name in given if given[name] != written[name]} <= {"max_position_embeddings"}

    again = (folder, "--workdir", workdir, *MESH)
    refuses(import_checkpoint.main, "--workdir must have no import or run: ", *again)
    refuses(export_checkpoint.main, "FOLDER must not exist, or be an empty folder", workdir, out, *MESH)
    refuses(export_checkpoint.main, "must be a step that is in", workdir, tmp_path / "b", *MESH, "--step", 7)
    (file := tmp_path / "file").touch()
    says = f"FOLDER must be one that can be made: {file / 'out'}: File exists"
    refuses(export_checkpoint.main, says, workdir, file / "out", *MESH)


@pytest.mark.slow
def test_an_import_can_be_used_from_any_directory_and_moved(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert run_import(folder, "run") == 0
    monkeypatch.chdir(folder)
    (tmp_path / "run").rename(tmp_path / "moved")
    workdir = tmp_path / "moved"
    config = parse([os.path.relpath(workdir / "preset.py")]).config
    assert config.workdir == str(workdir)
    assert config.init_from == str(workdir / "imported")
    assert config.data.tokenizer == str(workdir / "tokenizer.json")
    capsys.readouterr()
    assert sample.main([os.path.relpath(workdir), "--prompt", "the", "--max_tokens", "1", *MESH]) == 0
    assert capsys.readouterr().out.startswith("the")


def test_text_is_refused_without_the_tokenizer_of_the_import(folder, tmp_path, text, capsys, refuses):
    (folder / "tokenizer.json").unlink()
    workdir = tmp_path / "run"
    assert run_import(folder, workdir) == 0
    assert "FOLDER has no tokenizer.json" in capsys.readouterr().out
    says = "nothing says how to turn it into tokens of the imported checkpoint"
    refuses(run.main, says, workdir / "preset.py", "--data.path", text)
    refuses(sample.main, "tokens of the imported checkpoint, and nothing says how", workdir, "--prompt", "the")


def test_an_import_and_an_export_go_on_when_nobody_reads_their_output(folder, tmp_path, monkeypatch):
    workdir, out = tmp_path / "run", tmp_path / "out"
    for command, arguments in (
        (import_checkpoint, [folder, "--workdir", workdir]),
        (export_checkpoint, [workdir, out]),
    ):
        reading, writing = os.pipe()
        os.close(reading)
        with open(writing, "w") as unread, monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", unread)
            assert command.main([*map(str, arguments), *MESH]) == 0
    assert (workdir / "preset.py").is_file()
    assert (out / "config.json").is_file()


@pytest.mark.slow
def test_the_parameters_that_validation_uses_are_exported(folder, tmp_path, capsys):
    workdir = tmp_path / "run"
    assert run_import(folder, workdir) == 0
    save_with_running_mean(workdir)
    for name, options, factor, which in (
        ("mean", [], 2, "the running mean of the parameters of"),
        ("trained", ["--parameters", "trained"], 1, "the parameters of"),
    ):
        capsys.readouterr()
        assert export_checkpoint.main([str(workdir), str(tmp_path / name), *MESH, *options]) == 0
        assert f"exported   {which} " in capsys.readouterr().out
        before, after = (load_file(place / "model.safetensors") for place in (folder, tmp_path / name))
        assert all((factor * before[key] == after[key]).all() for key in before)


def save_with_running_mean(workdir):
    """Saves the imported parameters as those of step 7, with a running mean of twice their values."""
    config = load_config(workdir)
    mesh = make_training_mesh(config.mesh)
    with jax.set_mesh(mesh), Checkpoints(workdir / "checkpoints", keep=1) as checkpoints:
        params, _, _ = load_parameters(workdir, config, Trainer(config, mesh))
        state = TrainState(
            params, None, jnp.int32(7), jax.random.key_data(jax.random.key(0)), jax.tree.map(lambda x: 2 * x, params)
        )
        identity = RunIdentity({}, {}, architecture(config))
        checkpoints.save(7, state, data={"sequences": 0}, tokens=0, identity=identity)
        checkpoints.wait()


@pytest.mark.parametrize(("changes", "message"), [
    ({"model_type": "mamba"}, "model_type 'mamba', which is not supported"),
    ({"vocab_size": 200}, "FOLDER/tokenizer.json must match the vocabulary"),
    ({"hidden_size": 24}, "and must be [300, 24]"),
    ({"eos_token_id": "</s>"}, "must be a token or a list of tokens: got '</s>'"),
    ({"eos_token_id": 300}, "data.separator must be a token below model.vocab_size=300: got 300"),
    ({"intermediate_size": 26}, "got mlp_width=26 on 4 devices"),
])  # fmt: skip
def test_a_folder_that_cannot_be_imported_is_refused(folder, tmp_path, changes, message, refuses):
    change_config(folder, **changes)
    refuses(import_checkpoint.main, message, folder, "--workdir", tmp_path / "run", *MESH)
    assert not (tmp_path / "run" / "preset.py").exists()
    assert not (tmp_path / "run" / "imported").exists()


def interrupt(*_):
    raise KeyboardInterrupt


def test_an_import_onto_a_full_disk_leaves_nothing_and_can_be_repeated(folder, tmp_path, monkeypatch, capsys):
    """The limit on the size of files makes the system write a part of the preset, and refuse the rest of it."""
    workdir = tmp_path / "run"
    limits, as_preset = resource.getrlimit(resource.RLIMIT_FSIZE), import_checkpoint.as_preset

    def limited(*arguments):
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
        return as_preset(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(import_checkpoint, "as_preset", limited)
        try:
            assert run_import(folder, workdir) == 74
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "Nothing was imported" in capsys.readouterr().err
    assert {path.name for path in workdir.iterdir()} == {".lock"}
    assert run_import(folder, workdir) == 0


def test_what_is_left_of_an_import_that_was_killed_is_removed(folder, tmp_path):
    (tmp_path / "run" / ".import-x" / "imported").mkdir(parents=True)
    assert run_import(folder, tmp_path / "run") == 0
    assert not (tmp_path / "run" / ".import-x").exists()


@pytest.mark.parametrize("existed", [False, True])
def test_an_export_that_is_interrupted_leaves_nothing_and_can_be_repeated(
    existed, folder, tmp_path, monkeypatch, capsys
):
    workdir, out = tmp_path / "run", tmp_path / "out"
    assert run_import(folder, workdir) == 0
    if existed:
        out.mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(export_checkpoint.shutil, "copy2", interrupt)  # the tensors have just been written
        assert export_checkpoint.main([str(workdir), str(out), *MESH]) == 130
    assert "error: interrupted. Nothing was exported" in capsys.readouterr().err
    assert out.exists() == existed
    assert not existed or not list(out.iterdir())
    assert export_checkpoint.main([str(workdir), str(out), *MESH]) == 0


def test_reading_a_checkpoint_says_nothing(folder, tmp_path, caplog):
    """The package that reads it would otherwise log a warning for each of its options that reading does not use."""
    assert run_import(folder, tmp_path / "run") == 0
    logging.getLogger("absl").setLevel(logging.NOTSET)
    with Checkpoints(tmp_path / "run" / "imported", read_only=True):
        pass
    assert not caplog.records


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_from_transformers_and_back(tmp_path, text, capsys):
    """A checkpoint of `transformers` is imported, trained on, sampled, exported, and loaded there again."""
    import torch
    import transformers

    folder, workdir, out = tmp_path / "llama", tmp_path / "run", tmp_path / "out"
    config = transformers.LlamaConfig(
        vocab_size=304, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=8,
        num_key_value_heads=4, bos_token_id=0, eos_token_id=1, max_position_embeddings=64,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    train_tokenizer(folder / "tokenizer.json", text)

    assert run_import(folder, workdir) == 0
    options = [
        "--data.path", text, "--data.sequence_length", 16, "--data.batch_size", 8, "--steps", 20, "--eval.every", 20,
        "--optimizer.warmup_steps", 2, "--optimizer.learning_rate", 3e-3, "--eval.sample_tokens", 8,
        "--report.every", 1,
    ]  # fmt: skip
    assert run.main([str(workdir / "preset.py"), *map(str, options)]) == 0
    losses = [line["loss"] for line in lines_of(workdir)]
    assert len(losses) == 20
    assert losses[-1] < losses[0] - 0.5, "it learns"
    assert "\u2502" in (workdir / "sample.txt").read_text()

    capsys.readouterr()
    assert sample.main([str(workdir), "--prompt", "the quick", "--temperature", "0", "--max_tokens", "24"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("the quick")
    assert sample.main([str(workdir), "--prompt", "the", "--batch", "2", "--top_p", "0.9", "--max_tokens", "20"]) == 0
    assert re.match(r"--- 1\nthe(.|\n)*\n--- 2\nthe", capsys.readouterr().out)

    assert export_checkpoint.main([str(workdir), str(out), *MESH]) == 0
    model = transformers.AutoModelForCausalLM.from_pretrained(out).eval()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(out / "tokenizer.json"))
    tokens = tokenizer("the quick", return_tensors="pt").input_ids
    assert model.config.eos_token_id == 1
    with torch.no_grad():
        likely = model.generate(tokens, max_new_tokens=24, do_sample=False, pad_token_id=0)[0]
    assert tokenizer.decode(likely, skip_special_tokens=True).rstrip() == shown.rstrip()
