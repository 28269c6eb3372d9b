"""Import and export of parameters: equal to the bit for every family, onto any mesh, and bad files
are named.

tests/models/test_transformers.py compares with the package `transformers`.
"""

import dataclasses
import errno
import json
import math
import struct

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding

from models.config import TransformerConfig
from models.config_json import read_config, write_config
from models.families import FAMILIES
from models.hugging_face import export_parameters, import_parameters, load_config
from models.safetensors_files import TensorFiles, write
from models.transformer import Transformer
from tests.nn.conftest import make_mesh

BASE = TransformerConfig(
    vocab_size=30, layers=3, width=16, heads=4, kv_heads=2, mlp_width=24, head_dim=8
)
CONFIGS = {
    "llama": dataclasses.replace(
        BASE,
        attention_bias=True,
        mlp_bias=True,
        rope_theta=5e5,
        rope_factor=8.0,
        rope_original_length=16,
    ),
    "qwen3": dataclasses.replace(BASE, qk_norm=True, tie_embeddings=True, norm_epsilon=1e-6),
    "gemma": dataclasses.replace(
        BASE, activation="gelu", norm_plus_one=True, scale_embeddings=True, tie_embeddings=True
    ),
    "gemma2": dataclasses.replace(
        BASE,
        activation="gelu",
        norm_plus_one=True,
        scale_embeddings=True,
        tie_embeddings=True,
        post_norms=True,
        attention_scale=0.25,
        attention_softcap=50.0,
        logit_softcap=30.0,
        alternating_window=4,
    ),
    "mixtral": dataclasses.replace(BASE, experts=4),
    "qwen3_moe": dataclasses.replace(
        BASE,
        qk_norm=True,
        experts=8,
        experts_per_token=3,
        expert_width=16,
        normalize_expert_weights=False,
    ),
}


def abstract(config, mesh, **options):
    """Returns shape, dtype and sharding of every parameter."""

    def placed(leaf):
        return jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, leaf.sharding.spec)
        )

    with jax.set_mesh(mesh):
        state = jax.jit(
            lambda: nnx.state(Transformer(config, **options, rngs=nnx.Rngs(0)))
        ).eval_shape()
    return jax.tree.map(placed, nnx.to_pure_dict(state))


def random_parameters(config, mesh):
    rng = np.random.default_rng(0)
    return jax.tree.map(
        lambda leaf: jax.device_put(
            rng.standard_normal(leaf.shape).astype(leaf.dtype), leaf.sharding
        ),
        abstract(config, mesh),
    )


def export(folder, config, params, **options):
    folder.mkdir(exist_ok=True)
    written = export_parameters(folder, config, params, length=32, **options)
    (folder / "config.json").write_text(json.dumps(written))


def import_again(folder, mesh, **changes):
    family, fields = load_config(folder)
    config = dataclasses.replace(TransformerConfig(**fields), **changes)
    return config, import_parameters(TensorFiles(folder), family, abstract(config, mesh))


def assert_equal(got, want):
    jax.tree.map(
        lambda g, w: np.testing.assert_array_equal(np.asarray(g), np.asarray(w), strict=True),
        got,
        want,
    )


