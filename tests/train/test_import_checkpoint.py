"""Tests of train/import_checkpoint.py and train/export_checkpoint.py, at last with `transformers`
at both ends.
"""

import dataclasses
import fcntl
import json
import logging
import os
import resource
import shutil
import sys

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.models.test_hugging_face import BASE, export, random_parameters
from tests.nn.conftest import make_mesh
from tests.train.data.test_tokenizer import train_tokenizer
from tests.train.runs import lines_of
from train import export_checkpoint, import_checkpoint, run, sample
from train.checkpoints.manager import Checkpoints, load_parameters
from train.config.command import load_config, load_preset, parse
from train.step.mesh import make_mesh as make_training_mesh
from train.step.trainer import Trainer

MESH = ["--mesh.platform", "auto", "--mesh.data", "2", "--mesh.model", "4"]
CONFIG = dataclasses.replace(
    BASE, vocab_size=300, layers=2, kv_heads=4, tie_embeddings=True, qk_norm=True
)


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """Where the folder and its import are made once, of which each test gets a copy."""
    return tmp_path_factory.mktemp("kept")


@pytest.fixture
def folder(kept, tmp_path, text):
    made = kept / "folder"
    if not made.exists():
        export(made, CONFIG, random_parameters(CONFIG, make_mesh(1, 1)))
        train_tokenizer(made / "tokenizer.json", text)
        change_config(made, eos_token_id=[1, 0], bos_token_id=0)
        (made / "generation_config.json").write_text('{"eos_token_id": [2, 1]}')
    return shutil.copytree(made, tmp_path / "folder")


@pytest.fixture
def imported(folder, kept, tmp_path):
    """The workdir of an import."""
    if not (kept / "run").exists():
        assert run_import(folder, kept / "run") == 0
    return shutil.copytree(kept / "run", tmp_path / "run")


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
    refuses(
        export_checkpoint.main, "FOLDER must not exist, or be an empty folder", workdir, out, *MESH
    )
    refuses(
        export_checkpoint.main,
        "must be one that is in",
        workdir,
        tmp_path / "b",
        *MESH,
        "--step",
        7,
    )
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
    assert (
        sample.main([os.path.relpath(workdir), "--prompt", "the", "--max_tokens", "1", *MESH]) == 0
    )
    assert capsys.readouterr().out.startswith("the")


def test_text_is_refused_without_the_tokenizer_of_the_import(
    folder, tmp_path, text, capsys, refuses
):
    (folder / "tokenizer.json").unlink()
    workdir = tmp_path / "run"
    assert run_import(folder, workdir) == 0
    assert "FOLDER has no tokenizer.json" in capsys.readouterr().out
    says = "nothing says how to turn it into tokens of the imported checkpoint"
    refuses(run.main, says, workdir / "preset.py", "--data.path", text)
    refuses(
        sample.main,
        "tokens of the imported checkpoint, and nothing says how",
        workdir,
        "--prompt",
        "the",
    )


def test_an_import_and_an_export_go_on_when_nobody_reads_their_output(
    folder, tmp_path, monkeypatch
):
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


def test_every_file_of_save_pretrained_is_exported_again(folder, tmp_path, capsys):
    content = {
        "added_tokens.json": '{"<x>": 1}',
        "chat_template.jinja": "{{ messages }}",
        "special_tokens_map.json": "{}",
        "additional_chat_templates/tools.jinja": "{{ tools }}",
        "tokenizer_config.json": '{"a": 1}',
        "merges.txt": "a b",
        "vocab.json": "{}",
        "tokenizer.model": "binary",
    }
    (folder / "additional_chat_templates").mkdir()
    (folder / "tokenizer").mkdir()  # no file of `save_pretrained`
    for name, text in content.items():
        (folder / name).write_text(text)
    change_config(folder, max_position_embeddings=None)
    workdir, out = tmp_path / "run", tmp_path / "out"
    assert run_import(folder, workdir) == 0, capsys.readouterr().err
    assert "separator  token 1 (<end>) ends documents\n" in capsys.readouterr().out
    assert export_checkpoint.main([str(workdir), str(out), *MESH]) == 0, capsys.readouterr().err
    assert "tokenizer  that of the import\n" in capsys.readouterr().out
    assert {name: (out / name).read_text() for name in content} == content
    kept = {
        *content,
        "tokenizer.json",
        "generation_config.json",
        "config.json",
        "model.safetensors",
    }
    assert {path.relative_to(out).as_posix() for path in out.rglob("*") if path.is_file()} == kept
    assert json.loads((out / "config.json").read_text())["max_position_embeddings"] == 32768, (
        "as the class has it"
    )


