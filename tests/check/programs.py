"""Programs that the tests compile for topologies that are not there, each once in a process."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.compute_on import compute_on
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from flaxasync.check import HLO_ONLY, CompiledProgram, compile_for, topology_mesh
from tests.check import async_forms

DEVICES = {"v5e:2x2": 4, "v5e:2x4": 8, "v6e:2x2": 4, "v6e:2x4": 8, "v5p:2x2x1": 4, "v5p:2x2x2": 8, "tpu7x:2x2x1": 8}
ROWS = 512


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


@functools.cache
def compiled(fn, topology: str, rows: int = ROWS) -> CompiledProgram:
    """Returns `fn(x, w)` of local shards x [rows, rows] and w [rows, rows], compiled for a topology."""
    n = DEVICES[topology]
    mesh = topology_mesh(topology, (n,), ("x",))
    mapped = jax.shard_map(fn, mesh=mesh, in_specs=(P("x"), P()), out_specs=P("x"), check_vma=False)
    x = jax.ShapeDtypeStruct((n * rows, rows), jnp.bfloat16, sharding=NamedSharding(mesh, P("x")))
    w = jax.ShapeDtypeStruct((rows, rows), jnp.bfloat16, sharding=NamedSharding(mesh, P()))
    return compile_for(topology, jax.jit(mapped), x, w, compiler_options=HLO_ONLY)


@functools.cache
def async_form(name: str, topology: str = "v5e:2x2", rows: int = 1024, keep_dumps: object = False) -> CompiledProgram:
    """Returns one of the forms of async_forms.py, compiled for a topology."""
    n = DEVICES[topology]
    mesh = topology_mesh(topology, (n,), ("x",))
    fn = getattr(async_forms, name)
    mapped = jax.shard_map(fn, mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=False)
    x = jax.ShapeDtypeStruct((n * rows, 1024), jnp.bfloat16, sharding=NamedSharding(mesh, P("x")))
    options = {} if keep_dumps else HLO_ONLY
    return compile_for(topology, jax.jit(mapped), x, keep_dumps=keep_dumps, compiler_options=options)


def _matmul(topology: str, shape: tuple[int, ...], axes: tuple[str, ...], lhs, rhs, out: P) -> CompiledProgram:
    """Returns the product of two sharded arrays, each given as (shape, spec), as jnp.matmul compiles it."""
    mesh = topology_mesh(topology, shape, axes)
    operands = (
        jax.ShapeDtypeStruct(size, jnp.bfloat16, sharding=NamedSharding(mesh, spec)) for size, spec in (lhs, rhs)
    )
    fn = jax.jit(jnp.matmul, out_shardings=NamedSharding(mesh, out))
    return compile_for(topology, fn, *operands, compiler_options=HLO_ONLY)


@functools.cache
def mesh_matmul() -> CompiledProgram:
    """Returns LHS[M_X, K_Y] . RHS[K_X, N] -> O[M_X, N] of the 2x2 study on v5e."""
    lhs, rhs = ((16384, 16384), P("x", "y")), ((16384, 8192), P("x", None))
    return _matmul("v5e:2x2", (2, 2), ("x", "y"), lhs, rhs, P("x", None))


@functools.cache
def windowed_einsum() -> CompiledProgram:
    """Returns a matmul whose operand XLA gathers in a loop of its own, with two permutes in each step."""
    x, w = ((16384, 8192), P("model", None)), ((8192, 28672), P(None, "model"))
    return _matmul("v5e:2x4", (8,), ("model",), x, w, P(None, "model"))


@functools.cache
def on_cpu(fn) -> str:
    """Returns the text of a program compiled for eight CPU devices."""
    mesh = jax.make_mesh((8,), ("x",))
    mapped = jax.shard_map(fn, mesh=mesh, in_specs=(P("x"), P()), out_specs=P("x"), check_vma=False)
    x = jax.ShapeDtypeStruct((8 * 64, 64), jnp.float32, sharding=NamedSharding(mesh, P("x")))
    w = jax.ShapeDtypeStruct((64, 64), jnp.float32, sharding=NamedSharding(mesh, P()))
    return jax.jit(mapped).lower(x, w).compile().as_text()
