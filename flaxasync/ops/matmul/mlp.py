"""An MLP of fused kernels, whose activation is an epilogue of the kernels beside it.

```
x     [..., m, d]          this device's rows                           (R devices on axis_name)
ws    up, gate [d, f]      this device's columns; no gate in an MLP that is not gated
down  [f, d']              this device's rows
y     [..., m, d']         this device's rows of the sum

forward   up, gate, h     = all_gather(x) @ ws, act(gate) * up        one kernel; a product has no pass of its own
          y               = reduce_scatter(h @ down)
backward  dup, dgate, h   = gradients of h for all_gather(dy) @ down.T, which is never stored
          d_down          = h.T @ all_gather(dy)
          dx, dws         as in `vjp`
```

Saved for the backward pass are x, or all_gather(x), and the products up and gate: h is computed
again.
"""

import dataclasses
import functools
from typing import Any

import jax
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name

from flaxasync.kernels.engine.matmul import Values
from flaxasync.mesh import vary_alike
from flaxasync.ops.matmul import api, vjp
from flaxasync.ops.matmul.activation import FUSED, MLP, Activation, activate
from flaxasync.ops.matmul.fused import FusedExecutor
from flaxasync.ops.matmul.products import Arrays, Operands, weight_gradient
from flaxasync.ops.matmul.switch import SwitchExecutor
from flaxasync.ops.matmul.switch_mlp import switch_mlp
from flaxasync.ops.quantization import (
    Operand,
    Quantization,
    Quantized,
    backward_operands,
    cotangents,
    forward_operands,
    weight_operands,
)
from flaxasync.ops.saved import GATHERED, HIDDEN, PRODUCT, first_only
from flaxasync.transport.schedule import tie


def parallel_mlp(
    x: Array,
    ws: Operands,
    down: Operand,
    axis_name: str,
    activation: Activation,
    *,
    backend: str | None,
    precision: lax.PrecisionLike,
    gathered_bytes: int,
    quantization: Quantization | None = None,
) -> Array:
    """Returns y = reduce_scatter(activate(all_gather(x) @ ws) @ down); the ops have the operands
    and options.

    Where both ops are executed by "fused", h is computed of products that are not rounded.
    """
    options = api.Options(backend, precision=precision, quantization=quantization)
    size = api.check_operands("all_gather_matmul", (x,), (*ws, down), axis_name)
    options_up = dataclasses.replace(options, gathered_bytes=gathered_bytes)
    h = (*x.shape[:-2], size * x.shape[-2], down.shape[0])
    shapes = [x.shape, *(w.shape for w in ws)]
    gather, keep = api.choose_executor(
        "all_gather_matmul", shapes, x.dtype, axis_name, size, options_up
    )
    scatter, _ = api.choose_executor(
        "matmul_reduce_scatter", [h, down.shape], x.dtype, axis_name, size, options
    )
    x, ws, down = vary_alike((x, tuple(ws), down), axis_name)
    if (
        activation in FUSED
        and isinstance(gather, SwitchExecutor)
        and isinstance(scatter, SwitchExecutor)
    ):
        return switch_mlp(MLP(gather, keep, activation), x, ws, down)
    if (
        activation in FUSED
        and isinstance(gather, FusedExecutor)
        and isinstance(scatter, FusedExecutor)
    ):
        return _mlp(MLP(gather, keep, activation), x, ws, down)

    # otherwise all that lies between products and h would be saved: six arrays instead of two
    @jax.checkpoint
    def finish(products: Arrays, down: Operand) -> Array:
        return vjp.multiply_and_scatter(
            scatter, (activate(activation, products).astype(x.dtype),), (down,)
        )

    products = vjp.gather_and_multiply(gather, keep, x, ws)
    return finish(checkpoint_name(products, HIDDEN), down)


@dataclasses.dataclass(frozen=True)
class Activate:
    """The epilogue of the products of up and gate: returns h, and them before it if they are
    kept.
    """

    activation: Activation
    kept: int  # products that are kept: none, or all

    @property
    def results(self) -> int:
        return self.kept + 1

    def __call__(self, products: Values, operands: Values) -> Values:
        return *products[: self.kept], activate(self.activation, products)


