"""The parallel form of one plain layer: what can be replaced, and by what."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
from flax import nnx
from flax.nnx.nn.dtypes import promote_dtype
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from flaxasync.nn.adopt.fused import Fused, parts_of
from flaxasync.nn.adopt.loading import variables_of
from flaxasync.nn.adopt.lora import ParallelLoRA
from flaxasync.nn.attention.layer import ParallelAttention
from flaxasync.nn.embed import VocabParallelEmbed
from flaxasync.nn.linear import ColumnParallelLinear, ColumnParallelProjections, RowParallelLinear
from flaxasync.nn.placement import Layout

type Rule = Literal[
    "column", "logits", "row", "row_replicated", "embed", "embed_replicated", "attention"
]
type Options = dict[str, Any]


def _same(*names: str) -> dict[str, str]:
    """Returns keywords that are attributes of the plain layer, too."""
    return dict(zip(names, names, strict=True))


# The keywords of parallel layers that are taken from a plain one, with its attributes.
_EMBED = _same("dtype", "param_dtype", "promote_dtype")
_SHARED = _same("use_bias", "dtype", "param_dtype", "precision")
_LINEAR = _SHARED | _same("dot_general", "promote_dtype", "preferred_element_type")
_ATTENTION = (
    _SHARED
    | _same("normalize_qk", "dropout_rate", "deterministic", "head_dim", "out_features")
    | {
        "kv_heads": "num_kv_heads",
        "kv_features": "in_kv_features",
        "promote_dtype": "qkv_promote_dtype",
        "dot_general": "qkv_dot_general",  # None stands for the default
    }
)


def _check_attention(old: nnx.MultiHeadAttention) -> None:
    """Raises ValueError for attention that does what `ParallelAttention` does not."""
    parts: dict[str, type[nnx.Module]] = dict.fromkeys(
        ("query", "key", "value", "out"), nnx.LinearGeneral
    )
    if old.normalize_qk:
        parts |= {"query_ln": nnx.LayerNorm, "key_ln": nnx.LayerNorm}
    for name, kind in parts.items():
        if type(part := getattr(old, name)) is not kind:
            raise ValueError(
                f"its {name} is a {type(part).__name__} and not a {kind.__name__}, whose "
                "parameters ParallelAttention reads without calling it: adapt separate layers"
            )
    reasons = {
        "it decodes with a cache of keys and values: build the model with decode=False, and give "
        "the parallel layer its own cache with init_cache": old.decode
        or old.cached_key is not None,
        "its dropout is the same for the whole batch: give it broadcast_dropout=False": (
            old.dropout_rate and old.broadcast_dropout
        ),
        "it has an attention_fn of its own, which would see only the heads of one device: build "
        "ParallelAttention(attention_fn=...) yourself": old.attention_fn
        is not nnx.dot_product_attention,
        "it has a dot_general_cls: give it qkv_dot_general and out_dot_general": (
            old.qkv_dot_general_cls is not None or old.out_dot_general_cls is not None
        ),
        "its parts have several functions dot_general or promote_dtype, and ParallelAttention has "
        "one of each": (
            old.qkv_dot_general is not old.out_dot_general
            or old.qkv_promote_dtype is not old.out_promote_dtype
            or old.ln_promote_dtype is not promote_dtype
        ),
    }
    for reason, applies in reasons.items():
        if applies:
            raise ValueError(reason)


@dataclasses.dataclass(frozen=True)
class Form:
    """What a rule replaces, and how the parallel layer is made."""

    replaces: tuple[type[nnx.Module], ...]
    makes: Callable[..., nnx.Module]
    sizes: tuple[str, str]  # the attributes of a plain layer that are the first arguments
    options: Mapping[str, str]
    check: Callable[[Any], None] = lambda old: None  # raises ValueError for what cannot be replaced
    parts: Mapping[str, int] | None = None  # the features of each part, where the output has parts

    def make(self, old: Any, options: Options) -> nnx.Module:
        """Makes the layer for a plain one; for an `nnx.LoRA` around that, with an adapter around
        it.
        """
        if isinstance(old, nnx.LoRA):
            base: Any = self.make(_adapted(old), options)
            return ParallelLoRA(base, old.lora_a.shape[-1], rngs=nnx.Rngs(0))
        self.check(old)
        sizes = (getattr(old, name) for name in self.sizes)
        kept = {keyword: getattr(old, name) for keyword, name in self.options.items()}
        return self.makes(*sizes, rngs=nnx.Rngs(0), **kept, **options)


def form_of(rule: Rule | Fused) -> Form:
    """Returns the form of a rule."""
    if isinstance(rule, Fused):
        makes = functools.partial(_projections, rule)
        return Form((nnx.Linear,), makes, _LINEAR_SIZES, _LINEAR, parts=rule.parts)
    return RULES[rule]


def parallel_form(old: Any, rule: Rule | Fused, options: Options) -> nnx.Module:
    """Returns the parallel layer for a plain one: its parameters are abstract, in the dtypes of the
    plain ones.
    """
    form = form_of(rule)
    layer: Any = nnx.eval_shape(lambda: form.make(old, options))
    _take_over(layer, old, form.parts)
    if isinstance(layer, ParallelAttention):
        layer.rngs = old.rngs if old.dropout_rate else nnx.data(None)
    return layer


def _take_over(layer: nnx.Module, old: nnx.Module, parts: Mapping[str, int] | None) -> None:
    """Gives the abstract parameters of a layer the leading dimensions, dtypes and metadata of those
    of a plain one.

    How they are sharded is the layer's. The plain one may be of several `parts` side by side.
    """
    before = variables_of(old)
    after = variables_of(layer)
    if parts is not None:
        before = parts_of(before, parts)
    if before.keys() != after.keys():
        has, needed = (", ".join(sorted(one)) for one in (before, after))
        raise ValueError(f"it has the parameters {has}, and a layer of its options has {needed}")
    stack = _stack(old)
    whole = (None,) * len(stack)
    for name, variable in after.items():
        plain = before[name]
        value = variable.get_value()
        if type(plain) is not type(variable):
            raise ValueError(
                f"its {name} is of type {type(plain).__name__}, and that of a parallel layer is of "
                f"type {type(variable).__name__}"
            )
        if plain.shape[: len(stack)] != stack or plain.size != math.prod((*stack, *value.shape)):
            raise ValueError(
                f"its {name} is {list(plain.shape)}, and not {list(value.shape)} after dimensions "
                "of layers: make a stack of layers with out_axes=0 of nnx.vmap"
            )
        sharding = value.sharding
        if isinstance(sharding, NamedSharding):
            sharding = NamedSharding(sharding.mesh, P(*whole, *sharding.spec))
        variable.set_value(
            jax.ShapeDtypeStruct((*stack, *value.shape), plain.dtype, sharding=sharding)
        )
        if out_sharding := variable.get_metadata().get("out_sharding"):
            variable.set_metadata(out_sharding=(*whole, *out_sharding))
        metadata = plain.get_metadata()
        variable.set_metadata(
            **{
                key: metadata[key]
                for key in metadata
                if key not in ("out_sharding", "sharding_rules", "mesh")
            }
        )


def _stack(old: nnx.Module) -> tuple[int, ...]:
    """Returns the leading dimensions of the parameters of a layer that `nnx.vmap` made; () for a
    single layer.
    """
    if isinstance(old, nnx.MultiHeadAttention):
        return old.query.kernel.shape[:-3]
    name = {nnx.LoRA: "lora_a", nnx.Embed: "embedding", nnx.Linear: "kernel"}[type(old)]
    return getattr(old, name).shape[:-2]


def _adapted(old: nnx.LoRA) -> nnx.Linear:
    """Returns the layer that is adapted. Raises ValueError unless a `ParallelLoRA` does the
    same.
    """
    adapted = old.base_module
    if type(adapted) is not nnx.Linear:
        raise ValueError(
            f"it is around a {type(adapted).__name__}, and the rules are those of nnx.Linear: "
            "around a parallel layer put flaxasync.nn.ParallelLoRA in its place"
        )
    dtypes = [(layer.dtype, layer.param_dtype, layer.promote_dtype) for layer in (old, adapted)]
    if dtypes[0] != dtypes[1]:
        raise ValueError(
            "its dtype, param_dtype or promote_dtype is not that of the layer that it adapts"
        )
    return adapted


def _projections(
    rule: Fused, in_features: int, out_features: int, **options: Any
) -> ColumnParallelProjections:
    if sum(rule.parts.values()) != out_features:
        raise ValueError(f"it has {out_features} features, and the parts of its rule are {rule}")
    return ColumnParallelProjections(in_features, rule.parts, **options)


def _of_linear(cls: type[nnx.Module], **more: Any) -> Form:
    makes = functools.partial(cls, **more)
    return Form((nnx.Linear, nnx.LoRA), makes, _LINEAR_SIZES, _LINEAR)


def _of_embed(layout: Layout) -> Form:
    makes = functools.partial(VocabParallelEmbed, layout=layout)
    return Form((nnx.Embed,), makes, ("num_embeddings", "features"), _EMBED)


_LINEAR_SIZES = ("in_features", "out_features")
RULES: dict[Rule, Form] = {
    "column": _of_linear(ColumnParallelLinear),
    "logits": _of_linear(ColumnParallelLinear, pad=True),
    "row": _of_linear(RowParallelLinear),
    "row_replicated": _of_linear(RowParallelLinear, layout="replicated"),
    "embed": _of_embed("sequence"),
    "embed_replicated": _of_embed("replicated"),
    "attention": Form(
        (nnx.MultiHeadAttention,),
        ParallelAttention,
        ("in_features", "num_heads"),
        _ATTENTION,
        check=_check_attention,
    ),
}
