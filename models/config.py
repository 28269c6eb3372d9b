"""The architecture of `models.transformer`, and the check that a mesh can hold it.

This file does not import JAX, so that a command line can be checked before JAX is imported.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Literal

type Remat = Literal[
    "none", "cheap", "dots", "operands", "mlp", "attention", "layer", "offload", "offload_most"
]
type FsdpOverlap = Literal["xla", "prefetch", "prefetch_pallas"]
type ContextLayout = Literal["zigzag", "contiguous"]


@dataclasses.dataclass(frozen=True)
class Architecture:
    """What a model is."""

    vocab_size: int = 256
    """The entries of the vocabulary. Bytes need 256. A multiple of the model axis saves an
    all-to-all in each step.
    """
    layers: int = 4
    """The number of decoder layers."""
    width: int = 256
    """The features of the residual stream."""
    heads: int = 8
    """The query heads of each layer; a multiple of kv_heads. Heads that the model axis does not
    divide are padded.
    """
    kv_heads: int = 4
    """The key-value heads of each layer. Fewer than the model axis has devices are computed by
    several of them.
    """
    mlp_width: int = 768
    """The hidden features of the gated MLP; a multiple of the model axis."""
    experts: int = 0
    """The experts that stand in each layer for the MLP; 0 for the MLP. All layers have them, or
    none has.
    """
    experts_per_token: int = 2
    """How many of the experts each token chooses."""
    expert_width: int | None = None
    """The hidden features of an expert; None for mlp_width. A multiple of the model axis if that
    has more devices than there are experts."""
    shared_expert_width: int = 0
    """The hidden features of an expert that every token has beside those that it chooses; 0 for
    none.
    """
    router_scores: Literal["softmax", "sigmoid"] = "softmax"
    """The scores by which experts are chosen and weighted: the softmax over all of them, or the
    sigmoid of each.
    """
    normalize_expert_weights: bool = True
    """Whether the weights of the experts of a token are divided by their sum."""
    head_dim: int | None = None
    """The features of a head, an even number; None for width / heads."""
    activation: Literal["silu", "gelu"] = "silu"
    """The activation of the gated MLP; gelu is its tanh approximation."""
    attention_bias: bool = False
    """Whether the four projections of the attention have biases."""
    mlp_bias: bool = False
    """Whether the three projections of the MLP have biases."""
    qk_norm: bool = False
    """Whether each head of queries and keys is normalized by its root mean square before it is
    rotated.
    """
    attention_scale: float | None = None
    """The factor of the attention scores; None for 1 / sqrt(head_dim)."""
    attention_softcap: float | None = None
    """Attention scores s become c * tanh(s / c) with this c; None for as they are. All scores are
    then in memory.
    """
    alternating_window: int | None = None
    """In layers 0, 2, 4, ... a position attends to this many last positions only; None for all.
    Needs all scores.
    """
    rope_theta: float = 10_000.0
    """The base of the rotary position embedding."""
    rope_factor: float = 1.0
    """The divisor of its low frequencies, as in Llama 3.1; 1 for none. The next three fields say
    which are low.
    """
    rope_low_frequency: float = 1.0
    """The number of turns within rope_original_length below which a frequency is divided by the
    whole factor.
    """
    rope_high_frequency: float = 4.0
    """The number of turns within rope_original_length above which a frequency is kept."""
    rope_original_length: int = 8192
    """The length of the sequences for which the frequencies were meant, in tokens."""
    norm_epsilon: float = 1e-5
    """What RMSNorm adds to the mean square."""
    norm_plus_one: bool = False
    """Whether RMSNorm multiplies with 1 + scale, as in Gemma, instead of scale."""
    post_norms: bool = False
    """Whether attention and MLP have another RMSNorm after them, before they are added, as in Gemma
    2.
    """
    scale_embeddings: bool = False
    """Whether embeddings are multiplied with sqrt(width), as in Gemma."""
    logit_softcap: float | None = None
    """Logits l become c * tanh(l / c) with this c; None for as they are."""
    tie_embeddings: bool = False
    """Whether the output projection is the transposed embedding."""
    param_dtype: Literal["float32", "bfloat16"] = "float32"
    """The dtype of the parameters and of the optimizer's state."""

    @property
    def head_features(self) -> int:
        """The features of a head."""
        if self.head_dim is None:
            return self.width // self.heads
        return self.head_dim

    @property
    def expert_features(self) -> int:
        """The hidden features of an expert."""
        if self.expert_width is None:
            return self.mlp_width
        return self.expert_width


