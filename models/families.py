"""The families of decoders whose checkpoints can be imported: the names of their tensors and of
their options.

Each `Family` is a table. To add one, write such a table, add it to `FAMILIES` and its defaults to
`models.family_defaults`, and add a small model of it to tests/models/test_hugging_face.py. This
file does not import JAX.

A kernel is [in, out] here and [out, in] there. All other tensors have one layout. Rotary positions
rotate the same pairs, and the parameters of all layers are stacked here, so that {layer} stands for
an index along dimension 0. Those of experts are stacked as well: {expert} is an index along
dimension 1, and each of them is a kernel.
"""

import dataclasses
from collections.abc import Mapping

from models.family_defaults import DEFAULTS, ConfigJson, Fields


@dataclasses.dataclass(frozen=True)
class Family:
    """One family of decoders.

    Attributes:
      model_type: Its name in config.json.
      architecture: The class of `transformers` that loads it.
      tensors: The name there of every parameter here. A model has those that its options make.
      fields: The key in config.json of every field of `TransformerConfig` that differs between
        models of the family.
      required: The values that can be imported of keys that have no field here. A key that is
        absent is accepted, because the first of these values is the default of the class.
      always: The fields that are the same for all of its models.
      nullable: The keys of integers that may be null, which stands for what the class then makes of
        it.
      aliases: Other names of keys in config.json.
    """

    model_type: str
    architecture: str
    tensors: Mapping[str, str]
    fields: Mapping[str, str]
    required: Mapping[str, tuple[object, ...]]
    always: Fields = dataclasses.field(default_factory=dict)
    nullable: frozenset[str] = frozenset()
    aliases: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def defaults(self) -> ConfigJson:
        """What keys that config.json lacks stand for."""
        return DEFAULTS[self.model_type]


def _of_layers(names: Mapping[str, str]) -> dict[str, str]:
    """Returns the whole names of tensors, from those that they have within a layer."""
    return {f"layers.{ours}": f"model.layers.{{layer}}.{theirs}" for ours, theirs in names.items()}


_HEADS = {"query": "q", "key": "k", "value": "v", "out": "o"}
_ATTENTION_KERNELS = _of_layers(
    {f"attention.{name}.kernel": f"self_attn.{x}_proj.weight" for name, x in _HEADS.items()}
)
_ATTENTION_BIASES = _of_layers(
    {f"attention.{name}.bias": f"self_attn.{x}_proj.bias" for name, x in _HEADS.items()}
)
_MLP_KERNELS = _of_layers(
    {f"mlp.{name}.kernel": f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")}
)
_MLP_BIASES = _of_layers(
    {f"mlp.{name}.bias": f"mlp.{name}_proj.bias" for name in ("gate", "up", "down")}
)
_HEAD_NORMS = _of_layers(
    {
        "attention.query_ln.scale": "self_attn.q_norm.weight",
        "attention.key_ln.scale": "self_attn.k_norm.weight",
    }
)
_NORMS = _of_layers(
    {
        "attention_norm.scale": "input_layernorm.weight",
        "mlp_norm.scale": "post_attention_layernorm.weight",
    }
)
_FOUR_NORMS = _of_layers(
    {
        "attention_norm.scale": "input_layernorm.weight",
        "post_attention_norm.scale": "post_attention_layernorm.weight",
        "mlp_norm.scale": "pre_feedforward_layernorm.weight",
        "post_mlp_norm.scale": "post_feedforward_layernorm.weight",
    }
)
_OUTSIDE = {
    "embed.embedding": "model.embed_tokens.weight",
    "final_norm.scale": "model.norm.weight",
    "output.kernel": "lm_head.weight",  # not there if the embeddings are tied
}
_DENSE = _OUTSIDE | _NORMS | _ATTENTION_KERNELS | _ATTENTION_BIASES | _MLP_KERNELS
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
}
_WITH_BIAS = _FIELDS | {"attention_bias": "attention_bias"}
_REQUIRED: dict[str, tuple[object, ...]] = {
    "quantization_config": (None,),
    "transformers_weights": (None,),  # the name of another file of tensors
    "per_layer_config": (None,),
    "attention_dropout": (0, None),
    "use_sliding_window": (False, None),
    "use_bidirectional_attention": (False, None),
}
_SILU = _REQUIRED | {"hidden_act": ("silu",)}
_NULL_KV_HEADS = frozenset({"num_key_value_heads"})
_GEMMA_ALWAYS = {"activation": "gelu", "norm_plus_one": True, "scale_embeddings": True}

