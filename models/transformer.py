"""A Llama-style decoder: layers of `models.layer` between an embedding and an output layer, as one
scan.

The options of `TransformerConfig` make it the decoder of other families too, such as Qwen 3 and
Gemma 2. With experts it is a mixture of experts: each layer then adds the losses of its router to a
sum that goes through the layers with x.

The residual stream is sharded over the sequence: each device of the model axis holds its own rows
of it. Norms and residuals run on those rows, and the parallel layers gather and scatter rows while
they multiply. With a context axis the sequence is split over that axis too, and keys and values
travel along it. Layers are stacked along a leading dimension of their parameters and run as one
scan.

Shape suffixes: B batch, L sequence, D width, V vocabulary. On a mesh (data, model), x_BLD is
sharded P(data, model, None) and tokens_BL is P(data, None); with a context axis, they are P(data,
(context, model), None) and P(data, context). With an fsdp axis, "data" stands for (data, fsdp),
over which parameters are stored sharded as well.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

import flaxasync as fa
from flaxasync.ops.saved import STREAM, save_attention, save_mlp, save_operands
from models.config import ContextLayout, Remat, TransformerConfig, check_layers_are_alike
from models.layer import DecoderLayer, RMSNorm, layer_options

_POLICIES: dict[Remat | None, Callable[..., bool] | None] = {
    "none": jax.checkpoint_policies.everything_saveable,
    "cheap": fa.save_costly,
    "dots": fa.save_matmuls,
    "operands": save_operands,
    "mlp": save_mlp,
    "attention": save_attention,
    "offload": fa.offload_operands,
    "offload_most": fa.offload_most,
    "layer": None,
}


# the last norm, and the output projection or the embedding that stands for it
type _LastModules = tuple[RMSNorm, fa.nn.ColumnParallelLinear | fa.nn.VocabParallelEmbed]
# what goes through the layers: x, and the losses of the routers so far
type _Carry = tuple[Array, Array | None]


class Losses(NamedTuple):
    """The losses of a batch, float32; those of routers are means over the layers, and None where
    there are none.

    Attributes:
      cross_entropy: The mean cross-entropy of the targets, in nats a token.
      load_balance: How uneven the experts are chosen; 1 if they are chosen evenly. See
        `flaxasync.nn.Routing`.
      router_z: The mean of logsumexp(router logits)**2.
    """

    cross_entropy: Array
    load_balance: Array | None = None
    router_z: Array | None = None


class Transformer(nnx.Module):
    """Turns tokens into logits. The mesh axis "model" splits heads, hidden features, vocabulary and
    sequence.

    Args:
      config: The architecture. Without a trainer that chooses, its remat and fsdp_overlap None mean
        "none" and "xla".
      fsdp_axis: The mesh axis over which parameters are stored sharded as well, one of those that
        split the batch; None if there is none.
      context_axis: The mesh axis that splits sequences; None if they are not split.
      context_layout: The order of positions on it. Tokens and targets are given in the order of
        `flaxasync.sequence_order`.
      backend: What executes the collective ops of all layers; see `flaxasync.all_gather_matmul`. An
        op that lacks this backend chooses for itself.
      rngs: The random streams; the model draws from `params`.

    Raises:
      ValueError: No mesh is set, the axis does not divide the hidden features, or options exclude
        each other.
    """

    def __init__(
        self,
        config: TransformerConfig,
        *,
        fsdp_axis: str | None = None,
        context_axis: str | None = None,
        context_layout: ContextLayout = "zigzag",
        backend: str | None = None,
        rngs: nnx.Rngs,
    ):
        given: fa.nn.LayerOptions = {"fsdp_axis": fsdp_axis, "backend": backend}
        options = layer_options(config, given)
        check_layers_are_alike(config)
        self.config = dataclasses.replace(
            config, remat=config.remat or "none", fsdp_overlap=config.fsdp_overlap or "xla"
        )
        self.fsdp_axis = fsdp_axis
        self.embed = fa.nn.VocabParallelEmbed(
            config.vocab_size,
            config.width,
            embedding_init=nnx.initializers.normal(0.02),
            rngs=rngs,
            **options,
        )

        @nnx.split_rngs(splits=config.layers)
        @nnx.vmap(in_axes=(0,), out_axes=0, transform_metadata={nnx.PARTITION_NAME: None})
        def stack(rngs: nnx.Rngs) -> DecoderLayer:
            return DecoderLayer(
                config, context_axis=context_axis, context_layout=context_layout, rngs=rngs, **given
            )

        self.layers = stack(rngs)
        self.final_norm = RMSNorm(config, rngs=rngs)
        self.output: fa.nn.ColumnParallelLinear | None
        if config.tie_embeddings:
            self.output = None
        else:
            self.output = fa.nn.ColumnParallelLinear(
                config.width, config.vocab_size, use_bias=False, pad=True, rngs=rngs, **options
            )

    def __call__(
        self, tokens_BL: Int[Array, "B L"], segment_ids_BL: Int[Array, "B L"] | None = None
    ) -> Float[Array, "B L V"]:
        """Returns the logits of the next token at every position, sharded over the vocabulary.

        With segment ids, a position attends only to positions of the same id. Where the model axis
        does not divide the vocabulary, V is the next multiple, and the logits beyond the vocabulary
        are as low as can be.
        """

        def finish(modules: _LastModules, x_BLD: Array, losses: None) -> Array:
            return _logits(modules, x_BLD, self.config)

        return self._apply(finish, tokens_BL, segment_ids_BL)

    def init_cache(self, batch: int, length: int) -> None:
        """Makes an empty cache of keys and values of all layers, for `decode`.

        Args:
          batch: The number of sequences.
          length: The most tokens of a sequence.
        """
        config = self.config
        self.layers.attention.init_cache(
            (config.layers, batch, length, config.width), jnp.dtype(config.dtype)
        )

    def decode(self, tokens_BL: Int[Array, "B L"]) -> Float[Array, "B V"]:
        """Adds tokens to the sequences in the cache, and returns the logits of the token after the
        last one.

        Call `init_cache` first. The caller makes sure that the cache has room: in a full one the
        last tokens are replaced. Every device of the model axis has all rows, so any number of
        tokens can be added.
        """
        cached: Any = self.layers.attention
        if cached.cached_key is None:
            raise ValueError(
                "Transformer.decode needs a cache of keys and values, and has none: call "
                "init_cache first"
            )
        length = cached.cached_key[...].shape[2]
        index = cached.cache_index[...][0]
        positions = index + jnp.arange(tokens_BL.shape[1], dtype=index.dtype)
        spec = jax.P(jax.typeof(cached.cached_key[...]).sharding.spec[1], None)
        # under Explicit axes the rows must lie as those of the cache
        if jax.typeof(tokens_BL).sharding.spec != spec:
            tokens_BL = jax.sharding.reshard(tokens_BL, spec)

        @nnx.scan(
            in_axes=(0, 0, nnx.Carry),
            out_axes=nnx.Carry,
            transform_metadata={nnx.PARTITION_NAME: None},
        )
        def run(layer: DecoderLayer, is_windowed: Array, x_BLD: Array) -> Array:
            return layer(x_BLD, mask=self._window_mask(is_windowed, positions, length), decode=True)

        x_BLD = run(
            self.layers, self._windowed_layers(), self._embed(tokens_BL, layout="replicated")
        )
        return _logits(self._last_modules(), x_BLD[:, -1:], self.config)[:, 0]

    def _apply(
        self,
        finish: Callable[..., Any],
        tokens_BL: Array,
        segment_ids_BL: Array | None,
        *arrays: Array,
        routed: bool = False,
    ) -> Any:
        """Returns finish(modules, x, losses, *arrays) of the last layer's result x and the modules
        that make logits.

        `losses` are those of the routers of all layers, load-balancing and z, if they are wanted;
        otherwise None.
        """

        @nnx.scan(
            in_axes=(0, 0, nnx.Carry),
            out_axes=nnx.Carry,
            transform_metadata={nnx.PARTITION_NAME: None},
        )
        def run(layer: DecoderLayer, is_windowed: Array, carry: _Carry) -> _Carry:
            mask = self._window_mask(
                is_windowed, jnp.arange(tokens_BL.shape[1]), tokens_BL.shape[1]
            )
            return _with_remat(self.config.remat)(layer, *carry, segment_ids_BL, mask)

        x_BLD = self._embed(tokens_BL)
        losses = None
        if routed:
            losses = jnp.zeros(2, jnp.float32)
        carry = (x_BLD, losses)
        data = jax.sharding.get_abstract_mesh().shape.get("data", 1)
        sums_beside = self.config.fsdp_overlap == "prefetch" and data > 1
        if self.config.fsdp_overlap != "xla" and (self.fsdp_axis is not None or sums_beside):
            return self._apply_with_prefetch(finish, carry, segment_ids_BL, arrays)
        carry = run(self.layers, self._windowed_layers(), carry)
        return finish(self._last_modules(), *carry, *arrays)

    def _apply_with_prefetch(
        self,
        finish: Callable[..., Any],
        carry: _Carry,
        segment_ids_BL: Array | None,
        arrays: tuple[Array, ...],
    ) -> Any:
        """Does what `_apply` does, with the weights of the next layer gathered while one
        computes.
        """

        def apply(layer: DecoderLayer, carry: _Carry, *ids: Array) -> _Carry:
            return layer.with_losses(*carry, *ids)

        def finish_carry(modules: _LastModules, carry: _Carry, *arrays: Array) -> Any:
            return finish(modules, *carry, *arrays)

        ids = []
        if segment_ids_BL is not None:
            ids.append(segment_ids_BL)
        backend: Literal["xla", "pallas"] = "xla"
        if self.config.fsdp_overlap == "prefetch_pallas":
            backend = "pallas"
        return fa.nn.scan_with_prefetch(
            apply,
            self.layers,
            carry,
            *ids,
            fsdp_axis=self.fsdp_axis,
            dtype=jnp.dtype(self.config.dtype),
            backend=backend,
            policy=_POLICIES[self.config.remat],
            then=(finish_carry, self._last_modules(), *arrays),
        )

    def _embed(
        self, tokens_BL: Array, layout: Literal["sequence", "replicated"] = "sequence"
    ) -> Array:
        x_BLD = self.embed(tokens_BL, layout=layout)
        if self.config.scale_embeddings:
            return x_BLD * jnp.asarray(self.config.width**0.5, x_BLD.dtype)
        return x_BLD

    def _last_modules(self) -> _LastModules:
        """Returns what makes logits."""
        if self.output is None:
            return self.final_norm, self.embed
        return self.final_norm, self.output

    def _windowed_layers(self) -> Array:
        """Returns which layers attend only within `alternating_window`, bool [layers]."""
        return jnp.arange(self.config.layers) % 2 == 0

    def _window_mask(self, is_windowed: Array, positions: Array, length: int) -> Array | None:
        """Returns what queries at `positions` may attend to of `length` positions, bool [1, 1, q,
        length], or None.

        It says only what `alternating_window` forbids; the attention is causal beside it.
        """
        window = self.config.alternating_window
        if window is None:
            return None
        return ((positions[:, None] - jnp.arange(length)[None] < window) | ~is_windowed)[None, None]

    def loss(
        self,
        tokens_BL: Int[Array, "B L"],
        targets_BL: Int[Array, "B L"],
        *,
        segment_ids_BL: Int[Array, "B L"] | None = None,
        weights_BL: Float[Array, "B L"] | None = None,
    ) -> Float[Array, ""]:
        """Returns what training minimizes, as float32: the mean cross-entropy of the targets, in
        nats a token.

        There are never all logits. Weights make it a weighted mean. With experts, each loss of
        their routers is added: its mean over the layers, times its weight in the configuration.
        """
        losses = self.losses(
            tokens_BL, targets_BL, segment_ids_BL=segment_ids_BL, weights_BL=weights_BL
        )
        return self.total(losses)

    def total(self, losses: Losses) -> Float[Array, ""]:
        """Returns the sum of losses that training minimizes."""
        if losses.load_balance is None or losses.router_z is None:
            return losses.cross_entropy
        auxiliary = (
            self.config.load_balance_weight * losses.load_balance
            + self.config.router_z_weight * losses.router_z
        )
        return losses.cross_entropy + auxiliary

    def losses(
        self,
        tokens_BL: Int[Array, "B L"],
        targets_BL: Int[Array, "B L"],
        *,
        segment_ids_BL: Int[Array, "B L"] | None = None,
        weights_BL: Float[Array, "B L"] | None = None,
        routed: bool = True,
    ) -> Losses:
        """Returns what `loss` adds up, each by itself; without those of the routers unless
        `routed`.
        """

        def finish(
            modules: _LastModules,
            x_BLD: Array,
            losses: Array | None,
            targets_BL: Array,
            *weights_BL: Array,
        ) -> Losses:
            norm, output = modules
            weights = None
            if weights_BL:
                weights = weights_BL[0]
            cross_entropy = fa.nn.linear_cross_entropy(
                norm(x_BLD),
                output,
                targets_BL,
                weights=weights,
                logit_softcap=self.config.logit_softcap,
            )
            if losses is None:
                return Losses(cross_entropy)
            return Losses(cross_entropy, *(losses / self.config.layers))

        arrays = [targets_BL]
        if weights_BL is not None:
            arrays.append(weights_BL)
        return self._apply(
            finish, tokens_BL, segment_ids_BL, *arrays, routed=routed and self.config.experts > 0
        )


def _logits(modules: _LastModules, x_BLD: Array, config: TransformerConfig) -> Array:
    norm, output = modules
    x_BLD = norm(x_BLD)
    if isinstance(output, fa.nn.VocabParallelEmbed):
        logits_BLV = output.attend(x_BLD)
    else:
        logits_BLV = output(x_BLD)
    if config.logit_softcap is None:
        return logits_BLV
    padding = jnp.finfo(logits_BLV.dtype).min
    capped = config.logit_softcap * jnp.tanh(logits_BLV / config.logit_softcap)
    return jnp.where(logits_BLV == padding, padding, capped)


def _with_remat(remat: Remat | None) -> Callable[..., _Carry]:
    """Returns a function that applies a layer to its inputs, and says what the backward pass does
    again.

    With an fsdp axis, each weight is gathered once forward and, unless "none" or "cheap" keeps it,
    once backward.
    """

    def apply(
        layer: DecoderLayer,
        x_BLD: Array,
        losses: Array | None,
        segment_ids_BL: Array | None,
        mask: Array | None,
    ) -> _Carry:
        return layer.with_losses(checkpoint_name(x_BLD, STREAM), losses, segment_ids_BL, mask)

    if remat == "none":
        return apply
    return nnx.remat(apply, policy=_POLICIES[remat])
