"""The variants of the published 2x2 study: small, and one of them at full size against its
published times.

The small ones also show what `play` and `play_dump` return.
"""

import dataclasses
import importlib.metadata
import json
import math
import os
import subprocess
import sys

import pytest

from benchmarks import player_v6e
from benchmarks.player import ONE_CHIP, ROWS, STEP, misses, play_gemm, play_on_one_chip, predict
from benchmarks.player_kernels import STUDY, program
from flaxasync.check import topology_mesh
from flaxasync.check.player import play, play_dump, played_chip
from flaxasync.check.player.result import WaitTimes
from tests.check.programs import SHAPE, assert_times_add_up, sent_bytes, simulated

W, O = SHAPE[1] // 2 * SHAPE[2] * 2, SHAPE[0] // 2 * SHAPE[2] * 2  # noqa: E741, bytes of one device's w and o


@pytest.mark.parametrize(("variant", "bytes_sent", "phases"), [
    pytest.param(
        "collectives_and_gemm", None, ("all-gather", "gemm", "psum"), marks=pytest.mark.slow
    ),
    ("series", [W + O] * 4, ("all_gather", "gemm", "all_reduce")),
    ("fused", [W + O] * 4, ("fused", "all_reduce")),
    ("overlapped", [W + O, O, O, W + O], ("overlapped",)),
    ("xla", [O, W + O, W + O, O], ("collective-permute",)),  # two permute, two have what they need
])  # fmt: skip
def test_variants_of_the_study(variant, bytes_sent, phases):
    _, result = simulated(variant)
    assert_times_add_up(result)
    order = [
        next(p.start for p in result.slowest.phases if p.name.startswith(name)) for name in phases
    ]
    assert order == sorted(order)
    if bytes_sent:
        assert sent_bytes(result) == bytes_sent
    assert not result.notes
    flops = 2 * SHAPE[0] * SHAPE[1] * SHAPE[2] / 4
    for device in result.devices:  # every tile is full, so the busy time is the FLOPs at the peak
        assert device.matrix_busy == pytest.approx(
            flops / played_chip("v5e").sheet.flops, rel=0.005
        )


def test_the_overlapped_kernel_waits_less_for_others_than_the_fused_one():
    series, fused, overlapped = (
        simulated(variant)[1] for variant in ("series", "fused", "overlapped")
    )
    assert overlapped.exposed < 0.6 * fused.exposed
    assert overlapped.seconds < fused.seconds < series.seconds * 1.1


def test_a_simulation_is_the_same_every_time():
    folder, result = simulated("fused")
    again, third = play_dump(folder), play_dump(folder)
    assert result.to_json() == again.to_json() == third.to_json()
    assert again.slices == third.slices


def test_constants_can_be_replaced():
    folder, result = simulated("series")
    slow = dataclasses.replace(played_chip("v5e"), link_efficiency=0.5)
    assert play_dump(folder, chip=slow).exposed > 1.7 * result.exposed


