"""Folders of other people: which files are read, which tensors count, and what is refused before
anything is made.
"""

import dataclasses
import json
import os
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from models.config_json import read_config
from models.families import FAMILIES
from models.foreign_folder import checked_file, listed, require_local_folder, shown
from models.hugging_face import import_parameters, load_config
from models.safetensors_files import TensorFiles
from models.sizes import check_sizes
from tests.models.test_hugging_face import (
    CONFIGS,
    abstract,
    export,
    import_again,
    random_parameters,
)
from tests.nn.conftest import make_mesh

INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def parameters():
    return random_parameters(CONFIGS["qwen3"], make_mesh(1, 1))


@pytest.fixture
def folder(tmp_path, parameters):
    """A folder with one file of tensors."""
    export(tmp_path / "folder", CONFIGS["qwen3"], parameters)
    return tmp_path / "folder"


@pytest.fixture
def shards(tmp_path, parameters):
    """A folder with several files of tensors and their index."""
    export(tmp_path / "shards", CONFIGS["qwen3"], parameters, shard_bytes=8000)
    return tmp_path / "shards"


def change_index(folder, change):
    content = json.loads((folder / INDEX).read_text())
    change(content["weight_map"])
    (folder / INDEX).write_text(json.dumps(content))


def change_config(folder, **changes):
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(content | changes))


def as_in_the_cache(folder, root):
    """Makes a folder of links, as Hugging Face's cache has one for each snapshot, and returns
    it.
    """
    snapshot, blobs = root / "models--a--b" / "snapshots" / "0123", root / "models--a--b" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, file in enumerate(sorted(folder.iterdir())):
        (blobs / f"{number:040x}").write_bytes(file.read_bytes())
        (snapshot / file.name).symlink_to(f"../../blobs/{number:040x}")
    return snapshot


def test_the_cache_of_hugging_face_is_read(shards, tmp_path):
    for place in (shards, as_in_the_cache(shards, tmp_path)):
        assert TensorFiles(place).shapes == TensorFiles(shards).shapes
        assert load_config(place)[0].model_type == "qwen3"
    (tmp_path / "elsewhere").symlink_to(tmp_path / "models--a--b" / "snapshots" / "0123")
    assert TensorFiles(tmp_path / "elsewhere").shapes == TensorFiles(shards).shapes


def test_a_snapshot_may_not_lead_out_of_its_cache(shards, tmp_path):
    snapshot = as_in_the_cache(shards, tmp_path)
    secret = tmp_path / "secret"
    secret.write_text("{}")
    for target in (secret, tmp_path / "models--a--b" / "refs" / "main"):
        target.parent.mkdir(exist_ok=True)
        target.write_text("{}")
        (snapshot / "config.json").unlink()
        (snapshot / "config.json").symlink_to(target)
        with pytest.raises(
            ValueError, match=r"config.json leads out of the folder, to .*; copy that file"
        ):
            load_config(snapshot)


@pytest.mark.parametrize(
    "name", ["../secret", "/etc/passwd", "a/../../secret", "", "a\0b", "x\n" * 300]
)
def test_a_name_that_leads_out_of_the_folder_is_refused(name, shards):
    (shards.parent / "secret").write_bytes(sorted(shards.glob("*.safetensors"))[0].read_bytes())
    change_index(shards, lambda index: index.update({next(iter(index)): name}))
    with pytest.raises(
        ValueError, match=rf"which {INDEX} names,? (must be|cannot be read)"
    ) as raised:
        TensorFiles(shards)
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < 1000


def test_links_and_pipes_are_refused(shards, tmp_path):
    first = sorted(shards.glob("*.safetensors"))[0]
    first.rename(tmp_path / "outside")
    first.symlink_to(tmp_path / "outside")
    with pytest.raises(
        ValueError, match=rf"{first.name}, which {INDEX} names, leads out of the folder"
    ):
        TensorFiles(shards)
    for kind, make in (
        ("pipe", os.mkfifo),
        ("folder", os.mkdir),
        ("loop", lambda path: os.symlink(path, path)),
    ):
        first.unlink() if kind != "loop" else first.rmdir()
        make(first)
        with pytest.raises(
            ValueError, match=r"must be a regular file, and is none|Too many levels"
        ):
            TensorFiles(shards)
    first.unlink()
    first.symlink_to(sorted(shards.glob("*.safetensors"))[1].name)  # inside the folder
    with pytest.raises(ValueError, match=rf"{first.name} lacks .*, which the index says is in it"):
        TensorFiles(shards)


def test_the_single_file_stands_above_an_index_beside_it(folder, shards, parameters):
    """As in `transformers`: the index is what an older version of the model has left."""
    (stale := dict(load_file(folder / "model.safetensors")))["model.norm.weight"] += 1
    save_file(stale, shards / "model.safetensors")
    files = TensorFiles(shards)
    assert files.unused == [INDEX]
    np.testing.assert_array_equal(
        files.read("model.norm.weight", (slice(None),)), stale["model.norm.weight"]
    )
    assert TensorFiles(folder).unused == []


