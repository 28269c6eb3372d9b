"""The families of decoders whose checkpoints can be imported: the names of their tensors and of
their options.

Each `Family` is a table. To add one, write such a table, add it to `FAMILIES`, and add a small
model of it to tests/models/test_hugging_face.py. This file does not import JAX.

A kernel is [in, out] here and [out, in] there. All other tensors have one layout. Rotary positions
rotate the same pairs, and the parameters of all layers are stacked here, so that {layer} stands for
an index along dimension 0. Those
of experts are stacked as well: {expert} is an index along dimension 1, and each of them is a
  kernel.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, get_args

from models.config import HOW_IT_RUNS, TransformerConfig
from models.foreign_folder import listed, shown

_LAYER = "model.layers.{layer}."
_TENSORS = {
    "embed.embedding": "model.embed_tokens.weight",
    "layers.attention_norm.scale": _LAYER + "input_layernorm.weight",
    "layers.attention.query.kernel": _LAYER + "self_attn.q_proj.weight",
    "layers.attention.query.bias": _LAYER + "self_attn.q_proj.bias",
    "layers.attention.key.kernel": _LAYER + "self_attn.k_proj.weight",
    "layers.attention.key.bias": _LAYER + "self_attn.k_proj.bias",
    "layers.attention.value.kernel": _LAYER + "self_attn.v_proj.weight",
    "layers.attention.value.bias": _LAYER + "self_attn.v_proj.bias",
    "layers.attention.out.kernel": _LAYER + "self_attn.o_proj.weight",
    "layers.attention.out.bias": _LAYER + "self_attn.o_proj.bias",
    "layers.mlp_norm.scale": _LAYER + "post_attention_layernorm.weight",
    "layers.mlp.gate.kernel": _LAYER + "mlp.gate_proj.weight",
    "layers.mlp.up.kernel": _LAYER + "mlp.up_proj.weight",
    "layers.mlp.down.kernel": _LAYER + "mlp.down_proj.weight",
    "final_norm.scale": "model.norm.weight",
    "output.kernel": "lm_head.weight",  # not there if the embeddings are tied
}
_FIELDS = {
    "vocab_size": "vocab_size",
    "layers": "num_hidden_layers",
    "width": "hidden_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "mlp_width": "intermediate_size",
    "norm_epsilon": "rms_norm_eps",
    "tie_embeddings": "tie_word_embeddings",
    "attention_bias": "attention_bias",
}
_REQUIRED = {
    "quantization_config": (None,),
    "transformers_weights": (None,),  # the name of another file of tensors
    "per_layer_config": (None,),
    "attention_dropout": (0, None),
    "use_sliding_window": (False, None),
    "use_bidirectional_attention": (False, None),
}
_TYPES = {field.name: field.type for field in dataclasses.fields(TransformerConfig)}
_MOST_INTEGER = 2**31 - 1  # as positions and sizes are int32 on devices
_MOST_FLOAT = 3e38  # as these numbers become float32
_NEEDED = {
    frozenset({bool}): "true or false",
    frozenset({int}): "an integer above 0",
    frozenset({float}): "a number above 0",
    frozenset({int, type(None)}): "an integer above 0, or null",
    frozenset({float, type(None)}): "a number above 0, or null",
}
_ROPE_FIELDS = {  # of rope_parameters
    "rope_factor": "factor",
    "rope_low_frequency": "low_freq_factor",
    "rope_high_frequency": "high_freq_factor",
    "rope_original_length": "original_max_position_embeddings",
}
_HEAD_NORMS = {
    "layers.attention.query_ln.scale": _LAYER + "self_attn.q_norm.weight",
    "layers.attention.key_ln.scale": _LAYER + "self_attn.k_norm.weight",
}
_MLP_BIASES = {
    f"layers.mlp.{name}.bias": f"{_LAYER}mlp.{name}_proj.bias" for name in ("gate", "up", "down")
}


@dataclasses.dataclass(frozen=True)
class Family:
    """One family of decoders.

    Attributes:
      model_type: Its name in config.json.
      architecture: The class of `transformers` that loads it.
      tensors: The name there of every parameter here. A model has those that its options make.
      fields: The key in config.json of every field of `TransformerConfig` that differs between
        models of the family.
      always: The fields that are the same for all of its models.
      defaults: What keys that config.json lacks stand for: the defaults of the family's class in
        `transformers` 5.24, which are in src/transformers/models/FAMILY/configuration_FAMILY.py,
        and for rope_theta in modeling_rope_utils.py.
      required: The values that can be imported of keys that have no field here. A key that is
        absent is accepted, because the first of these values is the default of the class.
      nullable: The keys of integers that may be null, which stands for what the class then makes of
        it.
      aliases: Other names of keys in config.json.
    """

    model_type: str
    architecture: str
    tensors: Mapping[str, str]
    fields: Mapping[str, str]
    always: Mapping[str, Any]
    defaults: Mapping[str, Any]
    required: Mapping[str, tuple[Any, ...]]
    nullable: frozenset[str] = frozenset()
    aliases: Mapping[str, str] = dataclasses.field(default_factory=dict)


LLAMA = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    tensors=_TENSORS | _MLP_BIASES,
    fields=_FIELDS | {"mlp_bias": "mlp_bias"},
    always={},
    defaults={
        "vocab_size": 32_000,
        "hidden_size": 4096,
        "intermediate_size": 11_008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": None,
        "head_dim": None,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "rope_theta": 10_000,
        "max_position_embeddings": 2048,
    },
    required=_REQUIRED | {"hidden_act": ("silu",)},
    nullable=frozenset({"num_key_value_heads"}),
)
QWEN3 = Family(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    tensors=_TENSORS | _HEAD_NORMS,
    fields=_FIELDS,
    always={"qk_norm": True},
    defaults={
        "vocab_size": 151_936,
        "hidden_size": 4096,
        "intermediate_size": 22_016,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "head_dim": 128,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "rope_theta": 10_000,
        "max_position_embeddings": 32_768,
    },
    required=_REQUIRED | {"hidden_act": ("silu",)},
    nullable=frozenset({"num_key_value_heads"}),
)
GEMMA = Family(
    model_type="gemma",
    architecture="GemmaForCausalLM",
    tensors=_TENSORS,
    fields=_FIELDS,
    always={"activation": "gelu", "norm_plus_one": True, "scale_embeddings": True},
    defaults={
        "vocab_size": 256_000,
        "hidden_size": 3072,
        "intermediate_size": 24_576,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "head_dim": 256,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "rope_theta": 10_000,
        "max_position_embeddings": 8192,
    },
    # The first files of Gemma say "gelu" and mean the tanh approximation that it was trained with.
    required=_REQUIRED
    | {
        "hidden_act": ("gelu_pytorch_tanh", "gelu"),
        "hidden_activation": ("gelu_pytorch_tanh", None),
    },
)
GEMMA2 = Family(
    model_type="gemma2",
    architecture="Gemma2ForCausalLM",
    tensors=_TENSORS
    | {
        "layers.post_attention_norm.scale": _LAYER + "post_attention_layernorm.weight",
        "layers.mlp_norm.scale": _LAYER + "pre_feedforward_layernorm.weight",
        "layers.post_mlp_norm.scale": _LAYER + "post_feedforward_layernorm.weight",
    },
    fields=_FIELDS
    | {
        "attention_softcap": "attn_logit_softcapping",
        "logit_softcap": "final_logit_softcapping",
        "alternating_window": "sliding_window",
        "attention_scale": "query_pre_attn_scalar",  # the scale is its power of -1/2
    },
    always={**GEMMA.always, "post_norms": True},
    defaults={
        "vocab_size": 256_000,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "rope_theta": 10_000,
        "max_position_embeddings": 8192,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    required=_REQUIRED | {"hidden_activation": ("gelu_pytorch_tanh",)},
)
MIXTRAL = Family(
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    tensors=_TENSORS
    | {
        "layers.mlp.router.kernel": _LAYER + "block_sparse_moe.gate.weight",
        "layers.mlp.gate": _LAYER + "block_sparse_moe.experts.{expert}.w1.weight",
        "layers.mlp.up": _LAYER + "block_sparse_moe.experts.{expert}.w3.weight",
        "layers.mlp.down": _LAYER + "block_sparse_moe.experts.{expert}.w2.weight",
    },
    fields={name: key for name, key in _FIELDS.items() if name != "attention_bias"}
    | {"experts": "num_local_experts", "experts_per_token": "num_experts_per_tok"},
    always={},
    defaults={
        "vocab_size": 32_000,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": None,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "rope_theta": 1_000_000,
        "max_position_embeddings": 131_072,
    },
    required=_REQUIRED | {"hidden_act": ("silu",), "sliding_window": (None,)},
    nullable=frozenset({"num_key_value_heads"}),
    aliases={"num_experts": "num_local_experts"},  # of `transformers` 5
)
QWEN3_MOE = Family(
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    tensors=_TENSORS
    | _HEAD_NORMS
    | {"layers.mlp.router.kernel": _LAYER + "mlp.gate.weight"}
    | {
        f"layers.mlp.{name}": f"{_LAYER}mlp.experts.{{expert}}.{name}_proj.weight"
        for name in ("gate", "up", "down")
    },
    fields=_FIELDS
    | {
        "experts": "num_experts",
        "experts_per_token": "num_experts_per_tok",
        "expert_width": "moe_intermediate_size",
        "normalize_expert_weights": "norm_topk_prob",
    },
    always={"qk_norm": True},
    defaults={
        "vocab_size": 151_936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 24,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": None,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": False,
        "rope_theta": 10_000,
        "max_position_embeddings": 32_768,
    },
    required=_REQUIRED
    | {"hidden_act": ("silu",), "decoder_sparse_step": (1,), "mlp_only_layers": ([], None)},
    aliases={"num_local_experts": "num_experts"},  # of `transformers` 5
)
FAMILIES = {
    family.model_type: family for family in (LLAMA, QWEN3, GEMMA, GEMMA2, MIXTRAL, QWEN3_MOE)
}


def read_config(given: Mapping[str, Any]) -> tuple[Family, dict[str, Any]]:
    """Returns the family of a config.json, and the fields of `TransformerConfig` that it
    determines.

    Raises:
      NotImplementedError: The family, or an option, is not supported; the message names all that
        are not.
      ValueError: It is no object, or a value has another type than its field, is not above 0 or is
        too large; the message names all of them.
    """
    if not isinstance(given, Mapping):
        raise ValueError(f"config.json must be an object: got {shown(given)}")
    family = FAMILIES.get(str(given.get("model_type")))
    if family is None:
        raise NotImplementedError(
            f"config.json is of model_type {shown(repr(given.get('model_type')))}, which is not "
            "supported; supported "
            f"are {', '.join(FAMILIES)}"
        )
    named = {family.aliases.get(key, key): value for key, value in given.items()}
    wrong = _contradictory(family, given) + _malformed(family, named)
    if wrong:
        raise ValueError(f"config.json of a {family.model_type} is malformed: {listed(wrong)}")
    rope, unsupported = _read_rope(family, named)
    values = {**family.defaults, **named}
    if family in (LLAMA, GEMMA2) and values["hidden_size"] % values["num_attention_heads"]:
        raise ValueError(  # as their classes do
            f"config.json of a {family.model_type} is malformed: "
            f"hidden_size={values['hidden_size']} must be a "
            f"multiple of num_attention_heads={values['num_attention_heads']}"
        )
    for key, supported in family.required.items():
        if named.get(key, supported[0]) not in supported:
            why = (
                ", as all layers have experts"
                if key in ("decoder_sparse_step", "mlp_only_layers")
                else ""
            )
            got = shown(repr(named[key]))
            unsupported.append(f"{key}={got} (supported: {' or '.join(map(repr, supported))}{why})")
    unsupported += _unsupported_layers(family, values)
    if unsupported:
        raise NotImplementedError(
            f"config.json asks for what a {family.model_type} lacks here: {listed(unsupported)}"
        )
    fields = {name: values[key] for name, key in family.fields.items()} | {**family.always, **rope}
    fields["kv_heads"] = fields["heads"] if fields["kv_heads"] is None else fields["kv_heads"]
    if fields.get("attention_scale") is not None:
        fields["attention_scale"] = fields["attention_scale"] ** -0.5
    return family, fields


def write_config(config: TransformerConfig, *, length: int) -> tuple[Family, dict[str, Any]]:
    """Returns the family that a model belongs to, and its config.json.

    Args:
      config: The architecture.
      length: The longest sequence that the model is meant for (tokens).

    Raises:
      NotImplementedError: No family has these options; the message says what each one lacks.
    """
    plain = TransformerConfig()
    reasons = []
    rope_names = ("rope_theta", *_ROPE_FIELDS)
    free = HOW_IT_RUNS | {"param_dtype", *rope_names}
    for family in FAMILIES.values():
        lacks = [
            f"{field.name}={getattr(config, field.name)!r}"
            for field in dataclasses.fields(config)
            if field.name not in free
            and field.name not in family.fields
            and getattr(config, field.name)
            != family.always.get(field.name, getattr(plain, field.name))
        ]
        if not lacks:
            break
        reasons.append(f"{family.model_type} lacks {', '.join(lacks)}")
    else:
        raise NotImplementedError(f"no family has the options of this model: {'; '.join(reasons)}")
    written = {key: getattr(config, name) for name, key in family.fields.items()}
    written["head_dim"] = config.head_features
    if "expert_width" in family.fields:
        written[family.fields["expert_width"]] = config.expert_features
    if family is GEMMA2:
        scale = config.attention_scale
        written["query_pre_attn_scalar"] = (
            config.head_features if scale is None else _whole(scale**-2)
        )
        written["layer_types"] = [_layer_type(i, windowed=True) for i in range(config.layers)]
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rope_theta}
    if config.rope_factor != 1:
        rope |= {"rope_type": "llama3"} | {
            key: getattr(config, name) for name, key in _ROPE_FIELDS.items()
        }
    activation = {
        key: values[0] for key, values in family.required.items() if key.startswith("hidden_act")
    }
    return family, {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        **written,
        **activation,
        "max_position_embeddings": length,
        "rope_theta": config.rope_theta,  # where versions of `transformers` before 5 look
        "rope_parameters": rope,
        "rope_scaling": rope if config.rope_factor != 1 else None,
    }


def _read_rope(family: Family, given: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Returns the fields of the rotary position embedding, and what of it is not supported."""
    ropes = _rope_parameters(family, given)
    rope = ropes[0]
    kind = rope["rope_type"]
    fields = {"rope_theta": float(rope["rope_theta"])}
    rotated = rope.get("partial_rotary_factor")
    unsupported = (
        []
        if rotated in (1, None)
        else [f"partial_rotary_factor={shown(repr(rotated))} (supported: 1)"]
    )
    unsupported += [
        f"{key} of rotary positions of its own"
        for key, value in rope.items()
        if isinstance(value, dict)
    ]
    relevant = ("rope_type", "rope_theta", "partial_rotary_factor", *_ROPE_FIELDS.values())
    if any(rope.get(key) != other.get(key) for other in ropes[1:] for key in relevant):
        kinds = " and ".join(f"rope_type={shown(repr(each['rope_type']))}" for each in ropes)
        unsupported.append(f"rope_scaling and rope_parameters that differ ({kinds})")
    if kind == "default":
        return fields, unsupported
    if kind != "llama3":
        return fields, [
            *unsupported,
            f"rope_type={shown(repr(kind))} (supported: 'default' or 'llama3')",
        ]
    lacking = [key for key in _ROPE_FIELDS.values() if key not in rope]
    if lacking:
        return fields, [*unsupported, f"rope_type='llama3' without {', '.join(lacking)}"]
    return fields | {name: rope[key] for name, key in _ROPE_FIELDS.items()}, unsupported