def test_the_separator_is_not_one_that_ends_turns(folder, tmp_path, capsys):
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.content }}<end>{% endfor %}"
    )
    for options, separator, stops in (([], 0, (1, 2)), (["--separator", "1"], 1, (0, 2)), (["--separator", "none"],
                                      None, (1, 0, 2))):  # fmt: skip
        workdir = tmp_path / f"run{separator}"
        assert run_import(folder, workdir, *options) == 0, capsys.readouterr().err
        config = load_preset(workdir / "preset.py")
        assert (config.data.separator, config.eval.stop_tokens) == (separator, stops)
    assert "separator  none, as --separator says" in capsys.readouterr().out


@pytest.mark.parametrize(
    "name", ["tokenizer.json", "tokenizer.extra", "additional_chat_templates/a.jinja", "vocab.json"]
)
def test_what_leads_out_of_the_folder_is_not_copied(name, folder, tmp_path, refuses):
    secret = tmp_path / "secret"
    secret.write_text("secret")
    (folder / name).unlink(missing_ok=True)
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).symlink_to(secret)
    refuses(
        import_checkpoint.main,
        f"{folder / name} leads out of the folder",
        folder,
        "--workdir",
        tmp_path / "a",
    )
    (folder / name).unlink()
    os.mkfifo(folder / name)
    refuses(
        import_checkpoint.main,
        f"{folder / name} must be a regular file",
        folder,
        "--workdir",
        tmp_path / "a",
    )
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize(("place", "workdir", "message"), [
    ("gs://bucket/x", "run", "FOLDER must be a folder of this machine, and not a URL"),
    ("folder", "gs://bucket/x", "--workdir must be a folder of this machine, and not a URL"),
    ("folder", os.fsdecode(b"r\xff"), "--workdir must have a path that is text in UTF-8"),
    ("none", "run", "none must be a folder with config.json and safetensors files"),
])  # fmt: skip
def test_places_are_checked_first(place, workdir, message, folder, tmp_path, monkeypatch, refuses):
    monkeypatch.chdir(tmp_path)
    refuses(import_checkpoint.main, message, place, "--workdir", workdir, *MESH)
    assert {path.name for path in tmp_path.iterdir()} == {"folder"}


@pytest.mark.parametrize("name", ["tokenizer.json", "hugging_face", "preset.py"])
def test_a_link_that_leads_nowhere_is_in_the_way_of_an_import(name, folder, tmp_path, refuses):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / name).symlink_to(tmp_path / "none")
    refuses(import_checkpoint.main, f"run has {name}", folder, "--workdir", tmp_path / "run", *MESH)


