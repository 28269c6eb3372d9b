"""The scalar unit: integers wrap, and floats are kept as bits. test_dumps.py has unknown operations."""

import math

from hypothesis import given
from hypothesis import strategies as st

from flaxasync.check.player import scalar_operations as scalar
from flaxasync.check.player.bundle_text import parse_operation

WORDS = st.integers(0, 2**32 - 1)


def evaluate(text, **names):
    """Returns the value of a scalar operation whose operands are literals."""
    expression = scalar.result_value(parse_operation(text), lambda name: names[name])
    return eval(expression, dict(scalar.RUNTIME))


@given(WORDS, WORDS)
def test_integers_wrap_at_32_bits(a, b):
    assert evaluate(f"%s1_s0 = sadd.s32 {a}, {b}") == (a + b) % 2**32
    assert evaluate(f"%s1_s0 = ssub.s32 {a}, {b}") == (a - b) % 2**32
    assert evaluate(f"%s1_s0 = smul.u32 {a}, {b}") == a * b % 2**32
    assert evaluate(f"%s1_s0 = smin.u32 {a}, {b}") == min(a, b)
    assert evaluate(f"%p1_p0 = scmp.lt.s32.totalorder {a}, {b}") == (scalar.signed(a) < scalar.signed(b))
    assert evaluate(f"%p1_p0 = scmp.lt.u32.totalorder {a}, {b}") == (a < b)


@given(WORDS, st.integers(0, 40))
def test_shifts(a, n):
    assert evaluate(f"%s1_s0 = sshll.u32 {a}, {n}") == ((a << n) % 2**32 if n < 32 else 0)
    assert evaluate(f"%s1_s0 = sshrl.u32 {a}, {n}") == (a >> n if n < 32 else 0)
    assert scalar.signed(evaluate(f"%s1_s0 = sshra.s32 {a}, {n}")) == scalar.signed(a) >> min(n, 31)


def test_floats_are_kept_as_bits():
    assert scalar.as_float(evaluate("%s1_s0 = smul.f32 1.5, -2.0")) == -3.0
    assert scalar.as_float(scalar.as_bits(1e300)) == math.inf


def test_addresses_of_operands():
    assert evaluate("%s1_s0 = smov.u32 [#allocation2 + $0x3]", allocation2=100) == 103
    assert evaluate("%s1_s0 = scalar_lea.hbm 5, 4294967295 [#allocation2]", allocation2=100) == 4
