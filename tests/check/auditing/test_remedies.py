"""Every remedy of the audit is tried: a program in which it is given, and the same with it, which
is estimated shorter.

The programs are compiled for eight chips of a v5e or a v6e, or for eight GPUs. Errors are not here: their remedies
make results right, and tests/check/auditing/test_hazards.py and tests/transport/test_compiled.py
have programs with and without them.
"""

import functools

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import flaxasync as fa
from flaxasync import check
from flaxasync.check.auditing.advice import OFFLOAD_FLAGS
from flaxasync.check.auditing.findings import CODES, Severity

pytestmark = pytest.mark.slow
BATCH, ROWS, WIDTH, HIDDEN, LAYERS = 4, 2048, 4096, 14336, 2
X = P("data", "model", None)
# as MaxText's recipes have it
WITHOUT_XLAS_RINGS = {"xla_jf_spmd_threshold_for_windowed_einsum_mib": "1000000"}


@functools.cache
def mesh_of(topology):
    """Returns one mesh of each topology: the devices of two are not the same."""
    return check.topology_mesh(topology, (2, 4), ("data", "model"))


def array(topology, shape, spec):
    return jax.ShapeDtypeStruct(
        shape, jnp.bfloat16, sharding=NamedSharding(mesh_of(topology), spec)
    )


def constrain(topology, x, *spec):
    return lax.with_sharding_constraint(x, NamedSharding(mesh_of(topology), P(*spec)))


def found(topology, fn, args, **options):
    """Returns the audit of a function, and the seconds that it is estimated to take, with simulated
    kernels.
    """
    program = check.compile_for(topology, fn, *args, compiler_options=check.HLO_ONLY | options)
    return check.audit(program), check.timeline(program, kernels="play").seconds


def remedies(audit, code):
    return [f.remedy for f in audit.findings if f.code == code]


# A gather of rows before a matmul, and a sum after one: automatic sharding against the ops of this
# package.


def automatic(topology, reduces):
    """Returns a product of x with a kernel that is split, whose rows are gathered before, or summed
    after it.
    """

    def gather(x, w):
        y = jnp.einsum("bsd,df->bsf", x, w)
        return constrain(topology, y, "data", None, "model")

    def reduce(x, w):
        y = jnp.einsum("bsd,df->bsf", x, w)
        return constrain(topology, y, "data", "model", None)

    return reduce if reduces else gather


def mapped(topology, op, in_specs, out_specs):
    """Returns an op of this package on global arrays, with the backend that it takes by itself."""

    def fn(x, w):
        ring = functools.partial(op, axis_name="model")
        return jax.shard_map(ring, mesh=mesh_of(topology), in_specs=in_specs, out_specs=out_specs)(
            x, w
        )

    return fn


@pytest.mark.parametrize("topology", ["v5e:2x4"])
def test_gathered_rows_are_sent_around_a_ring(topology):
    args = (
        array(topology, (BATCH, ROWS, WIDTH), X),
        array(topology, (WIDTH, HIDDEN), P(None, "model")),
    )
    audit, before = found(topology, automatic(topology, reduces=False), args, **WITHOUT_XLAS_RINGS)
    (remedy,) = remedies(audit, "synchronous-collective")
    assert "flaxasync.all_gather_matmul does it" in remedy
    assert "all-gather over model" in str(audit)
    with_ring = mapped(
        topology, fa.all_gather_matmul, (X, P(None, "model")), P("data", None, "model")
    )
    after, seconds = found(topology, with_ring, args)
    assert not remedies(after, "synchronous-collective")
    assert seconds < before


SPLIT_FEATURES = P("data", None, "model"), P("model", None)


def features(topology):
    return (
        array(topology, (BATCH, ROWS, HIDDEN), SPLIT_FEATURES[0]),
        array(topology, (HIDDEN, WIDTH), SPLIT_FEATURES[1]),
    )


@pytest.mark.parametrize("topology", ["v6e:2x4"])
def test_a_product_that_is_summed_is_sent_around_a_ring(topology):
    args = features(topology)
    audit, before = found(topology, automatic(topology, reduces=True), args, **WITHOUT_XLAS_RINGS)
    (remedy,) = remedies(audit, "synchronous-collective")
    assert "flaxasync.matmul_reduce_scatter does it" in remedy
    after, seconds = found(
        topology, mapped(topology, fa.matmul_reduce_scatter, SPLIT_FEATURES, X), args
    )
    assert not remedies(after, "synchronous-collective")
    assert seconds < before


