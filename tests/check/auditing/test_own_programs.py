"""The package's own rings, as the TPU compiler leaves them, are safe and overlap.

tests/transport/test_compiled.py and test_jax_scenarios.py audit every transport.
"""

import functools

import pytest
from jax.sharding import PartitionSpec as P

import flaxasync as fa
from flaxasync.check import HLO_ONLY, audit, compile_for, timeline
from tests.check.programs import on_all_devices

OPS = pytest.mark.parametrize("op", [fa.all_gather_matmul, fa.matmul_reduce_scatter], ids=lambda op: op.__name__)


@functools.cache
def ring(op, backend):
    """Compiles x[4096, 2048] . w[2048, 4096] over eight chips, with rows or products sharded."""
    rows, columns = P("x", None), P(None, "x")
    specs, out = ((rows, columns), columns) if op is fa.all_gather_matmul else ((columns, rows), rows)
    local = functools.partial(op, axis_name="x", backend=backend)
    program = on_all_devices("v5e:2x4", local, specs, out, (4096, 2048), (2048, 4096), typed=True)
    return compile_for("v5e:2x4", *program, compiler_options=HLO_ONLY)


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
