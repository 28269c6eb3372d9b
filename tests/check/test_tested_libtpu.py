"""One line about programs of a libtpu that was not tested, in everything that reads such
programs.
"""

import dataclasses

import pytest

from flaxasync.check import CompiledProgram, timeline
from flaxasync.check.tested_libtpu import TESTED_LIBTPU, installed_libtpu, untested

TEXT = """HloModule m, is_scheduled=true

ENTRY e {
  x = f32[8,128]{1,0} parameter(0)
  ROOT y = f32[8,128]{1,0} negate(x)
}
"""
PROGRAM = CompiledProgram(TEXT, "v5e:1x1", {}, {}, ((0, 0, 0),), libtpu="0.0.99")


def test_versions_that_were_tested_are_not_mentioned():
    assert [untested(version) for version in TESTED_LIBTPU] == [None] * len(TESTED_LIBTPU)
    assert installed_libtpu() in TESTED_LIBTPU, "add a version when the tests pass with it"


@pytest.mark.parametrize(("version", "named"), [
    ("0.0.99", "compiled by libtpu 0.0.99, which was not tested"),
    ("", "compiled by a libtpu whose version is not known"),
])  # fmt: skip
def test_a_timeline_names_a_version_that_was_not_tested(version, named):
    program = dataclasses.replace(PROGRAM, libtpu=version)
    assert untested(version).startswith(named)
    assert timeline(program).notes == (untested(version),)
    assert f"note: {untested(version)}" in str(timeline(program))


def test_a_timeline_of_a_tested_version_or_of_a_text_says_nothing():
    assert timeline(dataclasses.replace(PROGRAM, libtpu=TESTED_LIBTPU[0])).notes == ()
    assert timeline(TEXT, "v5e").notes == ()
