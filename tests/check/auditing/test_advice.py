"""What the audit advises about a collective that holds the chip, and the gain that it predicts."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from flaxasync.check import audit, compile_for, parse
from flaxasync.check.auditing.advice import OFFLOAD_FLAGS, partial_sum_bytes
from flaxasync.hardware import chip
from tests.check.hlo_texts import ADD, LOOP, changed, module

V5E = chip("v5e")
ROWS, WEIGHT = "bf16[2048,4096]{1,0}", "bf16[4096,4096]{1,0}"
GROUPS = "replica_groups=[1,4]<=[4]"
DOT = "lhs_contracting_dims={1}, rhs_contracting_dims={0}"


def program(*lines, wrapped=""):
    """Returns a program of four devices with the operands bf16[2048,4096] and bf16[4096,4096]."""
    return module(
        *lines, wrapped=ADD.replace("f32", "bf16") + wrapped, inputs=(ROWS, WEIGHT), partitions=4
    )


def cycles(count):
    return f'backend_config={{"window_config":{{"estimated_cycles":"{count}"}}}}'


def finding_of(text, name="v5e", code="synchronous-collective"):
    (found,) = (f for f in audit(text, chip=name).findings if f.code == code)
    return found


def on_links(size, of=V5E):
    """Returns the seconds in which a ring of four gathers or reduce-scatters arrays of a size, in
    both directions.
    """
    return 3 / 4 * size / (2 * of.link_bandwidth) + 2 * of.hop_latency


def in_memory(size, of=V5E):
    return size / (of.hbm_bandwidth * of.hbm_efficiency)


GATHERED = program(
    f"%g = bf16[8192,4096]{{1,0}} all-gather(%operand0), dimensions={{0}}, {GROUPS}",
    f"%c = bf16[8192,4096]{{1,0}} copy(%g), {cycles(1)}",
    f"ROOT %y = bf16[8192,4096]{{1,0}} dot(%c, %operand1), {DOT}, {cycles(3_000_000)}",
)
# The product is summed over the devices, and %z needs the product's operand.
SUMMED = program(
    f"%n = {ROWS} negate(%operand0)",
    f"%p = {ROWS} dot(%n, %operand1), {DOT}, {cycles(900_000)}",
    f"%r = bf16[512,4096]{{1,0}} reduce-scatter(%p), dimensions={{0}}, {GROUPS}, to_apply=%add",
    f"%z = {ROWS} exponential(%n)",
    f"ROOT %t = (bf16[512,4096]{{1,0}}, {ROWS}) tuple(%r, %z)",
)


def test_a_gather_before_a_matmul_becomes_a_ring():
    """The matmul takes 2 ms and the gather 0.56 ms, so that the ring takes as long as the matmul
    alone.
    """
    found = finding_of(GATHERED)
    assert found.gain == pytest.approx(on_links(8192 * 4096 * 2), rel=1e-3)
    for named in ("while y multiplies", "flaxasync.all_gather_matmul"):
        assert named in str(found)
    assert "gain 561 us in a run, predicted" in str(found)
    # If the matmul takes 0.2 ms, a quarter of it is all that the ring adds to the gather.
    assert finding_of(GATHERED.replace("3000000", "300000")).gain == pytest.approx(
        0.75 * 3e5 / V5E.clock, rel=1e-3
    )


def test_a_ring_of_the_dimension_that_is_summed_over_adds_up_partial_sums():
    """A ring of four writes and reads three partial sums of 64 MiB more. On v5e this takes longer
    than the gather.
    """
    summed_over = changed(
        GATHERED, (ROWS, "bf16[8192,1024]{1,0}"), ("dimensions={0}", "dimensions={1}")
    )
    found, v5p = finding_of(summed_over, "v5p"), chip("v5p")
    sums = in_memory(3 * 2 * 8192 * 4096 * 2, v5p)
    assert found.gain == pytest.approx(on_links(8192 * 4096 * 2, v5p) - sums, rel=1e-3)
    assert "while y multiplies others" in found.remedy
    assert finding_of(summed_over).gain == 0


@pytest.mark.parametrize(
    ("labels", "window", "summed"),
    [
        ("0bf_io0->0bf", "1", True),
        ("0fb_io0->0bf", "1", False),
        ("bf0_io0->bf0", "4096", True),
        ("", "1", False),
    ],
)
def test_partial_sums_of_a_convolution_in_a_fusion(labels, window, summed):
    """XLA for TPU prints a matmul as a convolution in a fusion. The array reaches it through a
    fusion of a bitcast.
    """
    fused = f"""%bitcasted (p: bf16[8,1024,4096]) -> bf16[8,1024,4096] {{
  %p = bf16[8,1024,4096] parameter(0)
  ROOT %b = bf16[8,1024,4096] bitcast(%p)
}}
%fused (v: bf16[4096,3584,1], q: bf16[8,1024,4096]) -> bf16[8,1024,3584] {{
  %v = bf16[4096,3584,1] parameter(0)
  %q = bf16[8,1024,4096] parameter(1)
  %f = bf16[8,1024,4096] fusion(%q), kind=kLoop, calls=%bitcasted
  ROOT %c = bf16[8,1024,3584] convolution(%f, %v), window={{size={window}}}, dim_labels={labels}
}}
"""
    compiled = parse(module(
        f"%g = bf16[8,1024,4096] all-gather(%operand0), dimensions={{2}}, {GROUPS}",
        "ROOT %y = bf16[8,1024,3584] fusion(%operand1, %g), kind=kOutput, calls=%fused",
        wrapped=fused, inputs=("bf16[8,1024,1024]", "bf16[4096,3584,1]"), partitions=4,
    ))  # fmt: skip
    gather, matmul = (compiled.entry.by_name[name] for name in ("g", "y"))
    expected = 8 * 1024 * 3584 * 2 if summed else 0
    assert partial_sum_bytes(matmul, gather, 2) == expected


def test_a_matmul_hides_half_of_the_all_reduce_after_it():
    """The matmul takes longer than the reduce-scatter; the gather that follows has nothing to hide
    behind.
    """
    found = finding_of(
        changed(
            SUMMED,
            ("bf16[512,4096]", "bf16[2048,4096]"),
            ("reduce-scatter(%p), dimensions={0}", "all-reduce(%p)"),
        )
    )
    assert found.gain == pytest.approx(on_links(2048 * 4096 * 2), rel=0.05)
    assert "flaxasync.matmul_all_reduce does it" in found.remedy


def test_sums_of_gradients_are_told_from_sums_of_products():
    """The all-reduce of a backward pass hides behind other work of it, and names the axis along
    which it sums.
    """
    backward = '=%add, metadata={op_name="jit(f)/transpose(jvp(bsd,df->bsf))/dot_general"}'
    groups = "replica_groups=mesh['data'=4] {'data'}"
    text = changed(
        SUMMED,
        ("bf16[512,4096]", "bf16[2048,4096]"),
        (f"reduce-scatter(%p), dimensions={{0}}, {GROUPS}", f"all-reduce(%p), {groups}"),
        ("=%add", backward),
    )
    found = finding_of(text)
    assert "r (all-reduce over data, 16 MiB)" in found.message
    assert "scan_with_prefetch" in found.remedy
    assert "matmul_all_reduce" not in found.remedy
    # %z can run beside it
    assert found.gain == pytest.approx(in_memory(2 * 2048 * 4096 * 2), rel=0.05)


def test_a_program_that_uses_this_package_is_not_told_to_use_it():
    tables = 'FileNames\n1 "/site-packages/flaxasync/ops/matmul/ring.py"\n\n'
    found = finding_of(GATHERED.replace("%add (a", tables + "%add (a", 1))
    assert "flaxasync.all_gather_matmul" not in found.remedy
    assert "backend='xla'" in found.remedy


def test_what_a_backward_pass_computes_again_can_be_saved():
    """The gain is the matmul and the reduce-scatter, and not %n, which %z needs, less the traffic
    of the result.
    """
    scope = '=%add, metadata={op_name="jit(f)/checkpoint/rematted_computation/dot_general"}'
    found = finding_of(changed(SUMMED, ("=%add", scope)))
    seconds = 9e5 / V5E.clock + on_links(2048 * 4096 * 2) - in_memory(4 * 512 * 4096 * 2)
    assert found.gain == pytest.approx(seconds, rel=1e-3)
    assert "save_only_these_names" in found.remedy
    assert "4 MiB of memory in each layer" in found.remedy
    once = finding_of(SUMMED)
    assert "save_only_these_names" not in once.remedy
    assert "flaxasync.matmul_reduce_scatter" in once.remedy


def test_a_collective_without_a_matmul():
    """On v6e a flag of XLA moves it to the SparseCore, beside %work; on v5e nothing does."""
    text = program(
        f"%r = {ROWS} all-reduce(%operand0), {GROUPS}, to_apply=%add",
        f"%work = {WEIGHT} exponential(%operand1)",
        f"ROOT %t = ({ROWS}, {WEIGHT}) tuple(%r, %work)",
    )
    on_v6e, on_v5e = finding_of(text, "v6e"), finding_of(text)
    assert OFFLOAD_FLAGS["all-reduce"] in on_v6e.remedy
    assert on_v5e.remedy == "nothing that is known shortens it on v5e where it is"
    assert on_v5e.gain == 0
    assert on_v6e.gain == pytest.approx(in_memory(2 * 4096 * 4096 * 2, chip("v6e")), rel=1e-3)
    assert "beside work" in on_v6e.remedy


PERMUTE = (
    f"%start = ({ROWS}, {ROWS}, u32[], u32[]) collective-permute-start(%operand0), "
    "source_target_pairs={{0,1},{1,2},{2,3},{3,0}}",
    f"%done = {ROWS} collective-permute-done(%start)",
)


def test_an_empty_window_names_the_longest_work_that_could_move_in():
    text = program(
        f"%short = {ROWS} negate(%operand0)",
        f'%long = {WEIGHT} exponential(%operand1), metadata={{source_file="model.py" '
        f"source_line=12}}",
        *PERMUTE,
        f"ROOT %t = ({ROWS}, {WEIGHT}, {ROWS}) tuple(%short, %long, %done)",
    )
    found = finding_of(text, code="empty-window")
    assert "long (102 us, model.py:12) could run inside" in found.message
    assert found.gain == pytest.approx(in_memory((2 * 2048 + 2 * 4096) * 4096 * 2), rel=1e-3)


ALL_REDUCE = f"all-reduce(%v), {GROUPS}, to_apply=%add"
CALLED = f"""
%deep (v: bf16[4096,4096]) -> bf16[4096,4096] {{
  %v = {WEIGHT} parameter(0)
  ROOT %sum = {WEIGHT} {ALL_REDUCE}
}}

