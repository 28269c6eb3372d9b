"""Calls without a backend, of any shape, for described TPUs on which all kernels are trusted: none
may be refused.

Values are not computed. A call and its gradient are traced, which is when a kernel chooses its
tiles and refuses what it cannot serve.
"""

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import flaxasync as fa
from flaxasync.ops import trust
from flaxasync.ops.quantization import MAX_INT8_PRODUCTS

pytestmark = pytest.mark.slow

DEVICES = {"v5e:2x4": 8, "v6e:2x2": 4, "v5p:2x2x2": 8}
TOPOLOGIES, BATCHES = st.sampled_from(list(DEVICES)), st.sampled_from([1, 2, 3, 8])
DTYPES = st.sampled_from([jnp.bfloat16, jnp.bfloat16, jnp.float32])
ALL_INT8 = fa.Quantization("int8", backward="int8", weights="int8")


def sizes(largest, unit=1):
    """Returns the multiples of a unit, and as often those of larger powers of two."""
    units = [u for u in (unit, 8, 128, 1024) if u % unit == 0 and u <= largest]
    return st.sampled_from(units).flatmap(
        lambda u: st.integers(1, largest // u).map(lambda count: u * count)
    )


def trace(topology, fn, specs, out_specs, shapes, dtypes):
    """Traces a function of the arrays of one device on a ring of all devices, with the gradients of
    what is float.
    """
    mesh = fa.check.topology_mesh(topology, (DEVICES[topology],), ("ring",))
    mapped = jax.shard_map(fn, mesh=mesh, in_specs=specs, out_specs=out_specs)
    operands = [
        jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in zip(shapes, dtypes, strict=True)
    ]
    floats = tuple(place for place, dtype in enumerate(dtypes) if dtype != jnp.int32)
    with jax.set_mesh(mesh), trust.trusting("predicted"):
        jax.eval_shape(
            jax.grad(lambda *a: jnp.sum(mapped(*a).astype(jnp.float32)), argnums=floats), *operands
        )


def of_any_shape(*strategies):
    """Makes a test of some shapes, which are the same in every run."""

    def decorate(test):
        return hypothesis.settings(max_examples=15)(hypothesis.given(*strategies)(test))

    return decorate


@of_any_shape(
    st.sampled_from(["all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"]),
    TOPOLOGIES,
    BATCHES,
    sizes(32768),
    sizes(16384),
    sizes(32768),
    DTYPES,
    st.sampled_from([None, "int8", ALL_INT8]),
)
@hypothesis.example("all_gather_matmul", "v6e:2x2", 4, 13406, 1182, 26240, jnp.bfloat16, None)
@hypothesis.example("matmul_reduce_scatter", "v5e:2x4", 1, 50576, 16384, 1152, jnp.bfloat16, None)
@hypothesis.example("matmul_all_reduce", "v5p:2x2x2", 8, 2688, 256, 28800, jnp.bfloat16, None)
# sums of a block that takes two kernels, and of one that no number of kernels can take
@hypothesis.example("all_gather_matmul", "v6e:2x2", 24, 512, 8192, 7168, jnp.bfloat16, None)
@hypothesis.example("matmul_all_reduce", "v6e:2x2", 6, 8190, 2048, 8192, jnp.bfloat16, None)
def test_matmuls(op, topology, batch, m, k, n, dtype, quantization):
    ring = DEVICES[topology]
    # what int32 cannot add is refused
    hypothesis.assume(quantization is None or ring * batch * m <= MAX_INT8_PRODUCTS)
    gathers = op == "all_gather_matmul"
    rows, columns = P(None, "ring"), P(None, None, "ring")
    shapes = [(batch, m if op == "matmul_all_reduce" else ring * m, k if gathers else ring * k)]
    shapes += [(k, ring * n) if gathers else (ring * k, n)]
    specs = (rows, P(None, "ring")) if gathers else (columns, P("ring"))
    out_specs = columns if gathers else rows if op == "matmul_reduce_scatter" else P()
    trace(
        topology,
        lambda x, w: getattr(fa, op)(x, w, "ring", quantization=quantization),
        specs,
        out_specs,
        shapes,
        [dtype] * 2,
    )


@of_any_shape(
    st.booleans(),
    TOPOLOGIES,
    BATCHES,
    sizes(16384),
    st.sampled_from([1, 3, 8]),
    st.sampled_from([1, 2, 5]),
    st.sampled_from([32, 64, 80, 128, 192, 256]),
    DTYPES,
    st.booleans(),
    st.sampled_from([None, 1024]),
    st.booleans(),
)
def test_attention(
    is_ring, topology, batch, rows, groups, heads, head, dtype, causal, window, segments
):
    """With sequences that are split over the ring, or heads."""
    size = DEVICES[topology]
    spec, ids = (P(None, "ring"), P(None, "ring")) if is_ring else (P(None, None, "ring"), P())
    s, n = (rows * size, groups) if is_ring else (rows, groups * size)

    def attend(q, k, v, *ids):
        options = {"causal": causal, "window": window, "segment_ids": ids[0] if ids else None}
        return (
            fa.ring_attention(q, k, v, "ring", **options)
            if is_ring
            else fa.attention(q, k, v, **options)
        )

    shapes = [(batch, s, n * heads, head), *[(batch, s, n, head)] * 2, *[(batch, s)] * segments]
    trace(
        topology,
        attend,
        (spec,) * 3 + (ids,) * segments,
        spec,
        shapes,
        [dtype] * 3 + [jnp.int32] * segments,
    )


@of_any_shape(
    TOPOLOGIES,
    sizes(16384),
    st.sampled_from([1, 2, 8]),
    st.sampled_from([1, 4, 16]),
    sizes(8192, 64),
    sizes(4096, 64),
    DTYPES,
    st.one_of(st.none(), st.integers(1, 4096)),
)
@hypothesis.example("v5p:2x2x2", 15912, 1, 2, 5760, 2048, jnp.float32, None)
def test_experts(topology, rows, k, local, features, hidden, dtype, capacity):
    ring = DEVICES[topology]
    count, rows = ring * local, ring * rows
    hypothesis.assume(k <= count)
    shapes = [
        (rows, features),
        (rows, k),
        (rows, k),
        *[(count, features, hidden)] * 2,
        (count, hidden, features),
    ]
    trace(
        topology,
        lambda *operands: fa.expert_mlp(*operands, axis_name="ring", capacity=capacity),
        (P("ring"),) * 6,
        P("ring"),
        shapes,
        [dtype, jnp.int32, jnp.float32, dtype, dtype, dtype],
    )
