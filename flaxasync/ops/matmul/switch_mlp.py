"""An MLP on GPUs: the blocks of `switch` go through both products, and are never put in order.

```
forward   block by block:  y = x @ ws,  h = act(gate) * up,  h @ down, which is sent to its owner
backward  block by block:  dh = dy @ down.T,  dy of both products,  dx = them @ ws.T, which is sent
                           dws += x.T @ them,  d_down += h.T @ dy
```

Saved for the backward pass are x, or the blocks of all_gather(x), and the products of each block.
"""

import functools

import jax
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from flaxasync.ops.matmul.activation import MLP, activate
from flaxasync.ops.matmul.products import Arrays
from flaxasync.ops.matmul.switch import (
    SwitchExecutor,
    add_gradient,
    join_columns,
    split_columns,
)
from flaxasync.ops.saved import GATHERED, HIDDEN, PRODUCT

# the blocks of x that are kept, in the order in which they arrive; ws, down, the products of blocks
type Saved = tuple[Arrays, Arrays, Array, Arrays]


type SwitchMLP = MLP[SwitchExecutor]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def switch_mlp(mlp: SwitchMLP, x: Array, ws: Arrays, down: Array) -> Array:
    """Returns reduce_scatter(activate(all_gather(x) @ ws) @ down) for x [..., m, d], each of ws
    [d, f] and down [f, d'].
    """
    return _forward(mlp, x, ws, down)[0]


def _forward(mlp: SwitchMLP, x: Array, ws: Arrays, down: Array) -> tuple[Array, Arrays, Arrays]:
    """Returns y, the blocks of x, and the products of each."""
    executor = mlp.executor
    w = join_columns(ws, False)
    block = x
    blocks = []
    found = []
    hidden = []
    for hop in range(executor.size):
        blocks.append(block)
        with jax.named_scope("all_gather_matmul"):
            product = executor.product(block, w, x.dtype)
            if hop + 1 < executor.size:
                product, block = executor.beside(product, block)
        found.append(product)
        with jax.named_scope("matmul_reduce_scatter"):
            hidden.append(_hidden(mlp, len(ws), product))
    with jax.named_scope("matmul_reduce_scatter"):
        y = executor.sum_for_owners(hidden, down, x.dtype)
    return y, tuple(blocks), tuple(found)


def _mlp_fwd(mlp: SwitchMLP, x: Array, ws: Arrays, down: Array) -> tuple[Array, Saved]:
    y, blocks, found = _forward(mlp, x, ws, down)
    kept = (x,)
    if mlp.keep:
        kept = checkpoint_name(blocks, GATHERED)
    return checkpoint_name(y, PRODUCT), (kept, ws, down, checkpoint_name(found, HIDDEN))


def _mlp_bwd(mlp: SwitchMLP, saved: Saved, dy: Array) -> tuple[Array, Arrays, Array]:
    kept, ws, down, found = saved
    executor = mlp.executor
    size = executor.size
    w = join_columns(ws, False)
    block = kept[0]
    dy_block = dy
    dproducts = []
    hidden = functools.partial(_hidden, mlp, len(ws))
    dw: Array | None = None
    d_down: Array | None = None
    for hop in range(size):
        is_last = hop + 1 == size
        with jax.named_scope("matmul_reduce_scatter_dx"):
            dh = executor.product(dy_block, down, dy.dtype, transposed=True)
            h, pull = jax.vjp(hidden, found[hop])
            (dproduct,) = pull(dh)
            own_dy = dy_block
            if not is_last:
                dproduct, dy_block = executor.beside(dproduct, dy_block)
        dproducts.append(dproduct)
        with jax.named_scope("all_gather_matmul_dw"):
            dw = add_gradient(dw, block, dproduct, executor.precision)
            if mlp.keep and not is_last:
                block = kept[hop + 1]
            elif not is_last:
                dw, block = executor.beside(dw, block)
        with jax.named_scope("matmul_reduce_scatter_dw"):
            d_down = add_gradient(d_down, h, own_dy, executor.precision)
    assert dw is not None
    assert d_down is not None
    dws = _columns(dw.astype(ws[0].dtype), len(ws))
    with jax.named_scope("all_gather_matmul_dx"):
        dx = executor.sum_for_owners(dproducts, w, dy.dtype, transposed=True)
    return dx, dws, d_down.astype(down.dtype)


switch_mlp.defvjp(_mlp_fwd, _mlp_bwd)


def _hidden(mlp: SwitchMLP, columns: int, product: Array) -> Array:
    """Returns h of a block of the products of `columns` weights, which lie side by side."""
    return activate(mlp.activation, _columns(product, columns)).astype(product.dtype)


def _columns(array: Array, count: int) -> Arrays:
    """Returns equal parts of the last dimension."""
    width = array.shape[-1] // count
    return split_columns(array, [width] * count)