@dataclasses.dataclass(frozen=True)
class RunOptions:
    """How a model is computed or trained."""

    load_balance_weight: float = 0.01
    """The factor of the load-balancing loss, which is 1 where experts are chosen evenly, in the
    loss of training.
    """
    router_z_weight: float = 0.0
    """The factor of the mean of logsumexp(router logits)**2 in the loss of training."""
    capacity_factor: float | None = None
    """Drops the last tokens of an expert beyond this factor times the mean of all experts; None
    drops none.
    """
    dtype: Literal["float32", "bfloat16"] = "float32"
    """The dtype of activations and of the operands of matmuls, which accumulate in float32."""
    remat: Remat | None = None
    """What the backward pass does again: nothing; only what is cheap, so neither matmuls nor
    attention nor gathers of kernels; all but matmuls ("dots"); or each whole layer. Between the
    last two, "operands" keeps what attention and the activation of the MLP take, "mlp" what that
    activation takes and what attention adds to its input, and "attention" what attention takes,
    returns and adds. "offload" keeps in the memory of the host what each layer and its attention
    get, and "offload_most" also what attention returns. None lets the trainer choose the fastest of
    these that fits; elsewhere it means "none"."""
    exchange_heads: bool | None = None
    """Whether weights and heads of attention travel instead of rows; None for what is predicted to
    be faster.
    """
    gathered_mib: int | None = None
    """The most MiB for which a layer keeps the rows that a product gathers, until its gradient,
    instead of sending them again. Attention and MLP of a layer may keep as much: of all layers, or
    of one at a time with remat "layer". None lets the trainer choose, where it compares compiled
    forms; elsewhere nothing is kept."""
    quantization: Literal["int8", "fp8"] | None = None
    """The 8-bit type in which Dense layers multiply and gather; None for dtype. Experts and logits
    keep dtype.
    """
    quantization_backward: Literal["int8", "fp8"] | None = None
    """The 8-bit type of the gradients that they multiply for the gradients of their inputs; None
    for dtype.
    """
    quantization_weights: Literal["int8", "fp8"] | None = None
    """The 8-bit type in which they multiply the gradients of their weights, that of the two above;
    None for dtype.
    """
    fsdp_overlap: FsdpOverlap | None = None
    """Who hides the transfers of fsdp: XLA, as far as it can; or a scan that gathers the next
    layer's weights while one computes, by permutes (prefetch) or, on TPUs, by copies of Pallas
    kernels (prefetch_pallas). Without an fsdp axis, prefetch sums the gradients of each layer over
    the data axis while the rest of it computes backward. None lets the trainer choose what is
    predicted to be the fastest of those that are trusted; elsewhere it means "xla"."""

    @property
    def gathered_bytes(self) -> int:
        """The limit `gathered_mib` in bytes."""
        return (self.gathered_mib or 0) * 2**20


@dataclasses.dataclass(frozen=True)
class TransformerConfig(RunOptions, Architecture):
    """The architecture, and how it is computed: the options of both, under their names."""


