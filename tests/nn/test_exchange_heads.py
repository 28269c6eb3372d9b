"""Attention layers in which weights and heads travel, against plain layers and against those in
which rows travel.
"""

import re

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import flaxasync as fa
from flaxasync.nn.attention import exchange
from flaxasync.ops import trust
from flaxasync.ops.attention import exchanged
from flaxasync.transport import direct
from flaxasync.transport.transfers import Transfer, Transfers
from tests.nn.conftest import (
    ROWS,
    SAME,
    assert_alike,
    check_parity,
    drawn,
    gradients,
    make_mesh,
    ones,
)
from tests.nn.test_attention import pair
from tests.simulator.split_pairs import session

pytestmark = pytest.mark.usefixtures("quick_compile")


@pytest.mark.parametrize(
    ("heads", "kv_heads", "options", "form"),
    [
        (6, 3, {"backend": "xla", "gathered_bytes": 2**20}, {"size": 3}),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [
                (8, 4, {"use_bias": True, "backend": "none"}, {"size": 4}),
                (4, 4, {"gathered_bytes": 2**20}, {"size": 4, "dtype": "bfloat16"}),
                # heads that the axis does not divide
                (6, 2, {"backend": "none"}, {"size": 4}),
                (
                    8,
                    4,
                    {"backend": "none", "causal": False, "window": 3},
                    {"size": 4, "data": 2, "axis_type": AxisType.Auto},
                ),
                (4, 4, {}, {"size": 4, "dtype": "bfloat16"}),
                (16, 8, {"rope_theta": None, "backend": "xla"}, {"size": 8}),
            ]
        ),
    ],
)
def test_parity(heads, kv_heads, options, form):
    make, plain = pair(heads, kv_heads, exchange_heads=True, **options)
    check_parity(make, plain, (2, 3 * form["size"] if heads != 6 else 12, 8), **form)


def layers(exchange, *, features=8, **options):
    """Returns the same layer, with rows that travel and with heads that travel."""

    def make(exchange):
        return drawn(
            lambda: fa.nn.ParallelSelfAttention(
                features,
                8,
                kv_heads=4,
                head_dim=8,
                normalize_qk="rms",
                use_bias=True,
                exchange_heads=exchange,
                rngs=nnx.Rngs(0),
                **options,
            )
        )

    return make(False), make(exchange)


@pytest.mark.slow
def test_segments_and_the_norms_of_heads_are_those_of_rows_that_travel():
    rng = np.random.default_rng(0)
    with jax.set_mesh(make_mesh(1, 4)):
        x, dy = (
            jax.device_put(rng.standard_normal((2, 8, 8)).astype(np.float32), ROWS)
            for _ in range(2)
        )
        ids = jax.device_put(
            np.repeat([[3, 5], [1, 7]], 4, axis=1).astype(np.int32), P("data", None)
        )
        rows, heads = layers(True, backend="none")
        assert_alike(gradients(heads, x, dy, ids), gradients(rows, x, dy, ids))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backward", "weights", "options"),
    [
        (None, None, {"backend": "none"}),
        ("int8", "int8", {"backend": "xla"}),
        ("int8", "int8", {"backend": "none", "gathered_bytes": 2**20}),
    ],
)
def test_in_eight_bits_results_and_gradients_are_near_those_of_rows_that_travel(
    backward, weights, options
):
    rng = np.random.default_rng(0)
    with jax.set_mesh(make_mesh(1, 4)):
        x, dy = (
            jax.device_put(rng.standard_normal((3, 16, 64)).astype(np.float32), ROWS)
            for _ in range(2)
        )
        quantization = fa.Quantization("int8", backward, weights=weights)
        (rows, heads), (_, exact) = (
            layers(True, features=64, quantization=given, **options)
            for given in (quantization, None)
        )
        wants, plain = gradients(rows, x, dy), gradients(exact, x, dy)
        for got, want, other in zip(
            *map(jax.tree.leaves, (gradients(heads, x, dy), wants, plain)), strict=True
        ):
            largest = np.abs(want).max()
            assert np.abs(got - want).max() <= 3e-2 * largest
            assert np.abs(got - other).max() <= 5e-2 * largest
            # products are rounded
            assert got.ndim < 2 or np.abs(got - other).max() > 1e-4 * largest


