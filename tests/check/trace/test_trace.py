"""Exposed communication of profiles that the test builds, whose answer is known; and what cannot be
read.
"""

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.profiler import ProfileData

from flaxasync.check import parse
from flaxasync.check.__main__ import main
from flaxasync.check.trace.exposed import measure_exposed
from flaxasync.check.trace.profile import (
    DeviceProfile,
    Event,
    clip,
    median_seconds,
    read_profile,
    seconds,
    union,
)

# One run of 1000 us. The loop lasts as long as what runs in it. Two gathers are under way at the
# same time, and a product hides 300 us of them; of the rest, 100..400 and 700..900, the waits of
# the core are a part.
EVENTS = {
    "XLA Modules": [("jit_step(17)", 0, 1000), ("jit_other(18)", 2000, 100)],
    "XLA Ops": [
        ("while.1", 0, 1000),
        ("fusion.1", 0, 100),
        ("all-gather-done.1", 100, 300),
        ("fusion.2", 400, 300),
        ("all-gather-done.2", 700, 200),
        ("fusion.3", 900, 100),
        ("fusion.9", 2000, 100),
    ],
    "Async XLA Ops": [("all-gather-start.1", 50, 350), ("all-gather-start.2", 60, 840)],
}
PROGRAM = """HloModule jit_step, is_scheduled=true

ENTRY main {
  p = f32[8]{0} parameter(0)
  all-gather-start.1 = (f32[8]{0}, f32[16]{0}) all-gather-start(p), replica_groups={{0,1}}, dimensions={0}, \
metadata={op_name="jit(step)/while/body/attention/all_gather"}
  ROOT all-gather-done.1 = f32[16]{0} all-gather-done(all-gather-start.1), \
metadata={op_name="jit(step)/while/body/attention/all_gather"}
}
"""


def xplane(events, plane="/device:TPU:0"):
    """Returns a profile of one plane as bytes, from {line: [(name, begin, length)]} in
    microseconds.
    """
    names = sorted({name for line in events.values() for name, _, _ in line})
    text = f'planes {{ name: "{plane}"\n'
    for number, name in enumerate(names, 1):
        text += f'event_metadata {{ key: {number} value {{ id: {number} name: "{name}" }} }}\n'
    for line, found in events.items():
        text += f'lines {{ name: "{line}" timestamp_ns: 0\n'
        for name, start, length in found:
            times = f"offset_ps: {start * 10**6} duration_ps: {length * 10**6}"
            text += f"events {{ metadata_id: {names.index(name) + 1} {times} }}\n"
        text += "}\n"
    return ProfileData.text_proto_to_serialized_xspace(text + "}\n")


@pytest.fixture
def profile(tmp_path):
    file = tmp_path / "plugins" / "profile" / "host.xplane.pb"
    file.parent.mkdir(parents=True)
    file.write_bytes(xplane(EVENTS))
    return tmp_path


def test_a_moment_counts_once_however_many_transfers_share_it(profile):
    (times,) = measure_exposed(read_profile(profile), module=parse(PROGRAM))
    assert (times.program, times.runs) == ("jit_step", 1)
    assert times.seconds == pytest.approx(1000e-6)
    assert times.compute == pytest.approx(500e-6)
    assert times.communication == pytest.approx(850e-6)  # 50..900
    assert times.exposed == pytest.approx(500e-6)  # 100..400 and 700..900
    summed = sum(
        length
        for line in EVENTS.values()
        for name, _, length in line
        if name.startswith("all-gather")
    )
    assert summed == 1690, (
        "negative test: the sum of the times of the instructions is longer than the run"
    )
    # The shares of the instructions add up to the whole, and so do those of their layers, which the
    # program says.
    shares = {op.name: round(op.seconds * 1e6) for op in times.ops}
    assert shares == {"all-gather-start.1": 300, "all-gather-start.2": 200, "all-gather-done.1": 0,
                      "all-gather-done.2": 0}  # fmt: skip
    assert {layer.name: round(layer.seconds * 1e6) for layer in times.layers} == {
        "attention": 300,
        "": 200,
    }


