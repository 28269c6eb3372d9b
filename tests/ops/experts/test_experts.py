"""`flaxasync.expert_mlp` against all experts applied to all rows: values, gradients, what is
refused.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import flaxasync as fa
from flaxasync.ops import trust
from flaxasync.ops.experts import api, exchange
from flaxasync.ops.experts.assignments import sort as assignments_of
from flaxasync.ops.experts.local import ExpertBlock, Experts, _for_each
from flaxasync.ops.experts.products import Grouped, OneTile, Weights
from tests.kernels.conftest import assert_close, run
from tests.simulator import split_pairs

pytestmark = pytest.mark.usefixtures("quick_compile")
ROWS, FEATURES, HIDDEN = 12, 16, 24  # rows of a device


def routed(rows, experts, k, route, seed=0):
    """Returns ids of different experts for each row, and their weights, by a distribution over the
    experts.
    """
    rng = np.random.default_rng(seed)
    odds = {
        "even": np.ones(experts),
        "zipf": 1 / np.arange(1, experts + 1) ** 1.5,
        "one": np.eye(experts)[0] + 1e-9,
    }
    odds = odds[route] / odds[route].sum()
    ids = np.stack([rng.choice(experts, k, replace=False, p=odds) for _ in range(rows)])
    return ids.astype(np.int32), rng.random((rows, k), np.float32)


def drawn(rows, experts, k, route, features=FEATURES, hidden=HIDDEN, seed=0):
    """Returns all operands of a call: x, ids, weights, gate, up, down."""
    rng = np.random.default_rng(seed)
    kernels = [rng.standard_normal((experts, features, hidden)) * features**-0.5 for _ in range(2)]
    kernels.append(rng.standard_normal((experts, hidden, features)) * hidden**-0.5)
    x = rng.standard_normal((rows, features))
    return [
        np.asarray(x, np.float32),
        *routed(rows, experts, k, route, seed),
        *(k.astype(np.float32) for k in kernels),
    ]


def dense(x, ids, weights, gate, up, down, capacity=None, activation=jax.nn.silu):
    """Applies every expert to every row, and adds what the rows chose. `capacity` is that of all
    rows.
    """
    experts = jnp.arange(up.shape[0])
    chosen = ids[None] == experts[:, None, None]  # [experts, rows, k]
    if capacity is not None:
        flat = chosen.reshape(len(experts), -1)
        chosen = (flat & (jnp.cumsum(flat, axis=1) <= capacity)).reshape(chosen.shape)
    share = jnp.sum(jnp.where(chosen, weights[None], 0), axis=-1)
    h = jnp.einsum("rd,edf->erf", x, up)
    h = activation(h) if gate is None else activation(jnp.einsum("rd,edf->erf", x, gate)) * h
    return jnp.einsum("er,erf,efd->rd", share, h, down)


def specs(split):
    columns, down = (
        (P("ring"), P("ring")) if split == "experts" else (P(None, None, "ring"), P(None, "ring"))
    )
    return (P("ring"), P("ring"), P("ring"), columns, columns, down)


def both(devices, operands, split="experts", **options):
    """Returns the output and all gradients of a call on a ring, for a drawn cotangent."""
    cotangent = np.random.default_rng(9).standard_normal(operands[0].shape).astype(np.float32)

    def fn(x, ids, weights, gate, up, down, cotangent):
        y, pull = jax.vjp(
            lambda x, w, *k: fa.expert_mlp(x, ids, w, *k, "ring", **options),
            x,
            weights,
            gate,
            up,
            down,
        )
        return y, pull(cotangent)

    options["split"] = split
    in_specs = (*specs(split), P("ring"))
    out_specs = (P("ring"), tuple(in_specs[i] for i in (0, 2, 3, 4, 5)))
    mesh = fa.make_mesh((devices,), ("ring",))
    with jax.set_mesh(mesh):
        placed = [
            jax.device_put(a, jax.NamedSharding(mesh, s))
            for a, s in zip((*operands, cotangent), in_specs, strict=True)
        ]
        return jax.jit(jax.shard_map(fn, in_specs=in_specs, out_specs=out_specs))(
            *placed
        ), cotangent


def expected(operands, cotangent, **options):
    @jax.jit
    def compute(cotangent, x, ids, weights, *kernels):
        y, pull = jax.vjp(lambda x, w, *k: dense(x, ids, w, *k, **options), x, weights, *kernels)
        return y, pull(cotangent)

    return compute(cotangent, *operands)


def check(found, wanted, tolerance=1e-5):
    for got, want in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(
            got, want, rtol=0, atol=tolerance * max(np.abs(want).max(), 1e-3)
        )


# The slow cases add rings of one, two and eight devices, more experts than rows, and a single choice.
CASES = [  # devices, experts, k, backend, directions, route
    (4, 8, 2, "none", 1, "even"),
    *(
        pytest.param(*case, marks=pytest.mark.slow)
        for case in [
            (3, 6, 2, "exchange", 1, "zipf"),
            (1, 4, 2, "xla", 1, "even"),
            (2, 4, 1, "xla", 2, "one"),
            (3, 12, 8, "xla", 2, "one"),
            (8, 16, 2, "xla", 1, "zipf"),
            (3, 60, 1, "none", 2, "zipf"),
            (8, 8, 8, "none", 2, "even"),
            (1, 4, 2, "exchange", 2, "even"),
            (2, 4, 1, "exchange", 1, "one"),
            (8, 8, 8, "exchange", 2, "one"),
        ]
    ),
]


@pytest.mark.parametrize(("devices", "experts", "k", "backend", "directions", "route"), CASES)
def test_agrees_with_all_experts_on_all_rows(devices, experts, k, backend, directions, route):
    operands = drawn(devices * ROWS, experts, k, route)
    found, cotangent = both(devices, operands, backend=backend, directions=directions)
    check(found, expected(operands, cotangent))


def test_splits_hidden_features_of_few_experts():
    operands = drawn(4 * ROWS, 3, 2, "zipf")
    found, cotangent = both(4, operands, split="hidden", directions=2)
    check(found, expected(operands, cotangent))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("devices", "capacity", "directions", "backend"),
    [(2, 1, 1, "none"), (2, 4, 2, "xla"), (4, 3, 1, "exchange")],
)
def test_drops_the_last_rows_of_each_half_beyond_the_capacity_in_every_form(
    devices, capacity, directions, backend
):
    operands = drawn(devices * ROWS, 4, 2, "zipf")
    found, cotangent = both(
        devices, operands, capacity=capacity, directions=directions, backend=backend
    )

    half = functools.partial(dense, capacity=-(-capacity // 2))

    def loss(x, weights, *kernels):
        parts = (a.reshape(-1, ROWS // 2, a.shape[-1]) for a in (x, operands[1], weights))
        y = jax.vmap(half, in_axes=(0, 0, 0, None, None, None))(*parts, *kernels).reshape(x.shape)
        return jnp.sum(y * cotangent), y

    gradients, y = jax.jit(jax.grad(loss, range(5), has_aux=True))(operands[0], *operands[2:])
    check(found, (y, gradients))
    assert np.abs(jax.jit(dense)(*operands) - y).max() > 0.1, "some rows were dropped"


def test_without_a_gate_and_with_another_activation():
    x, ids, weights, _, up, down = drawn(2 * ROWS, 4, 2, "even")
    y = apply(x, ids, weights, None, up, down, activation=jax.nn.gelu)
    wanted = functools.partial(dense, gate=None, activation=jax.nn.gelu)
    check(y, jax.jit(wanted)(x, ids, weights, up=up, down=down))


def applied(*operands, devices=2, **options):
    """Returns the output of the op for global arrays on a ring."""
    return np.asarray(apply(*operands, devices=devices, **options))


@functools.cache
def jitted(devices, **options):
    """Returns the op on global arrays of some devices, which is compiled once for all calls."""
    fn = functools.partial(fa.expert_mlp, axis_name="ring", **options)
    return jax.jit(jax.shard_map(fn, in_specs=(P("ring"),) * 6, out_specs=P("ring")))


def apply(*operands, devices=2, **options):
    mesh = fa.make_mesh((devices,), ("ring",))
    with jax.set_mesh(mesh):
        placed = [
            a if a is None else jax.device_put(a, jax.NamedSharding(mesh, P("ring")))
            for a in operands
        ]
        return jitted(devices, **options)(*placed)


def test_a_row_with_an_unknown_expert_becomes_nan_and_no_other():
    operands = drawn(2 * ROWS, 4, 2, "even")
    whole = applied(*operands)
    for row, wrong in ((3, 4), (20, -1)):
        ids = operands[1].copy()
        ids[row, 1] = wrong
        y = applied(operands[0], ids, *operands[2:])
        assert np.isnan(y[row]).all()
        check(np.delete(y, row, 0), np.delete(whole, row, 0))


def test_nan_weights_propagate_to_their_row():
    operands = drawn(2 * ROWS, 4, 2, "even")
    operands[2][5, 0] = np.nan
    y = applied(*operands)
    assert np.isnan(y[5]).all()
    assert np.isfinite(np.delete(y, 5, 0)).all()


def test_no_rows_and_batches_of_rows():
    operands = drawn(2 * ROWS, 4, 2, "even")
    y = apply(*operands)
    batched = apply(*(a.reshape(2, 3, -1, a.shape[-1]) for a in operands[:3]), *operands[3:])
    check(batched.reshape(y.shape), y)
    assert apply(*(a[:0] for a in operands[:3]), *operands[3:]).shape == (0, FEATURES)


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        (
            {1: np.zeros((24, 5), np.int32), 2: np.zeros((24, 5), np.float32)},
            {},
            "5 choices among 4 experts",
        ),
        ({}, {"capacity": 0}, "capacity of 1 row or more"),
        ({}, {"split": "rows"}, "split='rows'"),
        ({}, {"kernel": "fast"}, "kernel='fast'"),
        ({}, {"backend": "ring"}, "backend='ring'"),
        ({1: np.zeros((24, 2), np.float32)}, {}, "integer ids"),
        (
            {0: np.zeros((24, FEATURES), np.int32)},
            {},
            "computes in the dtype of x: got int32; cast x to a floating one",
        ),
        ({2: np.zeros((24, 1), np.float32)}, {}, "of the same rows"),
        ({5: np.zeros((4, 16, 24), np.float32)}, {}, r"gate and up \[e, D, F\]"),
    ],
)
def test_refuses_what_does_not_fit(change, options, message):
    operands = drawn(2 * ROWS, 4, 2, "even")
    for place, value in change.items():
        operands[place] = value
    with pytest.raises(ValueError, match=message):
        apply(*operands, **options)


def test_an_exchange_sends_a_row_once_to_each_device_that_needs_it():
    """With a capacity the buffers have room for what the experts of a device take, and with none
    for all rows.
    """
    # experts 0, 1 are on device 0, ...
    ids = np.asarray([[0, 1], [2, 5], [3, 2], [7, 0], [1, 0], [6, 7]], np.int32)
    for capacity, room in ((None, 6), (1, 4)):
        options = {"parts": 2, "capacity": capacity, "tile_rows": 8}
        experts = Experts("ring", "experts", 8, 2, 8, 2, capacity, OneTile(jax.nn.silu))

        def rows_sent(ids, experts=experts, options=options, room=room):
            assignments, _ = assignments_of(ids, jnp.ones(ids.shape, jnp.float32), 8, **options)
            limits = exchange.bounds(experts, ExpertBlock(jnp.zeros((6, 4)), assignments), 4)
            assert limits.rows == room
            routes = exchange.find_routes(assignments, 6, 4, limits)
            return [exchange.rows_for(routes, limits, device, 6) for device in range(4)]

        sent = [rows.tolist() for rows in jax.jit(rows_sent)(ids)]
        of_device = [
            [row for row in range(6) if (ids[row] // 2 == device).any()] for device in range(4)
        ]
        if capacity:  # of each three rows an expert takes the first one
            of_device = [[0, 3, 4], [1, 2], [1], [3, 5]]
        assert sent == [rows + [6] * (room - len(rows)) for rows in of_device]


@pytest.mark.parametrize(
    ("held", "capacity", "loops"),
    [(1, 8, False), pytest.param(2, 8, False, marks=pytest.mark.slow), (1, None, True)],
)
def test_the_kernels_multiply_all_tiles_at_once_where_a_capacity_bounds_them(held, capacity, loops):
    """Also where a device holds one expert, whose rows are one tile: a loop would have a kernel for
    each turn.
    """
    ids = np.arange(16, dtype=np.int32).reshape(8, 2) % held
    sort = functools.partial(assignments_of, experts=held, parts=1, capacity=capacity, tile_rows=8)
    assignments, _ = jax.eval_shape(sort, ids, np.ones(ids.shape, np.float32))
    experts = Experts("ring", "hidden", held, 8, 8, 1, capacity, Grouped(jax.nn.silu))
    calls = []

    def add(tiles, count, carry):
        calls.append(count)
        return carry

    def run(assignments, x, w):
        weights, blocks = Weights((w, w), w), (ExpertBlock(x, assignments),)
        return _for_each(experts, weights, blocks, add, jnp.zeros(()), jnp.zeros(()))

    program = str(
        jax.make_jaxpr(run)(assignments, jnp.zeros((8, 128)), jnp.zeros((held, 128, 128)))
    )
    assert len(calls) == 1 + loops
    assert ("while[" in program) == loops


@pytest.mark.slow
@pytest.mark.parametrize(
    ("experts", "k", "route", "mode"), [(8, 2, "zipf", "eager"), (4, 1, "one", "on_wait")]
)
def test_an_exchange_by_direct_copies(experts, k, route, mode):
    """Without a capacity, TPUs send as many rows as there are. With one choice of all rows, devices
    send none.
    """
    operands = drawn(4 * 128, experts, k, route)
    with split_pairs.session(mode=mode) as report:
        found, cotangent = both(4, operands, backend="exchange", kernel="reference")
        found = jax.tree.map(np.asarray, found)
    assert report.problems() == set()
    check(found, expected(operands, cotangent))


def test_an_exchange_of_a_part_of_every_expert_is_refused():
    message = (
        "backend='exchange' sends rows .*: got split='hidden', where .* every expert; use "
        "backend='xla'"
    )
    with pytest.raises(NotImplementedError, match=message):
        apply(*drawn(2 * ROWS, 4, 2, "even"), backend="exchange", split="hidden")


@pytest.mark.parametrize("options", [{"kernel": "grouped"}, {"backend": "pallas"}])
def test_kernels_need_tpus(options):
    with pytest.raises(NotImplementedError, match="TPU kernels"):
        apply(*drawn(2 * ROWS, 4, 2, "even"), **options)


def lowered(kernel, precision, gate=True):
    """Returns the traced program of a call on described TPUs, whose kernels are trusted."""
    operands = drawn(8 * 256, 8, 2, "even", features=128, hidden=128)
    if not gate:
        operands[3] = None
    op = functools.partial(fa.expert_mlp, axis_name="ring", kernel=kernel, precision=precision)
    mesh = fa.check.topology_mesh("v5e:2x4", (8,), ("ring",))
    with jax.set_mesh(mesh), trust.trusting("predicted"):
        mapped = jax.shard_map(op, in_specs=specs("experts"), out_specs=P("ring"))
        return str(jax.make_jaxpr(mapped)(*operands))


@pytest.mark.parametrize("precision", [None, "default", jax.lax.Precision.DEFAULT])
def test_kernels_multiply_with_the_default_precision_by_any_name(precision):
    assert "pallas_call" in lowered("grouped", precision)
    assert "pallas_call" in lowered(None, precision)


def test_kernels_have_no_other_precision_and_need_a_gate():
    assert "pallas_call" not in lowered(None, "highest")
    with pytest.raises(NotImplementedError, match="takes the default precision alone; use kernel"):
        lowered("grouped", "highest")
    with pytest.raises(NotImplementedError, match="takes a gate; use kernel='reference'"):
        lowered("grouped", None, gate=False)


def test_a_second_derivative_is_refused():
    x, *others = drawn(2 * ROWS, 4, 2, "even")
    apply = functools.partial(fa.expert_mlp, axis_name="ring")
    mesh = fa.make_mesh((1,), ("ring",), devices=jax.devices()[:1])
    with jax.set_mesh(mesh):
        fn = jax.shard_map(
            lambda x: jax.lax.psum(jnp.sum(apply(x, *others)), "ring"), in_specs=P(), out_specs=P()
        )
        second = jax.grad(lambda x: jnp.sum(jax.grad(fn)(x)))
        with pytest.raises(NotImplementedError, match="first derivative only"):
            jax.eval_shape(second, x)


def test_bfloat16_adds_in_float32():
    operands = drawn(4 * ROWS, 8, 4, "even")
    wide = apply(*operands, devices=4)
    half = [a if a.dtype == np.int32 else jnp.asarray(a, jnp.bfloat16) for a in operands]
    y = apply(*half, devices=4)
    assert y.dtype == jnp.bfloat16
    check(np.asarray(y, np.float32), wide, 2e-2)


@pytest.mark.slow  # simulated kernels take a minute
@pytest.mark.parametrize(
    ("backend", "route", "dtype"),
    [("none", "one", "bfloat16"), ("exchange", "zipf", "float32")],
)
def test_kernels_on_simulated_tpus(backend, route, dtype):
    """With one choice, and all for one expert, there are experts and a device that have no rows."""
    operands = drawn(2 * 32, 4, 1 if route == "one" else 2, route, features=128, hidden=128)
    cotangent = np.random.default_rng(9).standard_normal(operands[0].shape).astype(np.float32)
    wanted = expected(operands, cotangent)

    def fn(x, ids, weights, gate, up, down, cotangent):
        x, gate, up, down, cotangent = (a.astype(dtype) for a in (x, gate, up, down, cotangent))
        # of all rows; without one it is made of pairs
        options = {"capacity": 64} if backend == "exchange" else {}
        op = functools.partial(
            fa.expert_mlp,
            axis_name="ring",
            backend=backend,
            kernel="grouped",
            directions=2,
            **options,
        )
        y, pull = jax.vjp(lambda x, w, *k: op(x, ids, w, *k), x, weights, gate, up, down)
        return y, pull(cotangent)

    in_specs = (*specs("experts"), P("ring"))
    out_specs = (P("ring"), tuple(in_specs[i] for i in (0, 2, 3, 4, 5)))
    found = run(fn, (*operands, cotangent), in_specs, out_specs, shape=(2,))
    for got, want in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert_close(got, np.asarray(want), dtype)


def test_tiles_suit_the_rows_of_an_expert():
    assert [api._tile_rows(mean) for mean in (0, 1, 9, 100, 4096)] == [8, 8, 16, 128, 512]
