"""Compiles forms for TPU topologies, without a TPU, and names what is wrong with the HLO."""

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from flaxasync import check
from flaxasync.check.hlo.shapes import VMEM

DEVICES = {"v5e:2x2": 4, "v5e:2x4": 8, "v6e:2x4": 8, "v5p:2x2x2": 8, "tpu7x:2x2x1": 8}
COLUMNS = 1024


def compile_form(
    fn,
    topology="v5e:2x2",
    *,
    rows=1024,
    dtype=jnp.bfloat16,
    axis_type=AxisType.Explicit,
    compiler_options=check.HLO_ONLY,
):
    """Compiles `fn`, which takes this device's block [rows, 1024] on the axis "x"."""
    size = DEVICES[topology]
    mesh = check.topology_mesh(topology, (size,), ("x",), axis_types=(axis_type,))
    with jax.set_mesh(mesh):
        x = jax.ShapeDtypeStruct((size * rows, COLUMNS), dtype, sharding=NamedSharding(mesh, P("x")))
        mapped = jax.shard_map(fn, in_specs=P("x"), out_specs=P("x"))
        return check.compile_for(topology, jax.jit(mapped), x, compiler_options=compiler_options)


def kernels(module):
    """Returns {computation: its Pallas calls, in the order in which they run}."""
    return {
        name: [i for i in computation.instructions if i.custom_call_target == "tpu_custom_call"]
        for name, computation in module.computations.items()
    }


def faults(program, *, pairs):
    """Returns the names of the checks that a program fails.

    deleted   it has another number of starts and dones than `pairs`
    copied    a loop copies a travelling buffer, or a buffer is copied between its start and its done
    vmem      a buffer that a start or a done works on lies in VMEM
    order     nothing runs between a start and its done
    unsafe    `check.audit` finds an error
    """
    module = check.parse(program.as_text())
    audit = check.audit(module, chip=program.chip)
    calls = [i for found in kernels(module).values() for i in found]
    found = set()
    for end in ("_start", "_done"):
        if sum(end in i.name for i in calls) != pairs:
            found.add("deleted")
    arrays = [leaf for i in calls for _, leaf in i.shape.leaves() if leaf.bytes >= COLUMNS]
    if any(leaf.memory_space == VMEM for leaf in arrays):
        found.add("vmem")
    blocks = {leaf.bytes for leaf in arrays}
    bodies = {
        i.attributes.get("body", "").lstrip("%") for c in module.computations.values() for i in c.instructions
    } & module.computations.keys()
    for i in (i for body in bodies for i in module.computations[body].instructions):
        # A copy to VMEM fetches an operand of the compute: it reads a source, which is allowed.
        if i.opcode == "copy" and i.shape.bytes in blocks and i.shape.memory_space != VMEM:
            found.add("copied")
    if "in-flight-copied" in audit.codes():
        found.add("copied")
    if not audit.ok:
        found.add("unsafe")
    if any(pair.spelling == "kernel" and not pair.work for pair in audit.pairs):
        found.add("order")
    return found
