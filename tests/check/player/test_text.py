"""The lowest floors: bundle text, addresses, scalar operations, the matrix unit, the network. Nothing is compiled."""

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flaxasync.check.player import matrix_unit
from flaxasync.check.player import scalar_operations as scalar
from flaxasync.check.player.addresses import Addresses, shape_bytes
from flaxasync.check.player.bundle_text import HEADER, parse_operation, read_program
from flaxasync.check.player.chip_grid import place_devices, topology
from flaxasync.check.player.chips import PLAYED_CHIPS, played_chip
from flaxasync.check.player.errors import DumpError, MeshMismatchError, OutOfBoundsError, PlayerError
from flaxasync.check.player.network import Network
from flaxasync.check.player.transfers import Spans, read_transfer

WORDS = st.integers(0, 2**32 - 1)


def evaluate(text, **names):
    """The value of a scalar operation whose operands are literals."""
    expression = scalar.result_value(parse_operation(text), lambda name: names[name])
    return eval(expression, dict(scalar.RUNTIME))


def write(folder, bundles, declared=""):
    bundle_file, original = folder / "1-k-03-final_bundles.txt", folder / "1-k-00-original.txt"
    bundle_file.write_text(f"{HEADER}\n\n{bundles}")
    original.write_text(declared)
    return read_program("k", bundle_file, original)


def test_operation_with_everything():
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


def test_program_with_comments_over_lines_and_regions(tmp_path):
    program = write(
        tmp_path,
        "     0   :  { %1 = shalt.err (!%p1_p0) /* stops }\n here */  ;;  %s2_s1 = smov.u32 3 } /* Start region 4 */\n"
        "   0x1 LB: > { } /* Start/End empty region 5 :: Start region 6 */\n   0x2   :  {}\n",
        "  #allocation0 [shape = 's32[2]{0}', space=sflag, size = 0x8, scoped, tag = 'scratch operand']\n",
    )
    assert [len(b.operations) for b in program.bundles] == [2, 0, 0]
    assert program.regions == {4: 0, 5: 1, 6: 1}
    assert program.bundles[0].operations[0].comment == "stops }\n here"
    assert program.declarations["allocation0"].size == 8


@pytest.mark.parametrize(
    ("bundles", "message"),
    [
        ("", "no bundle"),
        ("     0   :  { }\n   0x2   :  {}\n", "bundle 0x1 is missing"),
        ("     0   :  { %1 = shalt.err /* stops", "does not end"),
    ],
)
def test_text_that_was_cut(tmp_path, bundles, message):
    with pytest.raises(DumpError, match=message):
        write(tmp_path, bundles)


def test_text_of_another_version(tmp_path):
    (tmp_path / "a").write_text("LLO dump v2")
    with pytest.raises(DumpError, match="another version of libtpu"):
        read_program("k", tmp_path / "a", tmp_path / "a")


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


def test_unknown_scalar_operation():
    with pytest.raises(scalar.NoScalarError, match="sfrobnicate"):
        evaluate("%s1_s0 = sfrobnicate.u32 1, 2")


@pytest.mark.parametrize(
    ("shape", "size"),
    [
        ("bf16[8192,8192]{1,0:T(8,128)(2,1)}", 8192 * 8192 * 2),
        ("bf16[3,5]{1,0:T(8,128)(2,1)}", 8 * 128 * 2),
        ("f32[3,5]{0,1:T(8,128)}", 8 * 128 * 4),
        ("s32[8]{0:T(128)}", 512),
        ("(f32[2]{0}, pred[3]{0})", 11),
        ("u32[]", 4),
    ],
)
def test_bytes_of_shapes(shape, size):
    assert shape_bytes(shape) == size


def test_addresses_do_not_meet():
    addresses = Addresses(512)
    first, second = addresses.new("hbm", 1000, "a"), addresses.new("hbm", 1, "b")
    assert first.address + first.size <= second.address
    assert addresses.at("hbm", first.address + 1) is first
    assert addresses.at("hbm", first.address + first.size) is None
    assert addresses.at_granule("hbm", second.address * 16 + 15) is second


