"""Turns the layers of an existing model into parallel ones, in place, by the paths of its modules."""

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
from flax import nnx
from jax import lax

from flaxasync.mesh import mesh_axis_size
from flaxasync.nn.attention import ParallelAttention
from flaxasync.nn.embed import VocabParallelEmbed
from flaxasync.nn.linear import ColumnParallelLinear, RowParallelLinear
from flaxasync.nn.loading import load

type Rule = Literal["column", "logits", "row", "row_replicated", "embed", "embed_replicated", "attention"]


@dataclasses.dataclass(frozen=True)
class Replaced:
    """A layer that `parallelize` replaced.

    Attributes:
      path: Its path in the model, with dots.
      rule: The name of the rule.
      before: The type of the layer that was there.
      after: The type of the layer that is there now.
      shapes: The shapes of its parameters, by their names; they are those of before, but for merged heads.
    """

    path: str
    rule: str
    before: str
    after: str
    shapes: Mapping[str, tuple[int, ...]]

    def __str__(self) -> str:
        shapes = ", ".join(f"{name} {list(shape)}" for name, shape in self.shapes.items())
        return f"{self.path}: {self.before} -> {self.after} ({self.rule}), {shapes}"


def parallelize(
    model: nnx.Module,
    rules: Mapping[str, Rule],
    *,
    axis_name: str = "model",
    backend: str | None = None,
    verbose: bool = True,
) -> list[Replaced]:
    """Replaces layers of a model by parallel ones with the same parameters, and puts all of the model on the mesh.

    ```python
    fa.nn.parallelize(model, {"layers.*.up": "column", "layers.*.down": "row", "layers.*.attention": "attention"})
    ```

    A rule is one of:

    ```
    "column"            nnx.Linear -> ColumnParallelLinear      the output is sharded by features
    "logits"            nnx.Linear -> ColumnParallelLinear      likewise, padded where the axis does not divide them
    "row"               nnx.Linear -> RowParallelLinear         the output is sharded by rows
    "row_replicated"    nnx.Linear -> RowParallelLinear         the output is the same on all devices of the axis
    "embed"             nnx.Embed -> VocabParallelEmbed         the output is sharded by rows
    "embed_replicated"  nnx.Embed -> VocabParallelEmbed         the output is the same on all devices of the axis
    "attention"         nnx.MultiHeadAttention -> ParallelAttention
    ```

    Args:
      model: The model; its parameters may be on one device. The ambient mesh is that of the parallel layers. The
        parameters of an abstract model, of `nnx.eval_shape`, stay abstract, and `load` puts values into them.
      rules: A rule for each pattern of paths. `*` stands for one name, or for a part of it, and `**` for any number.
      axis_name: The mesh axis that splits the layers.
      backend: What executes the layers' collective ops; see `flaxasync.all_gather_matmul`.
      verbose: Whether to print what was replaced.

    Returns:
      What was replaced, in the order of the model.

    Raises:
      ValueError: A pattern matches no module, two patterns match one, a rule is unknown or does not fit the type of a
        layer, or a layer does things that the parallel one lacks. Nothing was replaced then.
    """
    mesh_axis_size("parallelize", axis_name)
    for pattern, rule in rules.items():
        if rule not in _MAKERS:
            raise ValueError(f"parallelize got {pattern!r}: {rule!r}: a rule is one of {', '.join(_MAKERS)}")
    modules = {".".join(map(str, path)): module for path, module in nnx.iter_modules(model) if path}
    chosen = _match(modules, rules)
    new: dict[str, nnx.Module] = {}
    for path, rule in chosen.items():
        kind, make = _MAKERS[rule]
        old = modules[path]
        if type(old) is not kind:
            raise ValueError(f"parallelize: {path} is a {type(old).__name__}, and {rule!r} replaces {kind.__name__}")
        reason = _lacking(old)
        if reason:
            raise ValueError(
                f"parallelize cannot replace {path}, a {kind.__name__}: {reason}; leave it out of the rules"
            )
        try:
            new[path] = nnx.eval_shape(
                lambda old=old, make=make: make(old, {"axis_name": axis_name, "backend": backend})
            )
        except ValueError as error:
            raise ValueError(f"parallelize cannot replace {path} by the rule {rule!r}: {error}") from error
        _keep_dtypes(new[path], old)
    places = _places([model, *modules.values()], {id(modules[path]): path for path in new})
    for path, layer in new.items():
        old = modules[path]
        if not _is_abstract(old):
            load(layer, old)
        _keep_metadata(layer, old)
        if isinstance(layer, ParallelAttention) and isinstance(old, nnx.MultiHeadAttention):
            layer.rngs = old.rngs if old.dropout_rate else nnx.data(None)
    done = []
    for path, layer in new.items():
        shapes = {".".join(map(str, p)): v.shape for p, v in nnx.to_flat_state(nnx.state(layer, nnx.Param))}
        done.append(Replaced(path, chosen[path], type(modules[path]).__name__, type(layer).__name__, shapes))
        for parent, name in places[path]:
            setattr(parent, name, layer)
    _place_rest(model)
    if verbose:
        print("\n".join(map(str, done)))
    return done


