"""The VJP rule of attention. It assumes valid input in which all operands vary over the same mesh axes.

```
q   [b, n, g, s, d]     this device's rows of n groups of g heads            (R devices on the ring)
kv  [2, b, n, s, d]     this device's keys and values
o   [b, s, n * g * d]   as the next projection reads it: a caller that saves it too then shares the one copy

forward   o  = softmax(q k.T) v                 kv travels; every product is added to the running softmax
          dq = ds k                             kv travels again
          dk = ds.T q,  dv = p.T do             partial sums travel one hop behind their kv, and back to its owner
```

Saved are q, kv, o and the log-sum-exp of this device's rows, as they are; nothing gathered is saved, and p is computed
again. `ring` has the loops over the blocks.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from flaxasync import transport
from flaxasync.kernels.engine.operands import LANES
from flaxasync.kernels.flash_attention import WHOLE_ROWS, Flash
from flaxasync.ops.attention import ring
from flaxasync.ops.attention.blocks import Reference, finish
from flaxasync.ops.attention.ring import Call, Shards
from flaxasync.ops.saved import ATTENTION, STATISTICS, first_only


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def attention(call: Call, q: Array, kv: Array, ids: Array | None) -> Array:
    return _forward(call, q, kv, ids)[0]


def _attention_fwd(call: Call, q: Array, kv: Array, ids: Array | None) -> tuple[Array, tuple]:
    q, kv = _first_derivative_only(call)(q, kv)
    out, log_sum_exp = _forward(call, q, kv, ids)
    out, log_sum_exp = checkpoint_name(out, ATTENTION), checkpoint_name(log_sum_exp, STATISTICS)
    return out, (q, kv, ids, out, log_sum_exp)


def _attention_bwd(call: Call, saved: tuple, do: Array) -> tuple[Array, Array, None]:
    q, kv, ids, out, log_sum_exp = saved
    do, out = _first_derivative_only(call)(do, out)
    # Without the tie, XLA sees that kv takes the same path as in the forward pass, and keeps what arrived then instead
    # of sending it again.
    kv, do = transport.tie(kv, do)
    with jax.named_scope("ring_attention_backward"):
        if kernel := _whole_kernel(call, q):
            (product,), segments = Shards(call, q, kv, ids).products(0)[0], None if ids is None else (ids, ids)
            do, log_sum_exp = do.astype(q.dtype), log_sum_exp[..., None, :]
            return *kernel.differentiate_whole(call.scores, q, kv, segments, do, out, log_sum_exp, product), None
        out, do = (x.reshape(*x.shape[:2], -1, q.shape[-1]) for x in (out, do))
        overlap = jnp.sum(out.astype(log_sum_exp.dtype) * do.astype(log_sum_exp.dtype), axis=-1, keepdims=True)
        rows = jnp.stack([log_sum_exp, group_heads(overlap, kv.shape[2])[..., 0]], axis=-2)
        do = group_heads(do.astype(q.dtype), kv.shape[2])
        dq, dkv = ring.differentiate(Shards(call, q, kv, ids, do, rows))
        dq = (dq * call.scores.scale).astype(q.dtype)
        scale = jnp.array([call.scores.scale, 1.0], dkv.dtype).reshape(2, 1, 1, 1, 1)
        return dq, (dkv * scale).astype(kv.dtype), None


attention.defvjp(_attention_fwd, _attention_bwd)


def group_heads(x: Array, groups: int) -> Array:
    """Turns [b, s, n * g, d] into [b, n, g, s, d]: heads grouped by the keys and values that they share."""
    b, s, _, d = x.shape
    return x.reshape(b, s, groups, -1, d).transpose(0, 2, 3, 1, 4)


def _forward(call: Call, q: Array, kv: Array, ids: Array | None) -> tuple[Array, Array]:
    """Returns o, and log2 of the sum of 2**score of each row."""
    with jax.named_scope("ring_attention"):
        shards = Shards(call, q, kv, ids)
        if kernel := _whole_kernel(call, q):
            (product,), segments = shards.products(0)[0], None if ids is None else (ids, ids)
            out, log_sum_exp = kernel.attend_whole(call.scores, q, kv, segments, product)
            return out, log_sum_exp[..., 0, :]
        out, log_sum_exp = finish(ring.attend(shards), q.dtype)
        b, n, g, s, d = out.shape
        return out.transpose(0, 3, 1, 2, 4).reshape(b, s, n * g * d), log_sum_exp


def _whole_kernel(call: Call, q: Array) -> Flash | None:
    """Returns the kernel if it can do without a carry: over whole sequences, of heads that are whole registers wide."""
    fits = q.shape[-1] % LANES == 0 and q.shape[-2] <= WHOLE_ROWS
    return call.kernel if call.ring is None and isinstance(call.kernel, Flash) and fits else None


def _first_derivative_only(call: Call) -> Callable[..., tuple[Array, ...]]:
    """Returns the identity for the operands of both rules; it refuses a derivative of the rules that does not exist."""
    if call.ring is not None:
        return _one_derivative_of_a_ring
    return (lambda *arrays: arrays) if isinstance(call.kernel, Reference) else _one_derivative_of_a_kernel


_INSTEAD = "for a Hessian or a gradient penalty use jax.nn.dot_product_attention"
_one_derivative_of_a_ring = first_only(
    "ring_attention", "its gradient is a ring of its own, which has no gradient", _INSTEAD
)
_one_derivative_of_a_kernel = first_only(
    "attention", "its gradient is a kernel, which has no gradient; kernel='reference' has one", _INSTEAD
)
