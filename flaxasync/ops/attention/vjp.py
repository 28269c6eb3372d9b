"""The VJP rules of attention. They assume valid input in which all operands vary over the same mesh
axes.

```
q   [b, n, g, s, d]     this device's rows of n groups of g heads            (R devices on the ring)
kv  [2, b, n, s, d]     this device's keys and values
o   [b, s, n * g * d]   as the next projection reads it: a caller that saves it too then shares the one copy

forward   o  = softmax(q k.T) v                 kv travels; every product is added to the running softmax
          dq = ds k                             kv travels again
          dk = ds.T q,  dv = p.T do             partial sums travel one hop behind their kv, and back to its owner
```

Saved are q, kv, o and the log-sum-exp of this device's rows, as they are; nothing gathered is
saved, and p is computed again. `ring` has the loops over the blocks.

`whole` is the rule of the flash kernel where no block travels. It takes q, k and v as projections
return them, with their heads side by side, and returns their gradients so: XLA would move other
forms from and to these by copies.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from flaxasync import transport
from flaxasync.kernels.attention_block import Product, Segments
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
    out = checkpoint_name(out, ATTENTION)
    log_sum_exp = checkpoint_name(log_sum_exp, STATISTICS)
    return out, (q, kv, ids, out, log_sum_exp)


def _attention_bwd(call: Call, saved: tuple, do: Array) -> tuple[Array, Array, None]:
    q, kv, ids, out, log_sum_exp = saved
    do, out = _first_derivative_only(call)(do, out)
    # Without the tie, XLA sees that kv takes the same path as in the forward pass, and keeps what
    # arrived then instead of sending it again.
    kv, do = transport.tie(kv, do)
    with jax.named_scope("ring_attention_backward"):
        out, do = (x.reshape(*x.shape[:2], -1, q.shape[-1]) for x in (out, do))
        overlap = jnp.sum(
            out.astype(log_sum_exp.dtype) * do.astype(log_sum_exp.dtype), axis=-1, keepdims=True
        )
        rows = jnp.stack([log_sum_exp, group_heads(overlap, kv.shape[2])[..., 0]], axis=-2)
        do = group_heads(do.astype(q.dtype), kv.shape[2])
        dq, dkv = ring.differentiate(Shards(call, q, kv, ids, do, rows))
        dq = (dq * call.scores.scale).astype(q.dtype)
        scale = jnp.array([call.scores.scale, 1.0], dkv.dtype).reshape(2, 1, 1, 1, 1)
        return dq, (dkv * scale).astype(kv.dtype), None


attention.defvjp(_attention_fwd, _attention_bwd)


def group_heads(x: Array, groups: int) -> Array:
    """Turns [b, s, n * g, d] into [b, n, g, s, d]: heads grouped by the keys and values that they
    share.
    """
    b, s, _, d = x.shape
    return x.reshape(b, s, groups, -1, d).transpose(0, 2, 3, 1, 4)


def _forward(call: Call, q: Array, kv: Array, ids: Array | None) -> tuple[Array, Array]:
    """Returns o, and log2 of the sum of 2**score of each row."""
    with jax.named_scope("ring_attention"):
        out, log_sum_exp = finish(ring.attend(Shards(call, q, kv, ids)), q.dtype)
        b, n, g, s, d = out.shape
        return out.transpose(0, 3, 1, 2, 4).reshape(b, s, n * g * d), log_sum_exp


def takes_whole(call: Call, head_size: int) -> bool:
    """Says whether `whole` can serve: with the flash kernel over whole sequences of heads that are
    whole registers.
    """
    fits = head_size % LANES == 0 and call.sequence.rows <= WHOLE_ROWS
    return call.ring is None and isinstance(call.kernel, Flash) and fits


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def whole(call: Call, head_size: int, q: Array, k: Array, v: Array, ids: Array | None) -> Array:
    """Returns o [b, s, n * g * d] of q [b, s, n * g * d] and of k and v [b, s, n * d]."""
    return _whole_forward(call, head_size, q, k, v, ids)[0]


def _of_whole(call: Call, q: Array, k: Array, ids: Array | None) -> tuple[Flash, Product, Segments]:
    """Returns the kernel, the only product, and the segments of its queries and of its keys."""
    assert isinstance(call.kernel, Flash)
    ((product,),) = Shards(call, q, k, ids).products(0)
    return call.kernel, product, None if ids is None else (ids, ids)


def _whole_forward(
    call: Call, head_size: int, q: Array, k: Array, v: Array, ids: Array | None
) -> tuple[Array, Array]:
    kernel, product, segments = _of_whole(call, q, k, ids)
    with jax.named_scope("attention"):
        out, log_sum_exp = kernel.attend_whole(call.scores, q, k, v, segments, product, head_size)
    return out, log_sum_exp[..., 0, :]


def _whole_fwd(
    call: Call, head_size: int, q: Array, k: Array, v: Array, ids: Array | None
) -> tuple[Array, tuple]:
    q, k, v = _first_derivative_only(call)(q, k, v)
    out, log_sum_exp = _whole_forward(call, head_size, q, k, v, ids)
    out = checkpoint_name(out, ATTENTION)
    log_sum_exp = checkpoint_name(log_sum_exp, STATISTICS)
    return out, (q, k, v, ids, out, log_sum_exp)


def _whole_bwd(
    call: Call, head_size: int, saved: tuple, do: Array
) -> tuple[Array, Array, Array, None]:
    q, k, v, ids, out, log_sum_exp = saved
    do, out = _first_derivative_only(call)(do, out)
    kernel, product, segments = _of_whole(call, q, k, ids)
    with jax.named_scope("attention_backward"):
        dqkv = kernel.differentiate_whole(
            call.scores,
            q,
            k,
            v,
            segments,
            do.astype(q.dtype),
            out,
            log_sum_exp[..., None, :],
            product,
            head_size,
        )
    return *dqkv, None


whole.defvjp(_whole_fwd, _whole_bwd)


def _first_derivative_only(call: Call) -> Callable[..., tuple[Array, ...]]:
    """Returns the identity for the operands of both rules; it refuses a derivative of the rules
    that does not exist.
    """
    if call.ring is not None:
        return _one_derivative_of_a_ring
    if isinstance(call.kernel, Reference):
        return lambda *arrays: arrays
    return _one_derivative_of_a_kernel


_INSTEAD = "for a Hessian or a gradient penalty use jax.nn.dot_product_attention"
_one_derivative_of_a_ring = first_only(
    "ring_attention", "its gradient is a ring of its own, which has no gradient", _INSTEAD
)
_one_derivative_of_a_kernel = first_only(
    "attention",
    "its gradient is a kernel, which has no gradient; kernel='reference' has one",
    _INSTEAD,
)
