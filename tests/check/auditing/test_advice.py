"""What the audit advises about a collective that holds the chip, and the gain that it predicts."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from flaxasync.check import audit, compile_for, parse
from flaxasync.check.auditing.advice import OFFLOAD_FLAGS, RING_FLAGS
from flaxasync.check.auditing.contraction import partial_sum_bytes
from flaxasync.hardware import chip

ADD = """
%add (a: bf16[], b: bf16[]) -> bf16[] {
  %a = bf16[] parameter(0)
  %b = bf16[] parameter(1)
  ROOT %s = bf16[] add(%a, %b)
}
"""
HEAD = "HloModule m, is_scheduled=true, num_partitions=4\n" + ADD
CYCLES = 'backend_config={"window_config":{"estimated_cycles":"%d"}}'
GROUPS = "replica_groups=[1,4]<=[4]"
DOT = "lhs_contracting_dims={1}, rhs_contracting_dims={0}"
BODY = """
ENTRY %e {
  %x = bf16[2048,4096]{1,0} parameter(0)
  %w = bf16[4096,4096]{1,0} parameter(1)
"""
GATHERED = (
    HEAD
    + BODY
    + f"""
  %g = bf16[8192,4096]{{1,0}} all-gather(%x), dimensions={{0}}, {GROUPS}
  %c = bf16[8192,4096]{{1,0}} copy(%g), {CYCLES % 1}
  ROOT %y = bf16[8192,4096]{{1,0}} dot(%c, %w), {DOT}, {CYCLES % 3_000_000}
}}
"""
)
# The product is summed over the devices. A backward pass computes both again, and %z needs the product's operand.
SUMMED = (
    HEAD
    + BODY
    + f"""
  %n = bf16[2048,4096]{{1,0}} negate(%x)
  %p = bf16[2048,4096]{{1,0}} dot(%n, %w), {DOT}, {CYCLES % 900_000}
  %r = bf16[512,4096]{{1,0}} reduce-scatter(%p), dimensions={{0}}, {GROUPS}, to_apply=%add, SCOPE
  %z = bf16[2048,4096]{{1,0}} exponential(%n)
  ROOT %t = (bf16[512,4096]{{1,0}}, bf16[2048,4096]{{1,0}}) tuple(%r, %z)
}}
"""
)
RECOMPUTED = SUMMED.replace("SCOPE", 'metadata={op_name="jit(f)/checkpoint/rematted_computation/dot_general"}')
ONCE = SUMMED.replace("SCOPE", 'metadata={op_name="jit(f)/dot_general"}')


def finding_of(text, name="v5e", code="synchronous-collective"):
    (found,) = (f for f in audit(text, chip=name).findings if f.code == code)
    return found


def gather_seconds(name="v5e"):
    return (3 / 4 * 8192 * 4096 * 2) / (2 * chip(name).link_bandwidth) + 2 * chip(name).hop_latency


def test_a_gather_before_a_matmul_becomes_a_ring():
    """The matmul takes 2 ms and the gather 0.56 ms, so that the ring takes as long as the matmul alone."""
    found = finding_of(GATHERED)
    assert found.gain == pytest.approx(gather_seconds(), rel=1e-3)
    for named in ("while y multiplies", RING_FLAGS["all-gather"], "flaxasync.all_gather_matmul"):
        assert named in str(found)
    assert "gain 0.561 ms in a run, predicted" in str(found)


def test_a_ring_that_the_links_limit_gains_less():
    """The matmul takes 0.2 ms, and a quarter of it is all that the ring adds to the gather."""
    found = finding_of(GATHERED.replace("3000000", "300000"))
    assert found.gain == pytest.approx(0.75 * 300_000 / chip("v5e").clock, rel=1e-3)


def summed_over_gathered():
    """Returns GATHERED with another gather, of the dimension over which the matmul sums."""
    return GATHERED.replace("bf16[2048,4096]", "bf16[8192,1024]").replace(
        "(%x), dimensions={0}", "(%x), dimensions={1}"
    )


def test_a_ring_of_the_dimension_that_is_summed_over_adds_up_partial_sums():
    """A ring of four writes and reads three partial sums of 64 MiB more. On v5e this takes longer than the gather."""
    found, v5p = finding_of(summed_over_gathered(), "v5p"), chip("v5p")
    sums = 3 * 2 * 8192 * 4096 * 2 / (v5p.hbm_bandwidth * v5p.hbm_efficiency)
    assert found.gain == pytest.approx(gather_seconds("v5p") - sums, rel=1e-3)
    assert "while y multiplies others" in found.remedy
    assert finding_of(summed_over_gathered()).gain == 0


@pytest.mark.parametrize(
    ("labels", "window", "summed"),
    [("0bf_io0->0bf", "1", True), ("0fb_io0->0bf", "1", False), ("bf0_io0->bf0", "4096", True), ("", "1", False)],
)
def test_partial_sums_of_a_convolution_in_a_fusion(labels, window, summed):
    """XLA for TPU prints a matmul as a convolution in a fusion. The array reaches it through a fusion of a bitcast."""
    text = f"""HloModule m, is_scheduled=true, num_partitions=4