def _match(modules: Mapping[str, nnx.Module], rules: Mapping[str, Rule]) -> dict[str, Rule]:
    """Returns the rule of each path, in the order of the model."""
    chosen: dict[str, tuple[str, Rule]] = {}
    for pattern, rule in rules.items():
        parts = {"**": ".*", "*": "[^.]*"}
        regex = re.compile("".join(parts.get(part, re.escape(part)) for part in re.split(r"(\*\*|\*)", pattern)))
        matched = [path for path in modules if regex.fullmatch(path)]
        if not matched:
            raise ValueError(
                f"parallelize: no module matches {pattern!r}; the model has {', '.join(sorted(modules)) or 'none'}"
            )
        for path in matched:
            if path in chosen:
                raise ValueError(f"parallelize: {path} matches both {chosen[path][0]!r} and {pattern!r}")
            chosen[path] = pattern, rule
    return {path: chosen[path][1] for path in modules if path in chosen}


def _places(parents: list[nnx.Module], paths: Mapping[int, str]) -> dict[str, list[tuple[nnx.Module, str]]]:
    """Returns the attributes that hold each layer, as modules and names. `paths` has the paths of the layers by id().

    Raises:
      ValueError: A layer is held by something that is not a module, whose entries cannot be assigned in general.
    """
    places: dict[str, list[tuple[nnx.Module, str]]] = {path: [] for path in paths.values()}
    nested = set()
    for parent in {id(parent): parent for parent in parents}.values():
        for name, value in vars(parent).items():
            if id(value) in paths:
                places[paths[id(value)]].append((parent, name))
            else:
                nested |= {paths[id(layer)] for layer in _layers_in(value) if id(layer) in paths}
    for path, found in places.items():
        if path in nested or not found:
            raise ValueError(
                f"parallelize cannot replace {path}: it is in a tuple, list or dict; use nnx.List or nnx.Dict"
            )
    return places


def _layers_in(value: Any) -> list[nnx.Module]:
    """Returns the modules in plain containers, which may be nested."""
    if isinstance(value, nnx.Module):
        return [value]
    entries = value.values() if isinstance(value, dict) else value if isinstance(value, tuple | list) else ()
    return [layer for entry in entries for layer in _layers_in(entry)]


def _lacking(old: nnx.Module) -> str:
    """Returns what a layer does that its parallel form does not; "" for nothing."""
    if isinstance(old, nnx.Linear) and old.dot_general is not lax.dot_general:
        return "it has a dot_general of its own"
    if isinstance(old, nnx.Linear) and old.kernel.ndim != 2:
        return f"its kernel is a stack, {list(old.kernel.shape)}: build the stack of parallel layers in nnx.vmap"
    if isinstance(old, nnx.MultiHeadAttention):
        if old.query.kernel.ndim != 3:
            return f"its kernels are stacks, {list(old.query.kernel.shape)}: build the stack in nnx.vmap"
        if old.decode:
            return "it decodes with a cache"
        if old.dropout_rate and old.broadcast_dropout:
            return "its dropout is the same for the whole batch: give it broadcast_dropout=False"
        if old.attention_fn is not nnx.dot_product_attention:
            return (
                "it has an attention_fn of its own, which would see only the heads of one device: build "
                "ParallelAttention(attention_fn=...) yourself"
            )
        functions = (old.qkv_dot_general, old.out_dot_general, old.qkv_dot_general_cls, old.out_dot_general_cls)
        if any(function is not None for function in functions):
            return "it has a dot_general of its own"
    for path, variable in _variables(old).items():
        if type(variable) is not nnx.Param:
            name = ".".join(map(str, path))
            return f"its {name} is of type {type(variable).__name__}, and that of a parallel layer is an nnx.Param"
    return ""


def _variables(layer: nnx.Module) -> dict[tuple, nnx.Variable]:
    """Returns the variables of a layer that are no random streams, by their paths."""
    found = {path: value for path, value in nnx.iter_graph(layer) if isinstance(value, nnx.Variable)}
    return {path: variable for path, variable in found.items() if not isinstance(variable, nnx.RngState)}


