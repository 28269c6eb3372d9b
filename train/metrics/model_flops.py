"""The number of floating-point operations that a model needs, however a program computes it.

Model FLOPs utilization (MFU) divides this number by what the chips could do in the same time.
Reference: Chowdhery et al., PaLM: Scaling Language Modeling with Pathways, 2022, appendix B,
https://arxiv.org/abs/2204.02311
"""

from models.config import TransformerConfig

FORMULA = "6 x matmul parameters + 12 x layers x heads x head features x sequence; recomputation is not counted"


def parameters_of_a_layer(config: TransformerConfig) -> int:
    """Returns the number of elements in the kernels of a layer."""
    q_width, kv_width = config.head_features * config.heads, config.head_features * config.kv_heads
    return config.width * (2 * q_width + 2 * kv_width + 3 * config.mlp_width)


def model_flops_per_token(config: TransformerConfig, sequence_length: int, *, causal: bool = False) -> float:
    """Computes the FLOPs of the forward pass and of the backward pass, which takes twice as many, for one token.

    Every token is counted as attending to the whole sequence, unless `causal` subtracts the half of attention that the
    causal mask saves. The lookup in the embedding is not a matmul; the output projection is one, tied or not.
    """
    parameters = config.layers * parameters_of_a_layer(config) + config.vocab_size * config.width
    attention = 12.0 * config.layers * config.head_features * config.heads * sequence_length
    return 6.0 * parameters + (attention / 2 if causal else attention)
