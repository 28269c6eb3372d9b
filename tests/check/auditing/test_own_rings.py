"""The package's own rings, as the TPU compiler leaves them, are safe and have work inside their windows."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import flaxasync as fa
from flaxasync.check import HLO_ONLY, audit, compile_for, format_module, parse, timeline, topology_mesh

RING = 8


@functools.cache
def program(op, backend):
    """Compiles x[4096, 2048] . w[2048, 4096] over eight chips, with rows or products sharded."""
    mesh = topology_mesh("v5e:2x4", (RING,), ("model",))
    gathers = op is fa.all_gather_matmul
    specs = (P("model", None), P(None, "model")) if gathers else (P(None, "model"), P("model", None))
    out = P(None, "model") if gathers else P("model", None)
    fn = jax.shard_map(
        functools.partial(op, axis_name="model", backend=backend), mesh=mesh, in_specs=specs, out_specs=out
    )
    shapes = ((4096, 2048), (2048, 4096))
    arrays = (
        jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))
        for shape, spec in zip(shapes, specs, strict=True)
    )
    return compile_for("v5e:2x4", jax.jit(fn), *arrays, compiler_options=HLO_ONLY)


@pytest.mark.parametrize("backend", ["xla", "pallas"])
@pytest.mark.parametrize("op", [fa.all_gather_matmul, fa.matmul_reduce_scatter], ids=lambda op: op.__name__)
def test_a_ring_is_safe_and_overlaps(op, backend):
    report = audit(program(op, backend))
    assert report.ok, str(report)
    moving = [p for p in report.pairs if p.communicates]
    assert moving
    assert all(p.spelling == ("kernel" if backend == "pallas" else "first-class") for p in moving)
    assert sum(p.overlapped for p in moving) >= len(moving) // 2
    module = parse(program(op, backend).text)
    assert parse(format_module(module)) == module


@pytest.mark.parametrize("op", [fa.all_gather_matmul, fa.matmul_reduce_scatter], ids=lambda op: op.__name__)
def test_without_a_ring_nothing_overlaps_and_it_takes_longer(op):
    report = audit(program(op, "none"))
    assert not [p for p in report.pairs if p.communicates and p.overlapped]
    assert "synchronous-collective" in report.codes()
    assert timeline(program(op, "xla")).seconds < timeline(program(op, "none")).seconds