def test_shards_without_an_index_are_named(shards):
    (shards / INDEX).unlink()
    with pytest.raises(
        ValueError, match=r"; which tensors model-00001-of-.* should have is not known without"
    ):
        TensorFiles(shards)


def test_an_index_without_shards_and_one_of_another_format(shards):
    (shards / "pytorch_model.bin.index.json").write_text("{}")  # the other index does not count
    TensorFiles(shards)
    for shard in shards.glob("*.safetensors"):
        shard.unlink()
    with pytest.raises(ValueError, match=r"model-00001-of-\d+.safetensors is missing"):
        TensorFiles(shards)


def test_the_index_says_which_of_two_tensors_is_right(shards):
    """A tensor that stands in two files is that of the file which the index names, whatever their
    order.
    """
    first, *_, last = sorted(shards.glob("*.safetensors"))
    index = json.loads((shards / INDEX).read_text())["weight_map"]
    for right, wrong in ((first, last), (last, first)):
        name = next(name for name, file in index.items() if file == right.name)
        before = load_file(right)[name]
        tensors = load_file(wrong)
        save_file(tensors | {name: before + 1}, wrong)
        got = TensorFiles(shards).read(name, (slice(None),) * before.ndim)
        np.testing.assert_array_equal(got, before)
    change_index(shards, lambda index: index.pop(name))
    with pytest.raises(
        ValueError,
        match=f"{name} is in .* and .*, and the index does not say which of them is right",
    ):
        TensorFiles(shards)


def test_a_tensor_that_the_index_does_not_list_is_read(shards):
    change_index(shards, lambda index: index.pop("model.norm.weight"))
    assert TensorFiles(shards).shapes["model.norm.weight"] == (16,)


@pytest.mark.parametrize(
    "content", ["[]", "{}", '{"weight_map": []}', '{"weight_map": {}}', '{"weight_map": {"a": 1}}']
)
def test_an_index_that_is_none_is_refused(content, shards):
    (shards / INDEX).write_text(content)
    with pytest.raises(ValueError, match=f"{INDEX} is not an index of tensors: it must have"):
        TensorFiles(shards)


def test_an_index_of_many_tensors_is_read_in_linear_time(tmp_path):
    """The processor time is compared with that of parsing the file, so that the machine does not
    matter.
    """
    names = [f"model.layers.{i}.self_attn.q_proj.weight" for i in range(200_000)]
    index = dict.fromkeys(names, "model-1.safetensors") | {"x": "none.safetensors"}
    text = json.dumps({"weight_map": index})
    (tmp_path / INDEX).write_text(text)
    begin = time.process_time()
    json.loads(text)
    parsing = time.process_time() - begin
    save_file({"a": np.zeros(1, np.float32)}, tmp_path / "model-1.safetensors")
    begin = time.process_time()
    with pytest.raises(
        ValueError, match=r"which the index says is in it; .*; and 199,991 more$"
    ) as raised:
        TensorFiles(tmp_path)
    assert time.process_time() - begin < 100 * parsing
    assert len(str(raised.value)) < 5000


def test_surplus_tensors_are_counted_and_not_listed(folder):
    tensors = load_file(folder / "model.safetensors")
    save_file(
        tensors | {f"surplus.{i}": np.zeros(1, np.float32) for i in range(2000)},
        folder / "model.safetensors",
    )
    with pytest.raises(
        ValueError, match=r"left over: surplus.0 \[1\]; .*; and 1,990 more$"
    ) as raised:
        import_again(folder, make_mesh(1, 1))
    assert str(raised.value).count("left over") == 10


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"num_hidden_layers": 10**13},
            "num_hidden_layers=10000000000000 must be at most 2147483647",
        ),
        (
            {"num_hidden_layers": 10**9},
            "num_hidden_layers is 1,000,000,000 and must be at most 3, the number of layers",
        ),
        (
            {"vocab_size": 10**9},
            "vocab_size is 1,000,000,000 and must be at most 480, the number of values of "
            "model.embed",
        ),
        (
            {"num_attention_heads": 10**6, "hidden_size": 10**7},
            "hidden_size is 10,000,000 and must be at most 480",
        ),
        (
            {"intermediate_size": 10**9},
            "must be at most 384, the number of values of model.layers.0.mlp.gate_proj.weight",
        ),
        ({"head_dim": None, "rms_norm_eps": 10**200}, "rms_norm_eps=1000.* must be at most 3e"),
        (
            {"max_position_embeddings": "64"},
            "max_position_embeddings='64' must be an integer above 0, or null",
        ),
    ],
)
def test_sizes_are_compared_with_the_files_before_anything_is_made(changes, message, folder):
    change_config(folder, **changes)
    with pytest.raises(ValueError, match=message):
        check_sizes(TensorFiles(folder), *load_config(folder))


def test_a_default_that_does_not_fit_says_that_it_is_one(folder):
    content = json.loads((folder / "config.json").read_text())
    del content["num_hidden_layers"]
    (folder / "config.json").write_text(json.dumps(content))
    with pytest.raises(
        ValueError,
        match=r"num_hidden_layers is 32, the default where config.json lacks it, and must",
    ):
        check_sizes(TensorFiles(folder), *load_config(folder))