%bitcasted (p: bf16[8,1024,4096]) -> bf16[8,1024,4096] {{
  %p = bf16[8,1024,4096] parameter(0)
  ROOT %b = bf16[8,1024,4096] bitcast(%p)
}}
%fused (v: bf16[4096,3584,1], q: bf16[8,1024,4096]) -> bf16[8,1024,3584] {{
  %v = bf16[4096,3584,1] parameter(0)
  %q = bf16[8,1024,4096] parameter(1)
  %f = bf16[8,1024,4096] fusion(%q), kind=kLoop, calls=%bitcasted
  ROOT %c = bf16[8,1024,3584] convolution(%f, %v), window={{size={window}}}, dim_labels={labels}
}}
ENTRY %e {{
  %x = bf16[8,1024,1024] parameter(0)
  %w = bf16[4096,3584,1] parameter(1)
  %g = bf16[8,1024,4096] all-gather(%x), dimensions={{2}}, {GROUPS}
  ROOT %y = bf16[8,1024,3584] fusion(%w, %g), kind=kOutput, calls=%fused
}}
"""
    module = parse(text)
    gather, matmul = (module.entry.by_name[name] for name in ("g", "y"))
    expected = 8 * 1024 * 3584 * 2 if summed else 0
    assert partial_sum_bytes(module, module.entry, matmul, gather, 2) == expected


def test_a_matmul_hides_half_of_the_all_reduce_after_it():
    """The matmul takes longer than the reduce-scatter; the gather that follows has nothing to hide behind."""
    text = ONCE.replace("bf16[512,4096]", "bf16[2048,4096]").replace(
        "reduce-scatter(%p), dimensions={0}", "all-reduce(%p)"
    )
    found, v5e = finding_of(text), chip("v5e")
    transfer = 2 * (3 / 4 * 2048 * 4096 * 2) / (2 * v5e.link_bandwidth)
    assert found.gain == pytest.approx(transfer / 2, rel=0.05)  # beside the latency of hops
    assert "flaxasync.matmul_all_reduce does it" in found.remedy


def test_a_program_that_uses_this_package_is_not_told_to_use_it():
    tables = 'FileNames\n1 "/site-packages/flaxasync/ops/matmul/ring.py"\n\n'
    found = finding_of(GATHERED.replace("%add (a", tables + "%add (a", 1))
    assert "flaxasync.all_gather_matmul" not in found.remedy
    assert "backend='xla'" in found.remedy


def test_what_a_backward_pass_computes_again_can_be_saved():
    """The gain is the matmul and the reduce-scatter, and not %n, which %z needs, less the traffic of the result."""
    found, v5e = finding_of(RECOMPUTED), chip("v5e")
    result, operand = 512 * 4096 * 2, 2048 * 4096 * 2
    scatter = (3 / 4 * operand) / (2 * v5e.link_bandwidth) + 2 * v5e.hop_latency
    traffic = 4 * result / (v5e.hbm_bandwidth * v5e.hbm_efficiency)
    assert found.gain == pytest.approx(900_000 / v5e.clock + scatter - traffic, rel=1e-3)
    assert "save_only_these_names" in found.remedy
    assert "4 MiB of memory in each layer" in found.remedy


def test_what_is_computed_once_is_not_saved():
    found = finding_of(ONCE)
    assert "save_only_these_names" not in found.remedy
    assert "flaxasync.matmul_reduce_scatter" in found.remedy


def test_a_collective_without_a_matmul():
    """On v6e a flag of XLA moves it to the SparseCore, beside %work; on v5e there is no such flag."""
    text = (
        HEAD
        + BODY
        + f"""
  %r = bf16[2048,4096]{{1,0}} all-reduce(%x), {GROUPS}, to_apply=%add
  %work = bf16[4096,4096]{{1,0}} exponential(%w)
  ROOT %t = (bf16[2048,4096]{{1,0}}, bf16[4096,4096]{{1,0}}) tuple(%r, %work)
}}
"""
    )
    on_v6e, on_v5e = finding_of(text, "v6e"), finding_of(text)
    assert OFFLOAD_FLAGS["all-reduce"] in on_v6e.remedy
    assert "no XLA flag is known on v5e" in on_v5e.remedy
    v6e = chip("v6e")
    assert on_v6e.gain == pytest.approx(2 * 4096 * 4096 * 2 / (v6e.hbm_bandwidth * v6e.hbm_efficiency), rel=1e-3)
    assert "beside work" in on_v6e.remedy


def test_an_empty_window_names_the_longest_work_that_could_move_in():
    start = "(bf16[2048,4096]{1,0}, bf16[2048,4096]{1,0}, u32[], u32[]) collective-permute-start(%x), "
    text = (
        HEAD
        + BODY
        + f"""
  %short = bf16[2048,4096]{{1,0}} negate(%x)
  %long = bf16[4096,4096]{{1,0}} exponential(%w), metadata={{source_file="model.py" source_line=12}}
  %start = {start}source_target_pairs={{{{0,1}},{{1,2}},{{2,3}},{{3,0}}}}
  %done = bf16[2048,4096]{{1,0}} collective-permute-done(%start)
  ROOT %t = (bf16[2048,4096]{{1,0}}, bf16[4096,4096]{{1,0}}, bf16[2048,4096]{{1,0}}) tuple(%short, %long, %done)
}}
"""
    )
    found = finding_of(text, code="empty-window")
    assert "long (101 us, model.py:12) could run inside" in found.message
    v5e = chip("v5e")
    work = (2 * 2048 + 2 * 4096) * 4096 * 2 / (v5e.hbm_bandwidth * v5e.hbm_efficiency)
    assert found.gain == pytest.approx(work, rel=1e-3)


ALL_REDUCE = "all-reduce(%v), replica_groups=[1,4]<=[4], to_apply=%add"
CALLS = f"""
%deep (v: bf16[4096,4096]) -> bf16[4096,4096] {{
  %v = bf16[4096,4096]{{1,0}} parameter(0)
  ROOT %sum = bf16[4096,4096]{{1,0}} {ALL_REDUCE}
}}

