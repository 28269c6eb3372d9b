"""Known defects of the platform: their programs are right where the defect is not, and a defect is
reported.
"""

import pathlib

import jax
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import PartitionSpec as P

from flaxasync import check, hardware
from flaxasync.verify import cases, measure, platform
from flaxasync.verify.__main__ import record_verdicts
from flaxasync.verify.verdict import Verdict, compare_times, judge, summarize

TPU = {"platform": "tpu", "kind": "TPU v5 lite", "chip": "v5e", "devices": 1}


def case_of(name, machine="cpu"):
    (case,) = cases.list_cases(machine, 4, quick=True, only=[f"platform/{name}"])
    return case


@pytest.mark.parametrize("name", platform.DEFECTS)
def test_the_simulator_has_no_defect(name):
    case = case_of(name)
    assert cases.unsupported(case, "cpu", quick=True) is None
    assert measure.run_case(case, repeats=2).errors == {"y": 0.0}


def test_a_chip_is_tried_alone_and_a_gpu_not_at_all():
    for name in platform.DEFECTS:
        assert case_of(name, "tpu").devices == 1
        assert cases.unsupported(case_of(name, "tpu"), "tpu", quick=False) is None
        assert cases.unsupported(case_of(name, "gpu"), "gpu", quick=True).startswith("needs TPUs")


def test_a_defect_is_named_with_its_report_and_its_workaround_and_is_no_verdict_on_a_kernel():
    """`test_verify.py` plants it in a child."""
    outcome = {"measurement": {"errors": {"y": 1.0}, "tolerance": 0.0, "timing": None}}
    wrong = judge(outcome, case_of("unused", "tpu"))
    said = (
        "a DMA from HBM in a kernel that has an unused operand gives zeros "
        "(https://github.com/jax-ml/jax/issues/39744): give kernels no operand that they do not "
        "read, "
    )
    assert wrong.verdict is Verdict.WRONG
    assert wrong.reason.startswith(said)
    assert "; differs from the reference: y by 1.0e+00" in wrong.reason
    summary = summarize(compare_times([wrong], TPU), TPU)
    assert f"1 WRONG\nKnown defect of this platform: {said}" in summary
    assert "Calls without a backend may take every backend that passed." in summary
    assert "Do not use here" not in summary
    assert "Please open an issue" not in summary
    assert record_verdicts([wrong], TPU) is None


def test_the_most_vector_memory_is_tried_first_and_a_refusal_is_the_defect():
    case = case_of("vmem", "tpu")
    assert cases.list_cases("tpu", 4, quick=True)[0] == case
    crashed = judge({"error": "RESOURCE_EXHAUSTED"}, case)
    assert crashed.verdict is Verdict.CRASHED
    summary = summarize([crashed], TPU)
    assert (
        "Known defect of this platform: a kernel cannot use the vector memory that the chip table "
        "gives it" in summary
    )
    assert "Do not use here" not in summary


@pytest.mark.parametrize("chip", ["v5e", pytest.param("v6e", marks=pytest.mark.slow)])
def test_the_compiler_gives_a_kernel_that_much_vector_memory_and_no_more(chip, monkeypatch):
    def compile_kernel():
        mesh = check.topology_mesh(
            f"{chip}:1x1", (1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,)
        )
        with jax.set_mesh(mesh):
            x = jax.ShapeDtypeStruct((8, 128), "float32", sharding=jax.NamedSharding(mesh, P()))
            check.compile_for(
                f"{chip}:1x1", jax.jit(lambda x: platform.through_all_vector_memory(x)), x
            )

    compile_kernel()
    monkeypatch.setattr(
        platform, "available", lambda: hardware.CHIPS[chip].vmem_bytes + hardware.MIB
    )
    with pytest.raises(RuntimeError, match="RESOURCE_EXHAUSTED"):
        compile_kernel()


def test_the_page_has_every_report_and_workaround():
    page = " ".join((pathlib.Path(__file__).parents[2] / "docs" / "tpu.md").read_text().split())
    for name, defect in platform.DEFECTS.items():
        assert f"| `{name}` | " in page
        assert f"({defect.report})" in page


def compiled_operands(run, x):
    """Returns the memory spaces of the operands of the one kernel of a program, compiled for one
    v5e.
    """
    mesh = check.topology_mesh("v5e:1x1", (1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    with jax.set_mesh(mesh):
        x = jax.ShapeDtypeStruct(x, "float32", sharding=jax.NamedSharding(mesh, P("x")))
        # The lambda is a new function each time, of which JAX has no trace in its cache.
        program = check.compile_for("v5e:1x1", lambda x: run(x), x, compiler_options=check.HLO_ONLY)
    (kernel,) = [
        (computation, i)
        for computation in check.parse(program.as_text()).computations.values()
        for i in computation.instructions
        if i.custom_call_target == "tpu_custom_call"
    ]
    return [kernel[0].by_name[name].shape.memory_space for name in kernel[1].operands]


def test_the_workaround_keeps_operands_in_hbm(monkeypatch):
    """XLA puts operands into VMEM that the kernel declares to be in HBM, which is what the report
    is about.
    """
    defect = platform.DEFECTS["unused"]
    assert compiled_operands(defect.program, defect.shape) == [1, 1]
    call = platform.pl.pallas_call

    def constrained(*args, **options):
        return lambda *operands: call(*args, **options)(
            *(pltpu.with_memory_space_constraint(x, pltpu.HBM) for x in operands)
        )

    monkeypatch.setattr(platform.pl, "pallas_call", constrained)
    assert compiled_operands(defect.program.__wrapped__, defect.shape) == [0, 0]
