"""The program of a case and its reference, as jitted functions of global arrays, with random operands.

The reference of every backend is the formula of its op on global arrays, which XLA partitions.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import flaxasync as fa
from flaxasync.ops.costs.cost import Shape
from flaxasync.ops.vocabulary import lookup_reduce_scatter
from flaxasync.transport import direct
from flaxasync.transport.pair import Pair
from flaxasync.verify.cases import AXIS, MESH_AXES, Case
from flaxasync.verify.platform import DEFECTS

BY_ROWS, BY_COLUMNS = P(None, AXIS, None), P(None, None, AXIS)
DIRECT = {"all_gather": direct.all_gather, "all_to_all": direct.all_to_all}
"""The start/done pairs in which every device sends to every other one."""
NAME = "verified"
"""The name of the jitted function, by which a profile shows its runs."""


@dataclasses.dataclass(frozen=True)
class Layout:
    """How an op splits its arrays.

    Attributes:
      operands: The partition of each operand.
      result: The partition of the result.
      names: The names of the operands that have gradients.
    """

    operands: tuple[P, ...]
    result: P
    names: tuple[str, ...]


LAYOUTS = {
    "all_gather_matmul": Layout((BY_ROWS, P(None, AXIS)), BY_COLUMNS, ("x", "w")),
    "matmul_reduce_scatter": Layout((BY_COLUMNS, P(AXIS, None)), BY_ROWS, ("x", "w")),
    "matmul_all_reduce": Layout((BY_COLUMNS, P(AXIS, None)), P(), ("x", "w")),
    "mesh_matmul": Layout((P("x", "y"), P("x", None)), P("x", None), ("lhs", "rhs")),
    "ring_attention": Layout((P(None, AXIS),) * 3, P(None, AXIS), ("q", "k", "v")),
    "attention": Layout((P(AXIS),) * 3, P(AXIS), ("q", "k", "v")),
    "lookup_reduce_scatter": Layout((P(), P(AXIS, None)), BY_ROWS, ("table",)),
    "ppermute": Layout((P(AXIS),), P(AXIS), ("x",)),
    "all_gather": Layout((P(AXIS),), P(None, AXIS), ("x",)),
    "all_to_all": Layout((P(AXIS),), P(None, AXIS), ("x",)),
    "platform": Layout((P(AXIS),), P(AXIS), ()),
}


def product(x: jax.Array, w: jax.Array) -> jax.Array:
    """Multiplies whole arrays."""
    return jnp.matmul(x, w, preferred_element_type=jnp.float32).astype(x.dtype)


def causal_attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Computes causal attention of whole sequences in float32."""
    wide = (x.astype(jnp.float32) for x in (q, k, v))
    return jax.nn.dot_product_attention(*wide, is_causal=True).astype(q.dtype)


