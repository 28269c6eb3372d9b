"""Random damages of a folder: an import refuses it in one paragraph, or imports exactly what the
folder has.

`DAMAGES=300 pytest -m slow` on this file tries more of them.
"""

import contextlib
import io
import json
import multiprocessing
import os
import random
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import tests.conftest  # noqa: F401  the settings of a test process
from models.config import TransformerConfig
from models.config_json import read_config
from tests.models.test_hugging_face import CONFIGS, export, random_parameters
from tests.nn.conftest import make_mesh
from tests.train.data.test_tokenizer import train_tokenizer
from tests.train.test_import_checkpoint import CONFIG, change_config
from train import import_checkpoint
from train.checkpoints.manager import load_parameters
from train.config.command import load_preset
from train.step.mesh import make_mesh as make_training_mesh
from train.step.trainer import Trainer

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::ResourceWarning")]

MOST_MEMORY = 2 << 30  # bytes that one process takes for all of them
ONE_DEVICE = ["--mesh.platform", "auto", "--mesh.data", "8", "--mesh.model", "1"]
INDEX = "model.safetensors.index.json"
JSON_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    INDEX,
)
VALUES = (
    None,
    True,
    False,
    0,
    -1,
    1,
    2,
    7,
    2**31,
    10**13,
    4_000_000_000,
    1e400,
    -0.5,
    1e-300,
    "",
    "x",
    "../../x",
    "/etc/passwd",
    "a\nb",
    "\0",
    [],
    [[]],
    [None],
    {},
    {"a": {}},
    [1] * 50,
    {"rope_type": "llama3"},
    {"rope_type": [], "factor": "8"},
)
TEXTS = (
    "",
    "[",
    "{}",
    "[]",
    "null",
    "5",
    '"x"',
    "[" * 100_000,
    '{"a":' * 5000,
    "1" * 5000,
    '{"a": NaN}',
    "\ufeff{}",
    '"\\ud800"',
)


def one_folder(folder, kind, text):
    """Writes a folder with one file of tensors, with several, or with another family."""
    config = CONFIGS["gemma2"] if kind == "gemma2" else CONFIG
    params = random_parameters(config, make_mesh(1, 1))
    export(folder, config, params, shard_bytes=10**9 if kind == "single" else 8000)
    if kind != "gemma2":
        train_tokenizer(folder / "tokenizer.json", text)
    change_config(folder, eos_token_id=[1, 0], bos_token_id=0, pad_token_id=None)
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 1]}')
    (folder / "tokenizer_config.json").write_text(
        '{"eos_token": "<end>", "added_tokens_decoder": {}}'
    )
    (folder / "chat_template.jinja").write_text("{{ messages }}<end>")


def change_json(rng, file):
    """Removes or replaces one value, at any depth."""
    content = json.loads(file.read_text())
    place = content
    for _ in range(rng.randrange(4)):
        inner = [value for value in (place.values() if isinstance(place, dict) else place)
                 if isinstance(value, (dict, list)) and value]  # fmt: skip
        if not inner:
            break
        place = rng.choice(inner)
    key = rng.choice(list(place) if isinstance(place, dict) else range(len(place)))
    if rng.random() < 0.3:
        del place[key]
        said = f"without {key}"
    else:
        place[key] = rng.choice(VALUES)
        said = f"{key}: {place[key]!r:.40}"
    file.write_text(json.dumps(content))
    return f"{file.name} {said}"


def change_tensors(rng, file):
    tensors = load_file(file)
    name = rng.choice(sorted(tensors))
    how = rng.choice(["lost", "surplus", "shape", "type", "renamed", "scalar"])
    if how in ("lost", "renamed"):
        lost = tensors.pop(name)
        if how == "renamed":
            tensors[name.replace("1", "10**9")] = lost
    elif how == "surplus":
        tensors |= {f"surplus.{i}\n": np.zeros(1, np.float32) for i in range(rng.choice([1, 3000]))}
    elif how == "shape":
        tensors[name] = np.ascontiguousarray(tensors[name][..., :-1])
    elif how == "type":
        tensors[name] = tensors[name].astype(np.int8)
    else:
        tensors[name] = np.float32(1)
    save_file({key: np.asarray(value) for key, value in tensors.items()}, file)
    return f"{file.name} {how} {name}"


def replace(rng, file, outside):
    """Puts something else than a file in the place of one."""
    kind = rng.choice(["nothing", "pipe", "folder", "loop", "outside", "device", "sparse"])
    file.unlink()
    if kind == "pipe":
        os.mkfifo(file)
    elif kind == "folder":
        file.mkdir()
    elif kind == "loop":
        file.symlink_to(file)
    elif kind == "outside":
        file.symlink_to(outside)
    elif kind == "device":
        file.symlink_to("/dev/zero")
    elif kind == "sparse":
        with open(file, "wb") as sparse:
            sparse.truncate(1 << 40)
    return f"{kind} for {file.name}"