@pytest.mark.parametrize("kind", [
    "here", "left", "link to nothing",
    *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("folder", "link", "disk")),
])  # fmt: skip
def test_an_export_fills_a_folder_and_does_not_replace_it(
    kind, imported, tmp_path, monkeypatch, capsys
):
    """A mount point cannot be replaced, and neither can the folder in which a shell is."""
    target = named = tmp_path / "out"
    if kind.startswith("link"):
        named = tmp_path / "link"
        named.symlink_to(target)
    if kind != "link to nothing":
        target.mkdir()
    if kind == "here":
        monkeypatch.chdir(target)
        named = "."
    if kind == "disk":
        (target / "lost+found").mkdir()
    if kind == "left":
        (target / ".export-x").mkdir()
        (target / ".export-x" / "model.safetensors").touch()
    before = target.stat().st_ino if target.exists() else None
    assert export_checkpoint.main([str(imported), str(named), *MESH]) == 0, capsys.readouterr().err
    assert before in (None, target.stat().st_ino)
    assert not list(tmp_path.rglob(".export-*"))
    assert {path.name for path in target.iterdir()} - {"lost+found"} == {
        "config.json", "generation_config.json", "model.safetensors", "tokenizer.json"
    }  # fmt: skip


def test_a_folder_that_another_export_fills_is_refused(imported, tmp_path, refuses):
    (tmp_path / "out" / ".export-x").mkdir(parents=True)
    held = os.open(tmp_path / "out", os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    refuses(export_checkpoint.main, "another export is writing", imported, tmp_path / "out", *MESH)
    assert (tmp_path / "out" / ".export-x").exists()
    os.close(held)


@pytest.mark.parametrize(("name", "message"), [
    ("gs://bucket/x", "FOLDER must be a folder of this machine, and not a URL"),
    (os.fsdecode(b"r\xff"), "FOLDER must have a path that is text in UTF-8"),
    ("run", "FOLDER must not exist, or be an empty folder: "),
    ("/proc/none", "FOLDER must be one that can be made: /proc/none: "),
])  # fmt: skip
def test_the_place_of_an_export_is_checked_before_parameters_are_read(
    name, message, imported, tmp_path, monkeypatch, refuses
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("train.checkpoints.manager.load_parameters", None)
    refuses(export_checkpoint.main, message, imported, name, *MESH)


def test_a_configuration_that_was_damaged_after_the_import_is_refused_first(
    imported, tmp_path, monkeypatch, refuses
):
    monkeypatch.setattr("train.checkpoints.manager.load_parameters", None)
    (imported / "hugging_face" / "config.json").write_text("[" * 10**5)
    refuses(
        export_checkpoint.main,
        "config.json is nested too deeply",
        imported,
        tmp_path / "out",
        *MESH,
    )
    assert not (tmp_path / "out").exists()


def test_the_tokenizer_of_a_run_is_exported(imported, tmp_path, text, capsys):
    """It stands above that of the import, of which nothing is left then."""
    config, other = load_preset(imported / "preset.py"), tmp_path / "other.json"
    train_tokenizer(other, text, vocab_size=290)
    tokens = dataclasses.replace(config.data, tokenizer=str(other), separator=1)
    changed = dataclasses.replace(
        config, data=tokens, eval=dataclasses.replace(config.eval, stop_tokens=(0,))
    )
    (imported / "config.json").write_text(json.dumps(dataclasses.asdict(changed)))
    (imported / "checkpoints").symlink_to("imported")
    assert export_checkpoint.main([str(imported), str(tmp_path / "out"), *MESH]) == 0, (
        capsys.readouterr().err
    )
    assert f"tokenizer  {other} as tokenizer.json" in capsys.readouterr().out
    names = {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert {path.name for path in (tmp_path / "out").iterdir()} == names
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == other.read_bytes()
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written["eos_token_id"] == [1, 0]
    assert "bos_token_id" not in written
    assert (
        json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())["eos_token"] == "<end>"
    )
    other.unlink()
    assert export_checkpoint.main([str(imported), str(tmp_path / "again"), *MESH]) == 0
    assert "tokenizer  that of the import" in capsys.readouterr().out


def interrupt(*_):
    raise KeyboardInterrupt


def test_an_import_onto_a_full_disk_leaves_nothing_and_can_be_repeated(
    folder, tmp_path, monkeypatch, capsys
):
    """The limit on the size of files makes the system write a part of the preset, and refuse the
    rest of it.
    """
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
    existed, imported, tmp_path, monkeypatch, capsys
):
    out = tmp_path / "out"
    if existed:
        out.mkdir()
    with monkeypatch.context() as patch:
        # the tensors have just been written
        patch.setattr(export_checkpoint.shutil, "copy2", interrupt)
        assert export_checkpoint.main([str(imported), str(out), *MESH]) == 130
    assert "error: interrupted. Nothing was exported" in capsys.readouterr().err
    assert out.exists() == existed
    assert not existed or not list(out.iterdir())
    assert export_checkpoint.main([str(imported), str(out), *MESH]) == 0


def test_reading_a_checkpoint_says_nothing(imported, caplog):
    """The package that reads it would otherwise log a warning for each of its options that reading
    does not use.
    """
    logging.getLogger("absl").setLevel(logging.NOTSET)
    with Checkpoints(imported / "imported", read_only=True):
        pass
    assert not caplog.records


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_from_transformers_and_back(tmp_path, text, capsys):
    """A checkpoint of `transformers` is imported, trained on, sampled, exported, and loaded there
    again.
    """
    import torch
    import transformers

    folder, workdir, out = tmp_path / "llama", tmp_path / "run", tmp_path / "out"
    config = transformers.LlamaConfig(
        vocab_size=304,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        bos_token_id=0,
        eos_token_id=1,
        max_position_embeddings=64,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    train_tokenizer(folder / "tokenizer.json", text)

    assert run_import(folder, workdir) == 0
    options = [
        "--data.path",
        text,
        "--data.sequence_length",
        16,
        "--data.batch_size",
        8,
        "--steps",
        20,
        "--eval.every",
        20,
        "--optimizer.warmup_steps",
        2,
        "--optimizer.learning_rate",
        3e-3,
        "--report.every",
        1,
    ]
    assert run.main([str(workdir / "preset.py"), *map(str, options)]) == 0
    losses = [line["loss"] for line in lines_of(workdir)]
    assert len(losses) == 20
    assert losses[-1] < losses[0] - 0.5, "it learns"

    capsys.readouterr()
    assert (
        sample.main(
            [str(workdir), "--prompt", "the quick", "--temperature", "0", "--max_tokens", "24"]
        )
        == 0
    )
    shown = capsys.readouterr().out
    assert shown.startswith("the quick")
    drawn = [str(workdir), "--prompt", "the", "--top_p", "0.9", "--max_tokens", "20"]
    assert sample.main(drawn) == 0
    assert capsys.readouterr().out.startswith("the")

    assert export_checkpoint.main([str(workdir), str(out), *MESH]) == 0
    model = transformers.AutoModelForCausalLM.from_pretrained(out).eval()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(out / "tokenizer.json"))
    tokens = tokenizer("the quick", return_tensors="pt").input_ids
    assert model.config.eos_token_id == 1
    with torch.no_grad():
        likely = model.generate(tokens, max_new_tokens=24, do_sample=False, pad_token_id=0)[0]
    assert tokenizer.decode(likely, skip_special_tokens=True).rstrip() == shown.rstrip()

    config = load_config(workdir)
    mesh = make_training_mesh(config.mesh)
    length = tokens.shape[1]
    # it is causal: this changes nothing
    padded = np.pad(tokens.numpy().astype(np.int32), ((0, 1), (0, 16 - length)))
    with jax.set_mesh(mesh):
        trainer = Trainer(config, mesh)
        params, path = load_parameters(workdir, config, trainer)
        logits = jax.jit(lambda params, tokens: trainer.model(params)(tokens))(
            params, jax.device_put(padded, jax.P("data"))
        )
    assert path.name == "20"
    with torch.no_grad():
        np.testing.assert_allclose(
            np.asarray(logits)[:1, :length], model(tokens).logits.numpy(), atol=1e-4
        )
