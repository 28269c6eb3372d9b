"""Turns the layers of an existing model into parallel ones, in place, by the paths of its
modules.
"""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
from flax import nnx

from flaxasync.mesh import mesh_axis_size
from flaxasync.nn.adopt.fused import Fused, is_called_fused
from flaxasync.nn.adopt.loading import load, variables_of
from flaxasync.nn.adopt.parallel_form import (
    RULES,
    Options,
    Rule,
    form_of,
    parallel_form,
)
from flaxasync.nn.placement import is_eager, put

FUSED_NOTE = (
    "if the model takes its output apart, the parts move between devices: use flaxasync.nn.Fused"
)


@dataclasses.dataclass(frozen=True)
class Replaced:
    """A layer that `parallelize` replaced."""

    path: str  # in the model, with dots
    rule: str
    before: str  # the type of the layer that was there
    after: str  # the type of the layer that is there now
    # of its parameters, by name; those of before, but for merged heads
    shapes: Mapping[str, tuple[int, ...]]
    note: str = ""  # what may cost time and could be otherwise

    def __str__(self) -> str:
        shapes = ", ".join(f"{name} {list(shape)}" for name, shape in self.shapes.items())
        return (
            f"{self.path}: {self.before} -> {self.after} ({self.rule}), "
            f"{shapes}{self.note and f'; {self.note}'}"
        )


def parallelize(
    model: nnx.Module,
    rules: Mapping[str, Rule | Fused],
    *,
    axis_name: str = "model",
    fsdp_axis: str | None = None,
    backend: str | None = None,
    verbose: bool = True,
) -> list[Replaced]:
    """Replaces layers of a model by parallel ones with the same parameters, and puts all of the
    model on the mesh.

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
    fa.nn.Fused(...)    nnx.Linear -> ColumnParallelProjections, each part of its output split by itself
    ```

    The rules of `nnx.Linear` turn an `nnx.LoRA` around one into a `ParallelLoRA` around the
    parallel layer. A layer that several modules share is replaced in all of them.
    A layer that `nnx.vmap` made becomes a stack of parallel layers, for `nnx.scan`. A function that
    makes a model and calls this may be traced: by `nnx.jit`, which makes the parameters sharded,
    and by `nnx.eval_shape`, for a checkpoint that is restored onto another mesh.

    Args:
      model: The model; its parameters may be on one device. The ambient mesh is that of the
        parallel layers. The parameters of an abstract model, of `nnx.eval_shape`, stay abstract,
        and `load` puts values into them.
      rules: A rule for each pattern of paths. `*` stands for one name, or for a part of it, and
        `**` for any number, also none: `**.up` is every `up`.
      axis_name: The mesh axis that splits the layers.
      fsdp_axis: A mesh axis over which the parallel layers store their parameters sharded as well;
        None for none.
      backend: What executes the layers' collective ops; see `flaxasync.all_gather_matmul`.
      verbose: Whether to print what was replaced.

    Returns:
      What was replaced, in the order of the model.

    Raises:
      ValueError: A pattern matches no module, two patterns match one, a rule is unknown or does not
        fit the type of a layer, or a layer does things that the parallel one lacks. Nothing was
        replaced then.
    """
    mesh_axis_size("parallelize", axis_name)
    for pattern, rule in rules.items():
        if not isinstance(rule, Fused) and rule not in RULES:
            raise ValueError(
                f"parallelize got {pattern!r}: {rule!r}: a rule is one of {', '.join(RULES)}, or a "
                "flaxasync.nn.Fused"
            )
    modules = {".".join(map(str, path)): module for path, module in nnx.iter_modules(model) if path}
    with_root = {"": model} | modules  # the root holds layers, and no pattern names it
    holders = _holders(with_root)
    asked = _match(modules, rules)
    chosen = _without_adapted(with_root, asked, holders)
    options = {"axis_name": axis_name, "fsdp_axis": fsdp_axis, "backend": backend}
    new = {path: _new_layer(path, modules[path], rule, options) for path, rule in chosen.items()}
    for path in new:
        _check_held(path, modules[path], holders)
    for path, layer in new.items():
        values = [variable.get_value() for variable in variables_of(modules[path]).values()]
        is_abstract = any(isinstance(value, jax.ShapeDtypeStruct) for value in values)
        if not is_abstract:
            load(layer, modules[path])
    # whatever is wrong was an error above: only from here on the model changes
    done = []
    for path, layer in new.items():
        old = modules[path]
        for holder in holders[id(old)]:
            setattr(holder.module, holder.name, layer)
        shapes = {
            ".".join(map(str, p)): v.shape
            for p, v in nnx.to_flat_state(nnx.state(layer, nnx.Param))
        }
        if chosen[path] == "column" and is_called_fused(path):
            note = FUSED_NOTE
        else:
            note = ""
        done.append(
            Replaced(
                path, str(chosen[path]), type(old).__name__, type(layer).__name__, shapes, note
            )
        )
    _place_rest(model)
    if verbose:
        print("\n".join(map(str, done)))
    return done


class _Holder(NamedTuple):
    """A module that has a layer or a parameter, and the attribute that is it; "" where it is in a
    tuple, list or dict.
    """

    path: str
    module: nnx.Module
    name: str


