"""A whole attention block in which weights and heads travel, where the usual form sends rows.

Every device projects its own rows, with the weights of all devices, which travel behind the
products. An all-to-all turns its rows of all heads into all rows of its heads, and a second one
turns the result back. Where the rows of all devices are more than the features of the weights, less
travels in this form. `times_as_fast` predicts what that gains.

```
x       [r, k]       for each sequence, this device's rows                          (R devices on the axis)
w       [n, k]       the projections of this device's heads, transposed
z       [R*n, r]     all_gather(w) @ x.T, whose block d has the heads of device d
        all-to-all   [R, n, r]: all rows of this device's heads, block d those of device d
heads   [R, m, r]    attention
        all-to-all   [R*m, r]: this device's rows of all heads
out     [m, k]       this device's rows of the output projection
y       [r, k]       heads.T @ all_gather(out)

backward   dheads = all_gather(out) @ dy.T                   the all-to-alls again, in the other order
           dout   = reduce_scatter(heads @ dy)
           dx     = dz.T @ all_gather(w)                     w travels again, or was kept
           dw     = reduce_scatter(dz @ x)
```

The sequences of the batch are exchanged one by one. While one of them attends, the next ones arrive
and the one before leaves. The first arrival has the projection of the last sequence beside it, and
backward the product of dout. The last departure of the backward pass has the products of dx beside
it, if w was kept; that of the forward pass has nothing.

With a quantization the weights travel in 8 bits, and heads in the dtype of x. x, w and dy are
quantised over k. z and dheads have the scales of both. out and heads are quantised over m, so that
all devices share the scales of out. `dx` sums over rows of w, so the scales of these are multiplied
into dz, as `ops.quantization` says for dw. dw and dout sum over r and the sequences. Where their
products are quantised, these are one sum, and have their scales together.

The all-to-all is that of Jacobs et al., "DeepSpeed Ulysses" (2023), where the weights are whole on
every device.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import PyTree

from flaxasync.hardware import Chip
from flaxasync.ops.matmul.products import Arrays, Operands, dot, row_major, weight_gradient
from flaxasync.ops.matmul.vjp import Executor
from flaxasync.ops.plan import plan
from flaxasync.ops.quantization import (
    Operand,
    Quantization,
    backward_operands,
    dequantize,
    forward_operands,
    quantize,
    weight_operands,
)
from flaxasync.ops.roofline import directions, hbm, hop_seconds
from flaxasync.ops.saved import GATHERED, PRODUCT, first_only
from flaxasync.transport import direct
from flaxasync.transport.transfers import Transfer, Transfers, meanwhile

# sequences that are on their way to this device's heads at a time; the links stay busy with two
IN_FLIGHT = 2
# how many times as fast this form must be predicted to be; predictions are no better than that
WORTH = 1.05
ATTENTION_SHARE = 0.4
"""The share of the peak that causal attention reaches forward, played on v6e. On v5e it is more,
and hides less.
"""


@dataclasses.dataclass(frozen=True)
class ExchangedAttention:
    """What is static in a block. Hashable."""

    projections: Executor  # what sends and multiplies the weights of the input projections
    output: Executor  # the same for the output projection
    # (z [R, n, r], constants, shared) -> heads [R, m, r] of one sequence
    attend: Callable[[Array, PyTree, PyTree], Array]
    # whether Pallas copies make the exchanges, beside what is computed meanwhile, or XLA's
    # all-to-all
    direct: bool
    keep: bool  # whether all_gather(w) is kept for the backward pass

    def exchange(self, x: Array) -> Transfers:
        """Begins to send block d of [R*n, r] to device d; what arrives is [R, n, r]."""
        axis_name = self.projections.axis_name
        size = lax.axis_size(axis_name)
        if self.direct:
            begun = Transfer(*direct.all_to_all(axis_name, size, 0).start(x))
        else:
            begun = Transfer(lax.all_to_all(x.reshape(size, -1, x.shape[-1]), axis_name, 0, 0))
        return Transfers([begun], "exchange_heads")

    def after(self, before: Transfers, x: Array) -> Transfers:
        """Begins an exchange when `before` has begun, which is waited for first and so must have
        the links first.
        """
        return self.exchange(meanwhile([before], lambda x: x, x))

    def through[T](
        self,
        first: Array,
        while_first_arrives: Callable[[list[Transfers]], Arrays],
        compute: Callable[[int, Array], tuple[Array, T]],
        while_last_leaves: Callable[[list[Transfers], Arrays], None],
    ) -> tuple[Arrays, list[T]]:
        """Sends each sequence [R*n, r] to where it is computed with, and the results [R*m, r] back.

        `while_first_arrives` is called with the transfers that are under way, and returns all
        sequences but the first. `compute` turns the number of a sequence and [R, n, r] into [R, m,
        r] and what is returned beside it. `while_last_leaves` is called with the transfers that are
        under way, and all results but the last.
        """
        arriving = [self.exchange(first)]
        extras = list[T]()
        leaving: list[Transfers] = []
        xs = (first, *while_first_arrives(arriving))
        arriving += [self.after(arriving[-1], x) for x in xs[1:IN_FLIGHT]]
        for i in range(len(xs)):
            (x,) = arriving[i].done()
            if i + IN_FLIGHT < len(xs):
                arriving.append(self.after(arriving[-1], xs[i + IN_FLIGHT]))
            under_way = leaving[-1:] + arriving[i + 1 :]
            y, extra = meanwhile(under_way, functools.partial(compute, i), x)
            leaving.append(self.exchange(y.reshape(-1, y.shape[-1])))
            extras.append(extra)
        back = tuple(_blocks_as_rows(transfers) for transfers in leaving[:-1])
        while_last_leaves(leaving[-1:], back)
        return (*back, _blocks_as_rows(leaving[-1])), extras


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def exchanged_attention(
    block: ExchangedAttention,
    xs: Arrays,
    w: Array,
    out: Array,
    constants: tuple[PyTree, ...],
    shared: PyTree,
) -> Arrays:
    """Returns y [r, k] of this device's rows [r, k] of each sequence; the head of this file has w
    and out.

    `attend` is given `constants`, which have no gradient, beside each sequence, and `shared` beside
    all of them.
    """
    return _forward(block, xs, w, out, constants, shared)[0]


def _forward(
    block: ExchangedAttention,
    xs: Arrays,
    w: Array,
    out: Array,
    constants: tuple[PyTree, ...],
    shared: PyTree,
) -> tuple[Arrays, tuple]:
    xs = _first_derivative_only(block, xs)
    quantization = block.projections.quantization
    (w_given, *given), _ = forward_operands(quantization, (w, *xs), ())
    xs_given = tuple(given)
    # the last sequence of several is projected while the first one arrives, from the weights that
    # are gathered by then
    count = max(1, len(xs) - 1)
    some = xs_given[:count]
    last = xs_given[count:]
    with jax.named_scope("project_inputs"):
        zs, gathered = block.projections.gather(
            w_given, some, transposed=True, keep=block.keep or len(xs) > 1
        )

    def other_zs(arriving: list[Transfers]) -> Arrays:
        with jax.named_scope("project_inputs"):
            return zs[1:] + tuple(meanwhile(arriving, product, gathered, x) for x in last)

    def product(gathered: Operand, x: Operand) -> Array:
        return dot(gathered, x, block.projections.precision, transposed=True).astype(x.dtype)

    def attend(i: int, z: Array) -> tuple[Array, Callable[[Array], tuple[Array, PyTree]]]:
        return jax.vjp(
            lambda z, shared: block.attend(z, constants[i], shared),
            checkpoint_name(z, PRODUCT),
            shared,
        )

    heads, pulls = block.through(zs[0], other_zs, attend, lambda leaving, back: None)
    with jax.named_scope("project_output"):
        _, (out_given,) = forward_operands(quantization, (), (out,), over=(block.output.axis_name,))
        _, heads_given = forward_operands(quantization, (), heads)
        ys = checkpoint_name(_transposed_product(block.output, out_given, heads_given), PRODUCT)
    if block.keep:
        kept = checkpoint_name(gathered, GATHERED)
    else:
        kept = None
    return ys, (xs_given, w_given, kept, out_given, heads_given, pulls)


def _backward(
    block: ExchangedAttention, saved: tuple, dys: Arrays
) -> tuple[Arrays, Array, Array, None, PyTree]:
    xs_given, w, gathered, out, heads_given, pulls = saved
    dys = _first_derivative_only(block, dys)
    quantization = block.projections.quantization
    with jax.named_scope("project_output_dx"):
        dys_given, (out_given,) = backward_operands(quantization, dys, (out,))
        dheads, _ = block.output.gather(out_given, dys_given, transposed=True)
    xs = tuple(map(dequantize, xs_given))
    heads = tuple(dequantize(one, 0) for one in heads_given)
    found: dict[str, Any] = {}  # dout and dxs, which are computed while heads travel

    def reduce_dout(arriving: list[Transfers]) -> Arrays:
        with jax.named_scope("project_output_dw"):
            found["dout"] = meanwhile(
                arriving,
                lambda *dys: _sum_over_sequences(block.output, heads, dys, of_x=False),
                *dys,
            )
        return dheads[1:]

    def of_dx(w: Operand, dzs: Arrays, axis_name: str | None) -> tuple[Operand, Operands]:
        return weight_operands(
            quantization,
            w,
            dzs,
            products="backward",
            axis_name=axis_name,
            others_are_cotangents=True,
        )

    def local_dx(*dzs: Array) -> Arrays:
        """Returns dz.T @ gathered for each dz."""
        with jax.named_scope("project_inputs_dx"):
            gathered_given, dzs_given = of_dx(gathered, dzs, None)
            return tuple(
                weight_gradient(dz, gathered_given, block.projections.precision).astype(w.dtype)
                for dz in dzs_given
            )

    def first_dxs(leaving: list[Transfers], dzs: Arrays) -> None:
        if gathered is not None and dzs:
            found["dxs"] = meanwhile(leaving, local_dx, *dzs)

    dzs, dshareds = block.through(dheads[0], reduce_dout, lambda i, dh: pulls[i](dh), first_dxs)
    if gathered is None:
        with jax.named_scope("project_inputs_dx"):
            given = of_dx(w, dzs, block.projections.axis_name)
            dxs = _transposed_product(block.projections, *given)
    else:
        dxs = (*found.get("dxs", ()), *local_dx(dzs[-1]))
    with jax.named_scope("project_inputs_dw"):
        dw = _sum_over_sequences(block.projections, dzs, xs, of_x=True)
    dshared = jax.tree.map(lambda *each: functools.reduce(jnp.add, each), *dshareds)
    return dxs, dw, found["dout"], None, dshared


exchanged_attention.defvjp(_forward, _backward)


def _first_derivative_only(block: ExchangedAttention, arrays: Arrays) -> Arrays:
    """Returns the arrays; those of a block with direct copies refuse a second derivative by
    name.
    """
    if block.direct:
        return _one_derivative(*arrays)
    return arrays


_one_derivative = first_only(
    "attention with exchange_heads",
    "its copies have no gradient of their own",
    "exchange_heads=False has none of them",
)


def _sum_over_sequences(executor: Executor, xs: Arrays, ys: Arrays, *, of_x: bool) -> Array:
    """Returns reduce_scatter(sum of x @ y), a gradient of weights; `of_x` says that x and not y is
    a cotangent.
    """
    quantization = executor.quantization
    if quantization is None:
        kind = None
    else:
        kind = quantization.weights
    if quantization is None or kind is None:
        return executor.reduce(xs, ys)[0]
    scale = quantization.scale
    roundings = (None, quantization.rounding)
    x = quantize(lax.concatenate(xs, 1), kind, 1, scale=scale, rounding=roundings[of_x])
    y = quantize(lax.concatenate(ys, 0), kind, 0, scale=scale, rounding=roundings[not of_x])
    return executor.reduce((x,), (y,))[0]


def _transposed_product(executor: Executor, w: Operand, zs: Operands) -> Arrays:
    """Returns z.T @ all_gather(w) for each z [R*m, r]."""
    return tuple(row_major(y.T) for y in executor.weight_gradient(w, zs))


def _blocks_as_rows(transfers: Transfers) -> Array:
    (y,) = transfers.done()
    return y.reshape(-1, y.shape[-1])


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The sizes of an attention block on one device."""

    batch: int  # sequences
    rows: int  # this device's rows of each
    features: int  # of input and output
    inputs: int  # the features of the queries, keys and values of this device's heads
    out: int  # the features of the queries of this device's heads