@pytest.mark.parametrize(("name", "dtype", "shard_bytes"), [
    ("gemma2", "bfloat16", 1000), *(pytest.param(*case, marks=pytest.mark.slow) for case in [
        ("llama", "float32", 10**9), ("qwen3", "float32", 1000), ("gemma", "bfloat16", 10**9),
        ("gemma2", "float32", 1000), ("mixtral", "bfloat16", 10**9), ("qwen3_moe", "float32", 1000),
    ]),
])  # fmt: skip
def test_export_and_import_are_equal_to_the_bit(name, dtype, shard_bytes, tmp_path):
    config = dataclasses.replace(CONFIGS[name], param_dtype=dtype)
    params = random_parameters(config, make_mesh(2, 4))
    export(tmp_path, config, params, shard_bytes=shard_bytes)
    assert (tmp_path / "model.safetensors.index.json").exists() == (shard_bytes == 1000)
    for mesh in (make_mesh(1, 8), make_mesh(1, 1)):
        again, imported = import_again(tmp_path, mesh, param_dtype=dtype)
        assert again == config
        assert_equal(imported, params)
        for leaf, like in zip(
            jax.tree.leaves(imported), jax.tree.leaves(abstract(config, mesh)), strict=True
        ):
            assert leaf.sharding.is_equivalent_to(like.sharding, leaf.ndim)
    second = tmp_path / "second"
    export(second, again, imported, shard_bytes=shard_bytes)
    for file in tmp_path.glob("*.safetensors"):
        assert file.read_bytes() == (second / file.name).read_bytes()


def test_parameters_are_cast_and_the_safetensors_package_reads_the_files(tmp_path):
    from safetensors.numpy import load_file

    config = CONFIGS["llama"]
    params = random_parameters(config, make_mesh(1, 8))
    export(tmp_path / "narrow", config, params, dtype="bfloat16")
    _, imported = import_again(tmp_path / "narrow", make_mesh(2, 4))
    assert_equal(
        imported, jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(jnp.float32), params)
    )
    export(tmp_path, config, params)
    tensors, ups = (
        load_file(tmp_path / "model.safetensors"),
        params["layers"]["mlp"]["up"]["kernel"],
    )
    np.testing.assert_array_equal(
        tensors["lm_head.weight"], np.asarray(params["output"]["kernel"]).T
    )
    np.testing.assert_array_equal(
        tensors["model.layers.2.mlp.up_proj.weight"], np.asarray(ups[2]).T
    )


def test_a_device_reads_its_own_part_only(tmp_path, monkeypatch):
    config = CONFIGS["llama"]
    export(tmp_path, config, random_parameters(config, make_mesh(1, 1)))
    read, sizes = TensorFiles.read, {}

    def spy(self, name, index):
        part = read(self, name, index)
        sizes.setdefault(name, []).append(part.shape)
        return part

    monkeypatch.setattr(TensorFiles, "read", spy)
    import_again(tmp_path, make_mesh(2, 4))
    assert sizes["model.layers.1.mlp.up_proj.weight"] == [(6, 16)] * 4, (
        "two replicas share what is read once"
    )
    assert sizes["model.norm.weight"] == [(16,)]


def rewrite(folder, change):
    """Writes the tensors of a folder again, after `change` was applied to them."""
    from safetensors.numpy import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


@pytest.fixture
def exported(tmp_path):
    config = CONFIGS["qwen3"]
    export(tmp_path, config, random_parameters(config, make_mesh(1, 1)))
    return tmp_path


def test_all_tensors_that_do_not_fit_are_named(exported):
    def change(tensors):
        del tensors["model.norm.weight"], tensors["model.layers.2.mlp.up_proj.weight"]
        tensors["model.layers.3.mlp.up_proj.weight"] = np.zeros((24, 16), np.float32)
        tensors["model.layers.0.self_attn.q_norm.weight"] = np.zeros(4, np.float32)

    rewrite(exported, change)
    with pytest.raises(ValueError, match="nothing was loaded") as error:
        import_again(exported, make_mesh(1, 1))
    for part in (
        "missing: model.layers.2.mlp.up_proj.weight [24, 16]; missing: model.norm.weight [16]",
        "left over: model.layers.3.mlp.up_proj.weight [24, 16]",
        "model.layers.0.self_attn.q_norm.weight is [4] and must be [8]",
    ):
        assert part in str(error.value)


def test_tensors_that_a_model_computes_are_left_out(exported):
    def change(tensors):
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(4, np.float32)
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]

    rewrite(exported, change)
    import_again(exported, make_mesh(1, 1))


