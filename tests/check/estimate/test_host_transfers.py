"""Transfers to and from the memory of the host, in the forms in which libtpu 0.0.52 writes them."""

import pytest

from flaxasync.check import audit, timeline
from tests.check.hlo_texts import changed, module

MIB = 1 << 20
ROW, ON_HOST = "f32[1,1048576]{1,0}", "f32[8,1048576]{1,0:S(5)}"
EACH = 4 * MIB / 32e9  # of one row on v6e, in either direction
WRITE = (
    f"%s = (({ON_HOST}, {ROW}, s32[], s32[]), {ON_HOST}, u32[]) dynamic-update-slice-start(%operand0, %operand1, "
    "%operand2, %operand2)"
)
READ = (
    f"%t = (({ON_HOST}, s32[], s32[]), {ROW}, u32[]) dynamic-slice-start(%operand0, %operand2, %operand2), "
    "dynamic_slice_sizes={1,1048576}"
)
WRITTEN = f"%d = {ON_HOST} dynamic-update-slice-done(%s)"
BROUGHT = f"%e = {ROW} dynamic-slice-done(%t)"


def program(*lines):
    return module(*lines, inputs=(ON_HOST, ROW, "s32[]"))


def work(cycles):
    config = f'backend_config={{"window_config":{{"estimated_cycles":"{cycles}"}}}}'
    return f"%c = {ROW} convolution(%operand1, %operand1), dim_labels=b_i->b, {config}"


@pytest.mark.parametrize(("start", "done", "name"), [(WRITE, WRITTEN, "to the host"), (READ, BROUGHT, "from the host")])
def test_only_a_slice_moves_and_is_hidden_behind_work_until_its_done(start, done, name):
    for cycles, host in ((1_750_000, 0.0), (17_500, EACH - 1e-5)):
        t = timeline(program(start, work(cycles), done), "v6e")
        assert (t.slowest.host, t.compute) == (pytest.approx(host), pytest.approx(cycles / 1.75e9))
        assert (t.exposed, t.slowest.memory) == (0, 0)
        assert t.seconds == pytest.approx(t.compute + host)
        assert t.slowest.causes == ({f"transfers {name}": pytest.approx(host)} if host else {})
        assert t.slowest.sources.get("host", 0.0) == pytest.approx(host)
        (moved,) = (s for s in t.slices if s.lane == name)
        assert moved.seconds == pytest.approx(EACH)


def test_directions_are_used_at_once_and_each_by_one_transfer_at_a_time():
    second = changed(WRITE, ("%s =", "%u ="))
    both = program(WRITE, READ, WRITTEN, BROUGHT)
    twice = program(WRITE, second, WRITTEN, f"%v = {ON_HOST} dynamic-update-slice-done(%u)")
    assert timeline(both, "v6e").seconds == pytest.approx(EACH)
    assert timeline(twice, "v6e").seconds == pytest.approx(2 * EACH)


@pytest.mark.parametrize("line", [
    f"%d = {ON_HOST} dynamic-update-slice(%operand0, %operand1, %operand2, %operand2)",
    f"%d = {ROW} dynamic-slice(%operand0, %operand2, %operand2), dynamic_slice_sizes={{1,1048576}}",
    "%d = f32[1,1048576]{1,0:S(5)} copy(%operand1)",
])  # fmt: skip
def test_synchronous_transfers_hold_the_core(line):
    t = timeline(program(line), "v6e")
    assert (t.seconds, t.slowest.host) == (pytest.approx(EACH), pytest.approx(EACH))


def test_a_copy_start_names_its_result_first():
    copy = "%s = (f32[1,1048576]{1,0:S(5)}, f32[1,1048576]{1,0}, u32[]) copy-start(%operand1)"
    t = timeline(program(copy, "%d = f32[1,1048576]{1,0:S(5)} copy-done(%s)"), "v6e")
    assert t.slowest.causes == {"transfers to the host": pytest.approx(EACH)}


def test_a_stack_in_hbm_is_no_transfer_to_the_host():
    """The negative test: the same program without memory of the host."""
    t = timeline(program(WRITE, READ, WRITTEN, BROUGHT).replace(":S(5)", ""), "v6e")
    assert t.slowest.host == 0 < t.slowest.memory < EACH / 2
    assert not any("memory of the host" in note for note in t.notes)


def test_the_bandwidth_of_a_chip_to_its_host_may_be_unknown():
    text = program(WRITE, READ, WRITTEN, BROUGHT)
    for chip, host, note in (
        ("v5e", 4 * MIB / 15e9, "over PCIe at 15 GB/s in each direction"),
        ("tpu7x", 0.0, "no source gives that bandwidth of a tpu7x, so that they take no time here"),
    ):
        t = timeline(text, chip)
        assert t.slowest.host == pytest.approx(host)
        assert f"2 transfers go to or from the memory of the host: {note}" in t.notes


def test_the_audit_has_the_bytes_and_the_time_of_a_slice():
    pairs = {pair.kind: pair for pair in audit(program(WRITE, READ, WRITTEN, BROUGHT), chip="v6e").pairs}
    for kind in ("dynamic-update-slice", "dynamic-slice"):
        assert (pairs[kind].bytes, pairs[kind].transfer) == (4 * MIB, pytest.approx(EACH)), kind