@pytest.mark.parametrize("topology", ["v5e:2x4"])
def test_a_product_that_is_summed_everywhere_is_sent_around_a_ring(topology):
    args = features(topology)

    def plain(x, w):
        return constrain(topology, jnp.einsum("bsf,fd->bsd", x, w), "data", None, None)

    audit, before = found(topology, plain, args)
    (remedy,) = remedies(audit, "synchronous-collective")
    assert "flaxasync.matmul_all_reduce does it" in remedy
    _, seconds = found(
        topology, mapped(topology, fa.matmul_all_reduce, SPLIT_FEATURES, P("data")), args
    )
    assert seconds < before


def test_a_product_whose_contraction_is_split_over_two_axes_becomes_mesh_matmul():
    """The program of the published 2x2 study, at a quarter of its size in each dimension."""
    mesh = check.topology_mesh("v5e:2x2", (2, 2), ("x", "y"))
    operands = [((4096, 4096), P("x", "y")), ((4096, 2048), P("x", None))]
    args = [
        jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))
        for shape, spec in operands
    ]

    def plain(lhs, rhs):
        return lax.with_sharding_constraint(lhs @ rhs, NamedSharding(mesh, P("x", None)))

    def ours(lhs, rhs):
        op = functools.partial(fa.mesh_matmul, axis_names=("x", "y"))
        specs = P("x", "y"), P("x", None)
        return jax.shard_map(op, mesh=mesh, in_specs=specs, out_specs=P("x", None))(lhs, rhs)

    audit, before = found("v5e:2x2", plain, args)
    assert any("mesh_matmul" in f.remedy for f in audit.findings), audit
    after, seconds = found("v5e:2x2", ours, args)
    assert not any("mesh_matmul" in f.remedy for f in after.findings)
    assert seconds < before


# The sums of gradients over "data": a scan of layers against one that sums beside the backward
# pass.


def stack(prefetch):
    """Returns the gradients of MLPs, one after the other, as a function of their parameters and
    x.
    """

    def make(rngs):
        options = {
            "use_bias": False,
            "gated": False,
            "param_dtype": jnp.bfloat16,
            "dtype": jnp.bfloat16,
        }
        return fa.nn.ParallelMLP(WIDTH, HIDDEN, rngs=rngs, backend="xla", **options)

    unnamed = {nnx.PARTITION_NAME: None}
    vmapped = nnx.vmap(make, in_axes=0, out_axes=0, transform_metadata=unnamed)
    layers = nnx.eval_shape(lambda: nnx.split_rngs(splits=LAYERS)(vmapped)(nnx.Rngs(0)))
    graph, state = nnx.split(layers)

    def loss(state, x):
        layers = nnx.merge(graph, state)
        if prefetch:
            apply = lambda layer, x: layer(x)  # noqa: E731
            y = fa.nn.scan_with_prefetch(apply, layers, x, fsdp_axis=None, dtype=jnp.bfloat16)
        else:
            axes = {"in_axes": (0, nnx.Carry), "out_axes": nnx.Carry, "transform_metadata": unnamed}
            y = nnx.scan(lambda layer, x: layer(x), **axes)(layers, x)
        return jnp.mean(jnp.square(y.astype(jnp.float32)))

    return jax.grad(loss), state


def test_sums_of_gradients_run_beside_the_backward_pass():
    topology, seconds = "v5e:2x4", {}
    mesh = check.topology_mesh(
        topology, (2, 4), ("data", "model"), axis_types=(AxisType.Explicit,) * 2
    )
    for prefetch in (False, True):
        with jax.set_mesh(mesh):
            step, state = stack(prefetch)
            x = jax.ShapeDtypeStruct(
                (BATCH, ROWS, WIDTH), jnp.bfloat16, sharding=NamedSharding(mesh, X)
            )
            audit, seconds[prefetch] = found(topology, step, (state, x))
        given = [r for r in remedies(audit, "synchronous-collective") if "scan_with_prefetch" in r]
        assert bool(given) is not prefetch
    assert seconds[True] < seconds[False]


