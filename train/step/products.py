"""What a model multiplies: the collective products of a layer on one device, and the FLOPs of a
token.

Model FLOPs are those that a model needs, however a program computes it. Model FLOPs utilization
(MFU) divides them by what the chips could do in the same time. Reference: Chowdhery et al., PaLM:
Scaling Language Modeling with Pathways, 2022, appendix B, https://arxiv.org/abs/2204.02311
"""

from typing import NamedTuple

from flaxasync.nn.uneven_shares import head_shares
from models.config import TransformerConfig

# Of the experts of a layer, those that a token chooses are counted.
FORMULA = (
    "6 x matmul parameters + 12 x layers x heads x head features x sequence; recomputation is not "
    "counted"
)


class Product(NamedTuple):
    """An op of two operands: the rows and the kernel of one device."""

    op: str
    x: tuple[int, ...]
    w: tuple[int, ...]


def local_heads(model: TransformerConfig, ring: int) -> tuple[int, int]:
    """Returns the query heads and the key-value heads that each of `ring` devices computes."""
    query, key = head_shares(model.heads, model.kv_heads, model.head_features, ring)
    return query.local, key.local


def products_of_a_layer(
    model: TransformerConfig, *, batch: int, length: int, ring: int
) -> tuple[Product, ...]:
    """Returns the products of query, key and value, of the projection after attention, of gate and
    up, and of down.

    The last two are those of an MLP, or of the shared expert of a mixture; without one there are
    the first two only.
    """
    heads, kv_heads = local_heads(model, ring)
    hidden = model.mlp_width // ring
    if model.experts:
        hidden = model.shared_expert_width // ring
    width = model.width
    head = model.head_features
    rows = (batch, length // ring, width)
    all_rows = (batch, length)
    products = (
        Product("all_gather_matmul", rows, (width, (heads + 2 * kv_heads) * head)),
        Product("matmul_reduce_scatter", (*all_rows, heads * head), (heads * head, width)),
        Product("all_gather_matmul", rows, (width, 2 * hidden)),
        Product("matmul_reduce_scatter", (*all_rows, hidden), (hidden, width)),
    )
    if not hidden:
        return products[:2]
    return products


def experts_of_a_layer(
    model: TransformerConfig, *, batch: int, length: int, ring: int
) -> tuple[tuple[int, ...], ...]:
    """Returns the shapes of x, ids, weights, and the kernels gate, up and down of
    `flaxasync.expert_mlp`.
    """
    rows = batch * length // ring
    each = -(-model.experts // ring)
    inner = model.expert_features
    chosen = (rows, model.experts_per_token)
    return (
        (rows, model.width),
        chosen,
        chosen,
        *((each, model.width, inner),) * 2,
        (each, inner, model.width),
    )


def hidden_of_a_token(config: TransformerConfig) -> int:
    """Returns the hidden features of the MLP, or of all experts that a token meets."""
    if not config.experts:
        return config.mlp_width
    return config.experts_per_token * config.expert_features + config.shared_expert_width


def parameters_of_a_layer(config: TransformerConfig) -> int:
    """Returns the number of elements in the kernels of a layer, of all experts too."""
    active = active_parameters_of_a_layer(config)
    if not config.experts:
        return active
    others = (config.experts - config.experts_per_token) * config.expert_features
    return active + config.width * 3 * others


def active_parameters_of_a_layer(config: TransformerConfig) -> int:
    """Returns the number of elements in the kernels of a layer that a token is multiplied with."""
    q_width = config.head_features * config.heads
    kv_width = config.head_features * config.kv_heads
    return config.width * (
        2 * q_width + 2 * kv_width + 3 * hidden_of_a_token(config) + config.experts
    )


def model_flops_per_token(
    config: TransformerConfig, sequence_length: int, *, causal: bool = False
) -> float:
    """Computes the FLOPs of the forward pass and of the backward pass, which takes twice as many,
    for one token.

    Every token is counted as attending to the whole sequence, unless `causal` subtracts the half of
    attention that the causal mask saves. The lookup in the embedding is not a matmul; the output
    projection is one, tied or not.
    """
    parameters = (
        config.layers * active_parameters_of_a_layer(config) + config.vocab_size * config.width
    )
    attention = 12.0 * config.layers * config.head_features * config.heads * sequence_length
    if causal:
        attention /= 2
    return 6.0 * parameters + attention
