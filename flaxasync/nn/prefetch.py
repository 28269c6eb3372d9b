"""A scan over fully sharded layers that gathers the weights of the next layer while the present one computes.

```
forward   turn i       y_i = layer_i(w_i, y_{i-1})                         w_{i+1} = gather(w_shard_{i+1})
backward  turn i       dw_i, dy_{i-1} = vjp(layer_i)(w_i, y_{i-1}, dy_i)   w_{i-1} = gather(w_shard_{i-1})
                                                                           dw_shard_{i+1} = reduce_scatter(dw_{i+1})
```

What stands side by side does not depend on each other, so the transfers of a turn have the whole turn to finish. Each
weight is gathered once forward and once backward, but for two: the last turn forward gathers the last layer again, with
which the backward pass begins, and the last turn backward gathers the first layer again, which nothing uses. So all
turns are alike. What is kept for the backward pass are those weights and the inputs of the layers, from which each
layer is computed again, as with `jax.checkpoint` around it; or what a policy of `jax.checkpoint` saves in each layer.
The weights themselves are gathered again in any case. The weights and the gradients of two layers are whole at a time.

What follows the layers, such as the output projection, can be part of the scan. Its weights arrive while the layers
run forward, and its gradients leave while they run backward.

`flaxasync.transport.shards` moves weights and gradients, by permutes or by direct copies.
Nothing of this has run on a TPU yet; docs/scaling.md has estimates from compiled programs.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from flaxasync.mesh import cast_to_varying, check_tpu, mesh_axis_size
from flaxasync.nn.fully_sharded import names_of, without_axis
from flaxasync.transport.schedule import tie
from flaxasync.transport.shards import start_gather, start_reduce_scatter
from flaxasync.transport.transfers import Transfer, Transfers, meanwhile

type Leaves = tuple[Array, ...]


def scan_with_prefetch(
    apply: Callable[..., Array],
    layers: nnx.Module,
    x: Array,
    *args: Array,
    fsdp_axis: str,
    dtype: DTypeLike,
    backend: Literal["xla", "pallas"] = "xla",
    policy: Callable[..., Any] | None = None,
    then: tuple[Callable[[Any, Array], Array], Any] | None = None,
) -> Array:
    """Applies a stack of layers one after the other, as `nnx.scan` over it does, on a mesh of Explicit axes.

    Args:
      apply: A function (layer, x, *args) -> x. It is called inside `jax.shard_map`, on local shards.
      layers: A module whose parameters have a leading dimension of layers, and no other state. A parameter that
        further axes shard along the same dimension names `fsdp_axis` last.
      x: The input, whose type says how it is sharded, as the output is: over `fsdp_axis`, too.
      *args: Arrays of integers or booleans that every layer is given. They have no gradient.
      fsdp_axis: The axis that was given to the layers as their `fsdp_axis`.
      dtype: The dtype in which weights are gathered: that of the computation.
      backend: What moves weights and gradients: "xla" on every device, or "pallas" on TPUs.
      policy: A policy of `jax.checkpoint`, such as `flaxasync.save_costly`. What it saves in each layer is kept for the
        backward pass. By default each layer is computed again from its input.
      then: A function (modules, x) -> y of the result of the last layer, and one or more modules, as a pytree, with
        whose weights it computes. It is called as `apply` is.

    Returns:
      The result of the last layer, or that of the function in `then`.

    Raises:
      NotImplementedError: The backend is "pallas", and the mesh is not of TPUs.
      ValueError: The backend is unknown, the axes of the mesh are not Explicit, it lacks the axis, the layers have
        other state, x is not sharded over the axis, an argument is of floats, or a parameter names another axis after
        this one.
    """
    mesh = jax.sharding.get_abstract_mesh()
    mesh_axis_size("scan_with_prefetch", fsdp_axis)
    if backend not in ("xla", "pallas"):
        raise ValueError(f"scan_with_prefetch has the backends 'xla' and 'pallas': got {backend!r}")
    if backend == "pallas":
        check_tpu("scan_with_prefetch with backend='pallas'", "backend='xla', which runs on every device")
    if any(kind != AxisType.Explicit for kind in mesh.axis_types):
        raise ValueError(
            "scan_with_prefetch reads from types how arrays are sharded: got a mesh with the axis types "
            f"{mesh.axis_types}; make all of them Explicit, or use nnx.scan"
        )
    stack = _Parameters.of(layers, fsdp_axis, stacked=True)
    x_spec, arg_specs = jax.typeof(x).sharding.spec, tuple(jax.typeof(arg).sharding.spec for arg in args)
    if not any(fsdp_axis in names_of(entry) for entry in x_spec):
        raise ValueError(
            f"scan_with_prefetch needs its input sharded over {fsdp_axis!r}, as a part of the batch: got {x_spec}; "
            "reshard it with jax.reshard, or use nnx.scan"
        )
    for arg in args:
        if jnp.issubdtype(arg.dtype, jnp.inexact):
            raise ValueError(
                "scan_with_prefetch has no gradient for further arguments, which must be integers or booleans: got "
                f"{arg.dtype}{list(arg.shape)}; make it a parameter of the layers, or use nnx.scan"
            )
    out_spec, last, finish = x_spec, _Parameters.of((), fsdp_axis), None
    if then is not None:
        finish, last = then[0], _Parameters.of(then[1], fsdp_axis)
        made = jax.eval_shape(lambda leaves, x: finish(last.module(leaves), x), last.leaves, x)
        out_spec = made.sharding.spec

    def apply_whole(whole: Leaves, x: Array, args: tuple[Array, ...]) -> Array:
        return apply(stack.module(whole, without=fsdp_axis), x, *args)

    def finish_whole(whole: Leaves, x: Array) -> Array:
        assert finish is not None
        return finish(last.module(whole, without=fsdp_axis), x)

    whole = finish_whole if finish else None
    scan = Scan(apply_whole, fsdp_axis, stack.dims, jnp.dtype(dtype), backend, policy, whole, last.dims)
    return jax.shard_map(
        functools.partial(_run, scan), in_specs=(stack.specs, last.specs, x_spec, arg_specs), out_specs=out_spec
    )(stack.leaves, last.leaves, x, args)


@dataclasses.dataclass(frozen=True)
class _Parameters:
    """The parameters of a module, or of a pytree of modules.

    Attributes:
      leaves: The parameters.
      specs: How each of them is sharded.
      dims: The dimension of each parameter, or of one layer of it, that the fsdp axis shards; None for none.
      graph: What else the module is made of.
      tree: The structure of the parameters.
    """

    leaves: Leaves
    specs: tuple[P, ...]
    dims: tuple[int | None, ...]
    graph: Any
    tree: Any

    @classmethod
    def of(cls, module: Any, fsdp_axis: str, *, stacked: bool = False) -> "_Parameters":
        """Takes a module apart; with `stacked`, parameters have a leading dimension of layers.

        Raises:
          ValueError: It has other state, or a parameter is sharded in a way that the scan lacks.
        """
        graph, params, *rest = nnx.split(module, nnx.Param, ...)
        other = rest[0]
        if jax.tree.leaves(other):
            path, variable = next(iter(nnx.to_flat_state(other)))
            remedy = (
                "to drop the cache of init_cache, set cached_key, cached_value and cache_index to None"
                if isinstance(variable, nnx.Cache)
                else "use nnx.scan"
            )
            raise ValueError(
                f"scan_with_prefetch takes layers that have parameters alone: got {'.'.join(map(str, path))}, too; "
                f"{remedy}"
            )
        leaves, tree = jax.tree.flatten(params)
        specs = tuple(jax.typeof(leaf).sharding.spec for leaf in leaves)
        paths = nnx.to_flat_state(params).paths
        dims = tuple(map(functools.partial(_dimension, fsdp_axis, stacked), paths, specs))
        return cls(tuple(leaves), specs, dims, graph, tree)

    def module(self, leaves: Leaves, *, without: str | None = None) -> Any:
        """Makes the module with other parameters; `without` is an axis over which they were gathered."""
        module = nnx.merge(self.graph, jax.tree.unflatten(self.tree, leaves))
        if without is not None:
            without_axis(module, without)
        return module


@functools.partial(jax.tree_util.register_dataclass, data_fields=["arrays"], meta_fields=["tree", "places"])
@dataclasses.dataclass(frozen=True)
class Kept:
    """What the backward pass of a layer needs, without its weights.

    Attributes:
      arrays: The input of the layer, or the residuals of its VJP other than weights and further arguments.
      tree: The structure of the VJP; None where only the input is kept.
      places: For each residual of the VJP, its number among weights and further arguments; None for one of `arrays`.
    """

    arrays: tuple[Array, ...]
    tree: Any
    places: tuple[int | None, ...]


@dataclasses.dataclass(frozen=True)
class Scan:
    """What is static in a scan.

    Attributes:
      apply: A function (parameters of one layer, x, args) -> x.
      axis: The fsdp axis.
      dims: The dimension of each parameter of one layer that the axis shards; None for none.
      dtype: The dtype in which parameters are gathered.
      backend: What moves weights and gradients.
      policy: What is kept of each layer; None for its input.
      finish: A function (further parameters, x) -> y of the result of the last layer; None for none.
      finish_dims: The dimension of each further parameter that the axis shards.
    """

    apply: Callable[[Leaves, Array, tuple[Array, ...]], Array]
    axis: str
    dims: tuple[int | None, ...]
    dtype: Any
    backend: str
    policy: Callable[..., Any] | None
    finish: Callable[[Leaves, Array], Array] | None
    finish_dims: tuple[int | None, ...]

    @property
    def turns(self) -> int:
        """The turns in the body of the loop. In the second of two, the buffers of the weights are back in their places.

        With one turn XLA copies all weights that were gathered, from where they arrived to where the loop carries them.
        What each of two turns keeps is stacked by itself: `lax.scan(..., unroll=2)` would join both first, with copies.
        """
        return 2 if self.backend == "pallas" else 1

    def forward(self, whole: Leaves, x: Array, args: tuple[Array, ...]) -> tuple[Array, Kept]:
        """Applies one layer to x, and returns what its backward pass needs beside the whole weights and `args`."""
        if self.policy is None:
            return self.apply(whole, x, args), Kept((x,), None, ())
        apply = jax.checkpoint(lambda whole, x: self.apply(whole, x, args), policy=self.policy)
        y, pull = jax.vjp(apply, whole, x)
        residuals, tree = jax.tree.flatten(pull)
        again = (*whole, *args)
        places = tuple(next((n for n, one in enumerate(again) if one is residual), None) for residual in residuals)
        kept = tuple(residual for residual, place in zip(residuals, places, strict=True) if place is None)
        return y, Kept(kept, tree, places)

    def backward(self, kept: Kept, args: tuple[Array, ...], whole: Leaves, dy: Array) -> tuple[Leaves, Array]:
        """Returns the gradients of the whole weights of one layer and of its input."""
        if kept.tree is None:
            return jax.vjp(lambda whole, x: self.apply(whole, x, args), whole, *kept.arrays)[1](dy)
        arrays, again = iter(kept.arrays), (*whole, *args)
        residuals = [next(arrays) if place is None else again[place] for place in kept.places]
        return jax.tree.unflatten(kept.tree, residuals)(dy)

    def gather_layer(self, stacked: Leaves, layer: Any) -> Transfers:
        """Begins to gather the parameters of one layer."""
        with jax.named_scope("prefetch_parameters"):
            shards = tuple(lax.dynamic_index_in_dim(leaf, layer, keepdims=False) for leaf in stacked)
        return self.gather(shards, self.dims)

    def gather(self, shards: Leaves, dims: tuple[int | None, ...]) -> Transfers:
        """Begins to gather parameters."""
        with jax.named_scope("prefetch_parameters"):
            begun = [
                Transfer(shard) if dim is None else start_gather(shard.astype(self.dtype), self.axis, dim, self.backend)
                for shard, dim in zip(shards, dims, strict=True)
            ]
        return Transfers(begun, "prefetch_parameters")

    def reduce(self, parameters: Leaves, gradients: Leaves, dims: tuple[int | None, ...]) -> Transfers:
        """Begins to sum gradients over the axis, each in the dtype of its parameter."""
        with jax.named_scope("scatter_gradients"):
            begun = [
                Transfer(gradient.astype(leaf.dtype))
                if dim is None
                else start_reduce_scatter(gradient, leaf.dtype, self.axis, dim, self.backend)
                for leaf, gradient, dim in zip(parameters, gradients, dims, strict=True)
            ]
        return Transfers(begun, "scatter_gradients")


def _write(sums: Leaves, gradients: Leaves, layer: Any) -> Leaves:
    """Writes the gradients of one layer into those of all layers."""
    pairs = zip(sums, gradients, strict=True)
    return tuple(lax.dynamic_update_index_in_dim(total, one, layer, 0) for total, one in pairs)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _run(scan: Scan, stacked: Leaves, last: Leaves, x: Array, args: tuple[Array, ...]) -> Array:
    return _run_fwd(dataclasses.replace(scan, policy=None), stacked, last, x, args)[0]


def _run_fwd(scan: Scan, stacked: Leaves, last: Leaves, x: Array, args: tuple[Array, ...]) -> tuple[Array, tuple]:
    layers = stacked[0].shape[0]

    def turn(carry: tuple[Array, Leaves], layer: Array) -> tuple[tuple[Array, Leaves], Kept]:
        x, whole = carry
        # The last turn gathers its own layer again: the backward pass begins with it.
        following = scan.gather_layer(stacked, jnp.minimum(layer + 1, layers - 1))
        y, kept = meanwhile([following], lambda x: scan.forward(_varying(whole, x), x, args), x)
        return (y, following.done()), kept

    def body(carry: tuple[Array, Leaves], layer: Array) -> tuple[tuple[Array, Leaves], list[Kept]]:
        kept = []
        for n in range(scan.turns):
            carry, one = turn(carry, layer + n)
            kept.append(one)
        return carry, kept

    def run(x: Array, first: Leaves) -> tuple[Array, Leaves, Any]:
        in_loop = layers // scan.turns * scan.turns
        carry, stacks = lax.scan(body, (x, first), jnp.arange(0, in_loop, scan.turns, dtype=jnp.int32))
        rest = []
        for layer in range(in_loop, layers):
            carry, one = turn(carry, jnp.int32(layer))
            rest.append(one)
        return (*carry, (stacks, rest))

    first = scan.gather_layer(stacked, 0).done()
    if scan.finish is None:
        y, whole, kept = run(x, first)
        return y, (stacked, last, kept, None, whole, args)
    first, shards = tie(first, last)  # the first layer does not wait for more than itself
    travelling = scan.gather(shards, scan.finish_dims)
    y, whole, kept = meanwhile([travelling], run, x, first)
    y, pull = jax.vjp(scan.finish, _varying(travelling.done(), y), y)
    return y, (stacked, last, kept, pull, whole, args)


def _run_bwd(scan: Scan, saved: tuple, dy: Array) -> tuple[Leaves, Leaves, Array, None]:
    stacked, last, kept, pull, whole, args = saved
    layers = stacked[0].shape[0]

    def pull_layer(whole: Leaves, kept: Kept, dy: Array) -> tuple[Leaves, Array]:
        return scan.backward(kept, args, _varying(whole, dy), dy)

    def turn(carry: tuple, layer: Array, kept: Kept) -> tuple:
        dy, whole, gradients, sums = carry
        preceding = scan.gather_layer(stacked, jnp.maximum(layer - 1, 0))  # nothing uses what the last turn gathers
        reduced = scan.reduce(stacked, gradients, scan.dims)
        gradients, dy = meanwhile([preceding, reduced], functools.partial(pull_layer, whole), kept, dy)
        # In the first turn no gradients are waiting. The zeros that are written then are replaced in the second turn.
        sums = _write(sums, reduced.done(), jnp.minimum(layer + 1, layers - 1))
        return dy, preceding.done(), gradients, sums

    def body(carry: tuple, step: tuple[Array, list[Kept]]) -> tuple[tuple, None]:
        layer, kept = step
        for n in reversed(range(scan.turns)):
            carry = turn(carry, layer + n, kept[n])
        return carry, None

    def run(dy: Array) -> tuple[Leaves, Array]:
        none = tuple(jnp.zeros_like(leaf) for leaf in _varying(whole, dy))
        sums = tuple(jnp.zeros_like(leaf) for leaf in _varying(stacked, dy))
        (stacks, rest), carry = kept, (dy, whole, none, sums)
        for n in reversed(range(len(rest))):
            carry = turn(carry, jnp.int32(layers - len(rest) + n), rest[n])
        steps = jnp.arange(0, layers - len(rest), scan.turns, dtype=jnp.int32), stacks
        (dx, _, gradients, sums), _ = lax.scan(body, carry, steps, reverse=True)
        return _write(sums, scan.reduce(stacked, gradients, scan.dims).done(), 0), dx

    dlast: Leaves = ()
    if pull is None:
        sums, dx = run(dy)
    else:
        dlast, dy = pull(dy)
        leaving = scan.reduce(last, dlast, scan.finish_dims)
        sums, dx = meanwhile([leaving], run, dy)
        dlast = leaving.done()
    return tuple(map(_sum_like, sums, stacked)), tuple(map(_sum_like, dlast, last)), dx, None


_run.defvjp(_run_fwd, _run_bwd)


def _varying(leaves: Leaves, like: Array) -> Leaves:
    return tuple(cast_to_varying(leaf, jax.typeof(like).mat.varying) for leaf in leaves)


def _sum_like(gradient: Array, leaf: Array) -> Array:
    """Sums a gradient over the axes on whose devices a parameter is the same."""
    axes = tuple(sorted(jax.typeof(gradient).mat.varying - jax.typeof(leaf).mat.varying))
    return lax.psum(gradient, axes) if axes else gradient


def _dimension(fsdp_axis: str, stacked: bool, path: tuple, spec: P) -> int | None:
    """Returns the dimension of a parameter, or of one layer of a stack of parameters, that the axis shards, or None.

    Raises:
      ValueError: The same dimension has another axis after it: what is gathered over it alone would be out of order. Or
        the layers themselves are sharded.
    """
    if stacked and len(spec) and names_of(spec[0]):
        raise ValueError(
            "scan_with_prefetch needs all layers of a stack on every device: "
            f"{'.'.join(map(str, path))} is stored {spec}, whose first dimension is that of the layers"
        )
    for dim, entry in enumerate(spec):
        if fsdp_axis in names_of(entry):
            if names_of(entry)[-1] != fsdp_axis:
                raise ValueError(
                    f"scan_with_prefetch needs {fsdp_axis!r} as the last axis of a dimension: "
                    f"{'.'.join(map(str, path))} is stored {spec}; change that order in its out_sharding, or use "
                    "nnx.scan"
                )
            return dim - stacked
    return None
