"""The estimated timeline: against the one published time, and by hand on small texts."""

import collections
import itertools
import re

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from flaxasync.check import CHIPS, HLO_ONLY, audit, compile_for, parse, timeline, topology_mesh
from flaxasync.check.estimate import estimator
from flaxasync.check.estimate.costs import KernelTime, collective_seconds
from flaxasync.check.estimate.costs_of import costs_of
from flaxasync.check.estimate.phases import layer_of, part_of, phase_of
from tests.check import programs
from tests.check.hlo_texts import LOOP, changed, module

MIB = 1 << 20
PERMUTE = "source_target_pairs={{0,1},{1,2},{2,3},{3,0}}"
BACK = "source_target_pairs={{1,0},{2,1},{3,2},{0,3}}"
SHAPE = "f32[1048576]"  # 4 MiB: 93.2 us on a v5e link
PAIR = f"({SHAPE}, {SHAPE}, u32[], u32[])"
HOP = 4 * MIB / 45e9 + 1e-6


def program(*lines, partitions=4):
    return module(*lines, inputs=(SHAPE, SHAPE), partitions=partitions)


def work(name, cycles, operand="operand0"):
    config = f'backend_config={{"window_config":{{"estimated_cycles":"{cycles}"}}}}'
    return f"%{name} = {SHAPE} convolution(%{operand}, %operand1), dim_labels=b_i->b, {config}"


def permute(name, pairs=PERMUTE):
    return f"%{name} = {PAIR} collective-permute-start(%operand0), {pairs}"


def test_the_published_time():
    """12.05 ms were measured on v5e. An estimate that is off by more than 15 % would be of no
    use.
    """
    t = timeline(programs.mesh_matmul())
    assert t.seconds == pytest.approx(12.05e-3, rel=0.15)
    assert t.seconds == pytest.approx(12.34e-3, rel=0.01)  # what docs/check.md says
    assert (t.chip, len(t.devices)) == ("v5e", 4)
    assert re.search(r"(?s)1.5 GHz.*nothing was run.*measured programs? on v5e", str(t))
    assert t.compute + t.exposed == pytest.approx(t.seconds)


def test_devices_that_keep_their_block_wait_later():
    """Two devices of the 2x2 matmul have the rows that they need. At the all-reduce they wait for
    the other two.
    """
    t = timeline(programs.mesh_matmul())
    kept, fetched = t.devices[0], t.devices[1]
    assert fetched.causes["collective-permute-start"] > 5 * kept.causes["collective-permute-start"]
    assert kept.causes["all-reduce"] > 1.5 * fetched.causes["all-reduce"]
    assert kept.seconds == pytest.approx(fetched.seconds)


def test_hidden_and_exposed_transfers():
    for cycles, seconds, exposed in ((1_500_000, 1e-3, 0), (15_000, HOP, HOP - 1e-5)):
        t = timeline(
            program(
                permute("s"), work("c", cycles), f"ROOT %d = {SHAPE} collective-permute-done(%s)"
            ),
            "v5e",
        )
        assert (t.seconds, t.exposed) == (pytest.approx(seconds), pytest.approx(exposed))
        assert t.compute == pytest.approx(cycles / 1.5e9)


def test_two_directions_are_used_at_once_and_one_direction_by_one_transfer_at_a_time():
    dones = (
        f"%d = {SHAPE} collective-permute-done(%s)",
        f"ROOT %e = {SHAPE} collective-permute-done(%t)",
    )
    for second, hops in ((BACK, 1), (PERMUTE, 2)):
        text = program(permute("s"), permute("t", second), *dones)
        assert timeline(text, "v5e").seconds == pytest.approx(hops * HOP)


def test_synchronous_collectives_hold_everyone():
    text = program(f"ROOT %a = {SHAPE} all-reduce(%operand0), replica_groups=[1,4]<=[4]")
    t = timeline(text, "v5e")
    # in both directions of a ring of four
    assert t.exposed == pytest.approx(2 * 0.75 * 4 * MIB / 90e9, rel=0.1)
    assert t.compute == 0