@pytest.mark.slow
def test_direct_copies_in_the_simulator():
    """Four devices with race detection: three sequences, of which two are on their way at a
    time.
    """
    rng = np.random.default_rng(0)
    direct.all_to_all.cache_clear()
    with jax.set_mesh(make_mesh(1, 4)):
        x, dy = (
            jax.device_put(rng.standard_normal((3, 512, 8)).astype(np.float32), ROWS)
            for _ in range(2)
        )
        rows, heads = layers(True, gathered_bytes=2**20)
        want = jax.block_until_ready(gradients(rows, x, dy))
        with session(mode="eager", delayed={1: 0.02}) as report:
            got = jax.block_until_ready(gradients(heads, x, dy))
    assert report.problems() == set()
    assert direct.all_to_all.cache_info().currsize == 1, "nothing travelled by direct copies"
    assert_alike(got, want)


@pytest.mark.parametrize(("quantization", "itemsize"), [(None, 2), ("int8", 1)])
def test_weights_are_kept_if_they_fit_as_they_travel(quantization, itemsize, monkeypatch):
    kept = []

    def attended(block, xs, w, *others):
        kept.append(block.keep)
        return xs

    monkeypatch.setattr(exchange, "exchanged_attention", attended)
    weights = 4 * (8 + 2 * 4) * 8 // 4 * 64  # of all devices
    with jax.set_mesh(make_mesh(1, 4)):
        for limit in (weights * itemsize - 1, weights * itemsize):
            options = {"dtype": "bfloat16", "gathered_bytes": limit, "quantization": quantization}
            _, heads = layers(True, features=64, **options)
            jax.eval_shape(heads, ones((1, 16, 64), ROWS))
    assert kept == [False, True]


def test_an_empty_batch_gives_an_empty_result():
    with jax.set_mesh(make_mesh(1, 4)):
        _, heads = layers(True)
        assert heads(ones((0, 8, 8), ROWS)).shape == (0, 8, 8)


def test_a_second_derivative_through_direct_copies_is_refused_by_name():
    mesh = fa.check.topology_mesh("v6e:2x2", (1, 4), ("data", "model"))
    with jax.set_mesh(mesh):
        layer = nnx.eval_shape(lambda: fa.nn.ParallelSelfAttention(
            256, 8, head_dim=128, dtype="bfloat16", exchange_heads=True, rngs=nnx.Rngs(0)
        ))  # fmt: skip
        graph, state = nnx.split(layer)
        x = jax.ShapeDtypeStruct((2, 512, 256), "bfloat16", sharding=jax.NamedSharding(mesh, ROWS))

        def slope(x, state):
            return jax.grad(lambda x: (nnx.merge(graph, state)(x).astype("float32") ** 2).sum())(x)

        with pytest.raises(NotImplementedError, match="has a first derivative only"):
            jax.eval_shape(
                jax.grad(lambda x, state: slope(x, state).astype("float32").sum()), x, state
            )


@pytest.mark.slow
def test_a_result_that_is_used_before_it_has_arrived_is_caught(monkeypatch):
    """The negative test of the simulator's run: nothing waits for what this device's heads
    receive.
    """
    monkeypatch.setattr(
        exchanged.ExchangedAttention, "exchange", forgetful(exchanged.ExchangedAttention.exchange)
    )
    direct.all_to_all.cache_clear()
    with jax.set_mesh(make_mesh(1, 4)):
        _, heads = layers(True)
        x = ones((1, 512, 8), ROWS)
        with session(mode="eager", delayed={1: 0.2}) as report:
            jax.block_until_ready(nnx.jit(lambda layer, x: layer(x))(heads, x))
    assert {"races", "leftover_semaphores"} & report.problems()


def forgetful(exchange):
    def start(self, x):
        transfers = exchange(self, x)
        (begun,) = transfers.begun
        return Transfers([Transfer(begun.future.buffer)], transfers.scope)

    return start