GENERAL = parse_operation("%1 = dma.general %s1_s0, 4, %s2_s1, [#allocation3], [#allocation4], [#allocation5], 0")


def transfer_from(source, target):
    """A transfer whose text does not name the memory spaces, between two buffers."""
    return read_transfer(GENERAL, (source.address * 16, 4, target.address * 16, 1, 0, 1, 0), "here", "kernel")


@pytest.mark.parametrize("before", [0, 600 << 20])  # a program's values in vmem, of which no two share a place
def test_the_space_of_an_address_is_told_however_much_lies_before_it(before):
    addresses = Addresses(512)
    addresses.new("vmem", before, "other values")
    in_vmem, in_hbm = addresses.new("vmem", 4096, "window"), addresses.new("hbm", 4096, "array")
    transfer = transfer_from(in_hbm, in_vmem)
    assert (transfer.source, transfer.target) == ("hbm", "vmem")
    assert [s.space for s in Spans(addresses).claim(dataclasses.replace(transfer, strided=False), 0, 0, "")] == [
        "hbm",
        "vmem",
    ]
    past = dataclasses.replace(transfer, strided=False, target_address=transfer.target_address + 4096 // 32)
    with pytest.raises(OutOfBoundsError, match="writes outside every buffer"):
        Spans(addresses).claim(past, 0, 0, "")


@pytest.mark.parametrize(
    ("space", "size"), [("vmem", 8 << 30), ("sflag", 4 << 13), ("smem", 8 << 20), ("hbm", 1 << 37)]
)
def test_a_space_ends_before_the_next_begins(space, size):
    with pytest.raises(PlayerError, match=f"buffers in {space} need addresses up to"):
        Addresses(512).new(space, size, "too large")


def matrix(text, chip="v5e"):
    return matrix_unit.matrix_operation(parse_operation(text), PLAYED_CHIPS[chip])


def test_a_multiply_holds_its_unit():
    multiply = matrix("%1 = vmatmul.bf16.gmra.mxu2 %v1_v0")
    cost = matrix_unit.cost(2, [(0, (multiply,)), (1, (multiply,))], matrix_unit.IDLE, latency=100)
    assert (multiply.unit, cost.cycles, cost.stall, cost.busy) == (2, 17, 15, 32)
    other = matrix("%1 = vmatmul.bf16.gmra.mxu1 %v1_v0")
    assert matrix_unit.cost(2, [(0, (multiply,)), (1, (other,))], matrix_unit.IDLE, latency=100).stall == 0


def test_a_pop_waits_for_its_result_and_waiting_ages_it():
    multiply, pop = matrix("%1 = vmatmul.f32.gmra.mxu0 %v1_v0"), matrix("%v2_v1 = vpop.f32.mrf.mxu0")
    cost = matrix_unit.cost(1, [(0, (multiply,))], matrix_unit.IDLE, latency=100)
    assert matrix_unit.cost(1, [(0, (pop,))], cost.state, latency=100).stall == 99
    assert matrix_unit.cost(1, [(0, (pop,))], matrix_unit.aged(cost.state, 60), latency=100).stall == 39
    assert matrix_unit.aged(cost.state, 1000) == ((0, 0, 0, (0,)),)  # nothing to wait for, but one result to pop


def test_unknown_vector_operation_is_none_of_the_known():
    assert not matrix_unit.is_vector(parse_operation("%1 = vquux.f32 %v1_v0"))


def run_network(flows):
    """Ends of flows (start, size, uses) on resources of capacity 10, in the order given."""
    network, ends, pending = Network({"hbm": 10.0, "link": 1.0}), {}, sorted(enumerate(flows), key=lambda f: f[1][0])
    while pending or network.next < math.inf:
        if pending and pending[0][1][0] <= network.next:
            number, (start, size, uses) = pending.pop(0)
            network.start(start, size, uses, lambda now, flow, number=number: ends.update({number: now}))
        else:
            network.finish()
    return [ends[n] for n in range(len(flows))]


HBM, LINK, OTHER = ("hbm", 0), ("link", 0, 1), ("link", 1, 2)


def test_own_transfers_go_in_order():
    assert run_network([(0, 100, ((HBM, 1.0),)), (0, 100, ((HBM, 2.0),))]) == pytest.approx([10, 30])


def test_a_transfer_between_chips_goes_before_the_core_s_own():
    assert run_network([(0, 100, ((HBM, 1.0),)), (0, 10, ((LINK, 1.0), (HBM, 1.0)))]) == pytest.approx([11, 10])


def test_a_link_sends_one_at_a_time_and_chips_share_it():
    assert run_network([(0, 10, ((LINK, 1.0),)), (0, 10, ((LINK, 1.0),))]) == pytest.approx([10, 20])
    passing = (0, 10, ((LINK, 1.0), (OTHER, 1.0)))
    assert run_network([passing, (0, 10, ((OTHER, 1.0),))]) == pytest.approx([20, 20])


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 100)), min_size=1, max_size=8))
def test_no_byte_is_lost_and_none_is_faster_than_its_link(flows):
    ends = run_network([(start, size, ((LINK, 1.0),)) for start, size in flows])
    for (start, size), end in zip(flows, ends, strict=True):
        assert end - start >= size * (1 - 1e-6)
    busy = sum(size for _, size in flows)
    assert max(ends) <= max(start for start, _ in flows) + busy + 1e-3