def _is_abstract(layer: nnx.Module) -> bool:
    """Says whether a layer has shapes in the place of arrays, as `nnx.eval_shape` makes it."""
    return any(isinstance(variable.get_value(), jax.ShapeDtypeStruct) for variable in _variables(layer).values())


def _keep_dtypes(layer: nnx.Module, old: nnx.Module) -> None:
    """Gives the parameters of an abstract layer the dtypes that they have, which may not be `param_dtype`."""
    before = _variables(old)
    for path, variable in _variables(layer).items():
        value = variable.get_value()
        if path in before:
            variable.set_value(jax.ShapeDtypeStruct(value.shape, before[path].dtype, sharding=value.sharding))


def _keep_metadata(layer: nnx.Module, old: nnx.Module) -> None:
    """Copies the metadata of the parameters, but for how they are sharded."""
    before = _variables(old)
    for path, variable in _variables(layer).items():
        metadata = before[path].get_metadata()
        variable.set_metadata(**{key: metadata[key] for key in metadata if key not in ("out_sharding", "mesh")})


def _linear_options(old: Any, options: dict[str, Any]) -> dict[str, Any]:
    return options | {
        "use_bias": old.use_bias,
        "dtype": old.dtype,
        "param_dtype": old.param_dtype,
        "precision": old.precision,
        "rngs": nnx.Rngs(0),
    }


def _column(old: nnx.Linear, options: dict[str, Any], *, pad: bool = False) -> nnx.Module:
    more: dict[str, Any] = {"promote_dtype": old.promote_dtype, "preferred_element_type": old.preferred_element_type}
    return ColumnParallelLinear(old.in_features, old.out_features, pad=pad, **_linear_options(old, options), **more)


def _logits(old: nnx.Linear, options: dict[str, Any]) -> nnx.Module:
    return _column(old, options, pad=True)


def _row(old: nnx.Linear, options: dict[str, Any], *, layout: Any = "sequence") -> nnx.Module:
    more: dict[str, Any] = {"promote_dtype": old.promote_dtype, "preferred_element_type": old.preferred_element_type}
    return RowParallelLinear(old.in_features, old.out_features, layout=layout, **_linear_options(old, options), **more)


def _row_replicated(old: nnx.Linear, options: dict[str, Any]) -> nnx.Module:
    return _row(old, options, layout="replicated")


def _embed(old: nnx.Embed, options: dict[str, Any], *, layout: Any = "sequence") -> nnx.Module:
    options = options | {"dtype": old.dtype, "param_dtype": old.param_dtype, "rngs": nnx.Rngs(0)}
    return VocabParallelEmbed(old.num_embeddings, old.features, layout=layout, **options)


def _embed_replicated(old: nnx.Embed, options: dict[str, Any]) -> nnx.Module:
    return _embed(old, options, layout="replicated")


def _attention(old: nnx.MultiHeadAttention, options: dict[str, Any]) -> nnx.Module:
    return ParallelAttention(
        old.in_features,
        old.num_heads,
        kv_heads=old.num_kv_heads,
        head_dim=old.head_dim,
        kv_features=old.in_kv_features,
        out_features=old.out_features,
        normalize_qk=old.normalize_qk,
        dropout_rate=old.dropout_rate,
        deterministic=old.deterministic,
        **_linear_options(old, options),
    )


_MAKERS: dict[str, tuple[type[nnx.Module], Callable[[Any, dict[str, Any]], nnx.Module]]] = {
    "column": (nnx.Linear, _column),
    "logits": (nnx.Linear, _logits),
    "row": (nnx.Linear, _row),
    "row_replicated": (nnx.Linear, _row_replicated),
    "embed": (nnx.Embed, _embed),
    "embed_replicated": (nnx.Embed, _embed_replicated),
    "attention": (nnx.MultiHeadAttention, _attention),
}


def _place_rest(model: nnx.Module) -> None:
    """Puts what is not on the mesh yet on all of its devices. Explicit axes do not mix with arrays elsewhere."""
    mesh = jax.sharding.get_mesh()
    replicated = jax.NamedSharding(mesh, jax.sharding.PartitionSpec())

    def place(value: Any) -> Any:
        if not isinstance(value, jax.Array) or getattr(value.sharding, "mesh", None) == mesh:
            return value
        return jax.device_put(value, replicated)

    nnx.update(model, jax.tree.map(place, nnx.state(model)))
