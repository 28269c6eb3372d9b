"""Imported models compute what the package `transformers` computes, and it loads what is exported.

The models are small, random, and made here. Both packages come with the extra `hf-test`, which
`make test-slow` installs.
"""

import json

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from models.config import TransformerConfig
from models.hugging_face import export_parameters, import_parameters, load_config
from models.safetensors_files import TensorFiles
from models.transformer import Transformer
from tests.models.test_hugging_face import abstract
from tests.nn.conftest import make_fsdp_mesh, make_mesh

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.usefixtures("quick_compile"),
]

SIZES = {
    "vocab_size": 62,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "attn_implementation": "eager",
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FAMILIES = {
    "llama": (
        "LlamaConfig",
        {
            "attention_bias": True,
            "mlp_bias": True,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 5e5,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 16,
            },
        },
    ),
    "qwen3": ("Qwen3Config", {"tie_word_embeddings": True}),
    "gemma": ("GemmaConfig", {"hidden_act": "gelu_pytorch_tanh"}),
    "gemma2": (
        "Gemma2Config",
        {
            "sliding_window": 5,
            "query_pre_attn_scalar": 24,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
        },
    ),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4}),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "norm_topk_prob": True,
        },
    ),
}
TOKENS = np.random.default_rng(0).integers(3, 62, (2, 24)).astype(np.int32)


@pytest.fixture(scope="module", params=FAMILIES)
def checkpoint(request, tmp_path_factory):
    """Returns a folder that `transformers` wrote, and its logits of TOKENS."""
    import torch
    import transformers

    name, options = FAMILIES[request.param]
    torch.manual_seed(0)
    config = getattr(transformers, name)(**SIZES, **options)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        # norms and biases as well, which are ones and zeros at first
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    folder = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(folder, max_shard_size="30KB")
    return folder, logits_there(model)


def logits_there(model):
    import torch

    with torch.no_grad():
        return model(torch.from_numpy(TOKENS).long()).logits.numpy()


def options_of(mesh):
    return {"fsdp_axis": "fsdp"} if "fsdp" in mesh.shape else {}


def logits_here(config, params):
    mesh = next(iter(jax.tree.leaves(params))).sharding.mesh
    with jax.set_mesh(mesh):
        make = lambda: Transformer(config, **options_of(mesh), rngs=nnx.Rngs(0))  # noqa: E731
        graph, state = nnx.split(nnx.eval_shape(make))
        nnx.replace_by_pure_dict(state, params)
        run = jax.jit(lambda state, tokens: nnx.merge(graph, state)(tokens))
        batch = P(("data", "fsdp")) if "fsdp" in mesh.shape else P("data")
        return np.asarray(run(state, jax.device_put(TOKENS, batch)))[..., :62]


MESHES = {
    "1 x 1": make_mesh(1, 1),
    "1 x 8": make_mesh(1, 8),
    "2 x 4": make_mesh(2, 4),
    "fsdp 2 x 4": make_fsdp_mesh(1, 2, 1, 4),
    "fsdp 2 x 2": make_fsdp_mesh(1, 2, 1, 2),
}


def imported(folder, mesh):
    family, fields = load_config(folder)
    config = TransformerConfig(**fields)
    files = TensorFiles(folder)
    return config, import_parameters(files, family, abstract(config, mesh, **options_of(mesh)))


@pytest.mark.parametrize(
    ("checkpoint", "name"),
    [
        *(
            (family, name)
            for family in ("mixtral", "qwen3_moe")
            for name in ("1 x 1", "1 x 8", "2 x 4")
        ),
        *((family, "2 x 4") for family in ("llama", "qwen3", "gemma", "gemma2")),
        ("gemma2", "1 x 8"),
        ("llama", "fsdp 2 x 4"),
        ("qwen3_moe", "fsdp 2 x 2"),
    ],
    indirect=["checkpoint"],
)
def test_the_logits_of_an_imported_model_are_the_same(checkpoint, name):
    """Eight and four devices share two key-value heads, and divide neither the vocabulary nor, in
    groups, the heads.

    On a mesh with an fsdp axis the parameters are stored sharded over it, too.
    """
    (folder, want), mesh = checkpoint, MESHES[name]
    config, params = imported(folder, mesh)
    kernel = params["layers"]["attention"]["query"]["kernel"].sharding.spec
    assert ("fsdp" in jax.tree.leaves(tuple(kernel))) == ("fsdp" in mesh.shape)
    got = logits_here(config, params)
    assert np.abs(want).max() > 1, "the comparison would say nothing about small logits"
    np.testing.assert_allclose(got, want, atol=1e-4)


def test_transformers_loads_what_is_exported(checkpoint, tmp_path):
    import transformers

    folder, want = checkpoint
    config, params = imported(folder, make_mesh(2, 4))
    written = export_parameters(tmp_path, config, params, length=64, shard_bytes=30_000)
    (tmp_path / "config.json").write_text(json.dumps(written))
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, output_loading_info=True, attn_implementation="eager"
    )
    assert not any(report.values()), report
    np.testing.assert_allclose(logits_there(model.eval()), want, atol=1e-5)
    assert load_config(tmp_path) == load_config(folder)
