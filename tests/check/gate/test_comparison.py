"""The gate on texts: each kind of difference is named with its line, and what does not matter is no
difference.
"""

# ruff: noqa: E501, because an instruction of HLO text is one line

import dataclasses
import re

import pytest

from flaxasync.check import compare, summarize
from flaxasync.check.gate.snapshot import CALLBACKS, MEMORY, TRANSFERS, WAITS, Summary, Total
from tests.check.hlo_texts import AXES, STEP, changed

BASELINE = summarize(STEP, axes=AXES)
COPIED = "a loop copies a buffer that it carries, on every iteration (forward loop)"
COPY = f"loop-copies: {COPIED}"
PERMUTE = "collective-permute over model (forward loop)"
REDUCE = "all-reduce over data (backward)"
ALL_WAITS = f"{WAITS}: all transfers"
REDUCED = "  ROOT %r = bf16[1024,1024]{1,0} all-reduce(%y)"
CALLBACK = """  %token = token[] after-all()
  %out = (s32[], u32[], token[]) send(%zero, %token), channel_id=9, is_host_transfer=true, metadata={op_name="jit(step)/debug_callback" source_file="/home/me/model.py" source_line=41}
  %out.1 = token[] send-done(%out), channel_id=9, is_host_transfer=true
  %back = (s32[], u32[], token[]) recv(%out.1), channel_id=10, is_host_transfer=true, metadata={op_name="jit(step)/debug_callback" source_file="/home/me/model.py" source_line=41}
  %back.1 = (s32[], token[]) recv-done(%back), channel_id=10, is_host_transfer=true
"""
GATHER = """  %g = bf16[1024,4096]{1,0} all-gather(%y), replica_groups=[2,4]<=[8], dimensions={1}, metadata={op_name="jit(step)/jvp()/gather" source_file="/home/me/model.py" source_line=42}
"""
WORK = re.search(r"  %work = .*\n", STEP)[0]
START = re.search(r"  %start = .*\n", STEP)[0]


def changes_of(text, **tolerances):
    return compare(BASELINE, summarize(text, axes=AXES), **tolerances).changes


def test_the_rows_of_the_step():
    """The permute and the copy run four times."""
    rows = {
        name: (total.amount, total.dtypes, total.sources)
        for name, total in BASELINE.rows.items()
        if not name.startswith(WAITS)
    }
    assert rows == {
        f"transfers: {PERMUTE}": (4 << 21, ["bf16"], {"/home/me/model.py:20": 1}),
        f"transfers: {REDUCE}": (1 << 21, ["bf16"], {"/home/me/model.py:30": 1}),
        COPY: (4, [], {"/home/me/model.py:22": 1}),
    }
    waits = [f"{WAITS}: {name}" for name in (PERMUTE, REDUCE)]
    assert sum(BASELINE.rows[row].amount for row in waits) == BASELINE.rows[ALL_WAITS].amount
    assert 0 < BASELINE.rows[ALL_WAITS].amount < BASELINE.seconds


@pytest.mark.parametrize(
    ("text", "kind", "words", "line"),
    [
        (
            changed(STEP, (REDUCED, GATHER + REDUCED)),
            "more transfers",
            "all-gather over model (forward): 8 MiB of bf16 in a step, 0 B in the baseline",
            42,
        ),
        (
            changed(STEP, (WORK, ""), (START, WORK + START)),
            "more seconds of waiting",
            f"{PERMUTE}: ",
            20,
        ),
        (
            changed(
                STEP,
                (
                    REDUCED,
                    "  %wide = f32[1024,1024]{1,0} convert(%y)\n"
                    + REDUCED.replace("bf16", "f32").replace("%y", "%wide"),
                ),
            ),
            "more transfers",
            "all-reduce over data (backward): 4 MiB of f32 in a step, 2 MiB of bf16 in the baseline",
            30,
        ),
        (
            changed(
                STEP,
                (
                    "  ROOT %t = (s32[], bf16[1024,1024]{1,0}) tuple(%next, %copy)",
                    "  %copy.2 = bf16[1024,1024]{1,0} copy(%x), "
                    'metadata={source_file="/home/me/model.py" source_line=43}\n'
                    "  ROOT %t = (s32[], bf16[1024,1024]{1,0}) tuple(%next, %copy)",
                ),
            ),
            "more loop-copies",
            f"{COPIED}: 8 runs in a step, 4 runs in the baseline",
            43,
        ),
        (
            changed(STEP, (REDUCED, CALLBACK + REDUCED)),
            "more host callbacks",
            "jax.debug.callback: 2 runs in a step, 0 runs in the baseline",
            41,
        ),
        (
            changed(STEP, ("constant(4)", "constant(8)")),
            "more transfers",
            "collective-permute over model (forward loop): 16 MiB of bf16 in a step, 8 MiB",
            20,
        ),
        (
            changed(
                STEP,
                (
                    REDUCED,
                    "  %two = bf16[2048,1024]{1,0} concatenate(%y, %y), dimensions={0}\n"
                    + REDUCED.replace("[1024", "[2048").replace("%y", "%two"),
                ),
            ),
            "more transfers",
            "all-reduce over data (backward): 4 MiB of bf16 in a step, 2 MiB of bf16 in the baseline",
            30,
        ),
    ],
    ids=["gather", "overlap", "dtype", "copy", "callback", "runs", "larger"],
)
def test_a_regression_is_named_with_its_line(text, kind, words, line):
    found = [c for c in changes_of(text) if c.kind == kind and words in c.text]
    assert len(found) == 1, changes_of(text)
    assert found[0].worse
    assert found[0].sources == (f"/home/me/model.py:{line}",)
    back = compare(summarize(text, axes=AXES), BASELINE)
    assert any(c.effect == "better" for c in back.changes), "the way back is one for the better"
    assert f"from /home/me/model.py:{line}" in str(compare(BASELINE, summarize(text, axes=AXES)))