# Fusions of libtpu that start a gather, end it, and perform another one, under names that do not
# say so.
FUSED = """HloModule jit_step, is_scheduled=true, num_partitions=2

%started (p: f32[8]) -> f32[16] {
  %p = f32[8]{0} parameter(0)
  ROOT %s = f32[16]{0} custom-call(%p), custom_call_target="AsyncCollectiveStart"
}

%ended (p: f32[16]) -> f32[16] {
  %p = f32[16]{0} parameter(0)
  ROOT %d = f32[16]{0} custom-call(%p), custom_call_target="AsyncCollectiveDone"
}

%gathers (p: f32[8]) -> f32[16] {
  %p = f32[8]{0} parameter(0)
  ROOT %g = f32[16]{0} all-gather(%p), replica_groups={{0,1}}, dimensions={0}
}

ENTRY %main (x: f32[8]) -> (f32[16], f32[16]) {
  %x = f32[8]{0} parameter(0)
  %fusion.4 = f32[16]{0} fusion(%x), kind=kCustom, calls=%started
  %fusion.5 = f32[16]{0} fusion(%fusion.4), kind=kCustom, calls=%ended
  %fusion.6 = f32[16]{0} fusion(%x), kind=kCustom, calls=%gathers
  ROOT %t = (f32[16]{0}, f32[16]{0}) tuple(%fusion.5, %fusion.6)
}
"""


@pytest.mark.parametrize(("names", "module"), [
    (("async-collective-start.1", "async-collective-done.1", "all-gather.2"), None),
    (("fusion.4", "fusion.5", "fusion.6"), FUSED),
], ids=["by name", "by program"])  # fmt: skip
def test_fusions_that_start_and_end_a_collective_do_not_compute(names, module, tmp_path):
    start, done, whole = names
    ops = [
        ("fusion.1", 0, 190),
        (start, 190, 10),
        (done, 200, 600),
        (whole, 800, 100),
        ("fusion.3", 900, 100),
    ]
    file = tmp_path / "host.xplane.pb"
    file.write_bytes(xplane({"XLA Modules": [("jit_step(17)", 0, 1000)], "XLA Ops": ops}))
    (times,) = measure_exposed(read_profile(file), module=None if module is None else parse(module))
    assert times.compute == pytest.approx(290e-6)
    assert times.communication == pytest.approx(710e-6)
    assert times.exposed == pytest.approx(710e-6)


@pytest.mark.parametrize("done", ["copy-done.1", "slice-done", "async-done.2"])
def test_a_wait_for_a_copy_within_the_device_hides_nothing(done, tmp_path):
    ops = [("fusion.1", 0, 400), (done, 400, 600)]
    file = tmp_path / "host.xplane.pb"
    under_way = {"Async XLA Ops": [("all-gather-start.1", 0, 1000)]}
    file.write_bytes(
        xplane({"XLA Modules": [("jit_step(17)", 0, 1000)], "XLA Ops": ops} | under_way)
    )
    (times,) = measure_exposed(read_profile(file))
    assert times.exposed == pytest.approx(600e-6)


@pytest.mark.parametrize("loops", [0, 3])
def test_runs_that_a_profile_does_not_number_are_told_apart(loops, tmp_path):
    """Five runs of 300 us, 1000 us from one to the next; a loop before the first instruction is a
    part of its run.
    """
    runs = range(0, 5000, 1000)
    looped = [("step", at + 10 * n, 10) for at in runs for n in range(loops)]
    streams = {
        "Stream #1(Compute)": [*looped, *(("gemm", at + 30, 100) for at in runs)],
        "Stream #2(NCCL)": [("ncclDevKernel_AllGather", at + 100, 230) for at in runs],
    }
    file = tmp_path / "host.xplane.pb"
    file.write_bytes(xplane(streams, "/device:GPU:0"))
    (times,) = measure_exposed(read_profile(file))
    assert times.runs == 5
    assert times.seconds == pytest.approx((330 if loops else 300) * 1e-6)
    assert times.exposed == pytest.approx(200e-6)
    assert times.compute == pytest.approx((100 + 10 * loops) * 1e-6)


def test_the_exact_name_of_a_program_goes_before_a_longer_one(profile):
    longer = {"XLA Modules": [("jit_step_long(16)", 3000, 50), *EVENTS["XLA Modules"]]}
    next(profile.rglob("*.xplane.pb")).write_bytes(xplane(EVENTS | longer))
    assert [t.program for t in measure_exposed(read_profile(profile), "jit_step")] == ["jit_step"]
    assert [t.program for t in measure_exposed(read_profile(profile), "jit_step_")] == [
        "jit_step_long"
    ]


