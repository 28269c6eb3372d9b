"""XLA's own loops, collectives and fusions: which run from their bundles, which are modelled, and
which are refused.
"""

import ast
import functools
import json
import re

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks import tp_mlp
from benchmarks.player_layers import estimated
from benchmarks.programs import SYNCHRONOUS, array, play_program
from flaxasync.check import CHIPS, parse, timeline, topology_devices, topology_mesh, topology_size
from flaxasync.check.auditing.advice import OFFLOAD_FLAGS
from flaxasync.check.player import (
    PlayerError,
    UnsimulatedError,
    collectives,
    play,
    played_chip,
    transfers,
)
from tests.check.programs import assert_times_add_up, play_shards, sent_bytes


@pytest.mark.parametrize(
    "topology",
    [
        "v5e:2x2",
        "v5p:2x2x1",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("v6e:2x4", "tpu7x:2x2x1")),
    ],
)
def test_a_while_loop_of_permutes(topology):
    size, iterations = topology_size(topology), 5

    def local(x, w):
        def step(x, _):
            return lax.ppermute(
                jnp.tanh(x @ w), "x", [(i, (i + 1) % size) for i in range(size)]
            ), None

        return lax.scan(step, x, None, length=iterations)[0]

    result = play_shards(
        topology, local, (P("x", None), P()), P("x", None), (256 * size, 256), (256, 256)
    )
    assert_times_add_up(result)
    starts, dones = (result.slowest.phase(f"collective-permute-{end}") for end in ("start", "done"))
    assert (starts.runs, dones.runs, dones.depth) == (iterations, iterations, 1)
    assert sent_bytes(result) == [iterations * 256 * 256 * 2] * size
    assert bool(result.notes) == (topology == "v5p:2x2x1")  # of its two cores, one is simulated
    assert ("assumed" in result.known_error) == (topology != "v5e:2x2")


def test_collectives_without_tables_run_from_their_bundles_and_others_are_marked():
    def local(x):
        return lax.all_to_all(x, "x", 1, 0, tiled=True), lax.all_gather(x, "x", tiled=True)

    result = play_shards("v5e:2x2", local, (P("x", None),), (P("x", None), P()), (1024, 512))
    assert not result.slowest.phase("all_to_all").analytic
    assert result.slowest.phase("all-gather").analytic
    assert any("ring model" in note and "all-gather" in note for note in result.notes)
    ring = 3 * 256 * 512 * 2 / (2 * played_chip("v5e").link)
    assert ring < result.slowest.phase("all-gather").waits["collective"] < 3 * ring  # it adds hops


@pytest.mark.parametrize(
    ("topology", "rows"), [("v5e:2x2", 1), pytest.param("v6e:2x4", 64, marks=pytest.mark.slow)]
)
def test_an_all_reduce_of_few_rows_runs_from_its_bundles(topology, rows):
    """Its table of ring neighbours is reconstructed. The bundles themselves halt if the ring does
    not close.
    """
    size = topology_size(topology)
    result = play_shards(
        topology, lambda x: lax.psum(x, "x"), (P("x", None),), P(), (rows * size, 4096)
    )
    assert_times_add_up(result)
    phase = result.slowest.phase("psum")
    assert not phase.analytic
    assert not result.notes
    # one row is gathered by all, more are reduced, then gathered
    hops = size // 2 if rows == 1 else 2 * (size // 2)
    latencies = (hops + 1) * 1e-6  # with that of the barrier
    assert (
        latencies < phase.seconds < 2 * latencies + 2 * rows * 4096 * 2 / played_chip(topology).link
    )


def test_the_table_of_another_order_of_the_ring_is_noticed(monkeypatch):
    """Negative test: a table whose ring leaves out a chip."""

    def without_third(*known):
        table = collectives.table_of(*known)
        if table is not None:
            table[1] = table[4 * table[1] + 1]  # of chip 0: the next chip but one
        return table

    monkeypatch.setattr(transfers, "table_of", without_third)
    with pytest.raises(PlayerError, match="Group didn't close"):
        play_shards("v5e:2x2", lambda x: lax.psum(x, "x"), (P("x", None),), P(), (4, 4096))


def gather_beside_a_matmul(options):
    def local(x, w, v):
        return v @ w, lax.all_gather(x, "x", tiled=True) @ w

    rows, columns = P("x"), P(None, "x")
    shapes = ((1024, 512), (512, 4096), (1024, 512))
    return play_shards(
        "v5e:2x2", local, (rows, columns, rows), (rows, columns), *shapes, compiler_options=options
    )


def refusal_of(gather, options=None) -> str:
    with pytest.raises(UnsimulatedError) as caught:
        gather(options)
    return str(caught.value)


def test_of_an_asynchronous_collective_there_is_an_estimate_and_the_option_that_makes_it_synchronous():
    refusal = refusal_of(gather_beside_a_matmul)
    assert "asynchronous all-gather of XLA reads a table" in refusal
    assert f"compiler_options={json.dumps(SYNCHRONOUS)}" in refusal
    own_rows, gathered_rows = 256, 1024
    products = 2 * (own_rows + gathered_rows) * 512 * 1024 / CHIPS["v5e"].flops
    estimate = re.search(r"From its text alone, it is estimated at (\d\.\d{3}) ms", refusal)
    assert products < float(estimate[1]) / 1e3 < 10 * products


