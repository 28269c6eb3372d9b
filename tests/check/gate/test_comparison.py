"""The gate on texts: each kind of difference is named with its line, and what does not matter is no
difference.
"""

# ruff: noqa: E501, because an instruction of HLO text is one line

import dataclasses
import re

import pytest

from flaxasync.check import Tolerances, compare, summarize
from flaxasync.check.gate.summary import Count, Row, Summary
from tests.check.hlo_texts import AXES, STEP, changed

BASELINE = summarize(STEP, axes=AXES)
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
    return compare(BASELINE, summarize(text, axes=AXES), Tolerances(**tolerances)).changes


def test_the_rows_of_the_step():
    transfers = {
        row: (count.count, count.runs, dict(count.sources))
        for row, count in BASELINE.transfers.items()
    }
    assert transfers == {
        Row("collective-permute", "forward loop", "model", "bf16", 1 << 21): (
            1,
            4,
            {"/home/me/model.py:20": 1},
        ),
        Row("all-reduce", "backward", "data", "bf16", 1 << 21): (1, 1, {"/home/me/model.py:30": 1}),
    }
    assert list(BASELINE.copies) == [Row("copy", "forward loop", "", "bf16", 1 << 21)]
    assert (BASELINE.callbacks, BASELINE.hazards, BASELINE.temporaries) == ({}, {}, None)
    assert 0 < BASELINE.exposed < 1


