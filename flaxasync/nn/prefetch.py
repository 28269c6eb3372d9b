"""A scan over layers whose weights and gradients travel while layers compute.

`flaxasync.nn.prefetched_scan` has the schedule. This file takes modules apart for it, and checks
how they are sharded. Nothing of this has run on a TPU yet; docs/scaling.md has estimates from
compiled programs.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from jaxtyping import PyTree

from flaxasync.mesh import check_tpu, mesh_axis_size
from flaxasync.nn.fully_sharded import without_axis
from flaxasync.nn.placement import all_explicit, axes_of
from flaxasync.nn.prefetched_scan import Leaves, Scan, run


def scan_with_prefetch(
    apply: Callable[..., Any],
    layers: nnx.Module,
    x: PyTree,
    *args: Array,
    fsdp_axis: str | None,
    dtype: DTypeLike,
    backend: Literal["xla", "pallas"] = "xla",
    policy: Callable[..., Any] | None = None,
    then: tuple[Any, ...] | None = None,
) -> Any:
    """Applies a stack of layers one after the other, as `nnx.scan` over it does, on a mesh of
    Explicit axes.

    With an fsdp axis, the weights of the next layer are gathered while one computes, and the
    gradients of the layer after it are reduce-scattered while it computes backward. Without one,
    the gradients of kernels are summed over the axes that shard the batch as soon as each is made,
    by permutes that XLA runs beside the rest of the backward pass.

    Args:
      apply: A function (layer, x, *args) -> x. It is called inside `jax.shard_map`, on local
        shards.
      layers: A module whose parameters have a leading dimension of layers, and no other state. If
        several axes shard one dimension of a parameter, `fsdp_axis` must be the last of them.
      x: The input, an array or a pytree of arrays of floats. The type of one of them must say that
        it is sharded over `fsdp_axis`; the output is sharded as `x` is. One that is the same on all
        devices, such as a sum of losses, must be so after each layer.
      *args: Arrays of integers or booleans that every layer is given. They have no gradient.
      fsdp_axis: The axis that was given to the layers as their `fsdp_axis`; None if none was.
      dtype: The dtype in which weights are gathered: that of the computation. Without an fsdp axis,
        it is that in which two devices exchange gradients, which they add in the dtype of the
        parameter.
      backend: What moves weights and gradients: "xla" on every device, or "pallas" on TPUs, which
        needs an fsdp axis.
      policy: A policy of `jax.checkpoint`, such as `flaxasync.save_costly`. What it saves in each
        layer is kept for the backward pass. By default each layer is computed again from its input.
      then: A function (modules, x, *arrays) -> y, the modules, a pytree, and arrays without a
        gradient, such as targets. After the last layer the function is called with them and the
        result x, as `apply` is.

    Returns:
      The result of the last layer, or that of the function in `then`.

    Raises:
      NotImplementedError: The backend is "pallas", and the mesh is not of TPUs.
      ValueError: The backend is unknown, the axes of the mesh are not Explicit, the mesh lacks
        `fsdp_axis`, the layers have other state, x is not sharded over the axis, an argument is of
        floats, or a parameter names another axis after this one; without `fsdp_axis`, no mesh is
        set, or the backend is "pallas".
    """
    mesh = jax.sharding.get_abstract_mesh()
    if fsdp_axis is not None:
        mesh_axis_size("scan_with_prefetch", fsdp_axis)
    elif mesh.empty:
        raise ValueError(
            "scan_with_prefetch needs a mesh, and none is set; wrap the call in `with "
            "jax.set_mesh(mesh):`"
        )
    if backend not in ("xla", "pallas"):
        raise ValueError(f"scan_with_prefetch has the backends 'xla' and 'pallas': got {backend!r}")
    if backend == "pallas" and fsdp_axis is None:
        raise ValueError(
            "scan_with_prefetch with backend='pallas' moves weights and gradients over an fsdp "
            "axis: got fsdp_axis=None; use backend='xla', whose permutes sum gradients over the "
            "other axes"
        )
    if backend == "pallas":
        check_tpu(
            "scan_with_prefetch with backend='pallas'", "backend='xla', which runs on every device"
        )
    if not all_explicit():
        raise ValueError(
            "scan_with_prefetch reads from types how arrays are sharded: got a mesh with the axis "
            f"types {mesh.axis_types}; make all of them Explicit, or use nnx.scan"
        )
    stack = _Parameters.of(layers, fsdp_axis, stacked=True)
    x_spec = jax.tree.map(_spec, x)
    x_specs = jax.tree.leaves(x_spec)
    if fsdp_axis is not None and not any(
        fsdp_axis in axes_of(entry) for spec in x_specs for entry in spec
    ):
        raise ValueError(
            f"scan_with_prefetch needs its input sharded over {fsdp_axis!r}, as a part of the "
            f"batch: got {', '.join(map(str, x_specs))}; reshard it with jax.reshard, or use "
            "nnx.scan"
        )
    for arg in args:
        if jnp.issubdtype(arg.dtype, jnp.inexact):
            raise ValueError(
                "scan_with_prefetch has no gradient for further arguments, which must be integers "
                f"or booleans: got {arg.dtype}{list(arg.shape)}; make it a parameter of the "
                "layers, or use nnx.scan"
            )
    finish, modules, *arrays = then or (None, ())
    out_spec = x_spec
    last = _Parameters.of(modules, fsdp_axis)
    last_arrays = tuple(arrays)
    if finish is not None:
        y = jax.eval_shape(last.applied(finish), last.leaves, x, last_arrays)
        out_spec = jax.tree.map(lambda leaf: leaf.sharding.spec, y)
        finish = last.applied(finish, without=fsdp_axis)
    apply = stack.applied(apply, without=fsdp_axis)
    scan = Scan(apply, fsdp_axis, stack.dims, jnp.dtype(dtype), backend, policy, finish, last.dims)
    return jax.shard_map(
        functools.partial(run, scan),
        in_specs=(stack.specs, last.specs, x_spec, *jax.tree.map(_spec, (args, last_arrays))),
        out_specs=out_spec,
    )(stack.leaves, last.leaves, x, args, last_arrays)


def _spec(x: Array) -> P:
    return jax.typeof(x).sharding.spec


@dataclasses.dataclass(frozen=True)
class _Parameters:
    """The parameters of a module, or of a pytree of modules, apart from what else it is made of."""

    leaves: Leaves
    specs: tuple[P, ...]
    # the dimension of each parameter, or of one layer of it, that the fsdp axis shards
    dims: tuple[int | None, ...]
    graph: Any
    tree: Any  # the structure of the parameters

    @classmethod
    def of(cls, module: Any, fsdp_axis: str | None, *, stacked: bool = False) -> "_Parameters":
        """Takes a module apart; with `stacked`, parameters have a leading dimension of layers."""
        graph, params, *rest = nnx.split(module, nnx.Param, ...)
        other = rest[0]
        if jax.tree.leaves(other):
            path, variable = next(iter(nnx.to_flat_state(other)))
            remedy = "use nnx.scan"
            if isinstance(variable, nnx.Cache):
                remedy = (
                    "to drop the cache of init_cache, set cached_key, cached_value and cache_index "
                    "to None"
                )
            raise ValueError(
                "scan_with_prefetch takes layers that have parameters alone: got "
                f"{'.'.join(map(str, path))}, too; {remedy}"
            )
        leaves, tree = jax.tree.flatten(params)
        specs = tuple(map(_spec, leaves))
        paths = nnx.to_flat_state(params).paths
        dims = tuple(map(functools.partial(_dimension, fsdp_axis, stacked), paths, specs))
        return cls(tuple(leaves), specs, dims, graph, tree)

    def applied(
        self, function: Callable[..., Any], *, without: str | None = None
    ) -> Callable[..., Any]:
        """Returns a function (leaves, x, args) that calls `function` with the module that has these
        parameters.

        `without` is an axis over which they were gathered.
        """

        def apply(leaves: Leaves, x: PyTree, args: tuple[Array, ...]) -> Any:
            module = nnx.merge(self.graph, jax.tree.unflatten(self.tree, leaves))
            if without is not None:
                without_axis(module, without)
            return function(module, x, *args)

        return apply


def _dimension(fsdp_axis: str | None, stacked: bool, path: tuple, spec: P) -> int | None:
    """Returns the dimension of a parameter, or of one layer of a stack of parameters, that the axis
    shards, or None.

    What is gathered over an axis that has another one after it in its dimension would be out of
    order.
    """
    if stacked and len(spec) and axes_of(spec[0]):
        raise ValueError(
            "scan_with_prefetch needs all layers of a stack on every device: "
            f"{'.'.join(map(str, path))} is stored {spec}, whose first dimension is that of the "
            "layers"
        )
    for dim, axes in enumerate(map(axes_of, spec)):
        if fsdp_axis not in axes:
            continue
        if axes[-1] != fsdp_axis:
            raise ValueError(
                f"scan_with_prefetch needs {fsdp_axis!r} as the last axis of a dimension: "
                f"{'.'.join(map(str, path))} is stored {spec}; change that order in its "
                "out_sharding, or use nnx.scan"
            )
        return dim - stacked
    return None
