"""What keys that a config.json lacks stand for: the defaults of the classes of `transformers` 5.24.

They are in src/transformers/models/FAMILY/configuration_FAMILY.py there, and for rope_theta in
modeling_rope_utils.py.
"""

from collections.abc import Mapping
from typing import Any

# the keys of a config.json, and their values
type ConfigJson = Mapping[str, Any]
# fields of `TransformerConfig`, and their values
type Fields = Mapping[str, Any]

_COMMON = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "head_dim": None,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "rope_theta": 10_000,
}
_LLAMA = _COMMON | {
    "vocab_size": 32_000,
    "intermediate_size": 11_008,
    "num_key_value_heads": None,
    "attention_bias": False,
    "mlp_bias": False,
    "max_position_embeddings": 2048,
}
_QWEN3 = _COMMON | {
    "vocab_size": 151_936,
    "intermediate_size": 22_016,
    "num_key_value_heads": 32,
    "head_dim": 128,
    "attention_bias": False,
    "max_position_embeddings": 32_768,
}
_BOTH_GEMMAS = _COMMON | {
    "vocab_size": 256_000,
    "head_dim": 256,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "max_position_embeddings": 8192,
}
_GEMMA = _BOTH_GEMMAS | {
    "hidden_size": 3072,
    "intermediate_size": 24_576,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
}
_GEMMA2 = _BOTH_GEMMAS | {
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}
_MIXTRAL = _COMMON | {
    "vocab_size": 32_000,
    "intermediate_size": 14_336,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "rope_theta": 1_000_000,
    "max_position_embeddings": 131_072,
}
_QWEN3_MOE = _COMMON | {
    "vocab_size": 151_936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 24,
    "num_key_value_heads": 4,
    "attention_bias": False,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": False,
    "max_position_embeddings": 32_768,
}
DEFAULTS: Mapping[str, ConfigJson] = {
    "llama": _LLAMA,
    "qwen3": _QWEN3,
    "gemma": _GEMMA,
    "gemma2": _GEMMA2,
    "mixtral": _MIXTRAL,
    "qwen3_moe": _QWEN3_MOE,
}