LLAMA = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    tensors=_DENSE | _MLP_BIASES,
    fields=_WITH_BIAS | {"mlp_bias": "mlp_bias"},
    required=_SILU,
    nullable=_NULL_KV_HEADS,
)
QWEN3 = Family(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    tensors=_DENSE | _HEAD_NORMS,
    fields=_WITH_BIAS,
    required=_SILU,
    always={"qk_norm": True},
    nullable=_NULL_KV_HEADS,
)
GEMMA = Family(
    model_type="gemma",
    architecture="GemmaForCausalLM",
    tensors=_DENSE,
    fields=_WITH_BIAS,
    # The first files of Gemma say "gelu" and mean the tanh approximation that it was trained with.
    required=_REQUIRED
    | {
        "hidden_act": ("gelu_pytorch_tanh", "gelu"),
        "hidden_activation": ("gelu_pytorch_tanh", None),
    },
    always=_GEMMA_ALWAYS,
)
GEMMA2 = Family(
    model_type="gemma2",
    architecture="Gemma2ForCausalLM",
    tensors=_DENSE | _FOUR_NORMS,
    fields=_WITH_BIAS
    | {
        "attention_softcap": "attn_logit_softcapping",
        "logit_softcap": "final_logit_softcapping",
        "alternating_window": "sliding_window",
        "attention_scale": "query_pre_attn_scalar",  # the scale is its power of -1/2
    },
    required=_REQUIRED | {"hidden_activation": ("gelu_pytorch_tanh",)},
    always=_GEMMA_ALWAYS | {"post_norms": True},
)
_MIXTRAL_EXPERTS = _of_layers(
    {
        "mlp.router.kernel": "block_sparse_moe.gate.weight",
        "mlp.gate": "block_sparse_moe.experts.{expert}.w1.weight",
        "mlp.up": "block_sparse_moe.experts.{expert}.w3.weight",
        "mlp.down": "block_sparse_moe.experts.{expert}.w2.weight",
    }
)
MIXTRAL = Family(
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    tensors=_DENSE | _MIXTRAL_EXPERTS,
    fields=_FIELDS | {"experts": "num_local_experts", "experts_per_token": "num_experts_per_tok"},
    required=_SILU | {"sliding_window": (None,)},
    nullable=_NULL_KV_HEADS,
    aliases={"num_experts": "num_local_experts"},  # of `transformers` 5
)
_QWEN3_EXPERTS = _of_layers(
    {
        "mlp.router.kernel": "mlp.gate.weight",
        "mlp.gate": "mlp.experts.{expert}.gate_proj.weight",
        "mlp.up": "mlp.experts.{expert}.up_proj.weight",
        "mlp.down": "mlp.experts.{expert}.down_proj.weight",
    }
)
_QWEN3_EXPERT_FIELDS = {
    "experts": "num_experts",
    "experts_per_token": "num_experts_per_tok",
    "expert_width": "moe_intermediate_size",
    "normalize_expert_weights": "norm_topk_prob",
}
QWEN3_MOE = Family(
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    tensors=_DENSE | _HEAD_NORMS | _QWEN3_EXPERTS,
    fields=_WITH_BIAS | _QWEN3_EXPERT_FIELDS,
    required=_SILU | {"decoder_sparse_step": (1,), "mlp_only_layers": ([], None)},
    always={"qk_norm": True},
    aliases={"num_local_experts": "num_experts"},  # of `transformers` 5
)
FAMILIES = {
    family.model_type: family for family in (LLAMA, QWEN3, GEMMA, GEMMA2, MIXTRAL, QWEN3_MOE)
}
