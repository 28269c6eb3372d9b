"""The parallel form of one plain layer: what can be replaced, and by what."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, cast

import jax
from flax import nnx
from flax.nnx.nn.dtypes import promote_dtype
from flax.typing import DotGeneralT
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from flaxasync.nn.adopt.fused import Fused, parts_of
from flaxasync.nn.adopt.loading import variables_of
from flaxasync.nn.adopt.products import ParallelLoRA
from flaxasync.nn.attention.layer import ParallelAttention
from flaxasync.nn.embed import VocabParallelEmbed
from flaxasync.nn.linear import ColumnParallelLinear, ColumnParallelProjections, RowParallelLinear
from flaxasync.nn.placement import Layout

type Rule = Literal[
    "column", "logits", "row", "row_replicated", "embed", "embed_replicated", "attention"
]
type Options = dict[str, Any]

# Options that a plain layer and the parallel one both have, under one name.
EMBED_OPTIONS = ("dtype", "param_dtype", "promote_dtype")
SHARED_OPTIONS = ("use_bias", "dtype", "param_dtype", "precision")
LINEAR_OPTIONS = (*SHARED_OPTIONS, "dot_general", "promote_dtype", "preferred_element_type")
ATTENTION_OPTIONS = (*SHARED_OPTIONS, "normalize_qk", "dropout_rate", "deterministic")


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
        "it decodes with a cache of keys and values: build the model with decode=False to train "
        "it, and decode with the plain one": old.decode or old.cached_key is not None,
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
    make: Callable[[Any, Options], nnx.Module]  # of a plain layer that is no adapter
    parts: Mapping[str, int] | None = None  # the features of each part, where the output has parts


def form_of(rule: Rule | Fused) -> Form:
    """Returns the form of a rule."""
    if isinstance(rule, Fused):
        return Form((nnx.Linear,), functools.partial(_fused, rule=rule), rule.parts)
    return RULES[rule]


def parallel_form(old: Any, rule: Rule | Fused, options: Options) -> nnx.Module:
    """Returns the parallel layer for a plain one: its parameters are abstract, in the dtypes of the
    plain ones.
    """
    form = form_of(rule)
    layer: Any = nnx.eval_shape(lambda: form.make(old, options))
    _take_over(layer, old, parts=form.parts)
    if isinstance(layer, ParallelAttention):
        layer.rngs = old.rngs if old.dropout_rate else nnx.data(None)
    return layer


def adapted_form(old: nnx.LoRA, base: Any, rule: Rule, options: Options) -> nnx.Module:
    """Returns the layer for an `nnx.LoRA`, around the parallel layer that is in the place of the
    adapted one.
    """
    adapted: Any = old.base_module
    if type(adapted) not in (nnx.Linear, ColumnParallelLinear, RowParallelLinear):
        raise ValueError(
            f"it is around a {type(adapted).__name__}, and the rules are those of nnx.Linear"
        )
    dtypes = [(layer.dtype, layer.param_dtype, layer.promote_dtype) for layer in (old, adapted)]
    if dtypes[0] != dtypes[1]:
        raise ValueError(
            "its dtype, param_dtype or promote_dtype is not that of the layer that it adapts"
        )
    if base is adapted:  # a parallel layer, which stays as it is
        row: Rule = "row" if base.layout == "sequence" else "row_replicated"
        fitting = ("column", "logits") if isinstance(base, ColumnParallelLinear) else (row,)
        axis_name = base.settings.axis_name
        if rule not in fitting or options["axis_name"] != axis_name:
            raise ValueError(
                f"it is around a {type(base).__name__} over {axis_name!r}, which stays as it is: "
                f"the rule for it is {fitting[0]!r}, with axis_name={axis_name!r}; got "
                f"axis_name={options['axis_name']!r}"
            )

    def factors() -> ParallelLoRA:
        layer = ParallelLoRA(base, old.lora_a.shape[-1], rngs=nnx.Rngs(0))
        # its parameters may be abstract already, and are none of this program
        layer.base_module = nnx.data(None)
        return layer

    layer: Any = nnx.eval_shape(factors)
    layer.base_module = base
    _take_over(layer, old, without="base_module")
    return layer


def _take_over(
    layer: nnx.Module,
    old: nnx.Module,
    without: str | None = None,
    parts: Mapping[str, int] | None = None,
) -> None:
    """Gives the abstract parameters of a layer the leading dimensions, dtypes and metadata of those
    of a plain one.

    How they are sharded is the layer's. The plain one may be of several `parts` side by side.
    """
    before, after = (
        {
            name: variable
            for name, variable in variables_of(one).items()
            if name.split(".")[0] != without
        }
        for one in (old, layer)
    )
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


def _options_of(old: nnx.Module, names: Sequence[str]) -> Options:
    """Returns the values of options that a plain layer and the parallel one both have."""
    return {name: getattr(old, name) for name in names}


def _linear(
    cls: Callable[..., nnx.Module], old: nnx.Linear, options: Options, **more: Any
) -> nnx.Module:
    kept = _options_of(old, LINEAR_OPTIONS)
    return cls(old.in_features, old.out_features, rngs=nnx.Rngs(0), **kept, **options, **more)


def _fused(old: nnx.Linear, options: Options, rule: Fused) -> ColumnParallelProjections:
    if sum(rule.parts.values()) != old.out_features:
        raise ValueError(
            f"it has {old.out_features} features, and the parts of its rule are {rule}"
        )
    kept = _options_of(old, LINEAR_OPTIONS)
    return ColumnParallelProjections(
        old.in_features, rule.parts, rngs=nnx.Rngs(0), **kept, **options
    )


def _embed(old: nnx.Embed, options: Options, *, layout: Layout) -> nnx.Module:
    kept = _options_of(old, EMBED_OPTIONS)
    return VocabParallelEmbed(
        old.num_embeddings, old.features, layout=layout, rngs=nnx.Rngs(0), **kept, **options
    )


def _attention(old: nnx.MultiHeadAttention, options: Options) -> nnx.Module:
    _check_attention(old)
    return ParallelAttention(
        old.in_features,
        old.num_heads,
        kv_heads=old.num_kv_heads,
        head_dim=old.head_dim,
        kv_features=old.in_kv_features,
        out_features=old.out_features,
        promote_dtype=old.qkv_promote_dtype,
        dot_general=cast(DotGeneralT, old.qkv_dot_general),  # None stands for the default
        rngs=nnx.Rngs(0),
        **_options_of(old, ATTENTION_OPTIONS),
        **options,
    )


_LINEAR = (nnx.Linear, nnx.LoRA)
RULES: dict[Rule, Form] = {
    "column": Form(_LINEAR, functools.partial(_linear, ColumnParallelLinear)),
    "logits": Form(_LINEAR, functools.partial(_linear, ColumnParallelLinear, pad=True)),
    "row": Form(_LINEAR, functools.partial(_linear, RowParallelLinear)),
    "row_replicated": Form(
        _LINEAR, functools.partial(_linear, RowParallelLinear, layout="replicated")
    ),
    "embed": Form((nnx.Embed,), functools.partial(_embed, layout="sequence")),
    "embed_replicated": Form((nnx.Embed,), functools.partial(_embed, layout="replicated")),
    "attention": Form((nnx.MultiHeadAttention,), _attention),
}
