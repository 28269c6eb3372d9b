"""The ring ops in compiled TPU programs, without a TPU: every block of an output is written once."""

import functools
import re

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import flaxasync as fa
from flaxasync import check

TOPOLOGY, R = "v5e:2x4", 8
B, S, D, F = 2, 4096, 2048, 8192  # large enough that the compiler neither fuses the ring away nor unrolls it
OUTPUT = f"bf16[{B},{S},{F // R}]"
COPIES = {"copy", "copy-start", "broadcast", "concatenate", "pad", "dynamic-update-slice", "transpose", "reshape"}


def compiled(fn, shapes, in_specs, out_specs):
    mesh = check.topology_mesh(TOPOLOGY, (R,), ("model",))
    args = [
        jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=jax.NamedSharding(mesh, spec))
        for shape, spec in zip(shapes, in_specs, strict=True)
    ]
    mapped = jax.jit(jax.shard_map(fn, mesh=mesh, in_specs=in_specs, out_specs=out_specs))
    return check.compile_for(TOPOLOGY, mapped, *args, compiler_options=check.HLO_ONLY)


def scheduled(text):
    """Yields (name, type, opcode, line) of every instruction that is scheduled: all but those inside a fusion."""
    computation = ""
    for line in text.splitlines():
        if line and not line.startswith(" "):
            computation = line
        match = re.match(r"\s+(?:ROOT )?%([\w.-]+) = (\(.*?\)|\S+) ([\w-]+)\(", line)
        if match and "fused" not in computation:
            yield (*match.groups(), line)


def copies_of(text, output):
    """Returns the instructions that produce a value of the output's type without multiplying anything into it."""
    bodies = {block.split(" ", 1)[0]: block for block in re.split(r"\n(?=%)", text)}
    found = []
    for name, shape, opcode, line in scheduled(text):
        if not shape.startswith(output):
            continue
        if opcode == "fusion":
            body = bodies[re.search(r"calls=(%[\w.-]+)", line)[1]]
            if not re.search(r" (convolution|dot)\(", body):
                found.append(name)
        elif opcode in COPIES:
            found.append(name)
    return found


@pytest.mark.parametrize("directions", [1, 2])
def test_all_gather_matmul_writes_each_block_once(directions):
    fn = functools.partial(fa.all_gather_matmul, axis_name="model", backend="xla", directions=directions)
    program = compiled(fn, [(B, S, D), (D, F)], (P(None, "model"), P(None, "model")), P(None, None, "model"))
    writes = [name for name, shape, op, _ in scheduled(program.text) if op == "fusion" and shape.startswith(OUTPUT)]
    assert copies_of(program.text, OUTPUT) == []
    assert len(writes) >= 4  # the turns of one loop body and those outside it
    # Memory has the blocks that travel and those that are multiplied, but never the gathered x, which is 8 blocks.
    assert program.memory["temp_size_in_bytes"] <= B * S * D * 2 / 2


def test_the_check_sees_that_an_output_of_zeros_is_written_first():
    """Negative test: a ring is usually written so, and then it broadcasts zeros to the whole output first."""

    def from_zeros(x, w):
        index, rows = lax.axis_index("model"), x.shape[-2]
        y = lax.pcast(jnp.zeros((B, S, F // R), x.dtype), "model", to="varying")

        def turn(hop, state):
            x, y = state
            product = jnp.dot(x, w, preferred_element_type=jnp.float32).astype(y.dtype)
            y = lax.dynamic_update_slice_in_dim(y, product, (index - hop) % R * rows, axis=1)
            return lax.ppermute(x, "model", [(i, (i + 1) % R) for i in range(R)]), y

        return lax.fori_loop(0, R, turn, (x, y), unroll=2)[1]

    program = compiled(from_zeros, [(B, S, D), (D, F)], (P(None, "model"), P(None, "model")), P(None, None, "model"))
    assert copies_of(program.text, OUTPUT) != []
