"""The parallel form of one plain layer: what can be replaced, and by what."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
from flax import nnx
from flax.nnx.nn.dtypes import promote_dtype
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from flaxasync.nn.adopt.fused import Fused, regroup
from flaxasync.nn.adopt.loading import load
from flaxasync.nn.adopt.lora import ParallelLoRA
from flaxasync.nn.adopt.names import variables_of
from flaxasync.nn.attention.layer import ParallelAttention
from flaxasync.nn.embed import VocabParallelEmbed
from flaxasync.nn.fully_sharded import ANNOTATIONS
from flaxasync.nn.linear import ColumnParallelLinear, ColumnParallelProjections, RowParallelLinear

type Rule = Literal[
    "column", "logits", "row", "row_replicated", "embed", "embed_replicated", "attention"
]
type Options = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Form:
    """What a rule replaces, and by what."""

    replaces: type[nnx.Module]
    makes: Callable[..., nnx.Module]
    kept: Mapping[str, str]  # keywords of the parallel layer, with the attributes of the plain one
    options: dict[str, Any] = dataclasses.field(default_factory=dict)  # its other keywords


def _same(*names: str) -> dict[str, str]:
    """Returns keywords that are attributes of the plain layer, too."""
    return dict(zip(names, names, strict=True))


_SHARED = _same("out_features", "use_bias", "dtype", "param_dtype", "precision")
_LINEAR = _SHARED | _same("in_features", "dot_general", "promote_dtype", "preferred_element_type")
_EMBED = _same("num_embeddings", "features", "dtype", "param_dtype", "promote_dtype")
_ATTENTION = (
    _SHARED
    | _same("num_heads", "head_dim", "normalize_qk", "dropout_rate", "deterministic")
    | {
        "features": "in_features",
        "kv_heads": "num_kv_heads",
        "kv_features": "in_kv_features",
        "promote_dtype": "qkv_promote_dtype",
        "dot_general": "qkv_dot_general",  # None stands for the default
    }
)
_REPLICATED = {"layout": "replicated"}
RULES: dict[Rule, Form] = {
    "column": Form(nnx.Linear, ColumnParallelLinear, _LINEAR),
    "logits": Form(nnx.Linear, ColumnParallelLinear, _LINEAR, {"pad": True}),
    "row": Form(nnx.Linear, RowParallelLinear, _LINEAR),
    "row_replicated": Form(nnx.Linear, RowParallelLinear, _LINEAR, _REPLICATED),
    "embed": Form(nnx.Embed, VocabParallelEmbed, _EMBED),
    "embed_replicated": Form(nnx.Embed, VocabParallelEmbed, _EMBED, _REPLICATED),
    "attention": Form(nnx.MultiHeadAttention, ParallelAttention, _ATTENTION),
}


def parallel_form(old: Any, rule: Rule | Fused, options: Options) -> nnx.Module:
    """Returns the parallel layer for a plain one, with its parameters in their dtypes. They are
    abstract if those of the plain one are.

    Raises:
      ValueError: The rule is not for such a layer, or the layer does what the parallel one lacks.
      NotImplementedError: The parallel layer lacks an option of the plain one.
    """
    if isinstance(rule, Fused):
        form = Form(nnx.Linear, ColumnParallelProjections, _LINEAR, {"out_features": rule.parts})
    elif rule in RULES:
        form = RULES[rule]
    else:
        raise ValueError(f"a rule is one of {', '.join(RULES)}, or a flaxasync.nn.Fused")
    layer: Any = nnx.eval_shape(lambda: _make(form, old, options))
    before = variables_of(old)
    is_abstract = any(
        isinstance(variable.get_value(), jax.ShapeDtypeStruct) for variable in before.values()
    )
    if isinstance(rule, Fused):
        before = _parts_of(before, layer)
    dims = 2  # of a kernel
    if isinstance(layer, ParallelAttention):
        dims = 3  # heads are a dimension of the plain one
        if old.dropout_rate:
            layer.rngs = old.rngs
    _take_over(layer, before, dims)
    if not is_abstract:
        load(layer, old)
    return layer


def _parts_of(fused: Mapping[str, nnx.Variable], layer: nnx.Module) -> dict[str, nnx.Variable]:
    """Returns abstract variables of the projections of a layer, with the metadata of fused ones."""
    whole = {name: jax.ShapeDtypeStruct(v.shape, v.dtype) for name, v in fused.items()}
    parts = jax.eval_shape(lambda source: regroup(layer, None, source, frozenset()), whole)
    return {name: fused[name.rpartition(".")[2]].replace(part) for name, part in parts.items()}


def _make(form: Form, old: Any, options: Options) -> nnx.Module:
    """Makes the layer for a plain one; for an `nnx.LoRA` around that, with an adapter around it."""
    if type(old) is nnx.LoRA:
        if isinstance(old.base_module, ColumnParallelLinear | RowParallelLinear):
            raise ValueError(
                f"the rule replaces nnx.{form.replaces.__name__}, and this nnx.LoRA is around a "
                f"{type(old.base_module).__name__}: put fa.nn.ParallelLoRA around that yourself"
            )
        base: Any = _make(form, old.base_module, options)
        adapter = ParallelLoRA(base, old.lora_a.shape[-1], rngs=nnx.Rngs(0))
        for name in ("dtype", "param_dtype", "promote_dtype"):
            setattr(adapter, name, getattr(old, name))
        return adapter
    if type(old) is not form.replaces:
        raise ValueError(
            f"the rule replaces nnx.{form.replaces.__name__}: got {type(old).__name__}"
        )
    if isinstance(old, nnx.MultiHeadAttention):
        _check_attention(old)
    kept = {keyword: getattr(old, name) for keyword, name in form.kept.items()}
    return form.makes(rngs=nnx.Rngs(0), **kept | form.options | options)


def _check_attention(old: nnx.MultiHeadAttention) -> None:
    """Raises ValueError for attention that does what `ParallelAttention` does not."""
    for name in ("query", "key", "value", "out", "query_ln", "key_ln"):
        part = getattr(old, name)
        kind = nnx.LayerNorm if name.endswith("_ln") else nnx.LinearGeneral
        if part is not None and type(part) is not kind:
            raise ValueError(
                f"its {name} is a {type(part).__name__} and not a {kind.__name__}, whose "
                "parameters ParallelAttention reads without calling it: adapt separate layers"
            )
    if old.decode or old.cached_key is not None:
        raise ValueError(
            "it decodes with a cache of keys and values: build the model with decode=False, and "
            "give the parallel layer its own cache with init_cache"
        )
    if old.dropout_rate and old.broadcast_dropout:
        raise ValueError(
            "its dropout is the same for the whole batch: give it broadcast_dropout=False"
        )
    if old.attention_fn is not nnx.dot_product_attention:
        raise ValueError(
            "it has an attention_fn of its own, which would see only the heads of one device: "
            "build ParallelAttention(attention_fn=...) yourself"
        )
    functions = (old.out_dot_general, old.out_promote_dtype, old.ln_promote_dtype)
    if functions != (old.qkv_dot_general, old.qkv_promote_dtype, promote_dtype) or (
        old.qkv_dot_general_cls or old.out_dot_general_cls
    ):
        raise ValueError(
            "its parts have several functions dot_general or promote_dtype, or a dot_general_cls, "
            "and ParallelAttention has one dot_general and one promote_dtype"
        )


def _take_over(layer: nnx.Module, before: Mapping[str, nnx.Variable], dims: int) -> None:
    """Gives the abstract parameters of a layer the leading dimensions, dtypes and metadata of those
    of a plain one, whose kernels have `dims` dimensions after those that `nnx.vmap` makes.

    How they are sharded is the layer's.
    """
    after = variables_of(layer)
    stack = max((variable.shape for variable in before.values()), key=len)[:-dims]
    dims_before = len(stack)
    has = {name: (type(v), v.shape[:dims_before], v.size) for name, v in before.items()}
    layers = math.prod(stack)
    needed = {name: (type(v), stack, layers * v.size) for name, v in after.items()}
    if has != needed:
        raise ValueError(
            f"it has the parameters {_listed(before)}, and a layer of its options has "
            f"{_listed(after)}; dimensions of a stack come first, as with out_axes=0 of nnx.vmap"
        )
    whole = (None,) * dims_before
    for name, variable in after.items():
        value = variable.get_value()
        sharding = value.sharding
        if isinstance(sharding, NamedSharding):
            sharding = NamedSharding(sharding.mesh, P(*whole, *sharding.spec))
        variable.set_value(
            jax.ShapeDtypeStruct((*stack, *value.shape), before[name].dtype, sharding=sharding)
        )
        kept = before[name].get_metadata()
        metadata = {key: kept[key] for key in kept if key not in (*ANNOTATIONS, "mesh")}
        if out_sharding := variable.get_metadata().get("out_sharding"):
            metadata["out_sharding"] = (*whole, *out_sharding)
        variable.set_metadata(**metadata)


def _listed(variables: Mapping[str, nnx.Variable]) -> str:
    """Returns the names, types and shapes of variables."""
    return ", ".join(
        f"{name} {type(variable).__name__}{list(variable.shape)}"
        for name, variable in sorted(variables.items())
    )