def test_a_loop_is_its_body_times_its_trips():
    body = work("c", 15_000, "g").replace("%operand1", "%g").replace(SHAPE, "f32[65536]{0}")
    text = changed(LOOP, ("%c = f32[65536]{0} negate(%g)", body))
    t = timeline(text, "v5e")
    assert t.compute == pytest.approx(4 * 1e-5, rel=0.01)  # the counter goes 0, 3, 6, 9
    many = timeline(text.replace("constant(12)", "constant(3000)"), "v5e")
    assert many.compute == pytest.approx(1000 * 1e-5, rel=0.01)
    assert many.seconds == pytest.approx(many.compute)
    assert len(many.slices) < 50  # the iterations in the middle are repeated
    (loop,) = many.loops
    assert (loop.name, loop.depth, loop.trips) == ("w", 0, 1000)
    assert (loop.start, loop.end) == (0, pytest.approx(many.seconds))
    begin, end = loop.iteration
    assert end - begin == pytest.approx(1e-5, rel=0.01)
    assert any(s.kind == "compute" and begin <= s.start < end for s in many.slices)


def test_copies_take_the_compilers_estimate_or_the_time_of_their_bytes():
    config = 'backend_config={"window_config":{"estimated_cycles":"184512"}}'
    text = program(
        f"%c = f32[2048,2048]{{1,0:S(1)}} copy(%operand0), {config}",
        f"ROOT %n = {SHAPE} negate(%operand0)",
    )
    text = text.replace("f32[1048576] parameter(0)", "f32[2048,2048]{1,0:S(1)} parameter(0)")
    by_cycles, by_bytes = timeline(text, "v5e"), timeline(text, "v5e", copies="bytes")
    assert by_cycles.seconds - by_bytes.seconds == pytest.approx(
        (184512 - 2**24 / 2500) / 1.5e9, rel=1e-3
    )
    latency = CHIPS["v5e"].memory_latency
    simulated = timeline(text, "v5e", copies="simulated").seconds
    assert simulated == pytest.approx(by_bytes.seconds + latency), (
        "the copy is within vector memory, and the negation is not"
    )
    in_hbm = text.replace(":S(1)}", "}")
    by_bytes_in_hbm = timeline(in_hbm, "v5e", copies="bytes").seconds
    simulated_in_hbm = pytest.approx(by_bytes_in_hbm + 2 * latency)
    assert timeline(in_hbm, "v5e", copies="simulated").seconds == simulated_in_hbm
    transposed = in_hbm.replace("f32[2048,2048]{1,0} copy", "f32[2048,2048]{0,1} copy")
    assert timeline(transposed, "v5e", copies="simulated").seconds == simulated_in_hbm
    relaid = text.replace("f32[2048,2048]{1,0:S(1)} copy", "f32[2048,2048]{0,1:S(1)} copy")
    slower = timeline(relaid, "v5e", copies="simulated").seconds - simulated
    assert slower == pytest.approx(2**24 * (1 / 240 - 1 / 2500) / 1.5e9, rel=1e-3)
    assert "cycle estimates of matmuls and copies" in by_cycles.basis
    assert "cycle estimates of matmuls at" in by_bytes.basis


def test_a_link_is_named_by_where_most_of_a_permute_goes():
    """In two rings of four that send backwards, device 0 sends to 3, and most others to the device
    before them.
    """
    pairs = "source_target_pairs={{0,3},{1,0},{2,1},{3,2},{4,7},{5,4},{6,5},{7,6}}"
    t = timeline(
        program(
            permute("s", pairs), f"ROOT %d = {SHAPE} collective-permute-done(%s)", partitions=8
        ),
        "v5e",
    )
    assert [s.lane for s in t.slices if s.kind == "transfer"] == ["link -1"]


def test_transfers_that_a_loop_carries():
    """Each iteration of the staggered loop waits for the transfer that the iteration before
    started.
    """
    t = timeline(programs.async_form("value"))
    # the first hop and eight more
    assert t.exposed == pytest.approx(9 * (2 * MIB / 45e9 + 1e-6), rel=0.05)


