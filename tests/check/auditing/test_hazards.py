"""Hazards of kernel pairs: correct forms are safe, and each wrong form is found.

Today's compiler guards some reads and writes with a copy. docs/check.md has those as texts
(test_audit.py).
"""

import pytest

from flaxasync.check import Severity, audit
from tests.check import programs
from tests.check.hlo_texts import KERNELS, TWO_SENDS, changed

# rows of 2 KiB; only their size keeps Refs out of vector memory, because a kernel that
TOO_LARGE_FOR_VMEM = 131072
# closes over Refs cannot hold them to HBM


def errors(report):
    return {f.code for f in report.findings if f.severity == Severity.ERROR}


@pytest.mark.parametrize(("form", "rows", "pairs"), [
    ("value", 1024, 3),
    ("value_with_compute", 1024, 3),
    ("stateful", TOO_LARGE_FOR_VMEM, 3),
    ("two_slots", TOO_LARGE_FOR_VMEM, 2),
])  # fmt: skip
def test_correct_forms_are_ok(form, rows, pairs):
    """tests/transport/test_compiled.py audits the forms of the package for every chip."""
    report = audit(programs.async_form(form, "v5e:2x2", rows), expect={"permute_start": pairs})
    assert report.ok, str(report)
    in_flight = [code for code in report.codes() if "in-flight" in code]
    assert not in_flight or rows == TOO_LARGE_FOR_VMEM  # of Refs, reads are information


@pytest.mark.parametrize(("form", "code"), [
    ("staggered_unroll_1", "in-flight-copied"),
    ("any_outputs", "in-flight-vmem"),
    ("read_in_flight", "in-flight-copied"),
    ("freed_in_flight", "in-flight-freed"),
    ("forgotten", "async-unfinished"),
])  # fmt: skip
def test_wrong_forms_are_found(form, code):
    report = audit(programs.async_form(form))
    assert not report.ok
    assert code in errors(report), str(report)


def test_two_transfers_of_one_source():
    """Both starts alias the block through and only read it. A write between them is still found."""
    assert audit(KERNELS).ok, str(audit(KERNELS))
    assert audit(TWO_SENDS).ok, str(audit(TWO_SENDS))
    written = changed(TWO_SENDS, ("negate(%x2)", "dynamic-update-slice(%x2, %x2)"))
    assert errors(audit(written)) == {"in-flight-written"}
    # Here the destination of the second transfer is the buffer that the first one sends.
    before, after = TWO_SENDS.split("custom-call(%x1), ")
    into = (
        f"{before}custom-call(%y1, %x1), "
        f"{after.replace('{{1}: (0, {})}', '{{1}: (0, {}), {2}: (1, {})}', 1)}"
    )
    assert "in-flight-written" in audit(into).codes()


@pytest.mark.parametrize(
    ("form", "spaces"),
    [
        pytest.param("stateful", "vmem-to-vmem", marks=pytest.mark.slow),
        ("value", "hbm-to-hbm"),
    ],
)
def test_the_memory_space_in_the_text_is_that_of_the_chips_instructions(form, spaces, tmp_path):
    """`S(1)` in the text of a start means that its DMA moves vector memory, as it does for small
    Refs.
    """
    program = programs.async_form.__wrapped__(form, keep_dumps=tmp_path)
    assert ("in-flight-vmem" in audit(program).codes()) == (spaces == "vmem-to-vmem")
    moves = [
        line
        for path in tmp_path.glob("*permute_start*final_bundles.txt")
        for line in path.read_text().splitlines()
        if "dma.general" in line
    ]
    assert moves
    assert all(spaces in line for line in moves)