@pytest.mark.parametrize("kind", ["all-reduce", "all-gather"])
def test_a_sparse_core_takes_a_collective_that_holds_the_chip(kind):
    """A collective beside a product that does not need it, on v6e."""
    topology = "v6e:2x4"
    shared = array(
        topology, (4096, 4096), P(None, None) if kind == "all-reduce" else P("model", None)
    )
    args = (
        shared,
        array(topology, (BATCH, ROWS, WIDTH), P("data")),
        array(topology, (WIDTH, HIDDEN), P(None, None)),
    )

    def fn(shared, x, w):
        def local(shared, x, w):
            if kind == "all-reduce":
                moved = lax.psum(lax.pcast(shared, ("model",), to="varying"), "model")
            else:
                moved = lax.all_gather(shared, "model", tiled=True)
            return moved, x @ w

        specs = args[0].sharding.spec, P("data"), P(None, None)
        out = P(None, None) if kind == "all-reduce" else P(("model",), None)
        return jax.shard_map(
            local, mesh=mesh_of(topology), in_specs=specs, out_specs=(out, P("data"))
        )(shared, x, w)

    audit, before = found(topology, fn, args)
    flag = OFFLOAD_FLAGS[kind]
    assert any(flag in remedy for remedy in remedies(audit, "synchronous-collective")), audit
    name, value = flag.split("=")
    _, seconds = found(topology, fn, args, **{name: value})
    assert seconds < before


# What a backward pass computes again.


def test_a_result_that_is_saved_is_not_computed_again():
    topology = "v5e:2x4"
    weights = (
        array(topology, (LAYERS, WIDTH, HIDDEN), P(None, None, "model")),
        array(topology, (LAYERS, HIDDEN, WIDTH), P(None, "model", None)),
    )
    args = weights, array(topology, (BATCH, ROWS, WIDTH), X)

    def step(policy):
        @functools.partial(jax.checkpoint, policy=policy)
        def layer(x, weights):
            up, down = weights
            hidden = constrain(topology, jnp.einsum("bsd,df->bsf", x, up), "data", None, "model")
            y = jnp.einsum("bsf,fd->bsd", jax.nn.gelu(hidden), down)
            y = checkpoint_name(constrain(topology, y, "data", "model", None), "saved")
            return x + jnp.sin(y), None

        return jax.grad(
            lambda weights, x: jnp.sum(lax.scan(layer, x, weights)[0].astype(jnp.float32))
        )

    audit, before = found(topology, step(None), args, **WITHOUT_XLAS_RINGS)
    assert [r for r in remedies(audit, "synchronous-collective") if "save_only_these_names" in r]
    saves = jax.checkpoint_policies.save_only_these_names("saved")
    after, seconds = found(topology, step(saves), args, **WITHOUT_XLAS_RINGS)
    assert not [
        r for r in remedies(after, "synchronous-collective") if "save_only_these_names" in r
    ]
    assert seconds < before


# Transfers with nothing inside, or too little, in one ring.


def ring(topology, body, blocks, width=2048):
    """Returns a function that `body(x, w)` makes of local shards, of x [blocks, width], and its
    arguments.
    """
    specs = P("model", None), P(None, None)
    args = array(topology, (4 * blocks, width), specs[0]), array(topology, (width, width), specs[1])

    def fn(x, w):
        return jax.shard_map(body, mesh=mesh_of(topology), in_specs=specs, out_specs=P("model"))(
            x, w
        )

    return fn, args


def onward(x):
    return lax.ppermute(x, "model", [(i, (i + 1) % 4) for i in range(4)])


def test_a_barrier_is_removed_from_before_a_transfer():
    def in_series(x, w):
        y = x @ w
        x, y = lax.optimization_barrier((x, y))
        return onward(x) + y

    def side_by_side(x, w):
        return onward(x) + x @ w

    audit, before = found("v5e:2x4", *ring("v5e:2x4", in_series, 2048))
    (remedy,) = remedies(audit, "empty-window")
    assert "remove the jax.lax.optimization_barrier" in remedy
    after, seconds = found("v5e:2x4", *ring("v5e:2x4", side_by_side, 2048))
    assert not remedies(after, "empty-window")
    assert seconds < before


def test_a_transfer_is_staggered():
    """Each block is sent before it is multiplied, and not after."""

    def serialised(x, w):
        y = jnp.zeros_like(x)
        for _ in range(3):
            x = onward(x)
            y += x @ w
            x, y = lax.optimization_barrier((x, y))
        return y

    def staggered(x, w):
        y = jnp.zeros_like(x)
        x = onward(x)
        for turn in range(3):
            following = onward(x) if turn < 2 else x
            y += x @ w
            x = following
        return y

    audit, before = found("v5e:2x4", *ring("v5e:2x4", serialised, 2048))
    given = remedies(audit, "serialised") + remedies(audit, "empty-window")
    assert CODES["serialised"].remedy in given
    _, seconds = found("v5e:2x4", *ring("v5e:2x4", staggered, 2048))
    assert seconds < before