def test_waits_and_their_percentiles():
    """All waits of a device are its times of waiting; a wait that is over at once is one of
    them.
    """
    _, result = simulated("fused")
    for device in result.devices:
        found = result.waits(device.device)
        assert sum(found.seconds) == pytest.approx(sum(device.waits.values()))
        tiles = result.waits(device.device, "fused", "hbm to vmem")
        assert (
            len(tiles.seconds)
            == 2 * math.prod(SHAPE[i] // 2 // 256 for i in (0, 1)) * SHAPE[2] // 256
        )
        assert 0.0 in tiles.seconds
        early, late = (
            result.waits(device.device, "fused", "hbm to vmem", **period)
            for period in ({"end": result.seconds / 3}, {"begin": result.seconds / 3})
        )
        assert sorted(early.seconds + late.seconds) == list(tiles.seconds)
    ten = WaitTimes(tuple(map(float, range(1, 11))))
    assert [ten.percentile(share) for share in (0, 10, 50, 90, 99, 100)] == [1, 1, 5, 9, 10, 10]
    assert WaitTimes(()).percentile(50) == 0.0


def test_the_counts_of_operations_are_those_of_each_program():
    _, result = simulated("xla")
    assert {"TLP", "fusion"} <= result.operations.keys()
    fusion, top = result.operations["fusion"], result.operations["TLP"]
    assert fusion.pops == 2 * fusion.multiplies > 0 == top.multiplies
    assert min(fusion.pushes, fusion.loads, fusion.stores, fusion.vector) > 0


def test_json_table_and_timeline():
    _, result = simulated("fused")
    content = json.loads(result.to_json())
    assert content["seconds"] == result.seconds
    assert len(content["devices"]) == 4
    assert not content.keys() & {"slices", "all_waits"}
    for text in (
        result.slowest.phase("fused").name,
        "basis:",
        "waits of",
        "p99",
        "known error:",
        "device 3",
        "bytes of all devices",
    ):
        assert text in str(result)
    with pytest.raises(KeyError, match=r"no phase begins with 'nothing': .*fused"):
        result.slowest.phase("nothing")
    for device in result.devices:
        waits = device.exposed + device.memory
        assert device.seconds == pytest.approx(device.compute + waits)
        assert waits == pytest.approx(sum(device.causes.values()))


@pytest.fixture(scope="module")
def fused(tmp_path_factory):
    """The one simulation at full size that runs here: its dumps and its result.
    benchmarks/player.py has the others.
    """
    folder = tmp_path_factory.mktemp("fused")
    fn, *arguments = program("fused", topology_mesh("v5e:2x2", (2, 2), ("x", "y")), STUDY)
    return folder, play(fn, *arguments, topology="v5e:2x2", keep_dumps=folder)


@pytest.mark.slow
def test_the_published_times_and_waits_of_the_fused_kernel(fused):
    """Times within 10 %, the total within 1 %, and percentiles and sums of waits within the bounds
    of their rows.
    """
    _, result = fused
    assert misses(predict([row for row in ROWS if row.variant == "fused"], {"fused": result})) == []
    assert "prediction" in result.basis
    assert importlib.metadata.version("libtpu") in result.basis


# VmHWM is the most memory that this program had resident; `ru_maxrss` is carried over from the
# process that started it.
ALONE = """
import sys
from flaxasync.check.player.__main__ import main
main(sys.argv[1:])
(line,) = (line for line in open("/proc/self/status") if line.startswith("VmHWM:"))
print("KiB:", line.split()[1])
"""


@pytest.mark.slow
def test_a_process_of_its_own_finds_the_same_in_little_memory(fused, tmp_path):
    folder, result = fused
    command = [sys.executable, "-c", ALONE, folder, "--json", tmp_path / "r.json"]
    done = subprocess.run(
        command,
        env=os.environ | {"PYTHONHASHSEED": "1"},
        check=True,
        capture_output=True,
        text=True,
    )
    assert (
        json.loads((tmp_path / "r.json").read_text())["devices"]
        == json.loads(result.to_json())["devices"]
    )
    assert int(done.stdout.split("KiB:")[1]) < 2 << 20


@pytest.mark.slow
def test_the_counts_of_operations_in_the_fusion_of_the_whole_product():
    """Within 10 % of those that the study counts; the player had -9 % of one kind, and 0.3 % of all
    others.
    """
    predicted = predict(
        [row for row in ROWS if row.variant == ONE_CHIP], {ONE_CHIP: play_on_one_chip()}
    )
    assert len(predicted) == 8
    assert misses(predicted) == []


# Every time, wait and count of operations that the study publishes, in the unit in which it does.
PUBLISHED = {
    "xla": [12.05, 731, 2.877, 5.881, 187, 95, 5.4, 3.25],
    "collectives_and_gemm": [12.5, 2.88, 415, 439, 5.93, 348, 174, 3.25],
    "series": [13.17, 3.32, 437.8, 2.88, 415, 439, 5.93, 3.07, 45.47, 46.5, 1.085, 408.7],
    "fused": [
        12.3,
        2.877,
        6.15,
        5.96,
        191,
        3.064,
        2.688,
        408.9,
        7.5,
        416,
        1870,
        3535,
        7.5,
        8.7,
        440,
        2575,
        924,
        606,
        216,
        8.7,
        573,
        33,
        58,
    ],
    STEP: [5.593, 8390],
    ONE_CHIP: [10117, 115, 2624, 656, 512, 5248, 7582, 7073, 3200],
}


def test_the_table_has_every_published_figure():
    for variant, figures in PUBLISHED.items():
        assert sorted(r.measured for r in ROWS if r.variant == variant) == sorted(figures), variant
    assert {row.variant for row in ROWS if row.measured} == PUBLISHED.keys()


@pytest.mark.slow
def test_the_step_of_the_gemm_kernel():
    assert misses(predict([row for row in ROWS if row.variant == STEP], {STEP: play_gemm()})) == []


def test_the_table_notices_what_is_too_far_and_what_is_out_of_order():
    exact = [(row, row.measured) for row in ROWS if row.measured]
    assert misses(exact) == []
    for row, value in exact:
        if row.label == "total" or row.variant == STEP:
            assert row.allowed == 0.01
        assert misses([(row, value * (1 + 0.9 * row.allowed))]) == []
        assert len(misses([(row, value * (1 + 1.1 * row.allowed))])) == 1
    swapped = {"collectives_and_gemm": 12.3, "fused": 12.4}
    *_, text = misses(
        [
            (row, swapped.get(row.variant, value) if row.label == "total" else value)
            for row, value in exact
        ]
    )
    assert "another order: xla, collectives_and_gemm, fused, series" in text


@pytest.mark.slow
def test_the_kernel_that_a_v6e_ran():
    """Its bytes are facts of its tiles. libtpu 0.0.50 orders its copies as in the profile; later
    versions do not.
    """
    result = player_v6e.play_matmul()
    steps = (2048 // 512) * (2048 // 1024) * (1024 // 512)
    assert result.bytes == {
        "hbm to vmem": steps * 4 * (512 * 512 + 512 * 1024),
        "vmem to hbm": 4 * 2048 * 2048,
    }
    total, *parts = [row.value(result) * 1e6 / row.measured for row in player_v6e.ROWS]
    if importlib.metadata.version("libtpu").startswith("0.0.50"):
        assert total == pytest.approx(1, abs=0.07)
        assert parts == pytest.approx([1, 1, 1], abs=0.15)
    else:
        assert 0.75 < total < 1