HOW_IT_RUNS = frozenset(field.name for field in dataclasses.fields(RunOptions))
"""The fields of `TransformerConfig` that do not say what a model is."""


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
      mesh_shape: The devices of each mesh axis. The model is split over "model", sequences over
        "context" if the mesh has it, and parameters are stored sharded over "fsdp" as well if it
        has that.
      context_layout: The order of positions on "context".

    Raises:
      ValueError: A size is not positive, memory is negative, options exclude each other, or
        something does not divide; the message names both, and a size that would where there is one.
    """
    fields = ("vocab_size", "layers", "width", "heads", "kv_heads", "mlp_width")
    sizes = {field: getattr(config, field) for field in fields}
    sizes["sequence_length"] = sequence_length
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name} must be 1 or more: got {size}")
    of_gradients = config.quantization_backward, config.quantization_weights
    if config.quantization is None and of_gradients != (None, None):
        raise ValueError(
            "quantization_backward and quantization_weights need a quantization: got "
            f"{' and '.join(map(repr, of_gradients))} without it; give it too, or leave them out"
        )
    if config.gathered_bytes < 0:
        raise ValueError(
            f"gathered_mib must be 0 or more: got {config.gathered_mib}; use 0 to keep nothing"
        )
    if config.head_dim is not None and (config.head_dim < 2 or config.head_dim % 2):
        raise ValueError(
            f"head_dim must be even, for rotary positions, or None: got head_dim={config.head_dim}"
        )
    if config.head_dim is None and (
        config.width % config.heads or config.width // config.heads % 2
    ):
        raise ValueError(
            "width must be an even multiple of heads, for rotary positions: got "
            f"width={config.width}, heads={config.heads}; use a multiple of {2 * config.heads}, or "
            "give head_dim"
        )
    if config.heads % config.kv_heads:
        raise ValueError(
            f"heads must be a multiple of kv_heads: got heads={config.heads}, "
            f"kv_heads={config.kv_heads}"
        )
    devices = mesh_shape["model"]
    if config.experts:
        _check_experts(config, devices)
    _check_fsdp(config, mesh_shape)
    context = mesh_shape.get("context", 1)
    for name in ("attention_softcap", "alternating_window"):
        if context > 1 and getattr(config, name) is not None:
            raise ValueError(
                f"{name} needs all scores of a position on one device, which a 'context' axis of "
                f"{context} devices splits: got {name}={getattr(config, name)}; use a context axis "
                "of 1"
            )
    unit = 1  # the length must be a multiple of it
    if context > 1:
        unit = context * devices
        if context_layout == "zigzag":  # two blocks for each device of context
            unit = math.lcm(unit, 2 * context)
    whole = -(-sequence_length // unit) * unit
    if sequence_length != whole:
        raise ValueError(
            f"sequence_length must be divisible by {unit}, for a 'context' axis of {context} "
            f"devices in {context_layout!r} layout and a 'model' axis of {devices}: got "
            f"sequence_length={sequence_length}; use {whole}, or smaller axes"
        )
    if config.experts:
        _check_divides("model", devices, shared_expert_width=config.shared_expert_width)
    else:
        _check_divides("model", devices, mlp_width=config.mlp_width)
    _check_divides("model", devices, sequence_length=sequence_length)  # without a context axis


def _check_fsdp(config: TransformerConfig, mesh_shape: Mapping[str, int]) -> None:
    """Checks that the scan which hides the transfers of fsdp can serve the model on a mesh."""
    fsdp = mesh_shape.get("fsdp", 1)
    data = mesh_shape.get("data", 1)
    _check_divides("fsdp", fsdp, width=config.width)
    if config.fsdp_overlap == "prefetch_pallas" and fsdp == 1:
        other = "xla"
        if data > 1:
            other = "prefetch"
        raise ValueError(
            "fsdp_overlap='prefetch_pallas' needs an 'fsdp' axis of 2 devices or more: got "
            f"{fsdp}; use fsdp_overlap={other!r} otherwise"
        )
    if config.fsdp_overlap == "prefetch" and fsdp == data == 1:
        raise ValueError(
            "fsdp_overlap='prefetch' needs an 'fsdp' or a 'data' axis of 2 devices or more: got 1 "
            "and 1; use fsdp_overlap='xla' otherwise"
        )
    if config.fsdp_overlap == "prefetch_pallas" and config.width % (128 * fsdp):
        raise ValueError(
            "fsdp_overlap='prefetch_pallas' moves blocks of whole tiles, so width must be a "
            f"multiple of 128 x the 'fsdp' axis: got width={config.width} on {fsdp} devices; use "
            "fsdp_overlap='prefetch' otherwise"
        )
    check_layers_are_alike(config)


def check_layers_are_alike(config: TransformerConfig) -> None:
    """Raises ValueError for layers that a scan which hides the transfers of fsdp cannot apply."""
    if config.fsdp_overlap not in (None, "xla") and config.alternating_window is not None:
        raise ValueError(
            f"fsdp_overlap={config.fsdp_overlap!r} applies the same function to all layers, which "
            "alternating_window="
            f"{config.alternating_window} does not: use fsdp_overlap='xla'"
        )


def _check_divides(axis: str, devices: int, **sizes: int) -> None:
    for name, size in sizes.items():
        whole = -(-size // devices) * devices
        if size != whole:
            raise ValueError(
                f"{name} must be divisible by the {axis!r} axis: got {name}={size} on {devices} "
                f"devices; use {whole}, or a smaller axis"
            )


def _check_experts(config: TransformerConfig, devices: int) -> None:
    """Checks the mixture of experts of each layer, for the devices of the model axis."""
    if not 1 <= config.experts_per_token <= config.experts:
        raise ValueError(
            f"experts_per_token must be 1 to experts={config.experts}, as a token chooses an "
            f"expert once: got experts_per_token={config.experts_per_token}"
        )
    if config.mlp_bias:
        raise ValueError(
            "mlp_bias is for a dense MLP, and experts have no biases: use mlp_bias=False"
        )
    if config.capacity_factor is not None and not config.capacity_factor > 0:
        raise ValueError(
            "capacity_factor must be above 0, or None to drop nothing: got "
            f"{config.capacity_factor}"
        )
    width = config.expert_features
    if width < 1:
        raise ValueError(f"expert_width must be 1 or more, or None for mlp_width: got {width}")
    name = "mlp_width" if config.expert_width is None else "expert_width"
    if config.experts < devices and width % devices:
        raise ValueError(
            f"a 'model' axis with more devices than experts splits each expert, so {name} must be "
            f"divisible by it: got {name}={width} for experts={config.experts} on {devices} "
            f"devices; use {-(-width // devices) * devices}, or a smaller axis"
        )
