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

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import flaxasync as fa
from flaxasync.nn.attention.rotary import rotary_tables, rotate
from flaxasync.ops.quantization import Quantization
from flaxasync.ops.roofline import Shape
from flaxasync.ops.vocabulary import lookup_reduce_scatter
from flaxasync.transport import direct
from flaxasync.transport.transfers import start_gather, start_reduce_scatter
from flaxasync.verify.cases import FORWARD_ONLY, Case

AXIS = "model"
AXES = {1: (AXIS,), 2: ("x", "y")}  # of meshes of one dimension, and of mesh_matmul
NAME = "verified"  # the name of the jitted function, by which a profile shows its runs
# the dimension that is split over the devices
WHOLE = P()
FIRST = P(AXIS)
SECOND = P(None, AXIS)
THIRD = P(None, None, AXIS)


def _ring(case: Case, *operands: Array) -> Array:
    options: dict[str, object] = {}
    if case.directions is not None:
        options["directions"] = case.directions
    kind = case.quantization
    if kind is not None:
        options["quantization"] = Quantization(kind, backward=kind, weights=kind)
    if case.keeps:
        options["gathered_bytes"] = 2**40  # all of it
    return getattr(fa, case.op)(*operands, AXIS, backend=case.backend, **options)


def _mesh_matmul(case: Case, lhs: Array, rhs: Array) -> Array:
    return fa.mesh_matmul(lhs, rhs, backend=case.backend)


def _lookup(case: Case, ids: Array, table: Array) -> Array:
    return lookup_reduce_scatter(ids, table, AXIS, backend=case.backend)


def _experts(case: Case, *operands: Array) -> Array:
    experts: Callable = partial(fa.expert_mlp, axis_name=AXIS, directions=case.directions)
    if case.op == "expert_products":
        return experts(*operands, backend="none", kernel=case.backend)
    return experts(*operands, backend=case.backend, kernel="reference")


def _attention(case: Case, q: Array, k: Array, v: Array) -> Array:
    """Rotates heads, and attends; by kernels where the kernel is "flash"."""
    q, k = _rotated(q, k, None if case.is_kernel else False)
    return fa.attention(q, k, v, kernel=case.backend)


def _rotated(q: Array, k: Array, kernel: bool | None) -> tuple[Array, Array]:
    """Rotates queries and keys, by a kernel or not; None for a kernel if that can."""
    tables = rotary_tables(q.shape[1], q.shape[3], jnp.float32)
    return rotate(q, tables, kernel), rotate(k, tables, kernel)


def _all_to_all(case: Case, x: Array) -> Array:
    if not case.is_kernel:
        return lax.all_to_all(x, AXIS, split_axis=0, concat_axis=0, tiled=True)
    pair = direct.all_to_all(AXIS, lax.axis_size(AXIS), 0)
    return pair.done(*pair.start(x)).reshape(x.shape)


def _prefetch(case: Case, x: Array) -> Array:
    """Gathers blocks along each dimension, and scatters the sum of what device d gathered, d + 1
    times.
    """
    for dim in (0, 1):
        whole = start_gather(x, AXIS, dim, case.backend).done()
        whole *= (1 + lax.axis_index(AXIS)).astype(x.dtype)
        summed = start_reduce_scatter(whole, jnp.float32, AXIS, dim, case.backend).done()
        x = summed.astype(x.dtype)
    return x


def _product(x: Array, w: Array) -> Array:
    return jnp.matmul(x, w, preferred_element_type=jnp.float32).astype(x.dtype)


def _causal_attention(q: Array, k: Array, v: Array) -> Array:
    wide = (x.astype(jnp.float32) for x in (q, k, v))
    return jax.nn.dot_product_attention(*wide, is_causal=True).astype(q.dtype)


def _rotated_attention(q: Array, k: Array, v: Array) -> Array:
    return _causal_attention(*_rotated(q, k, False), v)


def _all_experts(x: Array, ids: Array, weights: Array, *kernels: Array) -> Array:
    """Applies all experts to all rows, and adds what the rows chose."""
    x = x.astype(jnp.float32)
    weights = weights.astype(jnp.float32)
    y = jnp.zeros_like(x)
    for expert, of_expert in enumerate(zip(*kernels, strict=True)):
        gate, up, down = (kernel.astype(jnp.float32) for kernel in of_expert)
        share = jnp.sum(jnp.where(ids == expert, weights, 0), axis=-1, keepdims=True)
        y += share * ((jax.nn.silu(x @ gate) * (x @ up)) @ down)
    return y.astype(kernels[0].dtype)


def _looked_up(ids: Array, table: Array) -> Array:
    return table[ids]


def _devices() -> int:
    return jax.sharding.get_abstract_mesh().shape[AXIS]


