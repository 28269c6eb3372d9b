"""Texts that are too large, too deep or wrong for an opcode: a ValueError with the line, and time
that is bounded.
"""

import cProfile

import pytest

from flaxasync.check import HloError, audit, parse, timeline
from tests.check.hlo_texts import ADD, module

ARRAY = "f32[1024,1024]{1,0}"
DOT = "lhs_contracting_dims={1}, rhs_contracting_dims={0}"


def chain(
    depth: int, caller: str, root: str = f"ROOT %r = {ARRAY} exponential(%p)", times: int = 1
) -> str:
    """Returns a program whose computations call one another, each the next one so many times."""
    computations = [f"%c0 (p: {ARRAY}) -> {ARRAY} {{\n  %p = {ARRAY} parameter(0)\n  {root}\n}}\n"]
    for n in range(1, depth + 1):
        calls = [
            f"%a{k + 1} = {ARRAY} {caller.format(f'%a{k}', f'%c{n - 1}')}" for k in range(times)
        ]
        lines = [f"%a0 = {ARRAY} parameter(0)", *calls[:-1], f"ROOT {calls[-1]}"]
        computations.append(
            f"%c{n} (p: {ARRAY}) -> {ARRAY} {{\n" + "".join(f"  {line}\n" for line in lines) + "}\n"
        )
    last = f"ROOT %top = {ARRAY} {caller.format('%operand0', f'%c{depth}')}"
    return module(last, wrapped="\n".join(computations), inputs=(ARRAY,))


CALL, FUSION = "call({}), to_apply={}", "fusion({}), kind=kLoop, calls={}"


@pytest.mark.parametrize("caller", [CALL, FUSION], ids=["call", "fusion"])
def test_calls_within_calls(caller):
    assert timeline(chain(90, caller), "v5e").seconds == pytest.approx(
        timeline(chain(0, caller), "v5e").seconds
    )
    with pytest.raises(
        HloError, match=r"line \d+, column 1: '.*' calls 'c\d+': calls are nested deeper than 100"
    ):
        parse(chain(990, caller))


@pytest.mark.parametrize("caller", [CALL, FUSION], ids=["call", "fusion"])
def test_a_computation_that_calls_itself_is_refused(caller):
    root = f"ROOT %r = {ARRAY} {caller.format('%p', '%c1')}"
    with pytest.raises(
        HloError, match=r"line \d+, column 1: '(r|a1)' calls 'c\d', which is around it"
    ):
        parse(chain(1, caller, root))


def test_calls_that_repeat_one_another():
    """Each of 40 computations calls the one below it twice. A few hundred lines run a million
    million instructions.
    """
    text = chain(40, CALL, times=2)
    assert audit(text).ok
    with pytest.raises(
        HloError, match=r"line \d+, .*'top' runs 5\.\d+e\+12 instructions on each of 1 devices"
    ):
        timeline(text, "v5e")
    product = f"ROOT %r = {ARRAY} dot(%p, %p), {DOT}"
    assert timeline(chain(40, FUSION, product, times=2), "v5e").flops == 2**40 * 2 * 1024**3
    assert timeline(chain(12, CALL, times=2), "v5e").seconds == pytest.approx(
        2**12 * timeline(chain(0, CALL), "v5e").seconds
    )


def test_a_loop_whose_bound_is_a_sum_of_sums():
    """Its trip count is not found. That ends soon, though each of twenty sums adds the one before
    it to itself.
    """
    sums = [f"  %s{n + 1} = s32[] add(%s{n}, %s{n})" for n in range(20)]
    lines = ["  %p = (s32[]) parameter(0)", "  %s0 = s32[] get-tuple-element(%p), index=0", *sums]
    condition = "\n".join(
        [
            "%more (p: (s32[])) -> pred[] {",
            *lines,
            "  ROOT %c = pred[] compare(%s0, %s20), direction=LT",
            "}\n",
        ]
    )
    body = "%body (p: (s32[])) -> (s32[]) {\n  ROOT %p = (s32[]) parameter(0)\n}\n"
    loop = "ROOT %w = (s32[]) while(%t), condition=%more, body=%body"
    text = module(
        "%t = (s32[]) tuple(%operand0)", loop, wrapped=condition + body, inputs=("s32[]",)
    )
    program = parse(text)
    assert calls_of(audit, program) < 60_000
    assert [loop.trips for loop in timeline(program, "v5e").loops] == [1]


