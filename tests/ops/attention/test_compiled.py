"""Ring attention in compiled TPU programs: every transfer overlaps with work, and memory does not
grow with R.
"""

import functools
import re

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import flaxasync as fa
from tests.kernels.conftest import arranged


@functools.cache
def program(
    topology, size, rows, backend, *, kernel=None, backward=True, layout="zigzag", head_dim=128
):
    """Compiles attention of 8 heads and 2 key-value heads, with `rows` rows on each device."""
    mesh = fa.check.topology_mesh(
        topology, (size,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,)
    )
    spec = P(None, "x")
    arguments = arranged(
        mesh, [(1, rows * size, heads, head_dim) for heads in (8, 2, 2, 8)], [spec] * 4
    )
    attention = functools.partial(
        fa.ring_attention, axis_name="x", layout=layout, backend=backend, kernel=kernel
    )

    def both(q, k, v, do):
        o, vjp = jax.vjp(jax.shard_map(attention, in_specs=spec, out_specs=spec), q, k, v)
        return (o, vjp(do)) if backward else o

    with jax.set_mesh(mesh):
        return fa.check.compile_for(
            topology, jax.jit(both), *arguments, compiler_options=fa.check.HLO_ONLY
        )


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["xla", "pallas"])
def test_every_transfer_has_work_inside_and_none_is_touched(backend):
    """benchmarks/attention.py counts the same for eight devices, and for 32K and 256K tokens, which
    compile longer.
    """
    size = 4
    made = program("v5e:2x2", size, 1024, backend)
    report = fa.check.audit(made)
    assert report.ok, str(report)
    transfers = [pair for pair in report.pairs if pair.communicates]
    # In both directions: the hops of kv forward and backward, and those of its gradients, which
    # make one hop fewer around the ring and one to their owner. Fewer transfers would mean that XLA
    # kept the kv of the forward pass.
    assert sum(pair.runs for pair in transfers) == 2 * 3 * (size - 1)
    assert all(pair.overlapped for pair in transfers), str(report)
    assert "flash_attention_backward" in made.text  # the kernel that None chooses


@pytest.mark.slow
def test_a_gather_overlaps_with_no_work():
    """Negative test: the audit sees that nothing is overlapped."""
    report = fa.check.audit(program("v5e:2x4", 8, 8192, "none", backward=False))
    assert "synchronous-collective" in report.codes()
    assert not [pair for pair in report.pairs if pair.communicates and pair.overlapped]


@pytest.mark.slow
def test_memory_grows_only_with_the_rows_of_a_device():
    def temporaries(size, backend):
        made = program({4: "v5e:2x2", 8: "v5e:2x4"}[size], size, 8192, backend, backward=False)
        return made.bytes_by_kind["temporaries"]

    assert 0 < temporaries(8, "xla") <= 1.1 * temporaries(4, "xla")
    # Negative test: after a gather the rows of all devices are in memory.
    assert temporaries(8, "none") > 1.5 * temporaries(8, "xla")


@pytest.mark.slow
@pytest.mark.parametrize("mapped", [("data", "model"), ("model",)])
def test_a_layer_with_whole_sequences_keeps_its_scores_in_vmem(mapped):
    """Except in a shard_map that leaves an axis to XLA, which cannot partition a Pallas kernel."""
    rows = 384  # no other dimension has this size
    mesh = fa.check.topology_mesh("v5e:2x2", (2, 2), ("data", "model"))
    with jax.set_mesh(mesh):
        layer = nnx.eval_shape(
            lambda: fa.nn.ParallelSelfAttention(
                256, 4, dtype=jnp.bfloat16, backend="xla", rngs=nnx.Rngs(0)
            )
        )
        graph, state = nnx.split(layer)
        shardings = nnx.get_named_sharding(state, mesh)
        state = jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), state, shardings
        )
        x_spec = P("data", "model") if "data" in mapped else P(None, "model")
        (x,) = arranged(mesh, [(4, rows, 256)], [P("data", "model")])

        def apply(state, x):
            return nnx.merge(graph, state)(x)

        specs = jax.tree.map(lambda s: s.spec, shardings)
        fn = jax.shard_map(
            apply, in_specs=(specs, x_spec), out_specs=x_spec, axis_names=set(mapped)
        )
        both = jax.jit(lambda state, x, dy: jax.vjp(fn, state, x)[1](dy))
        made = fa.check.compile_for(
            "v5e:2x2", both, state, x, x, compiler_options=fa.check.HLO_ONLY
        )
    whole = "data" in mapped
    assert ("flash_attention_backward" in made.text) == whole
    # negative test: scores are an array
    assert bool(re.search(rf"\b{rows},{rows}\b", made.text)) != whole


def test_a_kernel_that_cannot_serve_is_refused():
    with pytest.raises(
        NotImplementedError,
        match=r"kernel='flash' takes head sizes .*: got 80; use kernel='reference'",
    ):
        program("v5e:2x2", 4, 2048, "xla", kernel="flash", head_dim=80)
    with pytest.raises(NotImplementedError, match="chunks of a multiple of 128 rows: got 100"):
        program("v5e:2x2", 4, 200, "xla", kernel="flash")
