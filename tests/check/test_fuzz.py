"""Mutated real programs: whatever the text, the reader raises HloError or nothing, and the audit
raises nothing.

A normal run tries a hundred inputs, and a run of the slow tests three hundred.
FLAXASYNC_FUZZ=100000 tries as many.
"""

import contextlib
import functools
import os
import subprocess
import sys

import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from flaxasync.check import HloError, audit, format_module, parse, timeline
from tests.check import programs
from tests.check.hlo_texts import EXAMPLES, KERNELS, LOOP, WIDE_SUM

PER_TEST = 100  # inputs, so that the watchdog notices a hang
# FLAXASYNC_FUZZ=100000 tries so many inputs
TESTS = max(3, int(os.environ.get("FLAXASYNC_FUZZ", "0")) // PER_TEST)
FRAGMENTS = (
    "{",
    "}",
    "(",
    ")",
    "[",
    "]",
    ",",
    '"',
    "\\",
    "%",
    "=",
    "->",
    "/*",
    "*/",
    "//",
    "\n",
    "\0",
    "\u2028",
    "\u0663",
    "\ud7ff",
    "ROOT ",
    "ENTRY ",
    "HloModule ",
    "f32[",
    "-1",
    "99999999999999999999",
    "<=",
    "?",
    "S(1)",
    "S(2)",
    "S(",
    "T(8,128)",
    "parameter(0)",
    "constant(",
    "-start(",
    "-done(",
    "-update(",
    "async-start(",
    ", calls=%",
    ", body=%",
    "tuple(",
    "get-tuple-element(",
    ", index=",
    "while(",
    "custom-call(",
    "copy(",
    ", control-predecessors={",
    "conditional(",
    ', backend_config={"a":',
    "replica_groups=[2,4]<=[8]",
    "source_target_pairs={{0,1},{1,0}}",
    "mesh['x'=2] {'x'}",
    "output_to_operand_aliasing={{}: (0, {})}",
    "is_scheduled=true",
    "branch_computations={",
    "token[]",
    "()",
)


@functools.cache
def corpus() -> tuple[str, ...]:
    """Returns real programs, without the bytecode of their kernels, and the examples of XLA's
    proposal.
    """
    texts = [
        programs.async_form(form).text for form in ("staggered_unroll_1", "stateful", "two_slots")
    ]
    texts += [
        programs.compiled(fn, "tpu7x:2x2x1").text
        for fn in (programs.psum, programs.scan_of_collectives)
    ]
    texts += [programs.compiled(fn, "v5e:2x4").text for fn in (programs.ppermute, programs.host)]
    texts += [programs.mesh_matmul().text, programs.on_cpu(programs.scan_of_collectives)]
    texts = [_shortened(text) for text in texts]
    return (*texts, KERNELS, LOOP, WIDE_SUM, *EXAMPLES.values())


def _shortened(text: str) -> str:
    lines = text.splitlines(keepends=True)
    return "".join(
        line if len(line) < 1500 else line[:700] + '"}}\n' * line.endswith("\n") for line in lines
    )


@st.composite
def mutated(draw: st.DrawFn) -> str:
    """Cuts, repeats, moves, inserts and replaces stretches of a program."""
    text = draw(st.sampled_from(corpus()))
    for _ in range(draw(st.integers(1, 6))):
        at = draw(st.integers(0, len(text)))
        length = draw(st.sampled_from((0, 1, 1, 2, 5, 20, 100, 400)))
        begin, stretch, rest = text[:at], text[at : at + length], text[at + length :]
        fragment, other = draw(st.sampled_from(FRAGMENTS)), draw(st.integers(0, len(text)))
        changes = {
            "cut": begin + rest,
            "repeat": begin + stretch * draw(st.integers(3, 5)) + rest,
            "move": text[:other] + stretch + text[other:],
            "insert": begin + fragment + stretch + rest,
            "replace": begin + fragment + rest,
            "end": begin,
            "text": begin + draw(st.text(max_size=8)) + rest,
        }
        text = changes[draw(st.sampled_from((*changes, "insert")))]
    return text


@pytest.mark.parametrize(
    "number", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, TESTS))]
)
def test_nothing_but_clean_errors(number):
    @seed(number)
    @settings(
        max_examples=PER_TEST,
        suppress_health_check=list(HealthCheck),
        database=None,
        derandomize=False,
    )
    @given(mutated())
    def run(text):
        read_and_audit(text)

    run()


def read_and_audit(text: str) -> None:
    try:
        module = parse(text)
    except HloError:
        return
    again = format_module(module)
    assert format_module(parse(again)) == again
    str(audit(module))
    if module.is_scheduled:
        with contextlib.suppress(HloError):  # a product of tuples, say
            str(timeline(module, "v5e"))


@pytest.mark.parametrize(
    "first", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(30, 300, 90))]
)
def test_damaged_lines(first):
    """In a process of its own, with 2 GiB of memory: nothing but ValueError, and less than 20 s for
    each text.
    """
    count = 90 if first else 30
    command = (sys.executable, "-m", "tests.check.damaged_texts", str(first), str(first + count))
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > count / 8  # most of the others have an operand that is not there
