"""Programs that the tests compile for topologies that are not there, each once in a process."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.compute_on import compute_on
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.programs import array
from flaxasync.check import HLO_ONLY, CompiledProgram, compile_for, topology_mesh, topology_size
from tests.check import async_forms


def all_gather(x, w):
    return x @ w + lax.all_gather(x, "x", tiled=True).sum(0)


def all_gather_and_matmul(x, w):
    return lax.all_gather(x, "x", tiled=True).sum(0) + jnp.tanh(x @ w) @ w


def psum(x, w):
    return lax.psum(x @ w, "x")


def reduce_scatter(x, w):
    return lax.psum_scatter(x @ w, "x", tiled=True)


def all_to_all(x, w):
    return lax.all_to_all(x @ w, "x", 0, 1, tiled=True)


def ppermute(x, w):
    n = lax.axis_size("x")
    return lax.ppermute(x, "x", [(i, (i + 1) % n) for i in range(n)]) + jnp.tanh(x @ w) @ w


def scan_of_collectives(x, w):
    n = lax.axis_size("x")

    def step(carry, _):
        moved = lax.ppermute(carry, "x", [(i, (i + 1) % n) for i in range(n)])
        return moved + lax.psum(carry @ w, "x"), None

    return lax.scan(step, x, None, length=4)[0]


def host(x, w):
    on_host = compute_on(lambda x: x * 2 + 1, compute_type="device_host", out_memory_spaces=jax.memory.Space.Device)
    return on_host(x) + x @ w


COLLECTIVES = (all_gather, psum, reduce_scatter, all_to_all, ppermute, scan_of_collectives)


def on_all_devices(topology, local, in_specs, out_specs, *shapes, dtype=jnp.bfloat16, typed=False):
    """Returns a jitted function of shards over the axis "x" of all devices, and its arguments of these global shapes.

    With `typed`, JAX tracks over which axes values vary.
    """
    kind = AxisType.Explicit if typed else AxisType.Auto
    mesh = topology_mesh(topology, (topology_size(topology),), ("x",), axis_types=(kind,))
    mapped = jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=typed)
    return jax.jit(mapped), *(array(shape, mesh, spec, dtype) for shape, spec in zip(shapes, in_specs, strict=True))


@functools.cache
def compiled(fn, topology: str, rows: int = 512) -> CompiledProgram:
    """Returns `fn(x, w)` of local shards x [rows, rows] and w [rows, rows], compiled for a topology."""
    shapes = (topology_size(topology) * rows, rows), (rows, rows)
    program = on_all_devices(topology, fn, (P("x"), P()), P("x"), *shapes)
    return compile_for(topology, *program, compiler_options=HLO_ONLY)


@functools.cache
def async_form(name: str, topology: str = "v5e:2x2", rows: int = 1024, keep_dumps: object = False) -> CompiledProgram:
    """Returns one of the forms of async_forms.py, compiled for a topology."""
    shape = topology_size(topology) * rows, 1024
    program = on_all_devices(topology, getattr(async_forms, name), (P("x"),), P("x"), shape)
    options = {} if keep_dumps else HLO_ONLY
    return compile_for(topology, *program, keep_dumps=keep_dumps, compiler_options=options)


@functools.cache
def mesh_matmul() -> CompiledProgram:
    """Returns LHS[M_X, K_Y] . RHS[K_X, N] -> O[M_X, N] of the 2x2 study on v5e."""
    mesh = topology_mesh("v5e:2x2", (2, 2), ("x", "y"))
    lhs, rhs = array((16384, 16384), mesh, P("x", "y")), array((16384, 8192), mesh, P("x", None))
    fn = jax.jit(jnp.matmul, out_shardings=NamedSharding(mesh, P("x", None)))
    return compile_for("v5e:2x2", fn, lhs, rhs, compiler_options=HLO_ONLY)


@functools.cache
def on_cpu(fn) -> str:
    """Returns the text of a program compiled for eight CPU devices."""
    mesh = jax.make_mesh((8,), ("x",))
    mapped = jax.shard_map(fn, mesh=mesh, in_specs=(P("x"), P()), out_specs=P("x"), check_vma=False)
    x, w = array((8 * 64, 64), mesh, P("x"), jnp.float32), array((64, 64), mesh, P(), jnp.float32)
    return jax.jit(mapped).lower(x, w).compile().as_text()
