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
from typing import Any, NamedTuple

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
        return jax.vjp(self.checkpointed, whole, x, args, saveable_args=(False, True, False))

    @functools.cached_property
    def checkpointed(self) -> Callable[[Leaves, Carried, tuple[Array, ...]], Carried]:
        """`apply`, of which is kept what the policy says. JAX traces one function once, for all
        turns.
        """

        def named(x: Array) -> Array:
            # libtpu would copy whole stacks around the transfers of other layouts to the host
            if platform() == "tpu":
                x = with_layout_constraint(x, Layout(tuple(range(x.ndim))))
            return checkpoint_name(x, STREAM)

        def apply(whole: Leaves, x: Carried, args: tuple[Array, ...]) -> Carried:
            return self.apply(whole, jax.tree.map(named, x), args)

        return jax.checkpoint(apply, policy=self.policy)

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
        self,
        parameters: Leaves,
        gradients: Leaves,
        dims: tuple[int | None, ...],
        *,
        in_loop: bool = False,
    ) -> Transfers:
        """Begins to sum gradients over the axis, each in the dtype of its parameter; without an
        axis, over the data axes those that are summed at once.
        """

        def start(leaf: Array, gradient: Array, dim: int | None) -> Transfer:
            if self.axis is None or dim is None:
                return Transfer(gradient.astype(leaf.dtype))
            return start_reduce_scatter(gradient, leaf.dtype, self.axis, dim, self.backend)

        with jax.named_scope("scatter_gradients"):
            if self.axis is None:
                gradients = self.sums(parameters, gradients, in_loop=in_loop)
            begun = [start(*one) for one in zip(parameters, gradients, dims, strict=True)]
        return Transfers(begun, "scatter_gradients")

    def sums(self, parameters: Leaves, gradients: Leaves, *, in_loop: bool) -> Leaves:
        """Returns gradients, of which those that are summed over the data axes at once are sums.

        The sums share the links of these axes. The TPU compiler plans the time of each as if it had
        the links to itself: outside of a loop it would begin them all after the last product of the
        layer, with little beside them. There each begins when the one before has arrived. The last
        parameters come first: as a rule a layer uses them last, and their gradients are made first.
        """
        in_turn = not in_loop and platform() != "gpu"
        sums = list(gradients)
        arrived: Array | None = None  # the last of what the sum before is made of
        for n in reversed(range(len(gradients))):
            if not self.sums_at_once(gradients[n]):
                continue
            for axis in _missing(gradients[n], parameters[n]):
                if in_turn and arrived is not None:
                    sums[n], _ = tie(sums[n], arrived)
                sums[n], arrived = ring_all_reduce(sums[n], parameters[n].dtype, axis)
        return tuple(sums)


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


class _Saved(NamedTuple):
    """What the backward pass needs."""

    stacked: Leaves
    last: Leaves  # the parameters of what follows the layers
    in_loop: list[Kept]  # of each turn of the loop's body, stacked over its iterations
    after_loop: list[Kept]  # of the layers that come after the loop
    pull: Any  # the VJP of `Scan.finish`; None without one
    whole: Leaves  # the weights of the last layer
    args: tuple[Array, ...]


def _forward(
    scan: Scan,
    stacked: Leaves,
    last: Leaves,
    x: Carried,
    args: tuple[Array, ...],
    arrays: tuple[Array, ...],
) -> tuple[Any, _Saved]:
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

    def loop(x: Carried, first: Leaves) -> tuple[Carried, Leaves, list[Kept], list[Kept]]:
        # The gradients of `finish` are large. So that they are gone when the loop begins backward,
        # one layer or more come after the loop, and they leave beside these.
        in_loop = layers if scan.finish is None else layers - 1
        in_loop -= in_loop % scan.turns
        # A loop of one body would be none for libtpu, which then fails at what is offloaded.
        if in_loop == scan.turns:
            in_loop = 0
        carry, kept_in_loop = lax.scan(
            body, (x, first), jnp.arange(0, in_loop, scan.turns, dtype=jnp.int32)
        )
        kept_after_loop = []
        for layer in range(in_loop, layers):
            carry, of_layer = turn(carry, jnp.int32(layer))
            kept_after_loop.append(of_layer)
        return *carry, kept_in_loop, kept_after_loop

    first = scan.gather_layer(stacked, 0).done()
    if scan.finish is None:
        y, whole, in_loop, after_loop = loop(x, first)
        return y, _Saved(stacked, last, in_loop, after_loop, None, whole, args)
    # the weights of `finish` set out once those of the first layer are there, and do not delay them
    first, shards = tie(first, last)
    travelling = scan.gather(shards, scan.finish_dims)
    y, whole, in_loop, after_loop = meanwhile([travelling], loop, x, first)
    finish = scan.finish
    y, pull = jax.vjp(lambda whole, y: finish(whole, y, arrays), vary_like(travelling.done(), y), y)
    return y, _Saved(stacked, last, in_loop, after_loop, pull, whole, args)


