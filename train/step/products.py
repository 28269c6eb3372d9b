"""What a model multiplies: the collective products of a layer on one device, and the FLOPs of a token.

Model FLOPs are those that a model needs, however a program computes it. Model FLOPs utilization (MFU) divides them by
what the chips could do in the same time. Reference: Chowdhery et al., PaLM: Scaling Language Modeling with Pathways,
2022, appendix B, https://arxiv.org/abs/2204.02311
"""

from typing import NamedTuple

from flaxasync.nn.uneven_shares import head_shares
from models.config import TransformerConfig

FORMULA = "6 x matmul parameters + 12 x layers x heads x head features x sequence; recomputation is not counted"


class Product(NamedTuple):
    """An op of two operands: the rows and the kernel of one device."""

    op: str
    x: tuple[int, ...]
    w: tuple[int, ...]


def local_heads(model: TransformerConfig, ring: int) -> tuple[int, int]:
    """Returns the query heads and the key-value heads that each of `ring` devices computes."""
    query, key = head_shares(model.heads, model.kv_heads, model.head_features, ring)
    return query.local, key.local


def products_of_a_layer(model: TransformerConfig, *, batch: int, length: int, ring: int) -> tuple[Product, ...]:
    """Returns the products of query, key and value, of the projection after attention, of gate and up, and of down."""
    heads, kv_heads = local_heads(model, ring)
    width, hidden, head = model.width, model.mlp_width // ring, model.head_features
    rows, all_rows = (batch, length // ring, width), (batch, length)
    return (
        Product("all_gather_matmul", rows, (width, (heads + 2 * kv_heads) * head)),
        Product("matmul_reduce_scatter", (*all_rows, heads * head), (heads * head, width)),
        Product("all_gather_matmul", rows, (width, 2 * model.mlp_width // ring)),
        Product("matmul_reduce_scatter", (*all_rows, hidden), (hidden, width)),
    )


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
