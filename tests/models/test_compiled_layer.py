"""The loop of `flaxasync.ring.staggered_loop` in the decoder layer, compiled for a ring of eight
TPUs.

Rings of six devices or fewer have no loop (tests/test_ring.py).
"""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from flaxasync import check
from models.config import TransformerConfig
from models.layer import DecoderLayer

ROWS, WIDTH = 512, 512
TURNS, DIRECTIONS = 2, 2


def compiled_layer(backend):
    config = TransformerConfig(
        width=WIDTH,
        heads=8,
        kv_heads=8,
        mlp_width=2 * WIDTH,
        dtype="bfloat16",
        exchange_heads=False,
    )
    mesh = check.topology_mesh(
        "v5e:2x4", (1, 8), ("data", "model"), axis_types=(AxisType.Explicit,) * 2
    )
    with jax.set_mesh(mesh):
        graph, params = nnx.split(
            nnx.eval_shape(lambda: DecoderLayer(config, backend=backend, rngs=nnx.Rngs(0)))
        )
        rows = jax.NamedSharding(mesh, P("data", "model", None))
        x = jax.ShapeDtypeStruct((1, ROWS, WIDTH), jnp.bfloat16, sharding=rows)
        layer = jax.jit(lambda params, x: nnx.merge(graph, params)(x))
        return check.compile_for("v5e:2x4", layer, params, x, compiler_options=check.HLO_ONLY)


@pytest.mark.parametrize(
    "backend",
    ["pallas", *(pytest.param(name, marks=pytest.mark.slow) for name in ("xla", "stateful"))],
)
def test_the_loop_has_two_turns_no_copy_of_what_travels_and_compute_in_every_window(backend):
    program = compiled_layer(backend)
    module, audit = check.parse(program.as_text()), check.audit(program)
    assert audit.ok
    assert not {"in-flight-copied", "loop-copies"} & set(audit.codes())
    loops = [i for c in module.computations.values() for i in c.instructions if i.opcode == "while"]
    assert sorted(loop.op_name.split("/")[-2] for loop in loops) == (
        ["all_gather_matmul"] * 2 + ["matmul_reduce_scatter"] * 2
    )
    for loop in loops:
        body = loop.attributes["body"].lstrip("%")
        transfers = [pair for pair in audit.pairs if pair.computation == body and pair.communicates]
        assert len(transfers) == TURNS * DIRECTIONS
        assert not [i.name for i in module.computations[body].instructions if i.opcode == "copy"]
        # XLA's own permutes are not tied: nothing keeps products beside the partial sums of a
        # reduce-scatter.
        if backend != "xla" or "all_gather_matmul" in loop.op_name:
            assert all(pair.work for pair in transfers), [
                pair.name for pair in transfers if not pair.work
            ]
