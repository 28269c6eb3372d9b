"""What config.json leaves out is what the class of `transformers` makes of it, or the file is
refused.

The configurations are random. The package comes with the extra `hf-test`, which `make test-slow`
installs.
"""

import json
import random

import pytest

from models.config_json import read_config
from models.families import FAMILIES
from tests.models.test_transformers import FAMILIES as CLASSES

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

CONFIGURATIONS = 100


def attribute(config, key):
    """Returns what a configuration of `transformers` has for a key of config.json."""
    if key == "rope_theta":
        return config.rope_parameters["rope_theta"]
    if key == "head_dim":
        return getattr(config, "head_dim", None)
    return getattr(config, key)


def as_they_say(family, config):
    """Returns the fields of `TransformerConfig` that a configuration of `transformers` means."""
    fields = {name: attribute(config, key) for name, key in family.fields.items()}
    fields["rope_theta"] = float(config.rope_parameters["rope_theta"])
    if fields.get("attention_scale") is not None:
        fields["attention_scale"] = fields["attention_scale"] ** -0.5
    if config.rope_parameters["rope_type"] == "llama3":
        fields["rope_factor"] = config.rope_parameters["factor"]
        fields["rope_low_frequency"] = config.rope_parameters["low_freq_factor"]
        fields["rope_high_frequency"] = config.rope_parameters["high_freq_factor"]
        fields["rope_original_length"] = config.rope_parameters["original_max_position_embeddings"]
    return fields


def random_config(rng, family):
    """Returns a config.json with every key of a family, in one of the forms of `transformers` 4 and
    5.
    """
    heads = rng.choice([2, 4, 8])
    values = {
        "model_type": family.model_type,
        "vocab_size": rng.randrange(8, 1000),
        "hidden_size": heads * 2 * rng.randrange(1, 9),
        "intermediate_size": rng.randrange(1, 100),
        "num_hidden_layers": rng.randrange(1, 7),
        "num_attention_heads": heads,
        "num_key_value_heads": rng.choice([1, 2, heads]),
        "head_dim": 2 * rng.randrange(1, 9),
        "hidden_act": family.required.get("hidden_act", ("silu",))[0],
        "hidden_activation": "gelu_pytorch_tanh",
        "rms_norm_eps": rng.choice([1e-5, 1e-6, 0.25]),
        "tie_word_embeddings": rng.random() < 0.5,
        "attention_bias": rng.random() < 0.5,
        "mlp_bias": rng.random() < 0.5,
        "attention_dropout": 0.0,
        "max_position_embeddings": rng.randrange(10_000, 20_000),
        "query_pre_attn_scalar": rng.randrange(1, 100),
        "attn_logit_softcapping": rng.choice([None, 5.0]),
        "final_logit_softcapping": rng.choice([None, 6.0]),
        "sliding_window": rng.randrange(1, 100) if family.model_type == "gemma2" else None,
        "use_sliding_window": False,
        "num_local_experts": rng.randrange(2, 9),
        "num_experts": rng.randrange(2, 9),
        "num_experts_per_tok": rng.randrange(1, 3),
        "moe_intermediate_size": rng.randrange(1, 50),
        "norm_topk_prob": rng.random() < 0.5,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    known = {*family.fields.values(), *family.required, "model_type", "max_position_embeddings"}
    known |= {"pad_token_id", "bos_token_id", "eos_token_id"}
    given = {key: value for key, value in values.items() if key in known}
    theta = rng.choice([10_000, 500_000.0, 7.5])
    rope = {"rope_type": "default"}
    if rng.random() < 0.5:
        rope = {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }  # fmt: skip
    form = rng.randrange(4)
    if form == 0:
        return given | {
            "rope_theta": theta,
            "rope_scaling": rope if rope["rope_type"] == "llama3" else None,
        }
    if form == 1:
        return given | {"rope_parameters": rope | {"rope_theta": theta}}
    if form == 2:
        return given | {"rope_parameters": rope, "rope_theta": theta}
    return given | {"rope_theta": theta, "rope_scaling": {"type": rope.pop("rope_type"), **rope}}


@pytest.mark.parametrize("name", FAMILIES)
def test_configurations_without_one_key_are_read_as_by_transformers(name, tmp_path):
    import transformers

    family = FAMILIES[name]
    kind = getattr(transformers, CLASSES[name][0])
    rng = random.Random(0)
    removed, refused, differing = set(), [], []
    for number in range(CONFIGURATIONS):
        given = random_config(rng, family)
        keys = sorted(given.keys() - {"model_type"})
        key = keys[number % len(keys)]
        nested = given.get("rope_parameters") or given.get("rope_scaling")
        if nested and rng.random() < 0.2:
            key = rng.choice(sorted(nested))
            del nested[key]
        else:
            del given[key]
        removed.add(key)
        (tmp_path / "config.json").write_text(json.dumps(given))
        try:
            _, fields = read_config(json.loads((tmp_path / "config.json").read_text()))
        except (ValueError, NotImplementedError) as error:
            refused.append(f"{key}: {error}")
            continue
        want = as_they_say(family, kind.from_pretrained(tmp_path))
        got = {name: fields.get(name) for name in want}
        if fields["head_dim"] is None:
            want["head_dim"] = (
                None
                if want["head_dim"] in (None, fields["width"] // fields["heads"])
                else want["head_dim"]
            )
        differing += [
            f"without {key}: {n} is {got[n]}, and there {want[n]}"
            for n in want
            if got[n] != want[n]
        ]
    assert not differing
    assert removed >= {*family.fields.values(), "rope_theta", "max_position_embeddings"}
    assert len(refused) < CONFIGURATIONS / 5, refused


@pytest.mark.parametrize("name", FAMILIES)
def test_the_table_of_defaults_is_that_of_the_class(name):
    import transformers

    family = FAMILIES[name]
    config = getattr(transformers, CLASSES[name][0])()
    width = family.defaults["hidden_size"] // family.defaults["num_attention_heads"]
    for key, default in family.defaults.items():
        # The class of Llama computes these two from others where they are absent.
        computed = {"head_dim": width, "num_key_value_heads": config.num_attention_heads}
        assert attribute(config, key) == (
            computed[key] if default is None and name == "llama" else default
        ), key
    for key, supported in family.required.items():
        assert config.to_dict().get(key, supported[0]) in supported, key