@dataclasses.dataclass(frozen=True)
class ActivateGradient:
    """The epilogue of dh, with the products of up and gate as operands: returns their gradients,
    and h.
    """

    activation: Activation
    columns: int  # 2 with a gate, or 1

    @property
    def results(self) -> int:
        return self.columns + 1

    def __call__(self, products: Values, operands: Values) -> Values:
        h, pull = jax.vjp(lambda *values: activate(self.activation, values), *operands)
        return *pull(*products), h


_first_derivative_only = first_only(
    "ParallelMLP with backend='fused'",
    "its gradient is a kernel, which has no gradient",
    "use backend='xla'",
)


type Saved = tuple[Operand, Operands, Operand, Arrays]  # x or all_gather(x), ws, down, products


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _mlp(mlp: MLP[FusedExecutor], x: Array, ws: Operands, down: Operand) -> Array:
    return _forward(dataclasses.replace(mlp, keep=False), 0, x, ws, down)[0]


def _mlp_fwd(mlp: MLP[FusedExecutor], x: Array, ws: Operands, down: Operand) -> tuple[Array, Saved]:
    operands = _first_derivative_only(x, ws, down)
    y, (saved, *others, products) = _forward(mlp, len(ws), *operands)
    if mlp.keep:
        saved = checkpoint_name(saved, GATHERED)
    return checkpoint_name(y, PRODUCT), (saved, *others, checkpoint_name(products, HIDDEN))


def _forward(
    mlp: MLP[FusedExecutor], kept: int, x: Array, ws: Operands, down: Operand
) -> tuple[Array, Saved]:
    """Returns y, and what is saved, with `kept` products; ws and down are as they are multiplied."""
    executor = mlp.executor
    with jax.named_scope("all_gather_matmul"):
        (x_given,), ws = forward_operands(executor.quantization, (x,), ws)
        ys, gathered = executor.gather(
            x_given,
            ws,
            keep=mlp.keep,
            epilogue=Activate(mlp.activation, kept),
            # h will be quantised, and the kernel has its magnitudes at hand
            measured=slice(kept, None) if executor.quantization else None,
        )
        products = ys[:kept]
        h, *most = ys[kept:]
    with jax.named_scope("matmul_reduce_scatter"):
        h_given, (down,) = forward_operands(
            executor.quantization, (h,), (down,), most=next(iter(most), None)
        )
        y, _ = executor.reduce(h_given, (down,))
    return y, (x_given if gathered is None else gathered, ws, down, products)


def _mlp_bwd(
    mlp: MLP[FusedExecutor], saved: Saved, dy: Array
) -> tuple[Array, tuple[Any, ...], Any]:
    executor = mlp.executor
    quantization = executor.quantization
    x, ws, down, products, dy = _first_derivative_only(*saved, dy)
    with jax.named_scope("matmul_reduce_scatter_dx"):
        (dy_given,), down_given = backward_operands(quantization, (dy,), (down,))
        found, all_dy = executor.gather(
            dy_given,
            down_given,
            transposed=True,
            keep=True,
            epilogue=ActivateGradient(mlp.activation, len(ws)),
            operands=products,
            measured=slice(0, len(ws)) if quantization and quantization.backward else None,
        )
        dproducts = found[: len(ws)]
        h, *most = found[len(ws) :]
    assert all_dy is not None
    with jax.named_scope("matmul_reduce_scatter_dw"):
        h_given: Operand = h.reshape(-1, h.shape[-1])
        # h is rounded as it was forward, or by `weight_operands` for a product in 8 bits
        if quantization is not None and quantization.weights is None:
            (h_given,), _ = forward_operands(quantization, (h_given,), ())
        all_dy, (h_given,) = weight_operands(quantization, all_dy, (h_given,))
        # In 8 bits d_down is computed beside the sums of dx, and comes back as `beside`.
        is_beside = isinstance(h_given, Quantized)
        if not is_beside:
            d_down = weight_gradient(h_given, all_dy).astype(dy.dtype)
            # d_down can travel beside what follows, and h and all_dy end here
            d_down, dproducts = tie(d_down, dproducts)
    local = [(h_given, (all_dy,))] if is_beside else []
    dx, dws, beside = vjp.gradients_of_gather(
        executor, mlp.keep, (x, ws), dproducts, local, next(iter(most), None)
    )
    return dx, dws, cotangents((down,), beside if is_beside else (d_down,))[0]


_mlp.defvjp(_mlp_fwd, _mlp_bwd)