def test_kernels_take_the_time_that_is_given():
    text = program(
        'ROOT %gemm.1 = f32[1048576] custom-call(%operand0), custom_call_target="tpu_custom_call"'
    )
    assert any("gemm.1" in note for note in timeline(text, "v5e").notes)
    estimate = (
        '{"custom_call_config":{"cost_estimate":{"flops":"394000000000","bytes_accessed":"1"}}}'
    )
    estimated = timeline(
        text.replace('"tpu_custom_call"', f'"tpu_custom_call", backend_config={estimate}'), "v5e"
    )
    assert estimated.seconds == pytest.approx(2e-3)  # at 197 TFLOP/s
    assert not estimated.notes[1:]
    given = timeline(text, "v5e", kernels={"gemm": 5e-3})
    assert given.seconds == pytest.approx(5e-3)
    assert not given.notes[1:]


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        (LOOP, {}, "chip must be given"),
        (LOOP, {"chip": "v4"}, "chip must be one of"),
        (
            LOOP.replace(", is_scheduled=true", ""),
            {"chip": "v5e"},
            "not scheduled.*compile it first",
        ),
        (LOOP, {"chip": "v5e", "copies": "guess"}, "copies must be"),
        (
            LOOP,
            {"chip": "v5e", "kernels": "play"},
            r"needs a program of flaxasync\.check\.compile_for: got str",
        ),
        (
            LOOP,
            {"chip": "v5e", "kernels": "played"},
            "kernels must be 'play', or seconds by name: got 'played'",
        ),
    ],
)
def test_bad_input(text, options, message):
    with pytest.raises(ValueError, match=message):
        timeline(text, **options)


@pytest.mark.parametrize(
    "topology",
    [
        "v5e:2x4",
        "tpu7x:2x2x1",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("v6e:2x4", "v5p:2x2x2")),
    ],
)
def test_slices_of_a_core_do_not_overlap(topology):
    t = timeline(programs.compiled(programs.scan_of_collectives, topology))
    assert t.chip == topology.partition(":")[0]
    assert (f"none measured on {t.chip}" in str(t)) == (t.chip == "tpu7x")
    core = sorted((s for s in t.slices if s.lane == "core"), key=lambda s: s.start)
    assert all(a.end <= b.start + 1e-12 for a, b in itertools.pairwise(core))
    assert core[-1].end == pytest.approx(t.seconds)


def test_a_collective_within_a_fusion_is_seen():
    """XLA writes a reduce-scatter as a fusion of an all-reduce and a slice."""
    t = timeline(programs.compiled(programs.reduce_scatter, "v5e:2x4", 1024))
    assert t.exposed > 0.5 * 1024 * 1024 * 2 * 7 / 8 / 90e9


def test_the_seconds_of_a_collective():
    v5e = CHIPS["v5e"]
    assert collective_seconds("all-gather", MIB, 2 * MIB, 2, v5e) == pytest.approx(
        MIB / 45e9 + 1e-6
    )
    assert collective_seconds("all-gather", MIB, 8 * MIB, 8, v5e) == pytest.approx(
        7 * MIB / 90e9 + 4e-6
    )
    gather = collective_seconds("all-gather", MIB, 8 * MIB, 8, v5e)
    scatter = collective_seconds("reduce-scatter", 8 * MIB, MIB, 8, v5e)
    assert collective_seconds("all-reduce", 8 * MIB, 8 * MIB, 8, v5e) == pytest.approx(
        gather + scatter
    )
    assert collective_seconds("all-reduce", MIB, MIB, 1, v5e) == 0
    assert collective_seconds("collective-permute", MIB, MIB, 8, v5e) == pytest.approx(
        MIB / 45e9 + 1e-6
    )


# As XLA prints programs for GPUs: a matmul of cuBLAS in a command buffer, beside an all-gather on a
# stream of its own.
BUFFER = """%command_buffer (a: bf16[4096,4096], b: bf16[4096,4096]) -> bf16[4096,4096] {
  %a = bf16[4096,4096]{1,0} parameter(0)
  %b = bf16[4096,4096]{1,0} parameter(1)
  %gemm = (bf16[4096,4096]{1,0}, s8[4194304]{0}) custom-call(%a, %b), custom_call_target="__cublas$gemm", \
backend_config={"operation_queue_id":"0","force_earliest_schedule":false,"gemm_backend_config":{"alpha_real":1}}
  ROOT %product = bf16[4096,4096]{1,0} get-tuple-element(%gemm), index=0
}
"""
GPU = module(
    "%start = (bf16[1024,4096]{1,0}, bf16[4096,4096]{1,0}) all-gather-start(%operand0), "
    "replica_groups=[1,4]<=[4], "
    "dimensions={0}, "
    'backend_config={"operation_queue_id":"0","collective_backend_config":{"is_sync":false}}',
    "%call = bf16[4096,4096]{1,0} call(%operand1, %operand1), to_apply=%command_buffer",
    "%done = bf16[4096,4096]{1,0} all-gather-done(%start)",
    "ROOT %t = (bf16[4096,4096]{1,0}, bf16[4096,4096]{1,0}) tuple(%done, %call)",
    wrapped=BUFFER,
    inputs=("bf16[1024,4096]{1,0}", "bf16[4096,4096]{1,0}"),
    partitions=4,
)


