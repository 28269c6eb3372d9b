"""The program of a case and its reference, as jitted functions of global arrays, with random
operands.

The reference of every backend is the formula of its op on global arrays, which XLA partitions. A
kernel in 8 bits has the plain backend in 8 bits for a reference, which is itself compared with the
formula, which rounds nothing.
"""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import flaxasync as fa
from flaxasync.kernels.engine.operands import LANES
from flaxasync.nn.attention.rotary import rotary_embedding, rotary_tables, rotate
from flaxasync.ops.roofline import Shape
from flaxasync.ops.vocabulary import lookup_reduce_scatter
from flaxasync.transport import direct
from flaxasync.transport.pair import Pair
from flaxasync.transport.transfers import start_gather, start_reduce_scatter
from flaxasync.verify.cases import AXIS, MESH_AXES, Case

BY_ROWS = P(None, AXIS, None)
BY_COLUMNS = P(None, None, AXIS)
NAME = "verified"  # the name of the jitted function, by which a profile shows its runs


def _product(x: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.matmul(x, w, preferred_element_type=jnp.float32).astype(x.dtype)


def _causal_attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    wide = (x.astype(jnp.float32) for x in (q, k, v))
    return jax.nn.dot_product_attention(*wide, is_causal=True).astype(q.dtype)


def _rotated_attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return _causal_attention(rotary_embedding(q), rotary_embedding(k), v)


def _experts(x: jax.Array, ids: jax.Array, weights: jax.Array, *kernels: jax.Array) -> jax.Array:
    """Applies all experts to all rows, and adds what the rows chose."""
    x = x.astype(jnp.float32)
    weights = weights.astype(jnp.float32)
    y = jnp.zeros_like(x)
    for expert in range(kernels[0].shape[0]):
        gate, up, down = (kernel[expert].astype(jnp.float32) for kernel in kernels)
        share = jnp.sum(jnp.where(ids == expert, weights, 0), axis=-1, keepdims=True)
        y += share * ((jax.nn.silu(x @ gate) * (x @ up)) @ down)
    return y.astype(kernels[0].dtype)


def _transpose_blocks(x: jax.Array) -> jax.Array:
    """Gives device d, as block d of the columns, block d of the rows of every device."""
    blocks = x.reshape(_devices(), _devices(), -1, x.shape[1])
    return blocks.transpose(0, 2, 1, 3).reshape(-1, _devices() * x.shape[1])


@dataclasses.dataclass(frozen=True)
class Form:
    """What an op computes, and how it splits its arrays."""

    operands: tuple[P, ...]
    result: P
    names: tuple[str, ...]  # of the operands; "ids" are integers, which have no gradient
    formula: Callable[..., jax.Array]  # the result as a function of the global operands


EXPERTS = Form((P(AXIS),) * 6, P(AXIS), ("x", "ids", "weights", "gate", "up", "down"), _experts)
FORMS = {
    "expert_mlp": EXPERTS,
    "expert_products": EXPERTS,
    "all_gather_matmul": Form((BY_ROWS, P(None, AXIS)), BY_COLUMNS, ("x", "w"), _product),
    "matmul_reduce_scatter": Form((BY_COLUMNS, P(AXIS, None)), BY_ROWS, ("x", "w"), _product),
    "matmul_all_reduce": Form((BY_COLUMNS, P(AXIS, None)), P(), ("x", "w"), _product),
    "mesh_matmul": Form((P("x", "y"), P("x", None)), P("x", None), ("lhs", "rhs"), _product),
    "ring_attention": Form((P(None, AXIS),) * 3, P(None, AXIS), ("q", "k", "v"), _causal_attention),
    "attention": Form((P(AXIS),) * 3, P(AXIS), ("q", "k", "v"), _rotated_attention),
    "lookup_reduce_scatter": Form(
        (P(), P(AXIS, None)), BY_ROWS, ("ids", "table"), lambda ids, table: table[ids]
    ),
    "ppermute": Form(
        (P(AXIS),), P(AXIS), ("x",), lambda x: jnp.roll(x, x.shape[0] // _devices(), axis=0)
    ),
    # Block d of the columns is what device d gathers.
    "all_gather": Form((P(AXIS),), P(None, AXIS), ("x",), lambda x: jnp.tile(x, (1, _devices()))),
    "all_to_all": Form((P(AXIS),), P(None, AXIS), ("x",), _transpose_blocks),
    "prefetch": Form(
        (P(None, AXIS),),
        P(None, AXIS),
        ("x",),
        lambda x: x * (_devices() * (_devices() + 1) // 2) ** 2,
    ),
}


def _devices() -> int:
    return jax.sharding.get_abstract_mesh().shape[AXIS]


def make_mesh(case: Case, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Makes the mesh of a case over the first devices of this machine, or over described ones.

    Where a topology has more devices than the case, they form several of its meshes, which all
    compute the same.
    """
    sizes = case.mesh
    names: tuple[str, ...] = (AXIS,)
    if case.op == "mesh_matmul":
        names = MESH_AXES
    if devices is not None and len(devices) > case.devices:
        sizes = (len(devices) // case.devices, *sizes)
        names = ("copy", *names)
    return fa.make_mesh(sizes, names, devices=devices, axis_types=(AxisType.Auto,) * len(names))


def make_program(case: Case, *, reference: bool = False) -> Callable:
    """Returns the jitted function (operands, dy) -> {"y": ..., "dx": ...} of a case, or of its
    reference.

    `dy` is the cotangent of the result. The mesh is that of the context in which the function is
    called, one of `make_mesh`.
    """
    form = FORMS[case.op]
    whole: Callable = form.formula
    if reference and case.quantization is not None and not case.plain:
        case = dataclasses.replace(case, backend="none")
        reference = False
    if not reference:
        whole = jax.shard_map(_op(case), in_specs=form.operands, out_specs=form.result)

    def verified(operands: tuple, dy: jax.Array) -> dict[str, jax.Array]:
        if not case.gradient:
            return {"y": whole(*operands)}
        named = dict(zip(form.names, operands, strict=True))
        varied = {name: operand for name, operand in named.items() if name != "ids"}
        y, pull = jax.vjp(lambda varied: whole(*(named | varied).values()), varied)
        return {"y": y} | {f"d{name}": gradient for name, gradient in pull(dy)[0].items()}

    return jax.jit(verified)


def abstract_arguments(
    case: Case, mesh: Mesh
) -> tuple[tuple[jax.ShapeDtypeStruct, ...], jax.ShapeDtypeStruct]:
    """Returns the shapes, dtypes and shardings of the operands and of dy."""
    form = FORMS[case.op]
    shapes = list(case.shapes)
    if case.op in ("ring_attention", "attention"):
        shapes.append(shapes[1])  # k and v have one shape
    operands = [
        _global(mesh, shape, spec, {"ids": "int32"}.get(name, case.dtype))
        for name, shape, spec in zip(form.names, shapes, form.operands, strict=True)
    ]
    shape = jax.eval_shape(form.formula, *operands).shape
    dy = jax.ShapeDtypeStruct(shape, operands[-1].dtype, sharding=NamedSharding(mesh, form.result))
    return tuple(operands), dy


def random_arguments(case: Case, mesh: Mesh, seed: int) -> tuple[tuple[jax.Array, ...], jax.Array]:
    """Returns random operands and a random dy. They are never constant: a constant hides blocks
    that are swapped.
    """
    rng = np.random.default_rng(seed)
    operands, dy = abstract_arguments(case, mesh)

    def draw(of: jax.ShapeDtypeStruct) -> jax.Array:
        if jnp.issubdtype(of.dtype, jnp.integer):
            values = rng.integers(0, operands[-1].shape[0], of.shape)
        else:
            values = rng.standard_normal(of.shape, np.float32)
        array = np.asarray(values, of.dtype)
        return jax.make_array_from_callback(of.shape, of.sharding, lambda index: array[index])

    return tuple(draw(operand) for operand in operands), draw(dy)


def _op(case: Case) -> Callable:
    """Returns the op of a case on the arrays of one device."""
    backend = case.backend
    pairs = {"all_gather": direct.all_gather, "all_to_all": direct.all_to_all}
    if case.op in pairs and backend == "pallas":
        return partial(_direct, pairs[case.op])
    ways: Any = case.directions  # 1, 2 or None
    experts: Callable = partial(fa.expert_mlp, axis_name=AXIS, directions=ways)
    others: dict[str, Callable] = {
        "expert_mlp": partial(experts, backend=backend, kernel="reference"),
        "expert_products": partial(experts, backend="none", kernel=backend),
        "attention": partial(_attention, backend),
        "mesh_matmul": partial(fa.mesh_matmul, axis_names=MESH_AXES, backend=backend),
        "ppermute": partial(fa.ppermute, axis_name=AXIS, shift=1, backend=backend),
        "all_gather": partial(lax.all_gather, axis_name=AXIS, tiled=True),
        "all_to_all": partial(
            lax.all_to_all, axis_name=AXIS, split_axis=0, concat_axis=0, tiled=True
        ),
        "prefetch": partial(_prefetch, backend),
        "lookup_reduce_scatter": partial(lookup_reduce_scatter, axis_name=AXIS, backend=backend),
    }
    if case.op in others:
        return others[case.op]
    op: Callable = getattr(fa, case.op)
    options = case.options
    return partial(op, axis_name=AXIS, backend=backend, directions=ways, **options)


def _attention(kernel: str, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Rotates heads, and attends; by kernels where the kernel is "flash"."""
    tables = rotary_tables(q.shape[1], q.shape[3], jnp.float32)
    in_kernel = kernel == "flash" and q.shape[3] % LANES == 0
    q = rotate(q, tables, kernel=in_kernel)
    k = rotate(k, tables, kernel=in_kernel)
    return fa.attention(q, k, v, kernel=kernel)


def _direct(pair: Callable[[str, int, int], Pair], x: jax.Array) -> jax.Array:
    """Starts a direct transfer of the rows of `x`, and waits for it."""
    chosen = pair(AXIS, lax.axis_size(AXIS), 0)
    y = chosen.done(*chosen.start(x))
    return y.reshape(-1, y.shape[-1])


def _prefetch(backend: str, x: jax.Array) -> jax.Array:
    """Gathers blocks along each dimension, and scatters the sum of what device d gathered, d + 1
    times.
    """
    for dim in (0, 1):
        whole = start_gather(x, AXIS, dim, backend).done() * (1 + lax.axis_index(AXIS)).astype(
            x.dtype
        )
        x = start_reduce_scatter(whole, jnp.float32, AXIS, dim, backend).done().astype(x.dtype)
    return x


def _global(mesh: Mesh, shape: Shape, spec: P, dtype: str) -> jax.ShapeDtypeStruct:
    """Returns the global array of which every device holds `shape`."""
    split = itertools.zip_longest(shape, spec)
    whole = tuple(n * mesh.shape.get(name, 1) for n, name in split)
    return jax.ShapeDtypeStruct(whole, jnp.dtype(dtype), sharding=NamedSharding(mesh, spec))