@pytest.mark.slow
def test_the_option_makes_it_synchronous():
    result = gather_beside_a_matmul(SYNCHRONOUS)
    assert [p.analytic for p in result.slowest.phases if "all" in p.name] == [True]


@pytest.mark.slow
def test_the_refusal_of_a_sparse_core_names_the_options_with_which_it_can_be_simulated():
    def gather(options):
        local = functools.partial(lax.all_gather, axis_name="x", tiled=True)
        return play_shards(
            "tpu7x:2x2x1", local, (P("x"),), P(), (8192, 1024), compiler_options=options
        )

    refusal = refusal_of(gather)
    assert "drives a SparseCore, which the player does not model" in refusal
    options = ast.literal_eval(re.search(r"compiler_options=({.*?})", refusal)[1])
    assert options == {flag.removesuffix("=true"): "false" for flag in OFFLOAD_FLAGS.values()}
    assert gather(options).seconds > 0


@pytest.mark.slow
def test_xlas_windowed_einsum_on_v6e():
    mesh, rows = topology_mesh("v6e:2x4", (8,), ("x",)), P("x", None)
    arguments = (
        array((16384, 256), mesh, rows),
        array((256, 512), mesh, P(None, "x")),
        array((512, 256), mesh, rows),
    )
    fn = jax.jit(lambda x, a, b: jax.nn.relu(x @ a) @ b, out_shardings=NamedSharding(mesh, rows))
    result = play(fn, *arguments, topology="v6e:2x4")
    assert_times_add_up(result)
    loops = [p for p in result.slowest.phases if p.name.startswith("while")]
    permutes = [
        p
        for p in result.slowest.phases
        if p.name.startswith("collective-permute-start") and p.depth == 1
    ]
    assert len(loops) == 2
    assert all(p.runs > 1 for p in permutes)
    assert min(sent_bytes(result)) == max(sent_bytes(result)) > 0
    assert not any("ring model" in note for note in result.notes)


def play_mlp(topology, backend, shape):
    mesh = tp_mlp.ring(topology_devices(topology), backend)
    with jax.set_mesh(mesh):
        fn, arguments = tp_mlp.program(backend, shape, mesh, backward=False)
        return play_program(topology, fn, *arguments)


@pytest.mark.parametrize(
    ("topology", "backend"),
    [
        ("v5e:2x2", "pallas"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [
                ("v5e:2x4", "xla"),
                ("v5e:2x4", "none"),
            ]
        ),
    ],
)
def test_an_mlp_runs_to_the_end(topology, backend):
    shape = tp_mlp.Shape(batch=2, sequence=1024, model=512, hidden=1024)
    result, _ = play_mlp(topology, backend, shape)
    assert_times_add_up(result)
    moved = sum(
        size for kind, size in result.bytes.items() if "remote" in kind or "ring model" in kind
    )
    # Each shard of the activations visits every other device, once on the way in and once on the
    # way out.
    assert (
        moved == 2 * (topology_size(topology) - 1) * shape.batch * shape.sequence * shape.model * 2
    )
    analytic = [p.name for p in result.slowest.phases if p.analytic]
    assert len(analytic) == (2 if backend == "none" else 0)
    assert all(any(name in note for note in result.notes) for name in analytic)


@pytest.mark.slow
def test_large_matmuls_of_a_layer_agree_with_the_compilers_estimate():
    """estimated_cycles is up to 9 % above the measured time of a large matmul fusion."""
    shape = tp_mlp.Shape(batch=2, sequence=2048, model=2048, hidden=8192)
    up, down = (e for e in estimated(*play_mlp("v5e:2x2", "none", shape)) if e.kind == "matmul")
    assert 0.9 < up.ratio < 1.02
    assert 0.9 < down.ratio < 1.02


@pytest.mark.parametrize("topology", ["v5e:1x1", pytest.param("v6e:1x1", marks=pytest.mark.slow)])
def test_a_transposing_copy_within_hbm_takes_the_time_of_its_bytes(topology):
    x = array((64, 1024, 4096), topology_mesh(topology, (1,), ("x",)), P())
    result, program = play_program(topology, jax.jit(lambda x: x.swapaxes(1, 2)), x)
    assert [i.opcode for i in parse(program.text).entry.instructions] == [
        "parameter",
        "copy",
        "bitcast",
    ]
    assert result.seconds == pytest.approx(timeline(program, copies="simulated").seconds, rel=0.03)
    assert result.seconds < timeline(program).seconds / 2


def test_passes_over_hbm_take_half_of_the_compilers_estimates():
    """estimated_cycles is up to twice the measured time of a plain copy or pass."""
    mesh = topology_mesh("v5e:1x1", (1,), ("x",))
    fn = jax.jit(lambda x: jnp.tanh(x) + 1)
    (found,) = estimated(*play_program("v5e:1x1", fn, array((4096, 4096), mesh, P())))
    assert found.kind == "passes"
    assert 0.45 < found.ratio < 0.55
