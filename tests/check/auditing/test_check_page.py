"""docs/check.md has a section for every code, and each example in a section has the finding of that section."""

import pathlib
import re

import pytest

from flaxasync.check import CODES, audit

PAGE = (pathlib.Path(__file__).parents[3] / "docs" / "check.md").read_text()
EXAMPLES = re.findall(r"\n### ([\w-]+)\n(.*?)(?=\n##|\Z)", PAGE, re.DOTALL)


def test_every_code_has_a_section_with_a_remedy():
    assert {code for code, _ in EXAMPLES} == set(CODES)
    assert all(code.remedy and code.meaning for code in CODES.values())
    assert all("**Remedy**" in text for _, text in EXAMPLES)


@pytest.mark.parametrize(("code", "text"), EXAMPLES)
def test_example(code, text):
    programs = re.findall(r"```hlo\n(.*?)```", text, re.DOTALL)
    assert programs or code == "deleted"
    for program in programs:
        report = audit(program, chip="v5e")
        assert code in report.codes(), str(report)
        severity = next(f.severity for f in report.findings if f.code == code)
        assert text.startswith(str(severity))


def test_the_page_has_its_pictures():
    pictures = re.findall(r"!\[[^\]]+\]\((img/[^)]+)\)", PAGE)
    assert pictures
    assert all((pathlib.Path(__file__).parents[3] / "docs" / name).exists() for name in pictures)
