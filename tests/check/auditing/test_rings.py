"""Which rings of flaxasync have lost their overlap, in the first line of an audit, of a dry run and
of a run.
"""

import json

import jax
import pytest

from flaxasync.check import audit
from tests.check import hlo_texts as texts
from tests.check.hlo_texts import changed
from train.lifecycle import preparation

PERMUTE = """\
  %start.{n} = (f32[1048576]{{0}}, f32[1048576]{{0}}, u32[], u32[]) collective-permute-start(%x), \
source_target_pairs={{{{0,1}},{{1,0}}}}, metadata={{op_name="jit(f)/shard_map/{path}/hop/ppermute"}}
{inside}  %done.{n} = f32[1048576]{{0}} collective-permute-done(%start.{n})
"""
WORK = "  %work.{n} = f32[1048576]{{0}} exponential(%x)\n"
SYNCHRONOUS = """\
  %held = f32[1048576]{0} collective-permute(%x), source_target_pairs={{0,1},{1,0}}, \
metadata={op_name="jit(f)/shard_map/ring_attention/hop/ppermute"}
"""


def program(*transfers: tuple[str, bool], more: str = "") -> str:
    """Returns a program with one permute for each (path of its function, whether work is inside)."""
    lines = ""
    for n, (path, has_work) in enumerate(transfers):
        inside = WORK.format(n=n) if has_work else ""
        lines += PERMUTE.format(n=n, path=path, inside=inside)
    return (
        "HloModule m, is_scheduled=true, num_partitions=2\n\nENTRY %e {\n"
        f"  %x = f32[1048576]{{0}} parameter(0)\n{lines}{more}"
        "  ROOT %end = f32[1048576]{0} negate(%x)\n}\n"
    )


GATHER, LOOP = "all_gather_matmul", "all_gather_matmul_dw/while/body/eval_jaxpr"


@pytest.mark.parametrize(
    ("transfers", "lost"),
    [
        ([(GATHER, True)] * 3, ""),
        ([(GATHER, True)] * 3 + [(GATHER, False)], ""),
        (
            [(GATHER, False)] * 3 + [(GATHER, True)],
            "3 of 4 permutes of all_gather_matmul have nothing inside",
        ),
        ([(LOOP, False)], "1 of 1 permutes of all_gather_matmul_dw has nothing inside"),
        ([("my_own_ring/step", True)], ""),
        (
            [("transpose(jvp(all_gather_matmul_dw))/while/body", False)],
            "1 of 1 permutes of all_gather_matmul_dw has nothing inside",
        ),
        (
            [(LOOP, False)] * 2 + [(GATHER, False)],
            "2 of 2 permutes of all_gather_matmul_dw have nothing inside; 1 of 1 permutes of "
            "all_gather_matmul has nothing inside",
        ),
    ],
)
def test_a_ring_that_lost_its_overlap_is_in_the_first_line(transfers, lost):
    found = audit(program(*transfers), chip="v5e")
    assert found.lost_overlap == lost
    first = str(found).splitlines()[0]
    assert first == f"audit of m (v5e): ok; {lost}".removesuffix("; ")
    transfers_in_json = sum(ring["transfers"] for ring in json.loads(found.to_json())["rings"])
    assert transfers_in_json == len(transfers)


def test_a_permute_of_another_function_belongs_to_no_ring():
    text = changed(program((GATHER, False)), ("/hop/ppermute", "/ppermute"))
    assert audit(text, chip="v5e").rings == ()


def test_of_a_program_without_a_schedule_nothing_is_said():
    text = changed(program((GATHER, False)), (", is_scheduled=true", ""))
    assert audit(text, chip="v5e").rings == ()


def test_a_permute_without_a_start_has_nothing_inside():
    found = audit(program((GATHER, True), more=SYNCHRONOUS), chip="v5e")
    assert found.lost_overlap == "1 of 1 permutes of ring_attention has nothing inside"


def test_permutes_in_a_loop_count_as_often_as_they_run():
    """The loop counts from 0 to 12 in steps of 3."""
    permute = (
        "%c = f32[65536]{0} collective-permute(%g), source_target_pairs={{0,1},{1,0}}, "
        'metadata={op_name="jit(f)/matmul_reduce_scatter/while/body/eval_jaxpr/hop/ppermute"}'
    )
    text = changed(texts.LOOP, ("%c = f32[65536]{0} negate(%g)", permute))
    (ring,) = audit(text, chip="v5e").rings
    assert str(ring) == "4 of 4 permutes of matmul_reduce_scatter have nothing inside"


@pytest.mark.parametrize(
    ("platform", "text", "lost"),
    [
        (
            "tpu",
            program((GATHER, False)),
            "1 of 1 permutes of all_gather_matmul has nothing inside",
        ),
        ("tpu", program((GATHER, True)), ""),
        ("tpu", "no program", ""),
        ("cpu", program((GATHER, False)), ""),
    ],
)
def test_a_run_says_which_rings_have_lost_their_overlap(monkeypatch, platform, text, lost):
    monkeypatch.setattr(jax, "default_backend", lambda: platform)
    assert preparation.lost_overlap(text) == lost
