"""The fault table of docs/operations.md: each fault is injected into a real run, which is then
started again.

After each fault the run says in one paragraph what is wrong and ends with the documented code, or
it goes on. Started again, with the cause removed where it was refused, it completes with the losses
of a run that was never disturbed, and no step, line or complete checkpoint is lost. The rows are
the tests in the other files of this folder, and in test_resume.py and test_distributed.py.
"""

from pathlib import Path

from tests.train.lifecycle import test_distributed, test_resume  # noqa: F401
from tests.train.lifecycle.conftest import ROWS
from tests.train.lifecycle.faults import (  # noqa: F401
    test_disks,
    test_processes,
    test_training_data,
    test_workdir_files,
)

DOCUMENT = Path(__file__).resolve().parents[4] / "docs" / "operations.md"


def test_the_table_in_the_document_has_these_rows():
    text = DOCUMENT.read_text().partition("## The fault table")[2].partition("\n## ")[0]
    lines = [
        [cell.strip() for cell in line.split("|")]
        for line in text.splitlines()
        if line.startswith("| ")
    ]
    documented = [name for _, name, *_ in lines if name != "Fault"]
    assert sorted(documented) == sorted(ROWS)
    assert len(documented) >= 30