def _rope_parameters(family: Family, given: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns what config.json says of rotary positions, in each of the places where versions of
    `transformers` do.

    `transformers` takes rope_scaling if it is there, and otherwise rope_parameters; what neither
    says is beside them.
    """
    beside = {"rope_theta": family.defaults["rope_theta"]}
    beside |= {key: given[key] for key in ("rope_theta", "partial_rotary_factor") if key in given}
    places = [given[name] for name in ("rope_scaling", "rope_parameters") if given.get(name)]
    return [
        beside | {"rope_type": place.get("type", "default")} | place for place in places or [{}]
    ]


def _contradictory(family: Family, given: Mapping[str, Any]) -> list[str]:
    """Returns the keys that stand under both of their names with different values."""
    return [
        f"{other}={shown(repr(given[other]))} and {key}={shown(repr(given[key]))} name one size"
        for other, key in family.aliases.items()
        if other in given and key in given and given[other] != given[key]
    ]


def _malformed(family: Family, given: Mapping[str, Any]) -> list[str]:
    """Returns the keys whose values cannot be read, each with its value and what it must be."""
    an_object = (dict, "an object")
    a_list = (list, "a list")
    containers = {"rope_scaling": an_object, "rope_parameters": an_object, "layer_types": a_list}
    wrong = [
        f"{key}={shown(repr(given[key]))} must be {needed}, or null"
        for key, (kind, needed) in containers.items()
        if not isinstance(given.get(key), kind | None)
    ]
    if given.get("max_position_embeddings") is not None:
        wrong += _misfit(
            "max_position_embeddings", given["max_position_embeddings"], {int, type(None)}
        )
    for name, key in family.fields.items():
        if key in given and not (given[key] is None and key in family.nullable):
            wrong += _misfit(key, given[key], _kinds(name))
    if any(
        not isinstance(given.get(key), dict | None) for key in ("rope_scaling", "rope_parameters")
    ):
        return wrong
    rope_keys = {"rope_theta": "rope_theta", **_ROPE_FIELDS}
    found = [
        problem
        for rope in _rope_parameters(family, given)
        for name, key in rope_keys.items()
        if key in rope
        for problem in _misfit(key, rope[key], _kinds(name))
    ]
    return wrong + list(dict.fromkeys(found))


def _kinds(name: str) -> set[type]:
    """Returns the types that a field of `TransformerConfig` may have."""
    return set(get_args(_TYPES[name]) or (_TYPES[name],))


def _misfit(key: str, value: Any, kinds: set[type]) -> list[str]:
    """Returns what is wrong with a value, if anything is."""
    fits = type(value) in kinds or (type(value) is int and float in kinds)
    if type(value) in (int, float):
        fits = fits and 0 < value < math.inf
    if not fits:
        return [f"{key}={shown(repr(value))} must be {_NEEDED[frozenset(kinds)]}"]
    most = _MOST_FLOAT if float in kinds else _MOST_INTEGER
    if type(value) in (int, float) and value > most:
        return [f"{key}={shown(repr(value))} must be at most {most}"]
    return []


def _unsupported_layers(family: Family, values: Mapping[str, Any]) -> list[str]:
    """Returns the layers whose windows are not those of the family."""
    found = values.get("layer_types")
    if found is None:
        return []
    layers = values["num_hidden_layers"]
    if len(found) != layers:
        return [f"layer_types of {len(found):,} layers, for num_hidden_layers={layers}"]
    windowed = "alternating_window" in family.fields and values.get("sliding_window") is not None
    wrong = [
        f"layer {i} is {shown(repr(kind))}, not {_layer_type(i, windowed=windowed)!r}"
        for i, kind in enumerate(found)
        if kind != _layer_type(i, windowed=windowed)
    ]
    return [f"layer_types ({listed(wrong)})"] if wrong else []


def _layer_type(layer: int, *, windowed: bool) -> str:
    return "sliding_attention" if windowed and layer % 2 == 0 else "full_attention"


def _whole(number: float) -> float | int:
    """Returns a number as an integer where it is one but for rounding."""
    return round(number) if abs(number - round(number)) < 1e-6 * max(1, abs(number)) else number