@pytest.mark.parametrize("bytes_left", [4, 200, -1])
def test_a_file_that_was_cut_short_is_named(exported, bytes_left):
    file = exported / "model.safetensors"
    file.write_bytes(file.read_bytes()[:bytes_left])
    with pytest.raises(ValueError, match=r"model.safetensors is cut short or damaged"):
        import_again(exported, make_mesh(1, 1))


def test_a_shard_that_is_missing_and_a_tensor_that_it_lacks_are_named(tmp_path):
    config = CONFIGS["qwen3"]
    export(tmp_path, config, random_parameters(config, make_mesh(1, 1)), shard_bytes=8000)
    shards = sorted(tmp_path.glob("*.safetensors"))
    assert len(shards) > 2
    shards[0].unlink()
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    index["weight_map"]["extra"] = shards[1].name
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(
        ValueError, match=rf"{shards[0].name} is missing; .*{shards[1].name} lacks extra"
    ):
        import_again(tmp_path, make_mesh(1, 1))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_full_disk_is_an_error_with_its_number(dtype, tmp_path):
    value = np.ones(1 << 20, jnp.dtype(dtype))
    (tmp_path / ".model.safetensors.tmp").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left") as raised:
        write(tmp_path, iter([("a", value)]), {"a": value.nbytes}, shard_bytes=1 << 30)
    assert raised.value.errno == errno.ENOSPC


def test_a_type_that_is_not_floating_point_is_named(tmp_path):
    header = json.dumps({"a": {"dtype": "I8", "shape": [4], "data_offsets": [0, 4]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(4))
    with pytest.raises(ValueError, match="a is of type I8; supported are F32, BF16, F16"):
        TensorFiles(tmp_path)


def test_a_folder_without_files_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"must be a folder with config.json"):
        load_config(tmp_path)
    with pytest.raises(
        ValueError,
        match=r"there is neither model.safetensors nor model.safetensors.index.json in \S+$",
    ):
        TensorFiles(tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(
        ValueError, match=r"; pytorch_model.bin cannot be read, save them as safetensors first"
    ):
        TensorFiles(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="is not JSON"):
        load_config(tmp_path)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_configuration_is_read_as_it_was_written(name):
    family, written = write_config(CONFIGS[name], length=32)
    assert family.model_type == name
    again, fields = read_config(written)
    assert again == family
    assert TransformerConfig(**fields) == CONFIGS[name]


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("gemma2", {"alternating_window": None}),
        # fields of experts say nothing of a dense model
        ("llama", {"experts_per_token": 1, "router_scores": "sigmoid"}),
        ("qwen3", {"expert_width": 8, "normalize_expert_weights": False}),
    ],
)
def test_what_a_family_allows_is_read_as_it_was_written(name, change):
    family, written = write_config(dataclasses.replace(CONFIGS[name], **change), length=32)
    assert family.model_type == name
    again, fields = read_config(written)
    assert again == family
    config = TransformerConfig(**fields)
    assert config.alternating_window is None
    assert config == dataclasses.replace(CONFIGS[name], alternating_window=None)


