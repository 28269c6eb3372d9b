"""The schedule of `flaxasync.nn.scan_with_prefetch`: which weights and gradients travel while a
layer computes.

```
forward   turn i       y_i = layer_i(w_i, y_{i-1})                         w_{i+1} = gather(w_shard_{i+1})
backward  turn i       dw_i, dy_{i-1} = vjp(layer_i)(w_i, y_{i-1}, dy_i)   w_{i-1} = gather(w_shard_{i-1})
                                                                           dw_shard_{i+1} = reduce_scatter(dw_{i+1})
```

On a mesh without an fsdp axis nothing is gathered, and each device has whole gradients, which are
summed over the data axes by permutes as soon as they are made. XLA runs these beside the rest of
the layer's backward pass:

```
backward  turn i       dw_i, dy_{i-1} = vjp(layer_i)(w_i, y_{i-1}, dy_i)   sum(gradients of kernels that are ready)
```

With an fsdp axis, the two columns do not depend on each other, so the transfers of a turn have the
whole turn to finish. All turns are alike, so the last turn of each pass gathers a layer that a
plain scan would not gather.

The scan keeps the input of each layer for the backward pass, or what a policy of `jax.checkpoint`
saves in each layer. The gathered weights are kept for the last layer alone. At any time, the
weights and the gradients of two layers are whole.

What follows the layers, such as the output projection, can be part of the scan. Its weights arrive
while the layers run forward, and its gradients leave while the last layers run backward.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.layout import Layout, with_layout_constraint
from jax.typing import DTypeLike
from jaxtyping import PyTree

from flaxasync.mesh import platform, vary_like
from flaxasync.ops.saved import STREAM
from flaxasync.transport.schedule import tie
from flaxasync.transport.transfers import (
    Transfer,
    Transfers,
    meanwhile,
    ring_all_reduce,
    start_gather,
    start_reduce_scatter,
)

type Leaves = tuple[Array, ...]
type Carried = PyTree  # what goes through the layers: an array, or a pytree of arrays
# the input of a layer, or the VJP of jax.vjp without its weights and further arguments
type Kept = PyTree


@dataclasses.dataclass(frozen=True)
class Scan:
    """What is static in a scan."""

    # (parameters of one layer, x, args) -> x
    apply: Callable[[Leaves, Carried, tuple[Array, ...]], Carried]
    axis: str | None  # over which parameters are fully sharded; None where they are not
    # the dimension of each parameter of one layer that the axis shards; None for none
    dims: tuple[int | None, ...]
    dtype: DTypeLike  # in which parameters are gathered
    backend: str
    policy: Callable[..., Any] | None  # what is kept of each layer; None for its input
    finish: (
        Callable[[Leaves, Carried, tuple[Array, ...]], Any] | None
    )  # (further parameters, x, arrays) -> y of the last x
    finish_dims: tuple[int | None, ...]

    @property
    def turns(self) -> int:
        """The turns in the body of the loop. In the second of two, the buffers of the weights are
        back in their places.

        With one turn XLA copies all weights that were gathered, from where they arrived to where
        the loop carries them. What each of two turns keeps is stacked by itself: `lax.scan(...,
        unroll=2)` would join both first, with copies.
        """
        if self.backend == "pallas":
            return 2
        return 1

    def forward(self, whole: Leaves, x: Carried, args: tuple[Array, ...]) -> tuple[Carried, Kept]:
        """Applies one layer to x, and returns what its backward pass needs beside the whole weights
        and `args`.
        """
        if self.policy is None:
            return self.apply(whole, x, args), x

        def named(x: Array) -> Array:
            # libtpu would copy whole stacks around the transfers of other layouts to the host
            if platform() == "tpu":
                x = with_layout_constraint(x, Layout(tuple(range(x.ndim))))
            return checkpoint_name(x, STREAM)

        def apply(whole: Leaves, x: Carried, args: tuple[Array, ...]) -> Carried:
            return self.apply(whole, jax.tree.map(named, x), args)

        apply = jax.checkpoint(apply, policy=self.policy)
        return jax.vjp(apply, whole, x, args, saveable_args=(False, True, False))

    def backward(
        self, args: tuple[Array, ...], whole: Leaves, kept: Kept, dy: Carried
    ) -> tuple[Leaves, Carried]:
        """Returns the gradients of the whole weights of one layer and of its input."""
        varying = vary_like(whole, dy)
        if self.policy is None:
            return jax.vjp(lambda whole, x: self.apply(whole, x, args), varying, kept)[1](dy)
        kept.args_res = [varying, kept.args_res[1], args]
        return kept(dy)[:2]

    def gather_layer(self, stacked: Leaves, layer: Array | int) -> Transfers:
        """Begins to gather the parameters of one layer."""
        with jax.named_scope("prefetch_parameters"):
            shards = tuple(
                lax.dynamic_index_in_dim(leaf, layer, keepdims=False) for leaf in stacked
            )
        return self.gather(shards, self.dims)

    def gather(self, shards: Leaves, dims: tuple[int | None, ...]) -> Transfers:
        """Begins to gather parameters."""

        def start(shard: Array, dim: int | None) -> Transfer:
            if self.axis is None or dim is None:
                return Transfer(shard.astype(self.dtype) if self.sums_at_once(shard) else shard)
            return start_gather(shard.astype(self.dtype), self.axis, dim, self.backend)

        with jax.named_scope("prefetch_parameters"):
            begun = [start(shard, dim) for shard, dim in zip(shards, dims, strict=True)]
        return Transfers(begun, "prefetch_parameters")

    def sums_at_once(self, leaf: Array | jax.ShapeDtypeStruct) -> bool:
        """Says whether the gradient of a parameter of one layer is summed over the data axes as
        soon as it is made.

        What has one dimension is small: one sum of all layers costs less than a transfer for each.
        """
        return self.axis is None and leaf.ndim > 1

    def reduce(
        self, parameters: Leaves, gradients: Leaves, dims: tuple[int | None, ...]
    ) -> Transfers:
        """Begins to sum gradients over the axis, each in the dtype of its parameter."""

        def start(leaf: Array, gradient: Array, dim: int | None) -> Transfer:
            if self.axis is None or dim is None:
                return Transfer(self.sum(gradient, leaf))
            return start_reduce_scatter(gradient, leaf.dtype, self.axis, dim, self.backend)

        with jax.named_scope("scatter_gradients"):
            begun = [start(*one) for one in zip(parameters, gradients, dims, strict=True)]
        return Transfers(begun, "scatter_gradients")

    def sum(self, gradient: Array, leaf: Array) -> Array:
        """Returns a gradient in the dtype of its parameter, summed over the data axes if that is
        done at once.
        """
        if self.sums_at_once(gradient):
            for axis in _missing(gradient, leaf):
                gradient = ring_all_reduce(gradient, leaf.dtype, axis)
        return gradient.astype(leaf.dtype)


def _write(sums: Leaves, gradients: Leaves, layer: Array | int) -> Leaves:
    """Writes the gradients of one layer into those of all layers."""
    pairs = zip(sums, gradients, strict=True)
    return tuple(lax.dynamic_update_index_in_dim(total, one, layer, 0) for total, one in pairs)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def run(
    scan: Scan,
    stacked: Leaves,
    last: Leaves,
    x: Carried,
    args: tuple[Array, ...],
    arrays: tuple[Array, ...],
) -> Any:
    return _forward(dataclasses.replace(scan, policy=None), stacked, last, x, args, arrays)[0]


def _forward(
    scan: Scan,
    stacked: Leaves,
    last: Leaves,
    x: Carried,
    args: tuple[Array, ...],
    arrays: tuple[Array, ...],
) -> tuple[Any, tuple]:
    layers = stacked[0].shape[0]

    def turn(carry: tuple[Carried, Leaves], layer: Array) -> tuple[tuple[Carried, Leaves], Kept]:
        x, whole = carry
        # The last turn gathers its own layer again: the backward pass begins with it.
        following = scan.gather_layer(stacked, jnp.minimum(layer + 1, layers - 1))
        y, kept = meanwhile([following], lambda x: scan.forward(vary_like(whole, x), x, args), x)
        return (y, following.done()), kept

    def body(
        carry: tuple[Carried, Leaves], layer: Array
    ) -> tuple[tuple[Carried, Leaves], list[Kept]]:
        kept = []
        for n in range(scan.turns):
            carry, of_layer = turn(carry, layer + n)
            kept.append(of_layer)
        return carry, kept

    def loop(x: Carried, first: Leaves) -> tuple[Carried, Leaves, Any]:
        # The gradients of `finish` are large. So that they are gone when the loop begins backward,
        # one layer or more come after the loop, and they leave beside these.
        in_loop = layers if scan.finish is None else layers - 1
        in_loop -= in_loop % scan.turns
        # A loop of one body would be none for libtpu, which then fails at what is offloaded.
        if in_loop == scan.turns:
            in_loop = 0
        carry, stacks = lax.scan(
            body, (x, first), jnp.arange(0, in_loop, scan.turns, dtype=jnp.int32)
        )
        rest = []
        for layer in range(in_loop, layers):
            carry, of_layer = turn(carry, jnp.int32(layer))
            rest.append(of_layer)
        return (*carry, (stacks, rest))

    first = scan.gather_layer(stacked, 0).done()
    if scan.finish is None:
        y, whole, kept = loop(x, first)
        return y, (stacked, last, kept, None, whole, args)
    # the weights of `finish` set out once those of the first layer are there, and do not delay them
    first, shards = tie(first, last)
    travelling = scan.gather(shards, scan.finish_dims)
    y, whole, kept = meanwhile([travelling], loop, x, first)
    finish = scan.finish
    y, pull = jax.vjp(lambda whole, y: finish(whole, y, arrays), vary_like(travelling.done(), y), y)
    return y, (stacked, last, kept, pull, whole, args)


def _backward(scan: Scan, saved: tuple, dy: PyTree) -> tuple[Leaves, Leaves, Carried, None, None]:
    stacked, last, kept, pull, whole, args = saved
    layers = stacked[0].shape[0]

    pull_layer = functools.partial(scan.backward, args)

    def turn(carry: tuple, layer: Array, kept: Kept) -> tuple:
        dy, whole, gradients, sums = carry
        # nothing uses what the last turn gathers
        preceding = scan.gather_layer(stacked, jnp.maximum(layer - 1, 0))
        if scan.axis is None:  # gradients do not wait for the next turn
            gradients, dy = pull_layer(whole, kept, dy)
            sums = _write(sums, scan.reduce(stacked, gradients, scan.dims).done(), layer)
            return dy, preceding.done(), (), sums
        reduced = scan.reduce(stacked, gradients, scan.dims)
        gradients, dy = meanwhile(
            [preceding, reduced], functools.partial(pull_layer, whole), kept, dy
        )
        # In the first turn no gradients are waiting. The zeros that are written then are replaced
        # in the second turn.
        sums = _write(sums, reduced.done(), jnp.minimum(layer + 1, layers - 1))
        return dy, preceding.done(), gradients, sums

    def body(carry: tuple, step: tuple[Array, list[Kept]]) -> tuple[tuple, None]:
        layer, kept = step
        for n in reversed(range(scan.turns)):
            carry = turn(carry, layer + n, kept[n])
        return carry, None

    dlast: Leaves = ()  # the gradients of `last`, as it is stored
    leaving: list[Transfers] = []  # one, where something follows the layers
    if pull is not None:
        whole_gradients, dy = pull(dy)
        leaving.append(scan.reduce(last, whole_gradients, scan.finish_dims))
    initial = _before_any_layer(scan, stacked, whole, dy)
    stacks, rest = kept
    in_loop = layers - len(rest)

    def after_loop(dy: Carried) -> tuple:
        carry = dy, whole, *initial
        for n in reversed(range(len(rest))):
            carry = turn(carry, jnp.int32(in_loop + n), rest[n])
        return carry

    carry = meanwhile(leaving, after_loop, dy)
    if leaving:
        # the loop begins once the buffers of whole gradients, and of what arrived, are free
        dlast, carry = tie(leaving[0].done(), carry)
    firsts = jnp.arange(0, in_loop, scan.turns, dtype=jnp.int32)
    (dx, _, gradients, sums), _ = lax.scan(body, carry, (firsts, stacks), reverse=True)
    if scan.axis is not None:
        sums = _write(sums, scan.reduce(stacked, gradients, scan.dims).done(), 0)
    return tuple(map(_sum_like, sums, stacked)), tuple(map(_sum_like, dlast, last)), dx, None, None


run.defvjp(_forward, _backward)


def _before_any_layer(
    scan: Scan, stacked: Leaves, whole: Leaves, dy: Carried
) -> tuple[Leaves, Leaves]:
    """Returns the whole gradients of no layer, and room for those of all layers, of which every one
    is written.
    """
    waiting: Leaves = ()
    if scan.axis is not None:
        waiting = tuple(jnp.zeros_like(leaf) for leaf in vary_like(whole, dy))
    sums = tuple(
        vary_like(lax.empty(leaf.shape, leaf.dtype), leaf, () if at_once else dy)
        for leaf, at_once in zip(stacked, map(scan.sums_at_once, whole), strict=True)
    )
    return waiting, sums


def _sum_like(gradient: Array, leaf: Array) -> Array:
    """Sums a gradient over the axes on whose devices a parameter is the same."""
    axes = _missing(gradient, leaf)
    if axes:
        return lax.psum(gradient, axes)
    return gradient


def _missing(gradient: Array, leaf: Array) -> tuple[str, ...]:
    return tuple(sorted(jax.typeof(gradient).mat.varying - jax.typeof(leaf).mat.varying))