class _Going(NamedTuple):
    """What goes back through the layers, to the turn of a layer."""

    dy: Carried
    whole: Leaves  # the weights of that layer
    waiting: Leaves  # the whole gradients of the layer after it, which set out in the turn
    sums: Leaves  # the gradients of all layers


def _backward(scan: Scan, saved: _Saved, dy: PyTree) -> tuple[Leaves, Leaves, Carried, None, None]:
    stacked = saved.stacked
    layers = len(stacked[0])
    pull_layer = functools.partial(scan.backward, saved.args)

    def turn(going: _Going, layer: Array, kept: Kept, *, in_loop: bool) -> _Going:
        # nothing uses what the last turn gathers
        preceding = scan.gather_layer(stacked, jnp.maximum(layer - 1, 0))
        if scan.axis is None:  # gradients do not wait for the next turn
            gradients, dy = pull_layer(going.whole, kept, going.dy)
            reduced = scan.reduce(stacked, gradients, scan.dims, in_loop=in_loop)
            sums = _write(going.sums, reduced.done(), layer)
            return _Going(dy, preceding.done(), (), sums)
        reduced = scan.reduce(stacked, going.waiting, scan.dims)
        gradients, dy = meanwhile(
            [preceding, reduced], functools.partial(pull_layer, going.whole), kept, going.dy
        )
        # In the first turn no gradients are waiting. The zeros that are written then are replaced
        # in the second turn.
        sums = _write(going.sums, reduced.done(), jnp.minimum(layer + 1, layers - 1))
        return _Going(dy, preceding.done(), gradients, sums)

    def body(going: _Going, step: tuple[Array, list[Kept]]) -> tuple[_Going, None]:
        layer, kept = step
        for n in reversed(range(scan.turns)):
            going = turn(going, layer + n, kept[n], in_loop=True)
        return going, None

    dlast: Leaves = ()  # the gradients of `last`, as it is stored
    leaving: list[Transfers] = []  # one, where something follows the layers
    if saved.pull is not None:
        whole_gradients, dy = saved.pull(dy)
        leaving = [scan.reduce(saved.last, whole_gradients, scan.finish_dims)]
    initial = _before_any_layer(scan, saved, dy)
    in_loop = layers - len(saved.after_loop)

    def after_loop(dy: Carried) -> _Going:
        going = initial._replace(dy=dy)
        for n, kept in reversed(list(enumerate(saved.after_loop))):
            going = turn(going, jnp.int32(in_loop + n), kept, in_loop=False)
        return going

    going = meanwhile(leaving, after_loop, dy)
    if leaving:
        # the loop begins once the buffers of whole gradients, and of what arrived, are free
        dlast, going = tie(leaving[0].done(), going)
    steps = (jnp.arange(0, in_loop, scan.turns, dtype=jnp.int32), saved.in_loop)
    going, _ = lax.scan(body, going, steps, reverse=True)
    if scan.axis is not None:
        reduced = scan.reduce(stacked, going.waiting, scan.dims)
        going = going._replace(sums=_write(going.sums, reduced.done(), 0))
    return _summed(going.sums, stacked), _summed(dlast, saved.last), going.dy, None, None


run.defvjp(_forward, _backward)


def _before_any_layer(scan: Scan, saved: _Saved, dy: Carried) -> _Going:
    """Returns what goes into the last layer: the gradients of no layer are waiting, and there is
    room for those of all layers, of which every one is written.
    """
    whole = saved.whole
    waiting: Leaves = ()
    if scan.axis is not None:
        waiting = tuple(jnp.zeros_like(leaf) for leaf in vary_like(whole, dy))
    sums = tuple(
        vary_like(lax.empty(leaf.shape, leaf.dtype), leaf, () if at_once else dy)
        for leaf, at_once in zip(saved.stacked, map(scan.sums_at_once, whole), strict=True)
    )
    return _Going(dy, whole, waiting, sums)


def _summed(gradients: Leaves, leaves: Leaves) -> Leaves:
    """Sums each gradient over the axes on whose devices its parameter is the same."""
    summed = []
    for gradient, leaf in zip(gradients, leaves, strict=True):
        axes = _missing(gradient, leaf)
        summed.append(lax.psum(gradient, axes) if axes else gradient)
    return tuple(summed)


def _missing(gradient: Array, leaf: Array) -> tuple[str, ...]:
    return tuple(sorted(jax.typeof(gradient).mat.varying - jax.typeof(leaf).mat.varying))
