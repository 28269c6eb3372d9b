"""The rules of ring attention, forward and backward. They assume valid input, cast to vary over the same axes.

```
q   [b, n, g, s, d]     this device's rows of n groups of g heads            (R devices on the ring)
kv  [2, b, n, s, d]     this device's keys and values
o   [b, s, n * g, d]    as the caller has it, who may save it, too: then it is saved once

forward   o  = softmax(q k.T) v                 kv travels; every product is added to the running softmax
          dq = ds k                             kv travels again
          dk = ds.T q,  dv = p.T do             sums that travel one hop behind their kv, and home at the end
```

Saved are q, kv, o and the log-sum-exp of this device's rows, as they are: nothing gathered. p is computed again. The
passes themselves are in `passes`.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from flaxasync import transport
from flaxasync.ops.attention import ring as passes
from flaxasync.ops.attention.blocks import Reference, finish
from flaxasync.ops.attention.ring import Op


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def ring_attention(op: Op, q: Array, kv: Array, ids: Array | None) -> Array:
    return _forward(op, q, kv, ids)[0]


def _ring_attention_fwd(op: Op, q: Array, kv: Array, ids: Array | None) -> tuple[Array, tuple]:
    q, kv = _differentiable(op)(q, kv)
    out, log_sum = _forward(op, q, kv, ids)
    return out, (q, kv, ids, out, log_sum)


def _ring_attention_bwd(op: Op, saved: tuple, do: Array) -> tuple[Array, Array, None]:
    q, kv, ids, out, log_sum = saved
    do, out = _differentiable(op)(do, out)
    # Else XLA sees that kv takes the way it took in the forward pass, and keeps what came instead of sending it again.
    kv, do = transport.tie(kv, do)
    with jax.named_scope("ring_attention_backward"):
        overlap = jnp.sum(out.astype(log_sum.dtype) * do.astype(log_sum.dtype), axis=-1, keepdims=True)
        rows = jnp.stack([log_sum, grouped(overlap, kv.shape[2])[..., 0]], axis=-2)
        dq, dkv = passes.differentiate(op, q, kv, ids, grouped(do.astype(q.dtype), kv.shape[2]), rows)
        dq = (dq * op.scores.scale).astype(q.dtype)
        scale = jnp.array([op.scores.scale, 1.0], dkv.dtype).reshape(2, 1, 1, 1, 1)
        return dq, (dkv * scale).astype(kv.dtype), None


ring_attention.defvjp(_ring_attention_fwd, _ring_attention_bwd)


def _differentiable(op: Op) -> Callable[..., tuple[Array, ...]]:
    """What the operands of both rules go through: it refuses the rules' own derivative, where there is none."""
    if op.ring is not None:
        return _one_derivative_of_a_ring
    return (lambda *arrays: arrays) if isinstance(op.kernel, Reference) else _one_derivative_of_a_kernel


def _refusing(why: str) -> Callable[..., tuple[Array, ...]]:
    """The identity, whose derivative raises NotImplementedError."""

    @jax.custom_jvp
    def identity(*arrays: Array) -> tuple[Array, ...]:
        return arrays

    @identity.defjvp
    def refuse(primals: tuple, tangents: tuple) -> Any:
        raise NotImplementedError(
            f"ring_attention has a first derivative only: {why}. For a Hessian or a gradient penalty use "
            "jax.nn.dot_product_attention"
        )

    return identity


_one_derivative_of_a_ring = _refusing("its gradient is a ring of its own, which has no gradient")
_one_derivative_of_a_kernel = _refusing("its gradient is a kernel, which has no gradient; kernel='reference' has one")


def _forward(op: Op, q: Array, kv: Array, ids: Array | None) -> tuple[Array, Array]:
    with jax.named_scope("ring_attention"):
        out, log_sum = finish(passes.attend(op, q, kv, ids), q.dtype)
        b, n, g, s, d = out.shape
        return out.transpose(0, 3, 1, 2, 4).reshape(b, s, n * g, d), log_sum


def grouped(x: Array, groups: int) -> Array:
    """[b, n, g, s, d] of [b, s, n * g, d]: heads by the keys and values that they share."""
    b, s, _, d = x.shape
    return x.reshape(b, s, groups, -1, d).transpose(0, 2, 3, 1, 4)