@pytest.mark.parametrize(
    ("text", "kind", "words", "line"),
    [
        (
            changed(STEP, (REDUCED, GATHER + REDUCED)),
            "extra transfer",
            "1 more all-gather of 8 MiB over model in the forward",
            42,
        ),
        (
            changed(STEP, (WORK, ""), (START, WORK + START)),
            "lost overlap",
            "collective-permute of 2 MiB over model in the f",
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
            "wider dtype",
            "1 all-reduce of 4 MiB over data in the backward pass is f32 on the wire, bf16 in the "
            "base",
            30,
        ),
        (
            changed(
                STEP,
                (
                    "  ROOT %t = (s32[], bf16[1024,1024]{1,0}) tuple(%next, %copy)",
                    "  %copy.2 = bf16[1024,1024]{1,0} copy(%copy), "
                    'metadata={source_file="/home/me/model.py" source_line=43}\n'
                    "  ROOT %t = (s32[], bf16[1024,1024]{1,0}) tuple(%next, %copy.2)",
                ),
            ),
            "extra copy in a loop",
            "1 more copy of 2 MiB in the forward loop",
            43,
        ),
        (
            changed(STEP, (REDUCED, CALLBACK + REDUCED)),
            "extra host callback",
            "1 more jax.debug.callback",
            41,
        ),
        (
            changed(STEP, ("constant(4)", "constant(8)")),
            "runs",
            "permute of 2 MiB over model in the forward loop: 8 runs in a step, 4 in the baseline",
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
            "larger transfer",
            "1 all-reduce of 4 MiB over data in the backward pass, 2 MiB in the baseline",
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
    assert any(not c.worse for c in back.changes), "the way back is a change for the better"
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
    assert (change.kind, change.sources) == ("extra hazard", ("/home/me/model.py:44",))
    assert "1 more in-flight-copied: the compiler copies a buffer" in change.text


def test_tolerances():
    lost = changed(STEP, (WORK, ""), (START, WORK + START))
    assert changes_of(lost, exposed=0.9) == ()
    larger = changed(STEP, (REDUCED, "  %c = bf16[1032,1024]{1,0} pad(%y, %y), padding=0_8x0_0\n"
                      + REDUCED.replace("[1024,", "[1032,").replace("%y", "%c")))  # fmt: skip
    assert changes_of(larger) == ()  # 0.8 %
    assert [c.kind for c in changes_of(larger, bytes=0.001)] == ["larger transfer"]
    with pytest.raises(
        ValueError, match="the tolerance exposed must be a share that is not negative"
    ):
        Tolerances(exposed=-1)


GATHERS = Row("all-gather", "forward", "model", "bf16", 1 << 26)


def with_gathers(
    *, seconds: float = 10e-3, rows: int = 1, copies: Count | None = None, **count
) -> Summary:
    """Returns a summary with rows of gathers that differ in their sizes."""
    one = Count(**{"count": 1, "runs": 1} | count)
    transfers = {dataclasses.replace(GATHERS, bytes=(64 + n) << 20): one for n in range(rows)}
    copied = {Row("copy", "forward loop", "", "bf16", 1 << 20): copies} if copies else {}
    share = rows * one.exposed / seconds
    return Summary(
        "jit_step", "v5e", 4, {"model": 4}, seconds, share, None, transfers, copied, {}, {}
    )


def test_the_time_of_all_waits_and_not_their_share():
    """A faster program with the same waits is not worse; many waits that each grow a little are."""
    assert compare(with_gathers(exposed=3e-3), with_gathers(exposed=3e-3, seconds=7e-3)).ok
    many, longer = (with_gathers(rows=30, exposed=n, seconds=100 * n) for n in (0.1e-3, 0.25e-3))
    (change,) = compare(many, longer).changes
    assert (change.kind, change.worse) == ("exposed time", True)
    assert (
        "the device waits 7.5 ms of a step for all transfers, 3 ms in the baseline" in change.text
    )


def test_a_row_whose_number_fell_is_compared():
    before = with_gathers(count=2, runs=16, exposed=1e-3)
    fewer = compare(before, with_gathers(count=1, runs=32, exposed=1e-3)).changes
    assert [(c.kind, c.worse) for c in fewer] == [("runs", True), ("removed transfer", False)]
    assert "32 runs in a step, 16 in the baseline" in fewer[0].text
    waits = compare(before, with_gathers(count=1, runs=8, exposed=3e-3)).changes
    assert [(c.kind, c.worse) for c in waits] == [
        ("lost overlap", True),
        ("removed transfer", False),
    ]
    more = compare(before, with_gathers(count=3, runs=24, exposed=3e-3)).changes
    assert [c.kind for c in more] == ["extra transfer", "exposed time"]
    copies = compare(with_gathers(copies=Count(2, 8)), with_gathers(copies=Count(1, 16))).changes
    assert [(c.kind, c.worse) for c in copies] == [
        ("runs", True),
        ("removed copy in a loop", False),
    ]
    assert (
        "1 copy of 1 MiB in the forward loop: 16 runs in a step, 8 in the baseline"
        in copies[0].text
    )


@pytest.mark.parametrize(
    ("before", "after", "named"),
    [
        (
            {"a.py:10": 1, "a.py:20": 1, "a.py:30": 1},
            {"a.py:11": 1, "a.py:21": 1, "a.py:31": 1, "a.py:40": 1},
            "40",
        ),
        (
            {"a.py:10": 1, "a.py:20": 1, "a.py:30": 1},
            {"a.py:10": 1, "a.py:15": 1, "a.py:24": 1, "a.py:34": 1},
            "15",
        ),
        ({"a.py:20": 1}, {"a.py:20": 1, "a.py:42": 1}, "42"),
        ({"a.py:20": 2}, {"a.py:22": 3}, "22"),
        ({"b.py:20": 1}, {"b.py:21": 1, "a.py:20": 1}, "20"),
    ],
)
def test_the_new_line_is_named_though_an_edit_moved_the_others(before, after, named):
    old, new = sum(before.values()), sum(after.values())
    (change,) = compare(
        with_gathers(count=old, runs=old, sources=before),
        with_gathers(count=new, runs=new, sources=after),
    ).changes
    assert (change.kind, change.sources) == ("extra transfer", (f"a.py:{named}",))


def test_temporary_memory():
    before, after = (dataclasses.replace(BASELINE, temporaries=n << 20) for n in (100, 120))
    (change,) = compare(before, after).changes
    assert (change.kind, change.worse) == ("temporary memory", True)
    assert "120 MiB of temporary memory, 100 MiB in the baseline" in change.text
    assert compare(before, after, Tolerances(temporaries=0.2)).ok
    assert compare(after, before).ok


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
            "another program: its mesh is {'data': 2, 'model': 4}",
        ),
        (
            STEP.replace("num_partitions=8", "num_partitions=16"),
            {},
            "its number of devices is 8.*--update",
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
    before = with_gathers(seconds=10e-3, exposed=1e-3)
    ring = {
        Row("collective-permute", "forward", "model", "bf16", 1 << 24): Count(
            3, 3, 1.5e-3, {"ring.py:7": 3}
        )
    }
    copies = {Row("copy", "forward loop", "", "bf16", 1 << 20): Count(1, 3, 0.0, {"ring.py:8": 1})}
    hazards = {Row("in-flight-copied", "forward loop"): Count(1, 3, 0.0, {"ring.py:9": 1})}
    after = dataclasses.replace(before, seconds=9e-3, exposed=0.17, transfers=ring, copies=copies)
    faster = compare(before, after)
    assert faster.ok
    assert "better than in the baseline" in str(faster)
    assert "  changed: extra transfer: 3 more collective-permutes of 16 MiB" in str(faster)
    assert not any(change.worse for change in faster.changes)
    slower = compare(before, dataclasses.replace(after, seconds=11e-3))
    assert {c.kind for c in slower.changes if c.worse} >= {"extra transfer", "extra copy in a loop"}
    unsafe = compare(before, dataclasses.replace(after, hazards=hazards))
    assert [c.kind for c in unsafe.changes if c.worse] == ["extra hazard"]


def test_a_faster_step_that_needs_more_memory_or_a_callback_is_still_worse():
    before = dataclasses.replace(with_gathers(seconds=10e-3), temporaries=1 << 28)
    callbacks = {Row("jax.debug.callback"): Count(1, 1, 0.0, {"model.py:3": 1})}
    after = dataclasses.replace(before, seconds=9e-3, temporaries=1 << 29, callbacks=callbacks)
    assert {c.kind for c in compare(before, after).changes if c.worse} == {
        "temporary memory",
        "extra host callback",
    }