def shift_blocks(x: jax.Array) -> jax.Array:
    """Moves the block of each device to the next one."""
    return jnp.roll(x, x.shape[0] // _devices(), axis=0)


def tile_whole(x: jax.Array) -> jax.Array:
    """Puts the whole array on every device: block d of the columns is what device d gathers."""
    return jnp.tile(x, (1, _devices()))


def transpose_blocks(x: jax.Array) -> jax.Array:
    """Gives device d, as block d of the columns, block d of the rows of every device."""
    blocks = x.reshape(_devices(), _devices(), -1, x.shape[1])
    return blocks.transpose(0, 2, 1, 3).reshape(-1, _devices() * x.shape[1])


FORMULAS: dict[str, Callable] = {
    "all_gather_matmul": product,
    "matmul_reduce_scatter": product,
    "matmul_all_reduce": product,
    "mesh_matmul": product,
    "ring_attention": causal_attention,
    "attention": causal_attention,
    "lookup_reduce_scatter": lambda ids, table: table[ids],
    "ppermute": shift_blocks,
    "all_gather": tile_whole,
    "all_to_all": transpose_blocks,
}
"""Each op as a formula of its global arrays."""


def _formula(case: Case) -> Callable:
    """Returns what a case computes, as a formula of its global arrays."""
    return DEFECTS[case.backend].reference if case.op == "platform" else FORMULAS[case.op]


def _devices() -> int:
    return jax.sharding.get_abstract_mesh().shape[AXIS]


def make_mesh(case: Case, devices: Sequence[Any] | None = None) -> Mesh:
    """Makes the mesh of a case over the first devices of this machine, or over described ones.

    Where a topology has more devices than the case, they form several of its meshes, which all compute the same.
    """
    sizes, names = case.mesh, MESH_AXES if case.op == "mesh_matmul" else (AXIS,)
    if devices is not None and len(devices) > case.devices:
        sizes, names = (len(devices) // case.devices, *sizes), ("copy", *names)
    return fa.make_mesh(sizes, names, devices=devices, axis_types=(AxisType.Auto,) * len(names))


def make_program(case: Case, *, reference: bool = False) -> Callable:
    """Returns the jitted function (operands, dy) -> {"y": ..., "dx": ...} of a case, or of its reference.

    It takes its mesh from the context in which it is called, that of `make_mesh`.

    The function takes as `dy` the cotangent of the result. Its result has gradients if the case has. The program of a
    known defect is jitted only as far as the defect needs it.
    """
    layout = LAYOUTS[case.op]
    if case.op == "platform":
        run = _formula(case) if reference else DEFECTS[case.backend].program
        return lambda operands, dy: {"y": run(*operands)}
    if reference:
        mapped: Callable = FORMULAS[case.op]
    else:
        mapped = jax.shard_map(_op(case), in_specs=layout.operands, out_specs=layout.result)

    def verified(operands: tuple, dy: jax.Array) -> dict[str, jax.Array]:
        if not case.gradient:
            return {"y": mapped(*operands)}
        constant = operands[: len(operands) - len(layout.names)]  # the ids of a look-up
        y, pull = jax.vjp(lambda *varied: mapped(*constant, *varied), *operands[len(constant) :])
        return {"y": y} | {f"d{name}": d for name, d in zip(layout.names, pull(dy), strict=True)}

    return jax.jit(verified)


def abstract_arguments(case: Case, mesh: Mesh) -> tuple[tuple[jax.ShapeDtypeStruct, ...], jax.ShapeDtypeStruct]:
    """Returns the shapes, dtypes and shardings of the operands and of dy."""
    layout, shapes = LAYOUTS[case.op], list(case.shapes)
    if case.op in ("ring_attention", "attention"):
        shapes.append(shapes[1])  # k and v have one shape
    operands = [_global(mesh, shape, spec, case.dtype) for shape, spec in zip(shapes, layout.operands, strict=True)]
    if case.op == "lookup_reduce_scatter":
        operands[0] = jax.ShapeDtypeStruct(operands[0].shape, jnp.int32, sharding=operands[0].sharding)
    shape = jax.eval_shape(_formula(case), *operands).shape
    dy = jax.ShapeDtypeStruct(shape, operands[-1].dtype, sharding=NamedSharding(mesh, layout.result))
    return tuple(operands), dy


def local_values(results: dict[str, jax.Array], case: Case, mesh: Mesh) -> dict[str, np.ndarray]:
    """Returns the values of results, or those that this process holds if it has a part of the devices.

    Results of one case, and of its reference, are then laid out alike.
    """
    layout = LAYOUTS[case.op]
    varied = layout.operands[len(layout.operands) - len(layout.names) :]  # the others have no gradient
    parts = {"y": layout.result} | {f"d{name}": spec for name, spec in zip(layout.names, varied, strict=True)}

    def held(name: str, result: jax.Array) -> np.ndarray:
        if result.is_fully_addressable:
            return np.asarray(result)
        laid_out = jax.device_put(result, NamedSharding(mesh, parts[name]))
        return np.concatenate([np.ravel(shard.data) for shard in laid_out.addressable_shards])

    return {name: held(name, result) for name, result in results.items()}


def random_arguments(case: Case, mesh: Mesh, seed: int) -> tuple[tuple[jax.Array, ...], jax.Array]:
    """Returns random operands and a random dy. They are never constant: a constant hides blocks that are swapped."""
    rng = np.random.default_rng(seed)
    operands, dy = abstract_arguments(case, mesh)

    def draw(of: jax.ShapeDtypeStruct) -> jax.Array:
        if jnp.issubdtype(of.dtype, jnp.integer):
            values = rng.integers(0, operands[1].shape[0], of.shape)
        else:
            values = rng.standard_normal(of.shape, np.float32)
        array = np.asarray(values, of.dtype)
        return jax.make_array_from_callback(of.shape, of.sharding, lambda index: array[index])

    return tuple(draw(operand) for operand in operands), draw(dy)


def _op(case: Case) -> Callable:
    """Returns the op of a case on the arrays of one device."""
    if case.op == "attention":
        return lambda q, k, v: fa.attention(q, k, v, kernel=case.backend)
    if case.op == "mesh_matmul":
        return lambda lhs, rhs: fa.mesh_matmul(lhs, rhs, MESH_AXES, backend=case.backend)
    if case.op == "ppermute":
        return lambda x: fa.ppermute(x, AXIS, 1, case.backend)
    if case.op in DIRECT and case.backend == "pallas":
        return functools.partial(_direct, DIRECT[case.op])
    if case.op == "all_gather":
        return lambda x: lax.all_gather(x, AXIS, tiled=True)
    if case.op == "all_to_all":
        return lambda x: lax.all_to_all(x, AXIS, 0, 0, tiled=True)
    if case.op == "lookup_reduce_scatter":
        return lambda ids, table: lookup_reduce_scatter(ids, table, AXIS, backend=case.backend)
    fn = getattr(fa, case.op)
    return lambda *operands: fn(*operands, AXIS, backend=case.backend, directions=case.directions)


def _direct(pair: Callable[[str, int, int], Pair], x: jax.Array) -> jax.Array:
    """Starts a direct transfer of the rows of `x`, and waits for it."""
    chosen = pair(AXIS, lax.axis_size(AXIS), 0)
    y = chosen.done(*chosen.start(x))
    return y.reshape(-1, y.shape[-1])


def _global(mesh: Mesh, shape: Shape, spec: P, dtype: str) -> jax.ShapeDtypeStruct:
    """Returns the global array of which every device holds `shape`."""
    sizes = [mesh.shape[name] if name else 1 for name in (*spec, *(None,) * (len(shape) - len(spec)))]
    whole = tuple(n * size for n, size in zip(shape, sizes, strict=True))
    return jax.ShapeDtypeStruct(whole, jnp.dtype(dtype), sharding=NamedSharding(mesh, spec))