def test_an_exposed_transfer_gets_more_work():
    """Halves of a block that travel both ways take half of the time, behind the same product."""

    def one_way(x, w):
        return onward(x), x[:, :1024] @ w[:1024]

    def both_ways(x, w):
        half = x.shape[0] // 2
        back = lax.ppermute(x[half:], "model", [(i, (i - 1) % 4) for i in range(4)])
        return (onward(x[:half]), back), x[:, :1024] @ w[:1024]

    audit, before = found("v5e:2x4", *ring("v5e:2x4", one_way, 4096))
    (remedy,) = remedies(audit, "exposed")
    assert "both directions of the ring" in remedy
    _, seconds = found("v5e:2x4", *ring("v5e:2x4", both_ways, 4096))
    assert seconds < before


def test_a_loop_that_copies_what_it_carries_is_unrolled_by_two():
    def body(unroll):
        def fn(x, w):
            def turn(_, carry):
                there, here = carry
                return onward(here), there + here @ w

            return lax.fori_loop(0, 8, turn, (x, x), unroll=unroll)[0]

        return fn

    audit, before = found("v5e:2x4", *ring("v5e:2x4", body(1), 2048))
    assert remedies(audit, "loop-copies"), audit
    after, seconds = found("v5e:2x4", *ring("v5e:2x4", body(2), 2048))
    assert not remedies(after, "loop-copies")
    assert seconds < before


def test_a_wide_transfer_is_rounded_before_it_travels():
    topology = "v5e:2x4"
    args = (*features(topology), array(topology, (BATCH, ROWS, WIDTH), X))

    def product(dtype):
        def fn(x, w, residual):
            y = jnp.einsum("bsf,fd->bsd", x, w, preferred_element_type=dtype)
            y = constrain(topology, y, "data", "model", None)
            return (y + residual.astype(dtype)).astype(jnp.bfloat16)

        return fn

    audit, before = found(topology, product(jnp.float32), args, **WITHOUT_XLAS_RINGS)
    (remedy,) = remedies(audit, "wide-transfer")
    assert "preferred_element_type=jnp.bfloat16" in remedy
    after, seconds = found(topology, product(jnp.bfloat16), args, **WITHOUT_XLAS_RINGS)
    assert not remedies(after, "wide-transfer")
    assert seconds < before


# What XLA for GPUs does to the products of a ring of four, which is written without a loop.


def gather_on_gpus(hold):
    def fn(x, w):
        made = []
        for _ in range(4):
            made.append(jnp.dot(*hold((x, w))))
            x = onward(x)
        return jnp.concatenate(made)

    args = [
        array("h100:8", (4 * ROWS, WIDTH), P("model")),
        array("h100:8", (WIDTH, HIDDEN), P(None, "model")),
    ]
    return on_gpus(fn, (P("model"), P(None, "model")), P(None, "model")), args


def scatter_on_gpus(hold):
    def fn(x, w):
        total = jnp.dot(x[0], w)
        for part in range(1, 4):
            total = onward(total) + hold(jnp.dot(x[part], w))
        return total

    args = [
        array("h100:8", (4, ROWS, HIDDEN), P(None, None, "model")),
        array("h100:8", (HIDDEN, WIDTH), P("model")),
    ]
    return on_gpus(fn, (P(None, None, "model"), P("model")), P("model")), args


def on_gpus(fn, in_specs, out_specs):
    return jax.shard_map(
        fn, mesh=mesh_of("h100:8"), in_specs=in_specs, out_specs=out_specs, check_vma=False
    )


def held_up(case, hold, code):
    """Returns the remedies of one code, and the seconds that the program is estimated to take."""
    fn, args = case(hold)
    program = check.compile_for("h100:8", fn, *args)
    return remedies(check.audit(program), code), check.timeline(program).seconds


@pytest.mark.parametrize(
    ("case", "code"),
    [(gather_on_gpus, "merged-products"), (scatter_on_gpus, "accumulates-arrival")],
)
def test_products_of_a_ring_on_gpus_are_held_apart(case, code):
    given, before = held_up(case, lambda operands: operands, code)
    assert given
    assert all("optimization_barrier" in remedy for remedy in given)
    after, seconds = held_up(case, lax.optimization_barrier, code)
    assert not after
    assert seconds < before


def test_this_file_has_a_program_for_every_warning():
    """A warning whose remedy is not about time is that of a module without a schedule."""
    with open(__file__) as source:
        text = source.read()
    for code, what in CODES.items():
        if what.severity == Severity.WARNING and code != "not-scheduled":
            assert f'"{code}")' in text, code
