"""The ring ops in compiled TPU programs, without a TPU: every block of an output is written
once.
"""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import flaxasync as fa
from flaxasync import check
from tests.kernels.conftest import arranged

TOPOLOGY, R = "v5e:2x4", 8
# large enough that the compiler neither fuses the ring away nor unrolls it
B, S, D, F = 2, 4096, 2048, 8192
OUTPUT = "bf16", (B, S, F // R)
COPIES = {
    "copy",
    "copy-start",
    "broadcast",
    "concatenate",
    "pad",
    "dynamic-update-slice",
    "transpose",
    "reshape",
}


def compiled(fn, shapes, in_specs, out_specs):
    mesh = check.topology_mesh(TOPOLOGY, (R,), ("model",))
    mapped = jax.jit(jax.shard_map(fn, mesh=mesh, in_specs=in_specs, out_specs=out_specs))
    return check.compile_for(
        TOPOLOGY, mapped, *arranged(mesh, shapes, in_specs), compiler_options=check.HLO_ONLY
    )


def instructions_that_make_outputs(program):
    """Returns the scheduled instructions, all but those inside a fusion, that have a result like
    the whole output.

    They are returned as two lists: those that multiply something into it, and those that only move
    or fill it.
    """
    module, multiply, move = check.parse(program.text), [], []
    instructions = [(c, i) for c in module.computations.values() for i in c.instructions]
    fused = {
        body for _, i in instructions if i.opcode == "fusion" for body in i.called_computations
    }
    for computation, i in instructions:
        if computation.name in fused or (i.shape.element_type, i.shape.dimensions) != OUTPUT:
            continue
        if i.opcode == "fusion" and i.contains_matmul:
            multiply.append(i.name)
        elif i.opcode == "fusion" or i.opcode in COPIES:
            move.append(i.name)
    return multiply, move


@pytest.mark.parametrize("directions", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_all_gather_matmul_writes_each_block_once(directions):
    fn = functools.partial(
        fa.all_gather_matmul, axis_name="model", backend="xla", directions=directions
    )
    program = compiled(
        fn, [(B, S, D), (D, F)], (P(None, "model"), P(None, "model")), P(None, None, "model")
    )
    writes, copies = instructions_that_make_outputs(program)
    assert copies == []
    assert len(writes) >= 4  # the turns of one loop body and those outside it
    # Memory has the blocks that travel and those that are multiplied, but never the gathered x,
    # which is 8 blocks.
    assert program.memory["temp_size_in_bytes"] <= B * S * D * 2 / 2


@pytest.mark.slow
def test_the_check_sees_that_an_output_of_zeros_is_written_first():
    """Negative test: a ring is usually written so, and then it broadcasts zeros to the whole output
    first.
    """

    def from_zeros(x, w):
        index, rows = lax.axis_index("model"), x.shape[-2]
        y = lax.pcast(jnp.zeros((B, S, F // R), x.dtype), "model", to="varying")

        def turn(hop, state):
            x, y = state
            product = jnp.dot(x, w, preferred_element_type=jnp.float32).astype(y.dtype)
            y = lax.dynamic_update_slice_in_dim(y, product, (index - hop) % R * rows, axis=1)
            return lax.ppermute(x, "model", [(i, (i + 1) % R) for i in range(R)]), y

        return lax.fori_loop(0, R, turn, (x, y), unroll=2)[1]

    program = compiled(
        from_zeros,
        [(B, S, D), (D, F)],
        (P(None, "model"), P(None, "model")),
        P(None, None, "model"),
    )
    assert instructions_that_make_outputs(program)[1] != []