def test_names_order_and_lines_do_not_matter():
    text = re.sub(r"%(\w+)", r"%other.\1.7", STEP)
    text = text.replace("source_line=2", "source_line=12")
    lines = text.splitlines(keepends=True)
    one = next(n for n, line in enumerate(lines) if "%other.one.7 = " in line)
    lines[one + 1], lines[one + 2] = lines[one + 2], lines[one + 1]  # %next and %x are independent
    assert changes_of("".join(lines)) == ()


def test_a_hazard_is_named():
    """A kernel's buffer is copied while a transfer writes it: the error of the audit, with its
    line.
    """
    kernel = """  %z = f32[4096]{0} constant(0)
  %k = (s32[]{:S(2)}, f32[4096]{0}, f32[4096]{0}) custom-call(%z), custom_call_target="tpu_custom_call", output_to_operand_aliasing={{1}: (0, {})}
  %sem = s32[]{:S(2)} get-tuple-element(%k), index=0
  %source = f32[4096]{0} get-tuple-element(%k), index=1
  %flying = f32[4096]{0} get-tuple-element(%k), index=2
  %moved = f32[4096]{0} copy(%flying), metadata={op_name="jit(step)/copy" source_file="/home/me/model.py" source_line=44}
  %over = f32[4096]{0} custom-call(%source, %moved, %sem), custom_call_target="tpu_custom_call", output_to_operand_aliasing={{}: (1, {})}
"""
    (change,) = changes_of(changed(STEP, (REDUCED, kernel + REDUCED)))
    assert (change.kind, change.sources) == ("more in-flight-copied", ("/home/me/model.py:44",))
    assert "the compiler copies a buffer that a transfer is reading" in change.text


def test_tolerances():
    lost = changed(STEP, (WORK, ""), (START, WORK + START))
    assert changes_of(lost, exposed=0.9) == ()
    larger = changed(STEP, (REDUCED, "  %c = bf16[1032,1024]{1,0} pad(%y, %y), padding=0_8x0_0\n"
                      + REDUCED.replace("[1024,", "[1032,").replace("%y", "%c")))  # fmt: skip
    assert changes_of(larger) == ()  # 0.8 %
    assert [c.kind for c in changes_of(larger, bytes=0.001)] == ["more transfers"]
    with pytest.raises(ValueError, match=r"must be a share that is not negative, .* exposed=-1"):
        compare(BASELINE, BASELINE, exposed=-1)


GATHERS = "all-gather over model (forward)"


def with_gathers(
    *, seconds: float = 10e-3, exposed: float = 0.0, amount: int = 64 << 20, rows: int = 1
) -> Summary:
    """Returns a summary with rows of gathers over several axes."""
    totals = {ALL_WAITS: Total(rows * exposed)}
    for n in range(rows):
        totals[f"{TRANSFERS}: {GATHERS} {n}"] = Total(amount, ["bf16"], {"a.py:20": 2})
        totals[f"{WAITS}: {GATHERS} {n}"] = Total(exposed, [], {"a.py:20": 2})
    return Summary("jit_step", "v5e", 4, {"model": 4}, seconds, totals)


def with_rows(summary: Summary, rows: dict[str, Total], **fields) -> Summary:
    """Returns a summary with other rows beside its own."""
    return dataclasses.replace(summary, rows=summary.rows | rows, **fields)


def test_the_time_of_all_waits_and_not_their_share():
    """A faster program with the same waits is not worse; many waits that each grow a little are."""
    assert compare(with_gathers(exposed=3e-3), with_gathers(exposed=3e-3, seconds=7e-3)).ok
    many, longer = (with_gathers(rows=30, exposed=n, seconds=100 * n) for n in (0.1e-3, 0.25e-3))
    (change,) = compare(many, longer).changes
    assert (change.kind, change.worse) == ("more seconds of waiting", True)
    assert change.text == "all transfers: 7.5 ms in a step, 3 ms in the baseline"


