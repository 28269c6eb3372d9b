"""Known defects of the platform: their programs are right where the defect is not, and a defect is reported."""

import pathlib

import jax
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import PartitionSpec as P

from flaxasync import check
from flaxasync.verify import cases, child, measure, platform, supervisor
from flaxasync.verify.__main__ import record_verdicts
from flaxasync.verify.verdict import Result, Verdict, compare_times, judge, summarize
from tests.verify import faulty_child

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


@pytest.mark.slow
def test_a_planted_defect_is_wrong_and_named_with_its_report_and_its_workaround():
    tried = cases.list_cases("cpu", 1, quick=True, only=["platform"])
    setup = child.Setup(cpu_devices=1, repeats=1, limit=90, serve=faulty_child.serve)
    results = list(map(judge, supervisor.run_cases(tried, setup), tried))
    verdicts = {result.case.backend: result.verdict for result in results}
    assert verdicts == dict.fromkeys(platform.DEFECTS, Verdict.PASS) | {"unused": Verdict.WRONG}
    said = (
        "a DMA from HBM in a kernel that has an unused operand gives zeros "
        "(https://github.com/jax-ml/jax/issues/39744): give kernels no operand that they do not read, "
    )
    (wrong,) = [result for result in results if result.verdict is Verdict.WRONG]
    assert wrong.reason.startswith(said)
    assert "; differs from the reference: y by 1.0e+00" in wrong.reason
    summary = summarize(compare_times(results, TPU), TPU)
    assert f"2 PASS, 1 WRONG\nKnown defect of this platform: {said}" in summary
    assert "Do not use here" not in summary
    assert "Please open an issue" not in summary


def test_a_defect_is_no_verdict_on_a_kernel():
    results = [Result(case_of("unused", "tpu"), Verdict.WRONG)]
    assert record_verdicts(results, TPU) is None
    assert "Calls without a backend may take every backend that passed." in summarize(results, TPU)


def test_the_page_has_every_report_and_workaround():
    page = " ".join((pathlib.Path(__file__).parents[2] / "docs" / "tpu.md").read_text().split())
    for name, defect in platform.DEFECTS.items():
        assert f"| `{name}` | " in page
        assert f"({defect.report})" in page


def compiled_operands(run, x):
    """Returns the memory spaces of the operands of the one kernel of a program, compiled for one v5e."""
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
    """XLA puts operands into VMEM that the kernel declares to be in HBM, which is what the report is about."""
    defect = platform.DEFECTS["unused"]
    assert compiled_operands(defect.program, defect.shape) == [1, 1]
    call = platform.pl.pallas_call

    def constrained(*args, **options):
        return lambda *operands: call(*args, **options)(
            *(pltpu.with_memory_space_constraint(x, pltpu.HBM) for x in operands)
        )

    monkeypatch.setattr(platform.pl, "pallas_call", constrained)
    assert compiled_operands(defect.program.__wrapped__, defect.shape) == [0, 0]