def test_a_program_for_gpus():
    """The window is a fact of the text: the command buffer runs while rows are gathered. The times
    are no GPU's.
    """
    report = audit(GPU, chip="v5e")
    assert report.ok
    assert "empty-window" not in report.codes()
    (pair,) = report.pairs
    assert (pair.kind, [w.instruction for w in pair.work]) == ("all-gather", ["call"])
    for notes in (report.notes, timeline(GPU, "v5e").notes):
        assert "this is a program for GPUs, whose times are not known" in notes[-1]
    call, done = (
        next(line for line in GPU.splitlines() if f" %{name} =" in line)
        for name in ("call", "done")
    )
    swapped = changed(GPU, (f"{call}\n{done}\n", f"{done}\n{call}\n"))
    (found,) = (f for f in audit(swapped).findings if f.code == "empty-window")
    assert "call" in found.message


NOTHING = GPU.replace("__cublas$gemm", "x").replace("operation_queue_id", "y")
# XLA also prints a matmul as a fusion for Triton, of which only the backend_config says so.
TRITON = NOTHING.replace(
    '"gemm_backend_config":{"alpha_real":1}', '"fusion_backend_config":{"kind":"__triton_gemm"}'
)


@pytest.mark.parametrize(("text", "noted"), [
    (GPU.replace("operation_queue_id", "y"), True),
    (GPU.replace("__cublas$gemm", "x"), True),
    (TRITON, True),
    (TRITON.replace("__triton_gemm", "__custom"), False),
    (NOTHING, False),
], ids=["cublas", "queue", "triton", "other", "nothing"])  # fmt: skip
def test_each_sign_of_a_gpu_is_enough(text, noted):
    assert any("GPU" in note for note in audit(text, chip="v5e").notes) == noted
    assert audit(text).chip == ("h100" if noted else "v5e")


def test_memory_of_the_host():
    mesh = topology_mesh("v5e:2x2", (4,), ("data",))
    on_device, on_host = (
        NamedSharding(mesh, P("data"), memory_kind=kind) for kind in ("device", "pinned_host")
    )
    x = jax.ShapeDtypeStruct((4096, 4096), jnp.float32, sharding=on_host)
    fn = jax.jit(lambda x: jnp.sin(jax.device_put(x, on_device)), out_shardings=on_device)
    program = compile_for("v5e:2x2", fn, x, compiler_options=HLO_ONLY)
    report = audit(program)
    assert report.ok
    timed = "1 transfer goes to or from the memory of the host: timed"
    assert f"{timed} at 15 GB/s of PCIe in each direction" in report.notes
    assert f"{timed} as within HBM, which is faster" in timeline(program, "tpu7x").notes
    (copied,) = (s for s in timeline(program).slices if s.kind == "copy")
    assert (copied.lane, copied.seconds) == ("from host", pytest.approx(4096 * 4096 * 4 / 4 / 15e9))


@pytest.mark.slow
def test_what_is_offloaded_travels_beside_the_layers():
    """Each layer sends 64 MiB to the host, and takes them back, on a lane of its own for each
    direction.
    """
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=["x"],
        offload_src="device",
        offload_dst="pinned_host",
    )

    def loss(kernels, x):
        def body(x, kernel):
            layer = jax.checkpoint(
                lambda x: x + jnp.tanh(checkpoint_name(x, "x") @ kernel), policy=policy
            )
            return layer(x), None

        return jnp.sum(jax.lax.scan(body, x, kernels)[0].astype(jnp.float32) ** 2)

    kernels = jax.ShapeDtypeStruct((4, 4096, 4096), jnp.bfloat16)
    program = compile_for(
        "v6e:1x1",
        jax.jit(jax.grad(loss)),
        kernels,
        jax.ShapeDtypeStruct((8192, 4096), jnp.bfloat16),
    )
    copies = [s for s in timeline(program).slices if s.lane in ("to host", "from host")]
    assert collections.Counter(s.lane for s in copies) == {"to host": 4, "from host": 4}
    assert {round(s.seconds * CHIPS["v6e"].host_bandwidth) for s in copies} == {2**26}


def test_a_text_without_cycles():
    assert any(
        "no cycle estimates" in note
        for note in audit(module("ROOT %a = f32[64] negate(%operand0)")).notes
    )