def times_as_fast(
    sizes: Sizes,
    chip: Chip,
    ring: int,
    itemsize: int,
    gathered_bytes: int = 0,
    quantization: Quantization | None = None,
) -> float:
    """Predicts the time with travelling rows divided by that with travelling heads, gradients
    included.

    Rows that travel are an all_gather_matmul and a matmul_reduce_scatter, and weights that travel
    two all_gather_matmuls. Both forms compute the same attention. On top of the weights come the
    exchanges that nothing hides, and transposes: products have features as rows, and attention has
    positions as rows. Either form may keep `gathered_bytes` of what it gathers: rows, or the
    weights of the inputs.
    """
    b = sizes.batch
    r = sizes.rows
    k = sizes.features
    options: Any = {"chip": chip, "ring": ring, "itemsize": itemsize, "quantization": quantization}
    rows = [
        plan(
            "all_gather_matmul",
            (b, r, k),
            (k, sizes.inputs),
            gathered_bytes=gathered_bytes,
            **options,
        ),
        plan("matmul_reduce_scatter", (b, ring * r, sizes.out), (sizes.out, k), **options),
    ]
    weights = [
        plan(
            "all_gather_matmul",
            (sizes.inputs, k),
            (k, b * r),
            gathered_bytes=gathered_bytes,
            **options,
        ),
        plan("all_gather_matmul", (sizes.out, k), (k, b * r), **options),
    ]
    travelling_rows, travelling_weights = (
        sum(p.seconds[p.backend] for p in plans) for plans in (rows, weights)
    )
    attended = ring * b * r * (sizes.inputs + sizes.out)
    # bytes, with those of the gradients
    transposed = 2 * 2 * (attended + sizes.inputs * k + b * r * k) * itemsize
    of_weights = 1 if quantization else itemsize  # bytes of an element that travels
    keep = ring * sizes.inputs * k * of_weights <= gathered_bytes
    exposed = _exposed_seconds(sizes, chip, ring, itemsize, of_weights, keep)
    return travelling_rows / (travelling_weights + exposed + transposed / hbm(chip))


