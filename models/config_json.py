"""config.json of somebody else's checkpoint: read into fields of `TransformerConfig`, and written.

`models.families` says which keys a family has. Every value is checked before it is used, because a
file may have anything. This file does not import JAX.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import get_args

from models.config import HOW_IT_RUNS, TransformerConfig
from models.families import FAMILIES, GEMMA2, LLAMA, Family
from models.family_defaults import ConfigJson, Fields
from models.foreign_folder import listed, shown

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
_ROPE_PLACES = ("rope_scaling", "rope_parameters")
_ALL_HAVE_EXPERTS = ("decoder_sparse_step", "mlp_only_layers")
# whose classes refuse a width that is no multiple of the heads, also where head_dim is given
_HEADS_DIVIDE_WIDTH = (LLAMA, GEMMA2)
# fields of experts, which say nothing of a model without any
_OF_EXPERTS = frozenset(
    {
        "experts_per_token",
        "expert_width",
        "shared_expert_width",
        "router_scores",
        "normalize_expert_weights",
    }
)


def read_config(given: ConfigJson) -> tuple[Family, Fields]:
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
            f"supported; supported are {', '.join(FAMILIES)}"
        )
    named = {family.aliases.get(key, key): value for key, value in given.items()}
    wrong = _contradictory(family, given) + _malformed(family, named)
    if wrong:
        raise ValueError(f"config.json of a {family.model_type} is malformed: {listed(wrong)}")
    rope, unsupported = _read_rope(family, named)
    values = {**family.defaults, **named}
    if family in _HEADS_DIVIDE_WIDTH and values["hidden_size"] % values["num_attention_heads"]:
        raise ValueError(
            f"config.json of a {family.model_type} is malformed: "
            f"hidden_size={values['hidden_size']} must be a multiple of "
            f"num_attention_heads={values['num_attention_heads']}"
        )
    unsupported += _unsupported_values(family, named)
    unsupported += _unsupported_layers(family, values)
    if unsupported:
        raise NotImplementedError(
            f"config.json asks for what a {family.model_type} lacks here: {listed(unsupported)}"
        )
    fields = {name: values[key] for name, key in family.fields.items()} | {**family.always, **rope}
    if fields["kv_heads"] is None:
        fields["kv_heads"] = fields["heads"]
    if fields.get("attention_scale") is not None:
        fields["attention_scale"] = fields["attention_scale"] ** -0.5
    return family, fields


def write_config(config: TransformerConfig, *, length: int) -> tuple[Family, ConfigJson]:
    """Returns the family that a model belongs to, and its config.json.

    Args:
      config: The architecture.
      length: The longest sequence that the model is meant for (tokens).

    Raises:
      NotImplementedError: No family has these options; the message says what each one lacks.
    """
    family = _family_of(config)
    written = {key: getattr(config, name) for name, key in family.fields.items()}
    written["head_dim"] = config.head_features
    if "expert_width" in family.fields:
        written[family.fields["expert_width"]] = config.expert_features
    if family is GEMMA2:
        written["query_pre_attn_scalar"] = config.head_features
        if config.attention_scale is not None:
            written["query_pre_attn_scalar"] = _whole(config.attention_scale**-2)
        windowed = config.alternating_window is not None
        written["layer_types"] = [_layer_type(i, windowed=windowed) for i in range(config.layers)]
    rope = {"rope_type": "default", "rope_theta": config.rope_theta}
    scaling = None
    if config.rope_factor != 1:
        llama3 = {key: getattr(config, name) for name, key in _ROPE_FIELDS.items()}
        rope |= {"rope_type": "llama3", **llama3}
        scaling = rope
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
        "rope_scaling": scaling,
    }


def _family_of(config: TransformerConfig) -> Family:
    """Returns the first family that has all options of a model."""
    reasons = []
    for family in FAMILIES.values():
        lacks = _lacking(family, config)
        if not lacks:
            return family
        reasons.append(f"{family.model_type} lacks {', '.join(lacks)}")
    raise NotImplementedError(f"no family has the options of this model: {'; '.join(reasons)}")


def _lacking(family: Family, config: TransformerConfig) -> list[str]:
    """Returns the options of a model that a family does not have."""
    plain = TransformerConfig()
    free = HOW_IT_RUNS | {"param_dtype", "rope_theta", *_ROPE_FIELDS}
    lacks = []
    if not config.experts:
        free |= _OF_EXPERTS
        if "experts" in family.fields:
            lacks.append("experts=0")
    if family in _HEADS_DIVIDE_WIDTH and config.width % config.heads:
        lacks.append(f"a width of {config.width} for {config.heads} heads")
    for field in dataclasses.fields(config):
        name = field.name
        value = getattr(config, name)
        expected = family.always.get(name, getattr(plain, name))
        if name not in free and name not in family.fields and value != expected:
            lacks.append(f"{name}={value!r}")
    return lacks


def _unsupported_values(family: Family, given: ConfigJson) -> list[str]:
    """Returns the keys without a field whose values cannot be imported."""
    found = []
    for key, supported in family.required.items():
        value = given.get(key, supported[0])
        if value in supported:
            continue
        possible = " or ".join(map(repr, supported))
        if key in _ALL_HAVE_EXPERTS:
            possible += ", as all layers have experts"
        found.append(f"{key}={shown(repr(value))} (supported: {possible})")
    return found


def _read_rope(family: Family, given: ConfigJson) -> tuple[Fields, list[str]]:
    """Returns the fields of the rotary position embedding, and what of it is not supported."""
    ropes = _rope_parameters(family, given)
    rope = ropes[0]
    kind = rope["rope_type"]
    fields = {"rope_theta": float(rope["rope_theta"])}
    rotated = rope.get("partial_rotary_factor")
    unsupported = []
    if rotated not in (1, None):
        unsupported.append(f"partial_rotary_factor={shown(repr(rotated))} (supported: 1)")
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
    lacking = [key for key in _ROPE_FIELDS.values() if key not in rope]
    if kind != "llama3":
        unsupported.append(f"rope_type={shown(repr(kind))} (supported: 'default' or 'llama3')")
    elif lacking:
        unsupported.append(f"rope_type='llama3' without {', '.join(lacking)}")
    else:
        fields |= {name: rope[key] for name, key in _ROPE_FIELDS.items()}
    return fields, unsupported


def _rope_parameters(family: Family, given: ConfigJson) -> list[ConfigJson]:
    """Returns what config.json says of rotary positions, in each of the places where versions of
    `transformers` do.

    `transformers` takes rope_scaling if it is there, and otherwise rope_parameters; what neither
    says is beside them.
    """
    beside = {"rope_theta": family.defaults["rope_theta"]}
    beside |= {key: given[key] for key in ("rope_theta", "partial_rotary_factor") if key in given}
    places = [given[name] for name in _ROPE_PLACES if given.get(name)]
    return [
        beside | {"rope_type": place.get("type", "default")} | place for place in places or [{}]
    ]


def _contradictory(family: Family, given: ConfigJson) -> list[str]:
    """Returns the keys that stand under both of their names with different values."""
    found = []
    for other, key in family.aliases.items():
        if other in given and key in given and given[other] != given[key]:
            values = [f"{name}={shown(repr(given[name]))}" for name in (other, key)]
            found.append(f"{' and '.join(values)} name one size")
    return found


def _malformed(family: Family, given: ConfigJson) -> list[str]:
    """Returns the keys whose values cannot be read, each with its value and what it must be."""
    wrong = []
    for key in _ROPE_PLACES:
        if not isinstance(given.get(key), dict | None):
            wrong.append(f"{key}={shown(repr(given[key]))} must be an object, or null")
    has_ropes = not wrong
    if not isinstance(given.get("layer_types"), list | None):
        wrong.append(f"layer_types={shown(repr(given['layer_types']))} must be a list, or null")
    length = given.get("max_position_embeddings")
    wrong += _misfit("max_position_embeddings", length, {int, type(None)})
    for name, key in family.fields.items():
        is_null = key in given and given[key] is None and key in family.nullable
        if key in given and not is_null:
            wrong += _misfit(key, given[key], _kinds(name))
    if has_ropes:
        wrong += _malformed_ropes(family, given)
    return wrong


def _malformed_ropes(family: Family, given: ConfigJson) -> list[str]:
    """Returns what `_malformed` does, of the rotary positions; each problem once."""
    found: dict[str, None] = {}
    for rope in _rope_parameters(family, given):
        for name, key in {"rope_theta": "rope_theta", **_ROPE_FIELDS}.items():
            if key in rope:
                found |= dict.fromkeys(_misfit(key, rope[key], _kinds(name)))
    return list(found)


def _kinds(name: str) -> set[type]:
    """Returns the types that a field of `TransformerConfig` may have."""
    return set(get_args(_TYPES[name]) or (_TYPES[name],))


def _misfit(key: str, value: object, kinds: set[type]) -> list[str]:
    """Returns what is wrong with a value, if anything is."""
    fits = type(value) in kinds or (type(value) is int and float in kinds)
    number = 1.0  # what is compared with the limits, which other values do not have
    if isinstance(value, int | float) and not isinstance(value, bool):
        number = value
    if not fits or not 0 < number < math.inf:
        return [f"{key}={shown(repr(value))} must be {_NEEDED[frozenset(kinds)]}"]
    most: float = _MOST_INTEGER
    if float in kinds:
        most = _MOST_FLOAT
    if number > most:
        return [f"{key}={shown(repr(value))} must be at most {most}"]
    return []


def _unsupported_layers(family: Family, values: ConfigJson) -> list[str]:
    """Returns the layers whose windows are not those of the family."""
    found = values.get("layer_types")
    if found is None:
        return []
    layers = values["num_hidden_layers"]
    if len(found) != layers:
        return [f"layer_types of {len(found):,} layers, for num_hidden_layers={layers}"]
    windowed = "alternating_window" in family.fields and values.get("sliding_window") is not None
    wrong = []
    for i, kind in enumerate(found):
        expected = _layer_type(i, windowed=windowed)
        if kind != expected:
            wrong.append(f"layer {i} is {shown(repr(kind))}, not {expected!r}")
    if wrong:
        return [f"layer_types ({listed(wrong)})"]
    return []


def _layer_type(layer: int, *, windowed: bool) -> str:
    if windowed and layer % 2 == 0:
        return "sliding_attention"
    return "full_attention"


def _whole(number: float) -> float:
    """Returns a number as an integer where it is one but for rounding."""
    whole = round(number)
    if abs(number - whole) < 1e-6 * max(1, abs(number)):
        return whole
    return number