def test_device_time_of_a_program_leaves_out_the_wait_for_other_cores(tmp_path):
    runs = [("jit_step(1)", 1000 * n, 100 + n) for n in range(5)]
    waits = [("barrier-cores.1", 1000 * n, 40) for n in range(5)]
    file = tmp_path / "host.xplane.pb"
    file.write_bytes(
        xplane({"XLA Modules": [*runs, ("jit_step_two(2)", 9000, 7)], "XLA Ops": waits})
    )
    (device,) = devices = read_profile(file)
    assert device.run_seconds("jit_step(") == pytest.approx([60e-6 + n * 1e-6 for n in range(5)])
    assert median_seconds(devices, "jit_step(", 5) == pytest.approx(62e-6)


def test_a_profile_without_runs_gives_the_time_in_which_the_device_did_anything(tmp_path):
    file = tmp_path / "host.xplane.pb"
    streams = {
        "Stream #1(Compute)": [("gemm", 0, 100)],
        "Stream #2(NCCL)": [("ncclDevKernel_AllGather", 50, 100)],
    }
    file.write_bytes(xplane(streams, "/device:GPU:0"))
    devices = read_profile(file)
    assert median_seconds(devices, "jit_step", 1) == pytest.approx(150e-6)
    (times,) = measure_exposed(devices)
    assert (round(times.compute * 1e6), round(times.exposed * 1e6)) == (100, 50)


def test_the_command_prints_the_measured_and_the_estimated_times(profile, tmp_path, capsys):
    program = tmp_path / "program.txt"
    program.write_text(PROGRAM)
    assert main(["trace", str(profile), "--program", str(program), "--chip", "v5e"]) == 0
    out = capsys.readouterr().out
    assert "jit_step, 1 runs; milliseconds of one run" in out
    assert "/device:TPU:0             1.000      0.500          0.850      0.500   50.0%" in out
    assert "estimated   " in out
    assert "  attention  " in out
    assert main(["trace", str(profile), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["exposed"] == pytest.approx(500e-6)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "must be an xplane file, or a folder that jax.profiler.trace wrote: it has none"),
        (b"no profile", "is not an xplane file"),
        (
            xplane({"python": [("main", 0, 1)]}, "/host:CPU"),
            "has no planes of devices and no instructions of XLA programs: it has the planes "
            "/host:CPU; run the",
        ),
        (xplane(EVENTS), "the profile has no program 'jit_nothing': it has jit_other, jit_step"),
    ],
)
def test_what_cannot_be_read_is_an_error_that_says_why(content, message, tmp_path, capsys):
    if content is not None:
        (tmp_path / "a.xplane.pb").write_bytes(content)
    assert main(["trace", str(tmp_path), "--module", "jit_nothing"]) == 2
    assert message in capsys.readouterr().err


INTERVALS = st.lists(
    st.tuples(st.integers(0, 20), st.integers(0, 20)).map(lambda pair: tuple(sorted(pair))),
    max_size=8,
)


def points(intervals):
    return {point for start, end in intervals for point in range(start, end)}


@given(INTERVALS)
def test_intervals_are_sets_of_moments(a):
    assert points(union(a)) == points(a)
    assert seconds(a) == len(points(a))
    assert points(clip(a, (5, 15))) == points(a) & set(range(5, 15))
    assert all(end > start for start, end in union(a))
    assert all(before[1] <= after[0] for before, after in itertools.pairwise(union(a)))


@given(INTERVALS.filter(len), INTERVALS)
def test_exposed_are_the_moments_without_work_each_for_the_transfer_that_began_first(a, b):
    def events(name, intervals):
        return [
            Event(f"{name}.{n}", start, end, "XLA Ops", program="p", run="1")
            for n, (start, end) in enumerate(intervals)
        ]

    transfers = events("all-gather", a)
    device = DeviceProfile("d", (*transfers, *events("fusion", b)), ())
    (times,) = measure_exposed([device])
    left = points(a) - points(b)
    assert times.exposed == len(left)
    shares = {op.name: op.seconds for op in times.ops}
    for event in sorted(transfers, key=lambda event: event.start):
        mine = left & points([event.interval])
        assert shares[event.name] == len(mine)
        left -= mine