def test_chips_and_routes():
    grid = topology("v5e:2x4")
    assert grid.devices == 8
    assert grid.coords(grid.chip_id((1, 3, 0))) == (1, 3, 0)
    assert grid.route((0, 0, 0), (1, 2, 0)) == (
        ("link", (0, 0, 0), (1, 0, 0)), ("link", (1, 0, 0), (1, 1, 0)), ("link", (1, 1, 0), (1, 2, 0)),
    )  # fmt: skip
    torus = topology("v5e:16x16")
    assert torus.route((0, 0, 0), (15, 0, 0)) == (("link", (0, 0, 0), (15, 0, 0)),)


@pytest.mark.parametrize(
    ("name", "devices", "coords", "message"),
    [
        ("v5e:2x4", 4, (), "compiled for 4 devices, but v5e:2x4 has 8"),
        ("v5e:2x2", 4, ((0, 0), (1, 0)), "names 2 chips"),
        ("v5e:2x2", 4, ((0, 0), (1, 0), (0, 1), (0, 2)), "has no chip"),
        ("v5e:2x2", 4, ((0, 0), (1, 0), (0, 1), (0, 1)), "each chip 1 time"),
    ],
)
def test_meshes_that_do_not_fit(name, devices, coords, message):
    with pytest.raises(MeshMismatchError, match=message):
        place_devices(topology(name), devices, coords)


@pytest.mark.parametrize("name", ["v5e", "v5e:4", "", "v5e:2x"])
def test_no_topology(name):
    with pytest.raises(PlayerError, match="topology must be"):
        topology(name)


def test_unknown_chip():
    with pytest.raises(PlayerError, match="got 'v4:2x2x1'"):
        played_chip("v4:2x2x1")


@pytest.mark.parametrize("chip", PLAYED_CHIPS.values(), ids=lambda chip: chip.name)
def test_occupancy_agrees_with_the_data_sheet(chip):
    """16 packed rows a multiply, on units of 128 x 128 or 256 x 256; tpu7x's sheet clock is above libtpu's."""
    side, units = (128, 4) if chip.name in ("v5e", "v5p") else (256, 2)
    rate = 2 * 16 * side * side / chip.occupancy["bf16"] * units * chip.clock * chip.cores
    assert rate == pytest.approx(chip.sheet.flops, rel=0.15 if chip.name == "tpu7x" else 0.005)