%called (v: bf16[4096,4096]) -> bf16[4096,4096] {{
  %v = bf16[4096,4096]{{1,0}} parameter(0)
  %started = bf16[4096,4096]{{1,0}} OPERATION
  %done = bf16[4096,4096]{{1,0}} ENDED(%started)
  ROOT %exp = bf16[4096,4096]{{1,0}} exponential(%done)
}}
{BODY}
  %start = (bf16[2048,4096]{{1,0}}, bf16[2048,4096]{{1,0}}, u32[], u32[]) collective-permute-start(%x), \
source_target_pairs={{{{0,1}},{{1,2}},{{2,3}},{{3,0}}}}
  %done = bf16[2048,4096]{{1,0}} collective-permute-done(%start)
  %own = bf16[4096,4096]{{1,0}} call(%w), to_apply=%called
  ROOT %t = (bf16[4096,4096]{{1,0}}, bf16[2048,4096]{{1,0}}) tuple(%own, %done)
}}
"""


@pytest.mark.parametrize(
    ("operation", "ended", "code"),
    [
        ("negate(%v)", "copy", "empty-window"),
        (ALL_REDUCE, "copy", "serialised"),
        (ALL_REDUCE.replace("(%v)", "-start(%v)"), "all-reduce-done", "serialised"),
        ("call(%v), to_apply=%deep", "copy", "serialised"),
    ],
    ids=["work", "collective", "start", "nested"],
)
def test_a_call_is_independent_work_unless_it_contains_a_collective(operation, ended, code):
    """The window of a permute is empty, and there is a call that does not depend on it."""
    found = audit(HEAD + CALLS.replace("OPERATION", operation).replace("ENDED", ended), chip="v5e").findings
    (permute,) = (f for f in found if f.instruction == "start")
    assert permute.code == code


def test_the_gain_counts_every_iteration_and_orders_the_findings():
    body = """