def _exposed_seconds(
    sizes: Sizes, chip: Chip, ring: int, itemsize: int, of_weights: int, keep: bool
) -> float:
    """Returns the seconds in which exchanges have nothing beside them, forward and backward, and
    those in which weights have less beside them than a gather of weights is planned to have.
    """

    # over the middle of a ring go ring**2 / 4 blocks each way, on two links
    def one_sequence(features: int) -> float:
        return hop_seconds(chip, ring**2 / 4 * features * sizes.rows * itemsize, 2)

    batch = sizes.batch
    inputs = sizes.inputs
    out = sizes.out
    first = one_sequence(inputs)
    last = one_sequence(out)
    middle = (batch - 1) * (first + last)
    attention = 2 * 2 * batch * out * (ring * sizes.rows) ** 2 / 2 / (ATTENTION_SHARE * chip.flops)
    # for each of the features of a weight
    products = 2 * batch * ring * sizes.rows * sizes.features / chip.flops
    projections = products * inputs
    weights = (ring - 1) * hop_seconds(
        chip, inputs * sizes.features * of_weights, directions(chip, ring)
    )
    # of several sequences, all but the last are projected while weights are gathered
    beside_weights = projections
    if batch > 1:
        beside_weights *= (batch - 1) / batch
    hidden = {
        "weights": (min(weights, projections), beside_weights),
        "projection": (first, projections / batch if batch > 1 else 0.0),
        "heads of the output": (last, 0.0),
        "dout": (last, products * out),
        "dx": (first, projections * (batch - 1) / batch if keep else 0.0),
        "attention": (middle, attention),
        "gradient of attention": (middle, 2 * attention),
    }
    return sum(max(0.0, exchange - beside) for exchange, beside in hidden.values())