@pytest.mark.parametrize(
    ("x_spec", "options", "more", "lacking"),
    [
        (SAME, {}, {}, "an input that every device has whole"),
        (ROWS, {}, {"mask": np.ones((8, 8), bool)}, "mask"),
        (ROWS, {}, {"bias": np.zeros((1, 1, 8, 8), np.float32)}, "bias"),
        (
            ROWS,
            {"preferred_element_type": "float32", "dtype": "bfloat16"},
            {},
            "a wider preferred_element_type",
        ),
    ],
)
def test_what_this_form_lacks_is_refused_by_name_or_left_to_rows(x_spec, options, more, lacking):
    with jax.set_mesh(make_mesh(1, 4)):
        x = ones((2, 8, 8), x_spec)

        def make(exchange):
            options_of = {"exchange_heads": exchange, **options}
            return drawn(lambda: fa.nn.ParallelSelfAttention(8, 4, rngs=nnx.Rngs(0), **options_of))

        y = nnx.eval_shape(lambda layer, x: layer(x, **more), make(None), x)
        assert y.shape == x.shape
        with pytest.raises(NotImplementedError, match=f"exchange_heads=True lacks .*{lacking}"):
            make(True)(x, **more)


@pytest.mark.slow
def test_the_compiled_exchange_is_safe_and_has_attention_beside_it():
    topology, size = "v5e:2x2", 4
    mesh = fa.check.topology_mesh(topology, (1, size), ("data", "model"))
    with jax.set_mesh(mesh):
        layer = nnx.eval_shape(
            lambda: fa.nn.ParallelSelfAttention(
                1024,
                16,
                kv_heads=8,
                head_dim=128,
                dtype="bfloat16",
                param_dtype="bfloat16",
                exchange_heads=True,
                rngs=nnx.Rngs(0),
            )
        )
        x = jax.ShapeDtypeStruct(
            (3, 2048, 1024), "bfloat16", sharding=jax.NamedSharding(mesh, ROWS)
        )
        graph, state = nnx.split(layer)
        loss = jax.grad(
            lambda state, x: nnx.merge(graph, state)(x).astype("float32").sum(), argnums=(0, 1)
        )
        program = fa.check.compile_for(
            topology, jax.jit(loss), state, x, compiler_options=fa.check.HLO_ONLY
        )
    audit = fa.check.audit(program)
    assert not [
        finding for finding in audit.findings if finding.severity == fa.check.Severity.ERROR
    ], str(audit)
    module = fa.check.parse(program.text)
    order = [i.name for i in module.entry.instructions]
    pairs = [
        op
        for op in fa.check.async_operations(module)
        if op.start.name.startswith("all_to_all_start")
    ]
    beside = []
    for op in pairs:
        for window in op.windows:
            inside = order[order.index(op.start.name) : order.index(window.done.name)]
            beside.append(sum(name.startswith("flash_attention") for name in inside))
    assert len(beside) == 2 * 2 * 3, "three sequences, there and back, forward and backward"
    assert beside.count(0) == 4, "the first arrivals and the last departures"
    began = {window.done.name: order.index(op.start.name) for op in pairs for window in op.windows}
    there = [began[name] for name in order if name in began]
    # forward and backward, in the order in which they are waited for
    for arrivals in (there[:3], there[6:9]):
        assert arrivals == sorted(arrivals)


def form(topology, batch, exchange=None):
    """Returns what exchanges the heads of a layer on described TPUs: "direct", "xla", or None where
    rows travel.
    """
    mesh = fa.check.topology_mesh(
        topology, (1, fa.check.topology_size(topology)), ("data", "model")
    )
    with jax.set_mesh(mesh):
        layer = nnx.eval_shape(lambda: fa.nn.ParallelSelfAttention(
            4096, 32, kv_heads=8, dtype="bfloat16", exchange_heads=exchange, rngs=nnx.Rngs(0)
        ))  # fmt: skip
        x = jax.ShapeDtypeStruct(
            (batch, 4096, 4096), "bfloat16", sharding=jax.NamedSharding(mesh, ROWS)
        )
        text = str(
            jax.make_jaxpr(lambda graph, state, x: nnx.merge(graph, state)(x), static_argnums=0)(
                *nnx.split(layer), x
            )
        )
    return (
        "direct"
        if "all_to_all_start" in text
        else "xla"
        if re.search(r"\ball_to_all\[", text)
        else None
    )


@pytest.mark.slow
def test_a_layer_chooses_what_is_predicted_to_be_faster_where_it_is_trusted():
    assert form("v6e:2x4", 4) == "direct"
    assert form("v5e:2x4", 1) is None
    with trust.trusting("verified"):
        assert form("v6e:2x4", 4) is None
        assert form("v6e:2x4", 4, exchange=True) == "direct"  # naming it always works