@pytest.mark.parametrize("key", ["num_partitions", "replica_count"])
@pytest.mark.parametrize("count", ["999999999", "0", "-1", "many", "65537"])
def test_a_number_of_devices_that_cannot_be(key, count):
    text = module(
        "ROOT %r = f32[64] all-reduce(%operand0), replica_groups={}, to_apply=%add", wrapped=ADD
    )
    with pytest.raises(
        HloError, match=f"line 1, column 1: {key} must be between 1 and 65536 in all: got '{count}'"
    ):
        parse(text.replace("num_partitions=1", f"{key}={count}"))


TUPLE = f"({ARRAY}, {ARRAY})"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            f"dot(%operand0, %operand0), {DOT.replace('{1}', '{2}')}",
            r"dot 'r' sums over dimensions \[2\] of .*, which has 2",
        ),
        (f"dot(%operand0), {DOT}", "dot 'r' needs two arrays"),
        (f"dot(%operand1, %operand0), {DOT}", "dot 'r' needs two arrays"),
        (
            "convolution(%operand0, %operand1), dim_labels=bf_io->bf",
            r"convolution 'r' needs two arrays: got .*, \(",
        ),
        (
            "convolution(%operand0, %operand0), dim_labels=bf01_01io->bf01",
            "convolution 'r' labels the 2 dimensions",
        ),
        ("convolution(), dim_labels=bf_io->bf", "convolution 'r' needs two arrays: got no operand"),
    ],
)
def test_products_that_cannot_be(line, message):
    text = module(f"ROOT %r = {ARRAY} {line}", inputs=(ARRAY, TUPLE))
    audit(text)
    with pytest.raises(HloError, match=rf"line 7, column 1: {message}"):
        timeline(text, "v5e")


# The time of an audit grows with the length of its program. Calls of functions are counted, and no
# time is measured.


def calls_of(fn, *arguments) -> int:
    profile = cProfile.Profile()
    profile.runcall(fn, *arguments)
    return sum(entry.callcount for entry in profile.getstats())


def permutes(count: int) -> str:
    """Returns transfers one after the other, with nothing to hide them."""
    future = f"({ARRAY}, {ARRAY}, u32[], u32[])"
    lines = [f"%x0 = {ARRAY} negate(%operand0)"]
    for n in range(count):
        lines += [
            f"%s{n} = {future} collective-permute-start(%x{n}), "
            f"source_target_pairs={{{{0,1}},{{1,0}}}}",
            f"%x{n + 1} = {ARRAY} collective-permute-done(%s{n})",
        ]
    return module(*lines, f"ROOT %r = {ARRAY} negate(%x{count})", inputs=(ARRAY,), partitions=2)


def windows(count: int) -> str:
    """Returns transfers that are all under way while the same work runs."""
    future = f"({ARRAY}, {ARRAY}, u32[], u32[])"
    starts = [
        f"%s{n} = {future} collective-permute-start(%operand0), "
        f"source_target_pairs={{{{0,1}},{{1,0}}}}"
        for n in range(count)
    ]
    work = [f"%w{n} = {ARRAY} exponential(%operand0)" for n in range(count)]
    dones = [f"%d{n} = {ARRAY} collective-permute-done(%s{n})" for n in range(count)]
    return module(
        *starts, *work, *dones, f"ROOT %r = ({ARRAY}) tuple(%d0)", inputs=(ARRAY,), partitions=2
    )


def layers(count: int) -> str:
    """Returns a step that gathers, multiplies and sums in each layer, in float32 that is rounded,
    with recomputation.
    """
    again = (
        'metadata={op_name="jit(f)/transpose(jvp())/rematted_computation/gather" '
        'source_file="f.py" source_line=3}'
    )
    lines = [f"%x0 = {ARRAY} negate(%operand0)"]
    for n in range(count):
        lines += [
            f"%g{n} = {ARRAY} all-gather(%operand1), dimensions={{0}}, replica_groups=[1,2]<=[2], "
            f"{again}",
            f"%m{n} = {ARRAY} dot(%x{n}, %g{n}), {DOT}",
            f"%r{n} = {ARRAY} all-reduce(%m{n}), replica_groups=[1,2]<=[2], to_apply=%add",
            f"%c{n} = bf16[1024,1024]{{1,0}} convert(%r{n})",
            f"%x{n + 1} = {ARRAY} add(%x{n}, %c{n})",
        ]
    inputs = (ARRAY, "f32[512,1024]{1,0}")
    return module(
        *lines, f"ROOT %r = {ARRAY} negate(%x{count})", wrapped=ADD, inputs=inputs, partitions=2
    )


@pytest.mark.parametrize("program", [permutes, windows, layers])
def test_an_audit_of_twice_the_program_is_twice_the_work(program):
    small, large = parse(program(200)), parse(program(400))
    assert calls_of(audit, large) < 2.3 * calls_of(audit, small)
    assert calls_of(timeline, large, "v5e") < 2.3 * calls_of(timeline, small, "v5e")