@pytest.mark.parametrize("name", CONFIGS)
def test_the_sizes_of_every_family_fit_their_files(name, tmp_path):
    export(tmp_path, CONFIGS[name], random_parameters(CONFIGS[name], make_mesh(1, 1)))
    check_sizes(TensorFiles(tmp_path), *load_config(tmp_path))


def test_an_output_that_differs_from_tied_embeddings_is_refused(folder):
    """`transformers` uses both tensors then, whatever the configuration says."""
    tensors = load_file(folder / "model.safetensors")
    output = tensors["model.embed_tokens.weight"].copy()
    save_file(tensors | {"lm_head.weight": output}, folder / "model.safetensors")
    import_again(folder, make_mesh(1, 1))
    output[-1, -1] += 1
    save_file(tensors | {"lm_head.weight": output}, folder / "model.safetensors")
    with pytest.raises(
        ValueError,
        match=r"lm_head.weight of \S+ differs from model.embed_tokens.weight, although tie",
    ):
        import_again(folder, make_mesh(1, 1))
    change_config(folder, tie_word_embeddings=False)
    config, params = import_again(folder, make_mesh(1, 1))
    assert not config.tie_embeddings
    np.testing.assert_array_equal(np.asarray(params["output"]["kernel"]), output.T)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"transformers_weights": "other.safetensors"},
            r"transformers_weights='other.safetensors' \(supported: None\)",
        ),
        ({"per_layer_config": {"0": {}}}, "per_layer_config="),
        (
            {"rope_parameters": {"full_attention": {"rope_theta": 5}}},
            "full_attention of rotary positions of its own",
        ),
        (
            {
                "rope_scaling": {"type": "default", "rope_theta": 5},
                "rope_parameters": {"rope_theta": 6},
            },
            "rope_scaling and rope_parameters that differ",
        ),
        (
            {"layer_types": ["full_attention"] * 2},
            "layer_types of 2 layers, for num_hidden_layers=3",
        ),
    ],
)
def test_what_transformers_would_read_otherwise_is_refused(changes, message, folder):
    change_config(folder, **changes)
    with pytest.raises(NotImplementedError, match=message):
        load_config(folder)


def test_one_size_under_two_names_is_refused():
    given = {"model_type": "qwen3_moe", "num_experts": 4, "num_local_experts": 8}
    with pytest.raises(ValueError, match="num_local_experts=8 and num_experts=4 name one size"):
        read_config(given)


def test_an_adapter_beside_the_parameters_is_refused(folder):
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(NotImplementedError, match="merge the two first"):
        load_config(folder)


def test_rotary_positions_of_two_places_are_those_of_transformers():
    """It takes rope_scaling if that is there, and what is beside both for what that does not
    say.
    """
    for given, theta in (
        ({"rope_theta": 5.0, "rope_scaling": {"type": "default"}}, 5.0),
        ({"rope_theta": 5.0, "rope_parameters": {"rope_type": "default", "rope_theta": 6.0}}, 6.0),
        ({"rope_scaling": {}, "rope_parameters": {"rope_theta": 6.0}}, 6.0),
        ({"rope_scaling": None}, 1e6),
        ({}, 1e6),
    ):
        assert read_config({"model_type": "mixtral"} | given)[1]["rope_theta"] == theta


def test_every_key_of_a_field_has_a_default():
    for family in FAMILIES.values():
        assert {
            *family.fields.values(),
            "rope_theta",
            "max_position_embeddings",
        } == family.defaults.keys()
        assert family.nullable <= family.defaults.keys()


def test_lists_and_values_are_cut():
    assert listed("abc") == "a; b; c"
    assert listed(range(10), ", ") == "0, 1, 2, 3, 4, 5, 6, 7, 8, 9"
    assert listed(range(1011)).endswith("; 9; and 1,001 more")
    assert shown("a\nb") == r"'a\nb'"
    assert len(shown("x" * 10**6)) == 123
    assert shown(["a"]) == "['a']"


@pytest.mark.parametrize(
    ("path", "message"),
    [
        (
            "gs://bucket/a",
            "--x must be a folder of this machine, and not a URL: got gs:/bucket/a; mount or copy",
        ),
        (
            os.fsdecode(b"/tmp/caf\xe9"),
            r"--x must have a path that is text in UTF-8: got b'/tmp/caf\\xe9'",
        ),
    ],
)
def test_places_that_are_no_folders_of_this_machine(path, message):
    with pytest.raises(ValueError, match=message):
        require_local_folder(Path(path), "--x")
    require_local_folder(Path("/tmp/caf\u00e9/c:d"), "--x")


def test_a_missing_file_is_told_apart(tmp_path):
    with pytest.raises(FileNotFoundError):
        checked_file(tmp_path, "none")


def test_files_that_were_opened_are_imported(folder, parameters):
    family, fields = load_config(folder)
    config = dataclasses.replace(CONFIGS["qwen3"], **fields)
    params = import_parameters(TensorFiles(folder), family, abstract(config, make_mesh(1, 1)))
    np.testing.assert_array_equal(params["final_norm"]["scale"], parameters["final_norm"]["scale"])