def _rolled(x: Array) -> Array:
    return jnp.roll(x, x.shape[0] // _devices(), axis=0)


def _transposed_blocks(x: Array) -> Array:
    """Gives device d, as block d of the columns, block d of the rows of every device."""
    blocks = x.reshape(_devices(), _devices(), -1, x.shape[1])
    return blocks.transpose(0, 2, 1, 3).reshape(-1, _devices() * x.shape[1])


def _summed_twice(x: Array) -> Array:
    return x * (_devices() * (_devices() + 1) // 2) ** 2


@dataclasses.dataclass(frozen=True)
class Form:
    """What an op computes on the arrays of one device, how global arrays are split, and what the
    result is as a function of these.
    """

    names: str  # of the operands; "ids" are integers, which have no gradient
    operands: tuple[P, ...]
    result: P
    op: Callable[..., Array]  # of a case and the operands
    formula: Callable[..., Array]  # of the global operands


EXPERTS = ("expert_mlp", "expert_products")
FORMS = {
    "all_gather_matmul": Form("x w", (SECOND, SECOND), THIRD, _ring, _product),
    "matmul_reduce_scatter": Form("x w", (THIRD, FIRST), SECOND, _ring, _product),
    "matmul_all_reduce": Form("x w", (THIRD, FIRST), WHOLE, _ring, _product),
    "mesh_matmul": Form("lhs rhs", (P(*AXES[2]), P("x")), P("x"), _mesh_matmul, _product),
    "ring_attention": Form("q k v", (SECOND,) * 3, SECOND, _ring, _causal_attention),
    "lookup_reduce_scatter": Form("ids table", (WHOLE, FIRST), SECOND, _lookup, _looked_up),
    **dict.fromkeys(
        EXPERTS,
        Form("x ids weights gate up down", (FIRST,) * 6, FIRST, _experts, _all_experts),
    ),
    "attention": Form("q k v", (FIRST,) * 3, FIRST, _attention, _rotated_attention),
    "ppermute": Form("x", (FIRST,), FIRST, _ring, _rolled),
    "all_to_all": Form("x", (FIRST,), SECOND, _all_to_all, _transposed_blocks),
    "prefetch": Form("x", (SECOND,), SECOND, _prefetch, _summed_twice),
}


def make_mesh(case: Case, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Makes the mesh of a case over the first devices of this machine, or over described ones.

    Where a topology has more devices than the case, they form several of its meshes, which all
    compute the same.
    """
    sizes = case.mesh
    names = AXES[len(case.mesh)]
    if devices is not None and len(devices) > case.devices:
        sizes = (len(devices) // case.devices, *sizes)
        names = ("copy", *names)
    # Arrays of Explicit axes say of which kind their devices are, for which CPU devices shall pass.
    return fa.make_mesh(sizes, names, (AxisType.Auto,) * len(names), devices=devices)


def make_program(case: Case) -> Callable:
    """Returns the jitted function (*operands, dy) -> {"y": ..., "dx": ...} of a case.

    `dy` is the cotangent of the result. The mesh is that of the context in which the function is
    called, one of `make_mesh`.
    """
    form = FORMS[case.op]
    op = jax.shard_map(partial(form.op, case), in_specs=form.operands, out_specs=form.result)
    return _with_gradients(case, op)


def make_reference(case: Case) -> Callable:
    """Returns the jitted function with the results that the program of a case must have."""
    if case.quantization is not None and case.backend != case.plain:
        return make_program(dataclasses.replace(case, backend=case.plain))
    return _with_gradients(case, FORMS[case.op].formula)


def _with_gradients(case: Case, op: Callable) -> Callable:
    names = FORMS[case.op].names.split()

    def verified(*arguments: Array) -> dict[str, Array]:
        *operands, dy = arguments
        if case.op in FORWARD_ONLY:
            return {"y": op(*operands)}
        y, pull = jax.vjp(op, *operands)
        results = {"y": y}
        for name, gradient in zip(names, pull(dy), strict=True):
            if name != "ids":
                results[f"d{name}"] = gradient
        return results

    return jax.jit(verified)


def abstract_arguments(case: Case, mesh: Mesh) -> list[jax.ShapeDtypeStruct]:
    """Returns the shapes, dtypes and shardings of the operands and of dy, on the ambient mesh."""
    form = FORMS[case.op]
    operands = []
    for number, (name, spec) in enumerate(zip(form.names.split(), form.operands, strict=True)):
        # the last operands of attention have one shape
        of_device = case.shapes[min(number, len(case.shapes) - 1)]
        split = itertools.zip_longest(of_device, spec)
        shape = tuple(length * mesh.shape.get(axis, 1) for length, axis in split)
        dtype = "int32" if name == "ids" else case.dtype
        operands.append(_abstract(shape, dtype, mesh, spec))
    shape = jax.eval_shape(form.formula, *operands).shape
    return [*operands, _abstract(shape, case.dtype, mesh, form.result)]


def _abstract(shape: Shape, dtype: str, mesh: Mesh, spec: P) -> jax.ShapeDtypeStruct:
    sharding = NamedSharding(mesh, spec)
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=sharding)


def random_arguments(case: Case, mesh: Mesh) -> list[Array]:
    """Returns random operands and a random dy. They are never constant: a constant hides blocks
    that are swapped.
    """
    rng = np.random.default_rng(0)
    arguments = abstract_arguments(case, mesh)
    choices = arguments[-2].shape[0]  # experts, or rows of a table

    def draw(of: jax.ShapeDtypeStruct) -> Array:
        if not jnp.issubdtype(of.dtype, jnp.integer):
            values = rng.standard_normal(of.shape, np.float32)
        elif case.op in EXPERTS:  # a row chooses different ones
            each = np.tile(np.arange(choices), (of.shape[0], 1))
            values = rng.permuted(each, axis=1)[:, : of.shape[1]]
        else:
            values = rng.integers(0, choices, of.shape)
        return jax.device_put(np.asarray(values, of.dtype), of.sharding)

    return [draw(of) for of in arguments]
