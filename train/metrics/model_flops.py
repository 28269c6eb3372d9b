"""The number of floating-point operations that a model needs, however a program computes it.

Model FLOPs utilization (MFU) divides this number by what the chips could do in the same time.

Reference: Chowdhery et al., PaLM: Scaling Language Modeling with Pathways, 2022, appendix B,
https://arxiv.org/abs/2204.02311
"""

from models.config import TransformerConfig

FORMULA = "6 x matmul parameters + 12 x layers x heads x head features x sequence; recomputation is not counted"


def model_flops_per_token(config: TransformerConfig, sequence_length: int) -> float:
    """Computes the FLOPs of the forward and the backward pass for one token.

    ```
    matmul parameters  P = layers * (2 * width * q_width + 2 * width * kv_width + 3 * width * mlp_width) + vocab * width
    forward            2 * P + 4 * layers * q_width * sequence
    backward           twice the forward pass
    ```

    Every token is counted as attending to the whole sequence: the work that the causal mask saves is not subtracted.
    The lookup in the embedding is not a matmul; the output projection is one, whether it is tied or not.
    """
    q_width, kv_width = config.head_features * config.heads, config.head_features * config.kv_heads
    layer = 2 * config.width * q_width + 2 * config.width * kv_width + 3 * config.width * config.mlp_width
    parameters = config.layers * layer + config.vocab_size * config.width
    return 6.0 * parameters + 12.0 * config.layers * q_width * sequence_length


def causal_flops_per_token(config: TransformerConfig, sequence_length: int) -> float:
    """Computes the same without the half of attention that the causal mask saves."""
    saved = 6.0 * config.layers * config.head_features * config.heads * sequence_length
    return model_flops_per_token(config, sequence_length) - saved
