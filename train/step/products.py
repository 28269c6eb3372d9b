"""The collective products of a layer, at the shapes of one device: what a dry run predicts, and what a run verifies."""

from typing import NamedTuple

from flaxasync.nn.shares import head_shares
from models.config import TransformerConfig


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