def damage(rng, folder, outside):
    """Damages a folder in a random way, and says how."""
    files = sorted(path for path in folder.iterdir() if path.is_file())
    file = rng.choice(files)
    how = rng.randrange(8)
    if how < 3:
        return change_json(
            rng, folder / rng.choice([name for name in JSON_FILES if (folder / name).exists()])
        )
    if how == 3:
        return change_tensors(rng, rng.choice(sorted(folder.glob("*.safetensors"))))
    if how == 4:
        return replace(rng, file, outside)
    if how == 5:
        file = folder / rng.choice([name for name in JSON_FILES if (folder / name).exists()])
        text = rng.choice(TEXTS)
        file.write_bytes(text.encode())
        return f"{file.name} is {text!r:.40}"
    content = bytearray(file.read_bytes())
    if how == 6:
        del content[rng.randrange(len(content)) :]
    else:  # in its header, because nothing tells whether a value of a tensor was changed
        for _ in range(rng.choice([1, 10])):
            content[
                rng.randrange(min(len(content), 2000 if file.suffix == ".safetensors" else 10**6))
            ] = rng.randrange(256)
    file.write_bytes(content)
    return f"{file.name} {'cut' if how == 6 else 'changed'}"


def tensors_of(folder):
    """Returns all tensors of a folder as its index and its files say, if the package reads them."""
    if (folder / "model.safetensors").is_file():
        return load_file(folder / "model.safetensors")
    index = json.loads((folder / INDEX).read_text())["weight_map"]
    found = {}
    for file in folder.glob("model-*.safetensors"):
        found |= {
            name: value
            for name, value in load_file(file).items()
            if index.get(name, file.name) == file.name
        }
    return found


def assert_exact(folder, workdir):
    """Compares an import with its folder: the configuration, the embeddings and one kernel of each
    layer.
    """
    config = load_preset(workdir / "preset.py")
    given = json.loads((folder / "config.json").read_text())
    assert config.model == TransformerConfig(**read_config(given)[1])
    mesh = make_training_mesh(config.mesh)
    with jax.set_mesh(mesh):
        params, _ = load_parameters(workdir, config, Trainer(config, mesh))
    tensors = tensors_of(folder)
    np.testing.assert_array_equal(
        params["embed"]["embedding"], tensors["model.embed_tokens.weight"]
    )
    np.testing.assert_array_equal(params["final_norm"]["scale"], tensors["model.norm.weight"])
    for layer, kernel in enumerate(np.asarray(params["layers"]["mlp"]["up"]["kernel"])):
        np.testing.assert_array_equal(kernel, tensors[f"model.layers.{layer}.mlp.up_proj.weight"].T)


def peak_memory():
    """Returns the most bytes that this program had resident; `ru_maxrss` begins with those of the
    test process.
    """
    (line,) = (
        line
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith("VmHWM:")
    )
    return int(line.split()[1]) * 1024


def import_damaged_folders(kind, tmp_path, text):
    """Damages a folder again and again, imports it, and says what was wrong first. A process of its
    own runs it.
    """
    folder = tmp_path / "folder"
    workdir = tmp_path / "run"
    outside = tmp_path / "outside"
    outside.write_text("{}")
    one_folder(tmp_path / "whole", kind, text)
    codes = []
    for seed in range(int(os.environ.get("DAMAGES", "60")) // 3):
        shutil.copytree(tmp_path / "whole", folder)
        how = damage(random.Random(f"{kind} {seed}"), folder, outside)
        with contextlib.redirect_stderr(io.StringIO()) as printed:
            code = import_checkpoint.main([str(folder), "--workdir", str(workdir), *ONE_DEVICE])
        err = printed.getvalue()
        assert code in (0, 2), (seed, how, err)
        assert err.count("\n") == (code == 2), (seed, how, err)
        assert len(err) < 5000, (seed, how, err)
        if code == 0:
            assert_exact(folder, workdir)
        else:
            assert err.startswith("error: ")
            assert not (workdir / "preset.py").exists(), (seed, how)
        codes.append(code)
        shutil.rmtree(workdir, ignore_errors=True)
        shutil.rmtree(folder)
    assert {0, 2} == set(codes)
    assert peak_memory() < MOST_MEMORY


@pytest.mark.parametrize("kind", ["single", "shards", "gemma2"])
def test_damaged_folders_are_refused_or_read_exactly(kind, tmp_path, text):
    """Each kind has its own process, because the peak memory of a process includes what earlier
    tests took.
    """
    arguments = kind, tmp_path, text
    process = multiprocessing.get_context("spawn").Process(
        target=import_damaged_folders, args=arguments
    )
    process.start()
    process.join()
    assert process.exitcode == 0