def test_waits_are_compared_whatever_is_moved():
    before = with_gathers(exposed=1e-3)
    fewer = compare(before, with_gathers(exposed=3e-3, amount=32 << 20)).changes
    assert [(c.kind, c.worse) for c in fewer] == [
        ("more seconds of waiting", True),
        ("more seconds of waiting", True),
        ("fewer transfers", False),
    ]
    assert fewer[1].text.startswith(f"{GATHERS} 0: ")
    assert fewer[0].text == "all transfers: 3 ms in a step, 1 ms in the baseline"


@pytest.mark.parametrize(
    ("sources", "named"),
    [
        ({"a.py:20": 2, "a.py:42": 1}, ("a.py:42",)),
        ({"a.py:20": 3}, ("a.py:20",)),
        # an edit moved the line, so that no line is known
        ({"a.py:22": 2, "a.py:44": 1}, ("a.py:22", "a.py:44")),
    ],
)
def test_lines_with_more_instructions_are_named(sources, named):
    after = with_gathers()
    after.rows[f"{TRANSFERS}: {GATHERS} 0"] = Total(96 << 20, ["bf16"], sources)
    (change,) = compare(with_gathers(), after).changes
    assert (change.kind, change.sources) == ("more transfers", named)


PROGRAM = f"{MEMORY}: the program"


def test_temporary_memory():
    before, after = (with_rows(BASELINE, {PROGRAM: Total(n << 20)}) for n in (100, 120))
    (change,) = compare(before, after).changes
    assert (change.kind, change.worse) == ("more bytes of temporary memory", True)
    assert "120 MiB in a step, 100 MiB in the baseline" in change.text
    assert compare(before, after, temporaries=0.2).ok
    assert compare(after, before).ok
    assert compare(BASELINE, after).changes == (), "a text does not say it"


@pytest.mark.parametrize(
    ("text", "options", "words"),
    [
        (
            STEP.replace("jit_step", "jit_other"),
            {"axes": AXES},
            "its module is jit_step.* is jit_other",
        ),
        (STEP, {"axes": AXES, "chip": "v6e"}, "another program: its chip is v5e"),
        (
            STEP,
            {"axes": {"data": 4, "model": 2}},
            "another program: its axes is {'data': 2, 'model': 4}",
        ),
        (
            STEP.replace("num_partitions=8", "num_partitions=16"),
            {},
            "its devices is 8.*--update",
        ),
        (STEP, {"axes": {"x": 3}}, "axes must multiply to the 8 devices of jit_step: got x=3"),
        (STEP.replace("is_scheduled=true, ", ""), {}, "is not scheduled"),
        ("", {}, "the text is empty"),
    ],
)
def test_programs_that_cannot_be_compared(text, options, words):
    with pytest.raises(ValueError, match=words):
        compare(BASELINE, summarize(text, **options))


def test_a_step_that_became_faster_is_not_called_worse():
    """A ring in place of a gather has more transfers, copies and waits, and the step takes less
    time.
    """
    before = with_gathers(exposed=1e-3)
    ring = {
        f"{TRANSFERS}: collective-permute over model (forward)": Total(
            48 << 20, ["bf16"], {"ring.py:7": 3}
        ),
        ALL_WAITS: Total(1.5e-3),
        COPY: Total(3, [], {"ring.py:8": 1}),
    }
    after = dataclasses.replace(before, seconds=9e-3, rows=ring)
    faster = compare(before, after)
    assert faster.ok
    assert "nothing is worse" in str(faster)
    assert "  changed: more transfers: collective-permute over model (forward): 48 MiB" in str(
        faster
    )
    slower = compare(before, dataclasses.replace(after, seconds=11e-3))
    assert {c.kind for c in slower.changes if c.worse} >= {"more transfers", "more loop-copies"}
    hazard = {"in-flight-copied: a buffer in flight": Total(3, [], {"ring.py:9": 1})}
    unsafe = compare(before, with_rows(after, hazard))
    assert [c.kind for c in unsafe.changes if c.worse] == ["more in-flight-copied"]


def test_a_faster_step_that_needs_more_memory_or_a_callback_is_still_worse():
    before = with_rows(with_gathers(seconds=10e-3), {PROGRAM: Total(1 << 28)})
    callback = {f"{CALLBACKS}: jax.debug.callback": Total(1, [], {"model.py:3": 1})}
    after = with_rows(before, callback | {PROGRAM: Total(1 << 29)}, seconds=9e-3)
    assert {c.kind for c in compare(before, after).changes if c.worse} == {
        "more bytes of temporary memory",
        "more host callbacks",
    }
