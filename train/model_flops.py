"""The arithmetic that a model needs, whatever a program does to compute it: what model FLOPs utilization counts.

Reference: Chowdhery et al., PaLM: Scaling Language Modeling with Pathways, 2022, appendix B,
https://arxiv.org/abs/2204.02311
"""

from models.transformer import TransformerConfig

FORMULA = "6 x matmul parameters + 12 x layers x width x sequence, a token; nothing computed again is counted"


def model_flops_per_token(config: TransformerConfig, sequence_length: int) -> float:
    """Returns the FLOPs of forward and backward for one token (FLOPs).

    ```
    matmul parameters  P = layers * (2 * width^2 + 2 * width * kv_width + 3 * width * mlp_width) + vocab * width
    forward            2 * P + 4 * layers * width * sequence        every token attends to the whole sequence
    with the backward  3 times that
    ```

    The embedding's lookup is no matmul; the output projection is one, tied or not. The causal mask is not counted as
    work saved.
    """
    kv_width = config.width // config.heads * config.kv_heads
    layer = 2 * config.width**2 + 2 * config.width * kv_width + 3 * config.width * config.mlp_width
    parameters = config.layers * layer + config.vocab_size * config.width
    return 6.0 * parameters + 12.0 * config.layers * config.width * sequence_length
