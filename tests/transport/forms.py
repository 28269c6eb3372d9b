"""The forms in which a transfer and compute can be written: run in the simulator, and compiled for
TPUs without one.

A form takes this device's block x [rows, columns] on the axis "x", lets it make `hops` hops, and
adds up in `seen` each block that it had in hand while that was travelling.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import flaxasync as fa
from flaxasync import check, ring, transport
from flaxasync.check.hlo.shapes import VMEM
from flaxasync.mesh import cast_to_varying

AXIS = "x"
DEVICES = {"v5e:2x2": 4, "v5e:2x4": 8, "v6e:2x4": 8, "v5p:2x2x2": 8, "tpu7x:2x2x1": 8}
COLUMNS = 1024  # of a block that is compiled
start, done = (
    functools.partial(fa.ppermute_start, axis_name=AXIS, backend="pallas"),
    fa.ppermute_done,
)


@dataclasses.dataclass(frozen=True)
class Form:
    run: Callable  # (x, hops) -> arrays
    # (hops, R) -> kernel pairs of the program, where the body of a loop counts once
    pairs: Callable[[int, int], int]
    # (blocks [R, rows, columns], hops) -> the arrays of all devices; tests/simulator/test_parity.py
    # has the collectives
    expect: Callable | None = None


def add(block, seen):
    return seen + block


def one_after_another(x, hops):
    """Start, compute and done in one turn; two turns in a body."""

    def turn(_, carry):
        x, seen = carry
        x, future = start(x)
        x, seen = transport.while_travelling(x, add, x, seen)
        return done(x, future), seen

    return lax.fori_loop(0, hops, turn, (x, jnp.zeros_like(x)), unroll=2)


def staggered(x, hops):
    """Accumulates while permuting: a future passes from turn to turn; two turns in a body."""

    def turn(_, carry):
        x, future, seen = carry
        x, seen = transport.while_travelling(x, add, x, seen)
        return *start(done(x, future)), seen

    carry = (*start(x), jnp.zeros_like(x))
    x, future, seen = lax.fori_loop(0, hops - 1, turn, carry, unroll=2)
    x, seen = transport.while_travelling(x, add, x, seen)
    return done(x, future), seen


def staggered_both(x, hops):
    """The same with one half-block in each direction: two transfers are under way at once."""
    half = x.shape[0] // 2
    starts = [functools.partial(start, shift=shift) for shift in (1, -1)]

    def window(halves, seen):
        blocks = [x for x, _ in halves]
        blocks, seen = transport.while_travelling(
            blocks, lambda b, seen: seen + jnp.concatenate(b), blocks, seen
        )
        return [done(x, future) for x, (_, future) in zip(blocks, halves, strict=True)], seen

    def turn(_, carry):
        blocks, seen = window(*carry)
        return [begin(x) for begin, x in zip(starts, blocks, strict=True)], seen

    carry = (
        [begin(block) for begin, block in zip(starts, (x[:half], x[half:]), strict=True)],
        jnp.zeros_like(x),
    )
    blocks, seen = window(*lax.fori_loop(0, hops - 1, turn, carry, unroll=2))
    return jnp.concatenate(blocks), seen


def swap(x, hops):
    """Two Refs that swap roles; a body makes two hops."""
    x_ref, y_ref = jax.new_ref(x), jax.new_ref(jnp.zeros_like(x))
    begin, end = (
        functools.partial(fa.ppermute_start_stateful, axis_name=AXIS),
        fa.ppermute_done_stateful,
    )

    def hop(sems, seen, here, there):
        seen = transport.tie_refs(here, there, values=seen)
        seen = transport.tie_refs(here, there, values=add(here[...], seen))
        end(*sems, here, there)
        return seen

    def two_hops(_, carry):
        sems, seen = carry
        seen = hop(sems, seen, x_ref, y_ref)
        seen = hop(begin(y_ref, x_ref), seen, y_ref, x_ref)
        return begin(x_ref, y_ref), seen

    assert hops % 2
    sems, seen = lax.fori_loop(0, hops // 2, two_hops, (begin(x_ref, y_ref), jnp.zeros_like(x)))
    seen = hop(sems, seen, x_ref, y_ref)
    return y_ref[...], seen


def slots(x, hops, *, tied=True):
    """The two slots of one Ref, chosen by the parity of the hop; a body makes one hop."""
    ref = jax.new_ref(jnp.stack([x, jnp.zeros_like(x)]))
    begin, end = functools.partial(fa.ppermute_start_slots, axis_name=AXIS), fa.ppermute_done_slots

    def window(hop, sems, seen):
        if tied:
            hop, seen = fa.tie_refs(ref, values=(hop, seen))
        seen = add(ref[hop % 2], seen)
        if tied:
            seen = fa.tie_refs(ref, values=seen)
        end(*sems, ref)
        return seen

    def turn(hop, carry):
        seen = window(hop, *carry)
        return begin(ref, (hop + 1) % 2), seen

    sems, seen = lax.fori_loop(0, hops - 1, turn, (begin(ref, 0), jnp.zeros_like(x)))
    seen = window(hops - 1, sems, seen)
    return ref[hops % 2], seen


def gather(backend, directions):
    """Doubles the rows of every device with `ring.ring_gather`."""

    def run(x, hops):
        def write(block, row, y):
            return lax.dynamic_update_slice_in_dim(y, block + block, row, axis=0)

        y = lax.empty((lax.axis_size(AXIS) * x.shape[0], x.shape[1]), x.dtype)
        loop = ring.Ring(AXIS, transport.TRANSPORTS[backend], directions)
        return (ring.ring_gather(loop, x, cast_to_varying(y, {AXIS}), write),)

    return Form(run, functools.partial(_ring_pairs, directions))


def reduce(backend, directions):
    """Sums the x of all devices with `ring.ring_reduce`, each weighted by the row for which it is
    meant.
    """

    def run(x, hops):
        def produce(row, count):
            return x[:count] * jnp.asarray(row + 1, jnp.float32).astype(x.dtype)

        loop = ring.Ring(AXIS, transport.TRANSPORTS[backend], directions)
        return (ring.ring_reduce(loop, x.shape[0], produce, x.dtype),)

    return Form(run, functools.partial(_ring_pairs, directions))


def _ring_pairs(directions, hops, size):
    """The first and the last two hops stand outside the loop, as do turns that do not fill a body
    of two.
    """
    turns = size - 1 - 2
    inside = 2 + turns % 2 if turns > 2 else turns
    return directions * (inside + min(size - 1, 2))


def _passing(blocks, hops, shift=1):
    seen = sum(np.roll(blocks, shift * hop, axis=0) for hop in range(hops))
    return np.roll(blocks, shift * hops, axis=0), seen


def _passing_both(blocks, hops):
    half = blocks.shape[1] // 2
    onward, back = _passing(blocks[:, :half], hops), _passing(blocks[:, half:], hops, -1)
    return tuple(np.concatenate(two, axis=1) for two in zip(onward, back, strict=True))


FORMS = {
    "one_after_another": Form(one_after_another, lambda hops, size: 2 + hops % 2, _passing),
    "staggered": Form(staggered, lambda hops, size: 2 + (hops - 1) % 2 + 1, _passing),
    "staggered_both": Form(
        staggered_both, lambda hops, size: 2 * (2 + (hops - 1) % 2 + 1), _passing_both
    ),
    "swap": Form(swap, lambda hops, size: 3, _passing),
    "slots": Form(slots, lambda hops, size: 2, _passing),
    **{f"gather_{b}_{d}": gather(b, d) for b, d in (("pallas", 1), ("pallas", 2), ("stateful", 2))},
    **{f"reduce_{b}_{d}": reduce(b, d) for b, d in (("pallas", 1), ("pallas", 2), ("stateful", 2))},
}


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
        x = jax.ShapeDtypeStruct(
            (size * rows, COLUMNS), dtype, sharding=NamedSharding(mesh, P("x"))
        )
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
        i.attributes.get("body", "").lstrip("%")
        for c in module.computations.values()
        for i in c.instructions
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