SQUARE = "f32[64,64]{1,0}"
DOT = "dot(%p, %p), lhs_contracting_dims={1}, rhs_contracting_dims={0}"
BRANCHES = f"""
%one (p: f32[64,64]) -> f32[64,64] {{
  %p = {SQUARE} parameter(0)
  ROOT %d = {SQUARE} {DOT}
}}

%two (p: f32[64,64]) -> f32[64,64] {{
  %p = {SQUARE} parameter(0)
  %c = {SQUARE} call(%p), to_apply=%one
  ROOT %d = {SQUARE} {DOT}
}}
"""
CALL = "call(%operand0), to_apply=%"
BRANCH = "conditional(%operand1, %operand0, %operand0), true_computation=%one, false_computation=%"


@pytest.mark.parametrize(
    ("lines", "products", "runs"),
    [
        ([f"ROOT %a = {SQUARE} {CALL}one"], 1, {"one": 1}),
        ([f"%a = {SQUARE} {CALL}one", f"ROOT %b = {SQUARE} {CALL}one"], 2, {"one": 2}),
        ([f"%a = {SQUARE} {CALL}two", f"ROOT %b = {SQUARE} {CALL}one"], 3, {"two": 1, "one": 2}),
        ([f"%a = {SQUARE} {CALL}two", f"ROOT %b = {SQUARE} {CALL}two"], 4, {"two": 2, "one": 2}),
        # a branch may run, and one of them does
        ([f"ROOT %a = {SQUARE} {BRANCH}two"], 2, {"one": 2, "two": 1}),
    ],
)
def test_each_call_and_the_longest_branch_count(lines, products, runs):
    text = module(*lines, wrapped=BRANCHES, inputs=(SQUARE, "pred[]"))
    costs = costs_of(parse(text), "v5e")
    assert costs.runs == {"e": 1} | runs
    one = costs.total_seconds(costs.module.computations["one"])
    found = timeline(text, "v5e")
    assert found.seconds == pytest.approx(products * one)
    assert found.flops == products * 2 * 64**3


PATHS = {
    "transpose(jvp())/while/body/shard_map/all_gather_matmul_dx/window/dot": (
        "backward",
        "all_gather_matmul_dx",
    ),
    "transpose(jvp())/checkpoint/rematted_computation/shard_map/gemm/dot": (
        "forward again",
        "gemm",
    ),
    "jvp()/while/body/eval_jaxpr/shard_map/ring_attention/dot_general": (
        "forward",
        "ring_attention",
    ),
    "jvp()/shard_map/mul": ("forward", ""),
    "optimizer/mul": ("optimizer", ""),
}


def test_operations_and_layers_are_named_by_their_paths():
    found = {
        path: (phase_of(f"jit(_train_step)/{path}"), part_of(f"jit(_train_step)/{path}"))
        for path in PATHS
    }
    assert found == PATHS
    assert phase_of("") == ""
    path = "while/body/attention/shard_map/all_gather_matmul_dx/ppermute"
    for around, decoder in (
        ("jvp()", ""),
        ("transpose(jvp())", ""),
        ("transpose(jvp(while))", ""),
        ("jvp(decoder)", "decoder/"),
        ("transpose(jvp(decoder))", "decoder/"),
    ):
        layer = f"{decoder}attention/all_gather_matmul_dx"
        assert layer_of(f"jit(step)/{around}/{path}") == layer
    assert layer_of("") == ""


def test_a_simulated_kernel_waits_for_the_copies_that_began_before_it():
    """One transfer after the other passes HBM: a copy to vector memory once, and the first block
    of the kernel after it.
    """
    kernel = 'custom-call({}), custom_call_target="tpu_custom_call"'
    in_vmem = f"{SHAPE}{{0:S(1)}}"
    text = program(
        f"%copy-start = ({in_vmem}, {SHAPE}, u32[]) copy-start(%operand0)",
        f"%k = {SHAPE} {kernel.format('%operand0')}",
        f"%copy-done = {in_vmem} copy-done(%copy-start)",
        f"ROOT %l = {SHAPE} {kernel.format('%copy-done')}",
    )
    played = {"k": KernelTime(2e-5, 0.0), "l": KernelTime(1e-5, 0.0)}
    found = estimator.timeline(text, "v5e", copies="simulated", played=played)
    copied = 4 * 2**20 / (CHIPS["v5e"].hbm_bandwidth * CHIPS["v5e"].hbm_efficiency)
    assert found.seconds == pytest.approx(copied + 3e-5), "the other one reads vector memory"
    assert found.slowest.causes == {"copy-start": pytest.approx(copied)}
    assert found.slowest.memory == pytest.approx(copied)
