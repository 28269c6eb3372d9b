"""Reading bundle dumps: operations, bundles, declarations, and texts that are incomplete."""

import pytest

from flaxasync.check.player.bundle_text import HEADER, parse_operation, read_program
from flaxasync.check.player.errors import DumpError


def write(folder, bundles, declared=""):
    bundle_file, original = folder / "1-k-03-final_bundles.txt", folder / "1-k-00-original.txt"
    bundle_file.write_text(f"{HEADER}\n\n{bundles}")
    original.write_text(declared)
    return read_program("k", bundle_file, original)


def test_an_operation_with_every_part():
    o = parse_operation("%s4_s2 = sadd.s32 (!%p1_p0), %s1_s0, [#allocation3 + $0x4]", "why")
    assert (o.name, o.result, o.predicate, o.comment) == ("sadd.s32", "s4_s2", "!%p1_p0", "why")
    assert o.operands == ("%s1_s0", "[#allocation3 + $0x4]")


@pytest.mark.parametrize(
    ("text", "predicate", "operands", "target"),
    [
        ("%7 = sst [smem:[#allocation1_spill]] %s2_s0", "", ("[smem:[#allocation1_spill]]", "%s2_s0"), -1),
        ("%7 = sst [smem:[#allocation1]] (%p6_p1), %s2_s0", "%p6_p1", ("[smem:[#allocation1]]", "%s2_s0"), -1),
        ("%38 = sbr.rel (!%p36_p3) target = $region259", "!%p36_p3", (), 259),
        ("%9 = dma.hbm_to_vmem [thread:$1] (%p1_p0), %s1_s0, 16, %s2_s1, [#allocation4]", "%p1_p0",
         ("%s1_s0", "16", "%s2_s1", "[#allocation4]"), -1),
    ],
)  # fmt: skip
def test_forms_of_operations(text, predicate, operands, target):
    o = parse_operation(text)
    assert (o.predicate, o.operands, o.target) == (predicate, operands, target)


def test_a_program_with_regions_and_comments_over_several_lines(tmp_path):
    program = write(
        tmp_path,
        "     0   :  { %1 = shalt.err (!%p1_p0) /* stops }\n here */  ;;  %s2_s1 = smov.u32 3 } /* Start region 4 */\n"
        "   0x1 LB: > { } /* Start/End empty region 5 :: Start region 6 */\n   0x2   :  {}\n",
        "  #allocation0 [shape = 's32[2]{0}', space=sflag, size = 0x8, scoped, tag = 'scratch operand']\n",
    )
    assert [len(bundle) for bundle in program.bundles] == [2, 0, 0]
    assert program.regions == {4: 0, 5: 1, 6: 1}
    assert program.bundles[0][0].comment == "stops }\n here"
    assert program.declarations["allocation0"].size == 8


@pytest.mark.parametrize(
    ("bundles", "message"),
    [
        ("", "no bundle"),
        ("     0   :  { }\n   0x2   :  {}\n", "bundle 0x1 is missing"),
        ("     0   :  { %1 = shalt.err /* stops", "does not end"),
    ],
)
def test_a_text_that_was_cut(tmp_path, bundles, message):
    with pytest.raises(DumpError, match=message):
        write(tmp_path, bundles)


def test_a_text_of_another_version(tmp_path):
    (tmp_path / "a").write_text("LLO dump v2")
    with pytest.raises(DumpError, match="another version of libtpu"):
        read_program("k", tmp_path / "a", tmp_path / "a")