def _holders(modules: Mapping[str, nnx.Module]) -> dict[int, list[_Holder]]:
    """Returns what has each module and each variable of a model, by the id() of that."""
    found: dict[int, list[_Holder]] = {}
    for path, module in modules.items():
        for name, value in vars(module).items():
            if isinstance(value, nnx.Module | nnx.Variable):
                found.setdefault(id(value), []).append(_Holder(path, module, name))
                continue
            for inner in jax.tree.leaves(
                value, is_leaf=lambda value: isinstance(value, nnx.Module)
            ):
                found.setdefault(id(inner), []).append(_Holder(path, module, ""))
    return found


# What stands for names in a pattern, and the regular expression of each.
_STAR = re.compile(r"((?:^|(?<=\.))\*\*\.|\.\*\*$|\*\*|\*)")
_STARS = {"**.": r"(?:.*\.)?", ".**": r"(?:\..*)?", "**": ".*", "*": "[^.]*"}


def _match(
    modules: Mapping[str, nnx.Module], rules: Mapping[str, Rule | Fused]
) -> dict[str, Rule | Fused]:
    """Returns the rule of each path, in the order of the model."""
    chosen: dict[str, tuple[str, Rule | Fused]] = {}
    for pattern, rule in rules.items():
        parts = [_STARS.get(part, re.escape(part)) for part in _STAR.split(pattern)]
        regex = "".join(parts)
        matched = [path for path in modules if re.fullmatch(regex, path)]
        if not matched:
            raise ValueError(
                f"parallelize: no module matches {pattern!r}; the model has "
                f"{', '.join(sorted(modules)) or 'none'}"
            )
        for path in matched:
            if path in chosen:
                raise ValueError(
                    f"parallelize: {path} matches both {chosen[path][0]!r} and {pattern!r}"
                )
            chosen[path] = pattern, rule
    return {path: chosen[path][1] for path in modules if path in chosen}


def _without_adapted(
    modules: Mapping[str, nnx.Module],
    asked: Mapping[str, Rule | Fused],
    holders: Mapping[int, list[_Holder]],
) -> dict[str, Rule | Fused]:
    """Returns the rules without those of layers that are replaced as a part of the `nnx.LoRA`
    around them.

    Raises ValueError for an `nnx.LoRA` that would stay around a layer that is replaced, and for one
    whose layer another module has, too.
    """
    paths = {id(module): path for path, module in modules.items()}
    chosen = dict(asked)
    for path, adapter in modules.items():
        if not isinstance(adapter, nnx.LoRA) or id(adapter.base_module) not in paths:
            continue
        base = paths[id(adapter.base_module)]
        if path not in asked and base in asked:
            holder = path or "the root of the model, which must be in a module such as an nnx.Dict"
            raise ValueError(
                f"parallelize cannot replace {base}, because nnx.LoRA would add arrays that are "
                f"sharded in different ways; it is at {holder}: give it the rule {asked[base]!r}, "
                "and it becomes a ParallelLoRA"
            )
        if path not in asked:
            continue
        if chosen.pop(base, asked[path]) != asked[path]:
            raise ValueError(
                f"parallelize cannot replace {path} by the rule {asked[path]!r}: it adapts {base}, "
                f"for which another rule says {asked[base]!r}; give both the same rule"
            )
        if len(holders[id(adapter.base_module)]) > 1:
            raise ValueError(
                f"parallelize cannot replace {path}: it adapts {base}, which another module has, "
                "too; take nnx.LoRA away, and put flaxasync.nn.ParallelLoRA around the parallel "
                "layer"
            )
    return chosen


def _new_layer(path: str, old: nnx.Module, rule: Rule | Fused, options: Options) -> nnx.Module:
    """Returns the parallel layer for the layer at a path."""
    kinds = form_of(rule).replaces
    if type(old) not in kinds:
        names = " and ".join(kind.__name__ for kind in kinds)
        raise ValueError(
            f"parallelize: {path} is a {type(old).__name__}, and {rule!r} replaces {names}"
        )
    try:
        return parallel_form(old, rule, options)
    except (ValueError, NotImplementedError) as error:
        raise ValueError(
            f"parallelize cannot replace {path} by the rule {rule!r}: {error}; or leave it out of "
            "the rules"
        ) from error


def _check_held(path: str, old: nnx.Module, holders: Mapping[int, list[_Holder]]) -> None:
    """Raises ValueError for a layer that cannot be replaced where it is, or that shares a parameter
    with another module: the parallel layer has its own.
    """
    if any(not holder.name for holder in holders[id(old)]):
        raise ValueError(
            f"parallelize cannot replace {path}: it is in a tuple, list or dict; use nnx.List "
            "or nnx.Dict"
        )
    for variable in variables_of(old).values():
        names = [f"{holder.path}.{holder.name}".lstrip(".") for holder in holders[id(variable)]]
        if len(names) > 1:
            raise ValueError(
                f"parallelize cannot replace {path}: {' and '.join(names)} are one parameter, "
                "and would be two; share the whole layer, or leave it out of the rules"
            )


def _place_rest(model: nnx.Module) -> None:
    """Puts what is not on the mesh yet on all of its devices. Explicit axes do not mix with arrays
    elsewhere.
    """

    def place(value: Any) -> Any:
        is_elsewhere = (
            isinstance(value, jax.Array)
            and getattr(value.sharding, "mesh", None) != jax.sharding.get_mesh()
        )
        if is_elsewhere:
            return put(value, jax.P())
        return value

    if is_eager():  # all that a traced program computes is on the mesh already
        nnx.update(model, jax.tree.map(place, nnx.state(model)))
