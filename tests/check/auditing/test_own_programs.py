"""The package's own rings and transports, as the TPU compiler leaves them, are safe, and rings overlap."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import flaxasync as fa
from flaxasync.check import HLO_ONLY, audit, compile_for, format_module, parse, timeline, topology_mesh
from tests.check.jaxlib_counts import counts, counts_of_jaxlib
from tests.transport.forms import FORMS, compile_form
from tests.transport.test_jax_scenarios import SCENARIOS

OPS = pytest.mark.parametrize("op", [fa.all_gather_matmul, fa.matmul_reduce_scatter], ids=lambda op: op.__name__)


@functools.cache
def ring(op, backend):
    """Compiles x[4096, 2048] . w[2048, 4096] over eight chips, with rows or products sharded."""
    mesh = topology_mesh("v5e:2x4", (8,), ("model",))
    rows, columns = P("model", None), P(None, "model")
    specs, out = ((rows, columns), columns) if op is fa.all_gather_matmul else ((columns, rows), rows)
    local = functools.partial(op, axis_name="model", backend=backend)
    fn = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=out)
    x, w = (
        jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))
        for shape, spec in zip(((4096, 2048), (2048, 4096)), specs, strict=True)
    )
    return compile_for("v5e:2x4", jax.jit(fn), x, w, compiler_options=HLO_ONLY)


@pytest.mark.parametrize("backend", ["xla", "pallas"])
@OPS
def test_a_ring_is_safe_and_overlaps(op, backend):
    report = audit(ring(op, backend))
    assert report.ok, str(report)
    moving = [p for p in report.pairs if p.communicates]
    assert moving
    assert all(p.spelling == ("kernel" if backend == "pallas" else "first-class") for p in moving)
    assert sum(p.overlapped for p in moving) >= len(moving) // 2


@OPS
def test_without_a_ring_nothing_overlaps_and_it_takes_longer(op):
    report = audit(ring(op, "none"))
    assert not [p for p in report.pairs if p.communicates and p.overlapped]
    assert "synchronous-collective" in report.codes()
    assert timeline(ring(op, "xla")).seconds < timeline(ring(op, "none")).seconds


FUTURES_AND_REFS = ("gather_pallas_2", "swap", "reduce_stateful_2")
COPIES = ("multiple_copies", "two_dynamic_slices", "stateful_copies", "remote_copies")  # the last: one source twice
STARTS = ("ppermute_start", "ppermute_stateful_start", "copy_start", "slice_start")


def test_the_transports_are_read_as_jaxlib_reads_them_and_found_safe():
    """All of them in one program, on one block of 2 MiB per device."""

    def fn(x):
        rings = [FORMS[name].run(x, 7) for name in FUTURES_AND_REFS]
        return jax.tree.leaves((rings, [SCENARIOS[name].run(x) for name in COPIES]))

    program = compile_form(fn)
    module = parse(program.text)
    assert counts_of_jaxlib([program.text]) == [counts(module)]
    assert parse(format_module(module)) == module
    report = audit(program)
    assert report.ok, str(report)
    kernels = [p for p in report.pairs if p.spelling == "kernel"]
    for start in STARTS:
        pairs = [p for p in kernels if p.name.startswith(start)]
        assert pairs, start
        assert all(p.dones for p in pairs)
