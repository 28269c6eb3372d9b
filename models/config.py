"""The architecture of `models.transformer`, and the check that a mesh can hold it.

This file does not import JAX, so that a command line can be checked before JAX is imported.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Literal

type Remat = Literal["none", "dots", "layer"]
type ContextLayout = Literal["zigzag", "contiguous"]


@dataclasses.dataclass(frozen=True)
class TransformerConfig:
    """The architecture, and how it is computed."""

    vocab_size: int = 256
    """The entries of the vocabulary; a multiple of the model axis. Bytes need 256."""
    layers: int = 4
    """The number of decoder layers."""
    width: int = 256
    """The features of the residual stream."""
    heads: int = 8
    """The query heads of each layer; a multiple of the model axis and of kv_heads."""
    kv_heads: int = 4
    """The key-value heads of each layer; a multiple of the model axis."""
    mlp_width: int = 768
    """The hidden features of the gated MLP; a multiple of the model axis."""
    rope_theta: float = 10_000.0
    """The base of the rotary position embedding."""
    norm_epsilon: float = 1e-5
    """What RMSNorm adds to the mean square."""
    tie_embeddings: bool = False
    """Whether the output projection is the transposed embedding."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """The dtype of activations and of the operands of matmuls, which accumulate in float32."""
    param_dtype: Literal["float32", "bfloat16"] = "float32"
    """The dtype of the parameters and of the optimizer's state."""
    remat: Remat = "none"
    """What the backward pass computes again: nothing; all but the results of matmuls ("dots"); or each whole layer."""


def check_fits(
    config: TransformerConfig,
    *,
    sequence_length: int,
    mesh_shape: Mapping[str, int],
    context_layout: ContextLayout = "zigzag",
) -> None:
    """Checks that a model can be laid out on a mesh before anything is built.

    Args:
      config: The architecture.
      sequence_length: The tokens of a sequence.
      mesh_shape: The devices of each mesh axis. The model is split over "model", and sequences over "context" if the
        mesh has it.
      context_layout: The order of positions on "context".

    Raises:
      ValueError: A size is not positive, or something does not divide; the message names both, and a size that would.
    """
    sizes = {
        field: getattr(config, field) for field in ("vocab_size", "layers", "width", "heads", "kv_heads", "mlp_width")
    }
    for name, size in {**sizes, "sequence_length": sequence_length}.items():
        if size < 1:
            raise ValueError(f"{name} must be 1 or more: got {size}")
    if config.width % config.heads or config.width // config.heads % 2:
        raise ValueError(
            f"width must be an even multiple of heads, for rotary positions: got width={config.width}, "
            f"heads={config.heads}; use a multiple of {2 * config.heads}"
        )
    if config.heads % config.kv_heads:
        raise ValueError(f"heads must be a multiple of kv_heads: got heads={config.heads}, kv_heads={config.kv_heads}")
    devices = mesh_shape["model"]
    context = mesh_shape.get("context", 1)
    shares = math.lcm(context * devices, 2 * context if context_layout == "zigzag" else 1) if context > 1 else 1
    if sequence_length % shares:
        raise ValueError(
            f"sequence_length must be divisible by {shares}, for a 'context' axis of {context} devices in "
            f"{context_layout!r} layout and a 'model' axis of {devices}: got sequence_length={sequence_length}; use "
            f"{-(-sequence_length // shares) * shares}, or smaller axes"
        )
    split = {name: sizes[name] for name in ("vocab_size", "heads", "kv_heads", "mlp_width")}
    for name, size in {**split, "sequence_length": sequence_length}.items():
        if size % devices:
            up = -(-size // devices) * devices
            raise ValueError(
                f"{name} must be divisible by the 'model' axis: got {name}={size} on {devices} devices; "
                f"use {up}, or a smaller axis"
            )