%body (p: (s32[], bf16[2048,4096])) -> (s32[], bf16[2048,4096]) {
  %p = (s32[], bf16[2048,4096]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one)
  %v = bf16[2048,4096]{1,0} get-tuple-element(%p), index=1
  %own = bf16[2048,4096]{1,0} exponential(%v)
  %looped = bf16[2048,4096]{1,0} all-reduce(%v), replica_groups=[1,4]<=[4], to_apply=%add
  %both = bf16[2048,4096]{1,0} add(%own, %looped)
  ROOT %t = (s32[], bf16[2048,4096]{1,0}) tuple(%next, %both)
}

%more (p: (s32[], bf16[2048,4096])) -> pred[] {
  %p = (s32[], bf16[2048,4096]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %n = s32[] constant(8)
  ROOT %lt = pred[] compare(%i, %n), direction=LT
}

ENTRY %e {
  %x = bf16[2048,4096]{1,0} parameter(0)
  %zero = s32[] constant(0)
  %once = bf16[2048,4096]{1,0} all-reduce(%x), replica_groups=[1,4]<=[4], to_apply=%add
  %own = bf16[2048,4096]{1,0} exponential(%x)
  %t = (s32[], bf16[2048,4096]{1,0}) tuple(%zero, %own)
  %w = (s32[], bf16[2048,4096]{1,0}) while(%t), condition=%more, body=%body
  %out = bf16[2048,4096]{1,0} get-tuple-element(%w), index=1
  ROOT %r = bf16[2048,4096]{1,0} add(%out, %once)
}
"""
    looped, once = (f for f in audit(HEAD + body, chip="v5e").findings if f.code == "synchronous-collective")
    assert (looped.instruction, looped.count) == ("looped", 8)
    assert (once.instruction, once.count) == ("once", 1)
    own = 2 * 2048 * 4096 * 2 / (chip("v5e").hbm_bandwidth * chip("v5e").hbm_efficiency)
    assert looped.gain == pytest.approx(8 * own, rel=1e-3)
    assert "gain" in dataclasses.asdict(looped)


@pytest.mark.slow
@pytest.mark.parametrize("flag", [*RING_FLAGS.values(), *OFFLOAD_FLAGS.values()])
def test_libtpu_knows_the_flags(flag):
    name, _, value = flag.partition("=")
    x = jax.ShapeDtypeStruct((8, 128), jnp.float32)
    assert compile_for("v5e:1x1", lambda x: x + 1, x, compiler_options={name: value}).as_text()


@pytest.mark.slow
def test_libtpu_refuses_a_flag_that_it_does_not_know():
    x = jax.ShapeDtypeStruct((8, 128), jnp.float32)
    with pytest.raises(RuntimeError, match="No such compile option"):
        compile_for("v5e:1x1", lambda x: x + 1, x, compiler_options={"xla_tpu_no_such_flag": "true"})