%called (v: bf16[4096,4096]) -> bf16[4096,4096] {{
  %v = {WEIGHT} parameter(0)
  %started = {WEIGHT} OPERATION
  %done = {WEIGHT} ENDED(%started)
  ROOT %exp = {WEIGHT} exponential(%done)
}}
"""


@pytest.mark.parametrize(("operation", "ended", "code"), [
    ("negate(%v)", "copy", "empty-window"),
    (ALL_REDUCE, "copy", "serialised"),
    (ALL_REDUCE.replace("(%v)", "-start(%v)"), "all-reduce-done", "serialised"),
    ("call(%v), to_apply=%deep", "copy", "serialised"),
], ids=["work", "collective", "start", "nested"])  # fmt: skip
def test_a_call_is_independent_work_unless_it_contains_a_collective(operation, ended, code):
    """The window of a permute is empty, and there is a call that does not depend on it."""
    text = program(
        *PERMUTE,
        f"%own = {WEIGHT} call(%operand1), to_apply=%called",
        f"ROOT %t = ({WEIGHT}, {ROWS}) tuple(%own, %done)",
        wrapped=changed(CALLED, ("OPERATION", operation), ("ENDED", ended)),
    )
    (permute,) = (f for f in audit(text, chip="v5e").findings if f.instruction == "start")
    assert permute.code == code


def test_the_gain_counts_every_iteration_and_orders_the_findings():
    reduced = (
        "%once = f32[8388608]{0} all-reduce(%OPERAND), replica_groups=[1,4]<=[4], to_apply=%add"
    )
    inside, outside = (reduced.replace("OPERAND", name) for name in ("g", "x"))
    text = changed(
        LOOP,
        ("is_scheduled=true\n", f"is_scheduled=true, num_partitions=4\n\n{ADD}"),
        ("65536", "8388608"),
        (
            "  %c = f32[8388608]{0} negate(%g)",
            f"  {inside.replace('once', 'looped')}\n  %own = f32[8388608]{{0}} exponential(%g)\n"
            "  %c = f32[8388608]{0} add(%own, %looped)",
        ),
        (
            "  %t = (s32[], f32[8388608]{0}) tuple(%zero, %x)",
            f"  {outside}\n  %own = f32[8388608]{{0}} exponential(%x)\n"
            "  %t = (s32[], f32[8388608]{0}) tuple(%zero, %own)",
        ),
        (
            "ROOT %r = f32[8388608]{0} get-tuple-element(%w), index=1",
            "%out = f32[8388608]{0} get-tuple-element(%w), index=1\n  ROOT %r = f32[8388608]{0} "
            "add(%out, %once)",
        ),
    )
    looped, once = (
        f for f in audit(text, chip="v6e").findings if f.code == "synchronous-collective"
    )
    assert (looped.instruction, looped.count) == ("looped", 4)
    assert (once.instruction, once.count) == ("once", 1)
    assert looped.gain == pytest.approx(4 * in_memory(2 * 4 * 8388608, chip("v6e")), rel=1e-3)
    assert "gain" in dataclasses.asdict(looped)


def compiled_with(options):
    x = jax.ShapeDtypeStruct((8, 128), jnp.float32)
    return compile_for("v5e:1x1", lambda x: x + 1, x, compiler_options=options).as_text()


@pytest.mark.slow
def test_libtpu_knows_the_flags():
    options = dict(flag.split("=") for flag in OFFLOAD_FLAGS.values())
    assert compiled_with(options)
    for name in options:
        with pytest.raises(RuntimeError, match="No such compile option"):
            compiled_with({name: options[name], f"{name}_of_nothing": options[name]})