def test_heads_that_do_not_divide_the_width_are_refused_where_the_class_does():
    changed = dataclasses.replace(CONFIGS["llama"], width=20, heads=6)
    with pytest.raises(
        NotImplementedError,
        match=r"llama lacks a width of 20 for 6 heads; qwen3 lacks .*; mixtral lacks experts=0, ",
    ):
        write_config(changed, length=32)
    changed = dataclasses.replace(CONFIGS["qwen3"], width=20, heads=6)
    assert read_config(write_config(changed, length=32)[1])[1]["width"] == 20


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (
            "llama",
            {"model_type": "mamba"},
            "model_type 'mamba', which is not supported; supported are llama, qwen3",
        ),
        (
            "llama",
            {"hidden_act": "relu", "quantization_config": {"bits": 4}},
            r"quantization_config=.*hidden_act='relu' \(supported: 'silu'\)",
        ),
        ("llama", {"rope_parameters": {"rope_type": "yarn"}}, "rope_type='yarn'"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "llama3"}, "rope_scaling": None},
            "without factor, low_freq",
        ),
        ("llama", {"partial_rotary_factor": 0.5}, r"partial_rotary_factor=0.5 \(supported: 1\)"),
        (
            "qwen3",
            {"rope_parameters": {"partial_rotary_factor": 0.25}},
            r"partial_rotary_factor=0.25",
        ),
        ("qwen3", {"use_sliding_window": True}, "use_sliding_window=True"),
        (
            "qwen3",
            {"layer_types": ["sliding_attention"] * 3},
            "layer 0 is 'sliding_attention', not 'full_attention'",
        ),
        (
            "gemma2",
            {"layer_types": ["full_attention"] * 3},
            "layer 0 is 'full_attention', not 'sliding_attention'",
        ),
        (
            "qwen3_moe",
            {"decoder_sparse_step": 2},
            r"decoder_sparse_step=2 \(supported: 1, as all layers have experts\)",
        ),
        (
            "qwen3_moe",
            {"mlp_only_layers": [0]},
            r"mlp_only_layers=\[0\] \(supported: \[\] or None, as all layers",
        ),
    ],
)
def test_what_is_not_supported_is_named(name, change, message):
    with pytest.raises(NotImplementedError, match=message):
        read_config(write_config(CONFIGS[name], length=32)[1] | change)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (
            "llama",
            {
                "num_hidden_layers": "3",
                "hidden_size": None,
                "attention_bias": 0,
                "rms_norm_eps": math.nan,
            },
            "num_hidden_layers='3' must be an integer above 0; hidden_size=None must .*; "
            "rms_norm_eps=nan must be a number above 0; attention_bias=0 must be true or false",
        ),
        (
            "llama",
            {"rope_parameters": [1], "layer_types": 3},
            "rope_parameters=.* an object, or null; layer_types=3 must",
        ),
        (
            "llama",
            {"rope_parameters": None, "rope_scaling": None, "rope_theta": None},
            "rope_theta=None must be a num",
        ),
        (
            "llama",
            {"rope_parameters": {"rope_type": "llama3", "factor": "8"}},
            "factor='8' must be a number above 0",
        ),
        (
            "gemma2",
            {"query_pre_attn_scalar": 0},
            "query_pre_attn_scalar=0 must be a number above 0, or null",
        ),
        ("gemma2", {"head_dim": 4.0}, "head_dim=4.0 must be an integer above 0, or null"),
    ],
)
def test_all_values_that_cannot_be_read_are_named(name, change, message):
    with pytest.raises(ValueError, match=f"config.json of a {name} is malformed: .*{message}"):
        read_config(write_config(CONFIGS[name], length=32)[1] | change)


def test_heads_that_share_no_keys_may_be_left_out():
    written = write_config(CONFIGS["llama"], length=32)[1] | {
        "num_key_value_heads": None,
        "head_dim": None,
    }
    fields = read_config(written)[1]
    assert (fields["kv_heads"], fields["head_dim"]) == (4, None)


def test_the_old_name_of_gemmas_activation_is_read_and_not_written():
    written = write_config(CONFIGS["gemma"], length=32)[1]
    assert written["hidden_act"] == written["hidden_activation"] == "gelu_pytorch_tanh"
    fields = read_config({**written, "hidden_act": "gelu", "hidden_activation": None})[1]
    assert TransformerConfig(**fields) == CONFIGS["gemma"]


def test_configurations_that_are_no_model_are_refused():
    with pytest.raises(ValueError, match=r"config.json must be an object: got \[1\]"):
        read_config([1])
    with pytest.raises(NotImplementedError, match=r"qwen3 lacks logit_softcap=3.0; gemma lacks"):
        write_config(dataclasses.replace(CONFIGS["qwen3"], logit_softcap=3.0), length=32)
