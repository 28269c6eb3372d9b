"""Turns the layers of an existing model into parallel ones, in place, by the paths of its
modules.
"""

import dataclasses
import re
from collections.abc import Iterable, Mapping
from typing import Any

import jax
from flax import nnx
from flax.typing import PathParts

from flaxasync.mesh import mesh_axis_size
from flaxasync.nn.adopt.fused import Fused
from flaxasync.nn.adopt.names import name_of, variables_of
from flaxasync.nn.adopt.parallel_form import Rule, parallel_form
from flaxasync.nn.placement import is_eager, put


@dataclasses.dataclass(frozen=True)
class Replaced:
    """A layer that `parallelize` replaced."""

    path: str  # in the model, with dots
    rule: str
    before: str  # the type of the layer that was there
    after: str  # the type of the layer that is there now
    # of its parameters, by name; those of before, but for merged heads
    shapes: Mapping[str, tuple[int, ...]]

    def __str__(self) -> str:
        shapes = ", ".join(f"{name} {list(shape)}" for name, shape in self.shapes.items())
        return f"{self.path}: {self.before} -> {self.after} ({self.rule}), {shapes}"


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
    rules = {"layers.*.up": "column", "layers.*.down": "row", "layers.*.attention": "attention"}
    fa.nn.parallelize(model, rules)
    ```

    A rule is one of:

    ```
    "column"            nnx.Linear -> ColumnParallelLinear      the output is sharded by features
    "logits"            nnx.Linear -> ColumnParallelLinear      likewise, padded for the axis
    "row"               nnx.Linear -> RowParallelLinear         the output is sharded by rows
    "row_replicated"    nnx.Linear -> RowParallelLinear         all devices of the axis have the output
    "embed"             nnx.Embed -> VocabParallelEmbed         the output is sharded by rows
    "embed_replicated"  nnx.Embed -> VocabParallelEmbed         all devices of the axis have the output
    "attention"         nnx.MultiHeadAttention -> ParallelAttention
    fa.nn.Fused(...)    nnx.Linear -> ColumnParallelProjections, each part split by itself
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
    modules = dict(nnx.iter_modules(model))
    paths = {name_of(path): path for path in modules if path}  # no pattern names the root
    duplicates = nnx.find_duplicates(model, only=(nnx.Module, nnx.Param))
    options = {"axis_name": axis_name, "fsdp_axis": fsdp_axis, "backend": backend}
    done = []
    changes = []
    for name, rule in _match(paths, rules).items():
        path = paths[name]
        old = modules[path]
        try:
            holders = _holders(path, rule, modules, duplicates)
            layer = parallel_form(old, rule, options)
        except (ValueError, NotImplementedError) as error:
            raise ValueError(
                f"parallelize cannot replace {name} by the rule {rule!r}: {error}; or leave it out "
                "of the rules"
            ) from error
        changes += [(*holder, layer) for holder in holders]
        shapes = {name: variable.shape for name, variable in variables_of(layer).items()}
        done.append(Replaced(name, str(rule), type(old).__name__, type(layer).__name__, shapes))
    # whatever is wrong was an error above: only from here on the model changes
    for holder, attribute, layer in changes:
        setattr(holder, attribute, layer)
    _place_rest(model)
    if verbose:
        print("\n".join(map(str, done)))
    return done


def _match(paths: Iterable[str], rules: Mapping[str, Rule | Fused]) -> dict[str, Rule | Fused]:
    """Returns the rule of each path, in the order of the model."""
    chosen: dict[str, str] = {}
    for pattern in rules:
        regex = "".join(map(_regex, pattern.split(".")))
        matched = [path for path in paths if re.fullmatch(regex, f".{path}")]
        if not matched:
            raise ValueError(
                f"parallelize: no module matches {pattern!r}; the model has "
                f"{', '.join(sorted(paths)) or 'none'}"
            )
        for path in matched:
            if path in chosen:
                raise ValueError(
                    f"parallelize: {path} matches both {chosen[path]!r} and {pattern!r}"
                )
            chosen[path] = pattern
    return {path: rules[chosen[path]] for path in paths if path in chosen}


def _regex(name: str) -> str:
    """Returns the regular expression of one name of a pattern, with the dot before it."""
    if name == "**":
        return r"(\..+)?"
    return r"\." + re.escape(name).replace(r"\*\*", ".*").replace(r"\*", "[^.]*")


def _holders(
    path: PathParts,
    rule: Rule | Fused,
    modules: Mapping[PathParts, nnx.Module],
    duplicates: Iterable[list[PathParts]],
) -> list[tuple[nnx.Module, str]]:
    """Returns the modules that have the layer at a path, and the attribute of each that is it.

    Raises ValueError for a layer that cannot be replaced where it is, and for one that shares a
    parameter or a part with another: the parallel layer has its own.
    """
    places = [path]
    for same in duplicates:
        if path in same:
            places = same
        elif any(other[: len(path)] == path for other in same):
            instead = "share the whole layer"
            if any(isinstance(modules.get(other[:-1]), nnx.LoRA) for other in same):
                instead = "put fa.nn.ParallelLoRA around the parallel layer yourself"
            raise ValueError(
                f"{' and '.join(map(name_of, same))} are one, and would be two; {instead}"
            )
    holders = []
    for *parent, name in places:
        holder = modules.get(tuple(parent))
        if holder is None:
            raise ValueError("it is in a tuple, list or dict; use nnx.List or nnx.Dict")
        if isinstance(holder, nnx.LoRA):
            where = name_of(parent) or (
                "the root of the model, which must be in a module such as an nnx.Dict"
            )
            advice = f"give the rule {rule!r} to that alone, and it becomes a ParallelLoRA"
            if len(places) > 1:
                advice = "put fa.nn.ParallelLoRA around the parallel layer yourself"
            raise ValueError(
                "nnx.LoRA would add arrays that are sharded in different ways; it is at "
                f"{where}: {advice}"
            )
        holders.append((holder, str(name)))
    return holders


def _place_rest(model: nnx.Module) -> None:
    """Puts what is not on the mesh yet on all of its devices. Explicit axes do not mix with arrays
    elsewhere.
    """
    if not is_eager():  # all that a traced program computes is on the mesh already
        return
    mesh = jax.sharding.get_mesh()

    def place(value: Any) -> Any:
        if isinstance(value, jax.Array) and getattr(value.sharding, "mesh", None) != mesh:
            return put(value, jax.P())
        return value

    nnx.update(model, jax.tree.map(place, nnx.state(model)))
