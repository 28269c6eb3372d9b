"""Ring arithmetic on plain ints, and the staggered loop on rings of all sizes."""

import functools
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

import flaxasync as fa
from flaxasync import ring, transport
from flaxasync.mesh import cast_to_varying

pytestmark = pytest.mark.usefixtures("quick_compile")


@given(size=st.integers(1, 16), shift=st.sampled_from([1, -1, 2]), index=st.integers(0, 15))
def test_gathered_owner_follows_the_permutation(size, shift, index):
    index %= size
    source = {destination: source for source, destination in ring.permutation(size, shift)}
    holder, block = index, index
    for hop in range(size):
        assert ring.gathered_owner(index, hop, size=size, shift=shift) == block
        holder = source[holder]
        block = holder


@given(size=st.integers(1, 16), shift=st.sampled_from([1, -1]))
def test_a_sum_passes_every_device_and_ends_at_its_owner(size, shift):
    goes_to = dict(ring.permutation(size, shift))
    for start in range(size):
        owner = ring.reduced_owner(start, 0, size=size, shift=shift)
        device, seen = start, [start]
        for hop in range(1, size):
            device = goes_to[device]
            seen.append(device)
            assert ring.reduced_owner(device, hop, size=size, shift=shift) == owner
        assert device == owner
        assert sorted(seen) == list(range(size))


@given(rows=st.integers(0, 1000), parts=st.integers(1, 8))
def test_split_rows_covers_all_rows_evenly(rows, parts):
    ranges = ring.split_rows(rows, parts)
    assert [row for start, count in ranges for row in range(start, start + count)] == list(
        range(rows)
    )
    assert max(count for _, count in ranges) - min(count for _, count in ranges) <= 1


def test_a_block_of_one_row_is_not_halved():
    assert ring.shifts(2, rows=1) == (1,)
    assert ring.shifts(2, rows=2) == (1, -1)
    assert ring.shifts(1, rows=8) == (1,)


class Recorder:
    """A transport and its channel, which move nothing and record what they were asked to do."""

    def __init__(self):
        self.log = []

    def open(self, block, axis_name, *, shift):
        self.block = block
        return self

    def check_unroll(self, unroll):
        pass

    def start(self):
        self.log.append("start")
        return self.block

    def read(self, state, turn):
        return state

    def tie(self, state, values):
        return state, values

    def hop(self, state, update, turn):
        self.log += ["done", "start"]
        return state + 1

    def finish(self, state, update, turn):
        self.log.append("done")
        return state + 1


# with more, fori_loop traces turns that nobody counts
@pytest.mark.parametrize("hops", [0, 1, 2, 3, 4, 5])
def test_every_window_stands_between_a_start_and_its_done(hops):
    recorder = Recorder()

    def window(hop, blocks, carry):
        recorder.log.append("window")
        return blocks, [*carry, hop]

    blocks, carry = ring.staggered_loop(
        ring.Ring("x", recorder), (0,), [], window, shifts=(1,), hops=hops
    )
    assert recorder.log == ["start", "window", "done"] * hops
    assert carry == list(range(hops))
    assert blocks == (hops,)


@pytest.mark.parametrize(("unroll", "smallest"), [(1, 5), (2, 7)])
def test_the_smallest_ring_with_a_loop(unroll, smallest):
    def loops(size):
        def visit(x):
            through = ring.Ring("x", transport.TRANSPORTS["xla"], unroll=unroll)
            return ring.ring_gather(through, x, x, lambda block, row, carry: carry + block)

        mesh = jax.make_mesh((size,), ("x",), devices=jax.devices()[:size])
        x = jax.ShapeDtypeStruct((size, 1), jnp.float32, sharding=jax.NamedSharding(mesh, P("x")))
        mapped = jax.shard_map(visit, mesh=mesh, in_specs=P("x"), out_specs=P("x"))
        return str(jax.make_jaxpr(mapped)(x)).count("scan[")

    assert [loops(size) for size in range(2, 9)] == [int(size >= smallest) for size in range(2, 9)]


def gathered(through, x):
    return ring.ring_gather(through, x, x, lambda block, row, carry: carry + block)


def reduced(through, x):
    return ring.ring_reduce(
        through, x.shape[0], lambda row, count: x[:count] * jnp.asarray(row, x.dtype), x.dtype
    )


def visited(through, x):
    def visit(hop, blocks, carry):
        return blocks, carry + blocks[0]

    def last(carry):
        return (carry,), carry

    hops = jax.lax.axis_size("x") - 1
    (y,), _ = ring.ring_visit(through, (x,), x, visit, last, add=jnp.add, shifts=(1,), hops=hops)
    return y


def attended(through, x):
    q = x.reshape(1, x.shape[0], 1, x.shape[1])
    return fa.ring_attention(q, q, q, "x", backend="xla", kernel="reference")[0, :, 0]


TABLE = (
    (pathlib.Path(__file__).parent.parent / "docs" / "async.md")
    .read_text()
    .split("<!-- rings -->")[1]
)
RINGS = {
    "ring_gather": gathered,
    "ring_reduce": reduced,
    "ring_attention": attended,
    "ring_visit": visited,
}


@pytest.mark.parametrize("name", RINGS)
def test_the_table_of_rings(name):
    """docs/async.md says from which size on a ring has a loop: there it has one, and the next
    smaller one has none.
    """
    (smallest,) = (
        int(n)
        for first, n in re.findall(r"^\| `(\w+)`.*\| (\d+) devices \|$", TABLE, re.M)
        if first == name
    )

    def loops(size):
        mesh = jax.sharding.AbstractMesh(
            (size,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,)
        )
        with jax.sharding.use_abstract_mesh(mesh):
            x = jax.ShapeDtypeStruct(
                (size * 2, 8), jnp.float32, sharding=jax.NamedSharding(mesh, P("x"))
            )
            run = functools.partial(RINGS[name], ring.Ring("x", transport.TRANSPORTS["xla"]))
            mapped = jax.shard_map(run, in_specs=P("x"), out_specs=P("x"))
            return len(re.findall(r"= (?:scan|while)\[", str(jax.make_jaxpr(mapped)(x))))

    assert loops(smallest) - loops(smallest - 1) == 1


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("unroll", [1, 2, 8])
def test_both_directions_bring_every_block(size, unroll):
    """One of the two blocks is a pytree."""
    mesh = jax.make_mesh((size,), ("x",), devices=jax.devices()[:size])

    def visit(x):
        def window(hop, blocks, seen):
            return blocks, seen.at[hop].set(jnp.concatenate([-blocks[0]["v"], blocks[1]]))

        blocks, seen = ({"k": x, "v": -x}, x), cast_to_varying(jnp.zeros((size, 2), x.dtype), {"x"})
        blocks, seen = ring.staggered_loop(
            ring.Ring("x", transport.TRANSPORTS["xla"], unroll=unroll),
            blocks,
            seen,
            window,
            shifts=(1, -1),
            hops=size - 1,
        )
        return window(size - 1, blocks, seen)[1][None]

    with jax.set_mesh(mesh):
        x = jax.device_put(jnp.arange(size), P("x"))
        seen = np.asarray(jax.jit(jax.shard_map(visit, in_specs=P("x"), out_specs=P("x")))(x))
    index, hop = np.meshgrid(np.arange(size), np.arange(size), indexing="ij")
    np.testing.assert_array_equal(seen[..., 0], (index - hop) % size)
    np.testing.assert_array_equal(seen[..., 1], (index + hop) % size)
