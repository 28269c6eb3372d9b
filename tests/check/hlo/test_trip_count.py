"""How often a loop runs, counted from its instructions, as running the loop counts."""

import pytest

from flaxasync.check import parse
from flaxasync.check.hlo.trip_count import trip_count

LOOP = """HloModule loop, is_scheduled=true

%condition (c: (s32[], s32[])) -> pred[] {{
  %c = (s32[], s32[]) parameter(0)
  %i = s32[] get-tuple-element(%c), index=0
  %n = s32[] get-tuple-element(%c), index=1
  %more = s32[] constant({added})
  %limit = s32[] add(%n, %more)
  ROOT %holds = pred[] compare(%i, %limit), direction={direction}
}}

%body (b: (s32[], s32[])) -> (s32[], s32[]) {{
  %b = (s32[], s32[]) parameter(0)
  %i = s32[] get-tuple-element(%b), index=0
  %n = s32[] get-tuple-element(%b), index=1
  %step = s32[] constant({step})
  %next = s32[] add(%i, %step)
  %change = s32[] constant({change})
  %bound = s32[] add(%n, %change)
  ROOT %t = (s32[], s32[]) tuple(%next, %bound)
}}

ENTRY %main (p: s32[]) -> (s32[], s32[]) {{
  %p = s32[] parameter(0)
  %first = s32[] constant({first})
  %last = s32[] constant({last})
  %begin = (s32[], s32[]) tuple(%first, %last)
  ROOT %w = (s32[], s32[]) while(%begin), condition=%condition, body=%body
}}
"""


def counted(first, last, step, added=0, change=0, direction="LT"):
    text = LOOP.format(
        first=first, last=last, step=step, added=added, change=change, direction=direction
    )
    return trip_count(parse(text).entry.root)


def run(first, last, step, added, direction):
    """Counts by running the loop."""
    holds = {"LT": int.__lt__, "LE": int.__le__, "GT": int.__gt__, "GE": int.__ge__}[direction]
    count = 0
    while holds(first, last + added):
        first += step
        count += 1
    return count


@pytest.mark.parametrize(
    ("first", "last", "step", "added", "direction"),
    [
        (0, 10, 1, 0, "LT"),
        (0, 10, 1, 1, "LT"),
        (0, 10, 1, -3, "LT"),
        (0, 10, 3, 1, "LE"),
        (10, 0, -1, 2, "GT"),
        (10, 0, -4, -1, "GE"),
        (5, 3, 1, 0, "LT"),
        (5, 3, 1, 4, "LT"),
    ],
)
def test_the_count_is_that_of_running_the_loop(first, last, step, added, direction):
    wanted = run(first, last, step, added, direction)
    assert counted(first, last, step, added, direction=direction) == wanted


@pytest.mark.parametrize(
    "loop",
    [
        {"first": 0, "last": 10, "step": 1, "change": -1},
        {"first": 0, "last": 10, "step": 1, "change": 1},
        {"first": 0, "last": 10, "step": 0},
        {"first": 0, "last": 10, "step": -1},
    ],
    ids=["the bound comes nearer", "the bound goes on", "no step", "the counter moves away"],
)
def test_what_is_not_known(loop):
    assert counted(**loop) is None
