"""The parts of the simulator, each alone: the text of bundles, scalar and matrix units, links,
clocks, chips.
"""

import itertools
import math
from collections import Counter, deque
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flaxasync.check.player import (
    MeshMismatchError,
    PlayerError,
    UnknownOperationError,
    matrix_unit,
)
from flaxasync.check.player import scalar_operations as scalar
from flaxasync.check.player.basic_blocks import BlockCode
from flaxasync.check.player.bundle_text import HEADER, parse_operation, read_program
from flaxasync.check.player.chips import PLAYED_CHIPS, chip_grid, places_of_partitions, played_chip
from flaxasync.check.player.errors import DumpError
from flaxasync.check.player.memory import Addresses
from flaxasync.check.player.network import Network
from flaxasync.check.player.result import SIGNAL
from flaxasync.check.player.semaphores import Semaphores
from flaxasync.check.player.state import VectorClocks


def write(folder, bundles, declared=""):
    bundle_file, original = folder / "1-k-03-final_bundles.txt", folder / "1-k-00-original.txt"
    bundle_file.write_text(f"{HEADER}\n\n{bundles}")
    original.write_text(declared)
    return read_program("k", bundle_file, original)


@pytest.mark.parametrize(
    ("text", "predicate", "operands", "target"),
    [
        (
            "%s4_s2 = sadd.s32 (!%p1_p0), %s1_s0, [#allocation3 + $0x4]",
            "!%p1_p0",
            ("%s1_s0", "[#allocation3 + $0x4]"),
            -1,
        ),
        (
            "%7 = sst [smem:[#allocation1_spill]] %s2_s0",
            "",
            ("[smem:[#allocation1_spill]]", "%s2_s0"),
            -1,
        ),
        (
            "%7 = sst [smem:[#allocation1]] (%p6_p1), %s2_s0",
            "%p6_p1",
            ("[smem:[#allocation1]]", "%s2_s0"),
            -1,
        ),
        ("%38 = sbr.rel (!%p36_p3) target = $region259", "!%p36_p3", (), 259),
        (
            "%9 = dma.hbm_to_vmem [thread:$1] (%p1_p0), %s1_s0, 16, %s2_s1, [#allocation4]",
            "%p1_p0",
            ("%s1_s0", "16", "%s2_s1", "[#allocation4]"),
            -1,
        ),
    ],
)
def test_forms_of_operations(text, predicate, operands, target):
    o = parse_operation(text, "why")
    assert (o.predicate, o.operands, o.target, o.comment) == (predicate, operands, target, "why")
    assert text.startswith(f"%{o.result} = {o.name} ")


def test_a_program_with_regions_and_comments_over_several_lines(tmp_path):
    program = write(
        tmp_path,
        "     0   :  { %1 = shalt.err (!%p1_p0) /* stops }\n here */  ;;  %s2_s1 = smov.u32 3 } /* "
        "Start region 4 */\n"
        "   0x1 LB: > { } /* Start/End empty region 5 :: Start region 6 */\n   0x2   :  {}\n",
        "  #allocation0 [shape = 's32[2]{0}', space=sflag, size = 0x8, scoped, tag = 'scratch "
        "operand']\n",
    )
    assert [len(bundle) for bundle in program.bundles] == [2, 0, 0]
    assert program.regions == {4: 0, 5: 1, 6: 1}
    assert program.bundles[0][0].comment == "stops }\n here"
    assert program.declarations["allocation0"].size == 8


def test_operations_are_counted_by_what_they_do(tmp_path):
    operations = (
        "vmatmul.bf16.gmra.mxu0 %v1",
        "vmatmul.bf16.gmra.mxu1 %v1",
        "vmatpush1.bf16.msra.mxu0 %v1",
        "vpop.f32.mrf.mxu0",
        "vpop.permute.xlu0 0",
        "vld [vmem:[#allocation0]]",
        "vst [vmem:[#allocation0]] 255, %v1",
        "vmatprep.subr.mxu0 %v1",
        "vadd.f32 %v1, %v2",
        "vadd.f32 %v2, %v2",
        "sadd.s32 %s1_s0, 4",
        "vsyncadd [#allocation1], 1",
    )
    program = write(
        tmp_path,
        "     0   :  { " + "  ;;  ".join(f"%{n} = {o}" for n, o in enumerate(operations)) + " }\n",
    )
    counts = matrix_unit.operations(program)._asdict()
    expected = {
        "bundles": 1,
        "names": 11,
        "multiplies": 2,
        "pushes": 1,
        "pops": 1,
        "loads": 1,
        "stores": 1,
        "vector": 4,
    }
    assert counts == expected


@pytest.mark.parametrize(("bundles", "message"), [
    ("", "no bundle"),
    ("     0   :  { }\n   0x2   :  {}\n", "bundle 0x1 is missing"),
    ("     0   :  { %1 = shalt.err /* stops", "does not end"),
])  # fmt: skip
def test_a_text_that_was_cut(tmp_path, bundles, message):
    with pytest.raises(DumpError, match=message):
        write(tmp_path, bundles)


def test_a_text_of_another_version(tmp_path):
    (tmp_path / "a").write_text("LLO dump v2")
    with pytest.raises(DumpError, match="another version of libtpu"):
        read_program("k", tmp_path / "a", tmp_path / "a")


# The scalar unit: integers wrap, and floats are kept as bits. test_dumps.py has unknown operations.

WORDS = st.integers(0, 2**32 - 1)


def evaluate(text, **names):
    """Returns the value of a scalar operation whose operands are literals."""
    expression = scalar.result_value(parse_operation(text), lambda name: names[name])
    return eval(expression, dict(scalar.RUNTIME))


@given(WORDS, WORDS)
def test_integers_wrap_at_32_bits(a, b):
    assert evaluate(f"%s1_s0 = sadd.s32 {a}, {b}") == (a + b) % 2**32
    assert evaluate(f"%s1_s0 = ssub.s32 {a}, {b}") == (a - b) % 2**32
    assert evaluate(f"%s1_s0 = smul.u32 {a}, {b}") == a * b % 2**32
    assert evaluate(f"%s1_s0 = smin.u32 {a}, {b}") == min(a, b)
    assert evaluate(f"%p1_p0 = scmp.lt.s32.totalorder {a}, {b}") == (
        scalar.signed(a) < scalar.signed(b)
    )
    assert evaluate(f"%p1_p0 = scmp.lt.u32.totalorder {a}, {b}") == (a < b)


@given(WORDS, st.integers(0, 40))
def test_shifts(a, n):
    assert evaluate(f"%s1_s0 = sshll.u32 {a}, {n}") == ((a << n) % 2**32 if n < 32 else 0)
    assert evaluate(f"%s1_s0 = sshrl.u32 {a}, {n}") == (a >> n if n < 32 else 0)
    assert scalar.signed(evaluate(f"%s1_s0 = sshra.s32 {a}, {n}")) == scalar.signed(a) >> min(n, 31)


def test_floats_are_kept_as_bits_and_addresses_are_added():
    assert scalar.as_float(evaluate("%s1_s0 = smul.f32 1.5, -2.0")) == -3.0
    assert scalar.as_float(scalar.as_bits(1e300)) == math.inf
    assert evaluate("%s1_s0 = smov.u32 [#allocation2 + $0x3]", allocation2=100) == 103
    assert evaluate("%s1_s0 = scalar_lea.hbm 5, 4294967295 [#allocation2]", allocation2=100) == 4


def code_of(folder, *bundles):
    text = "".join(
        f"   {index:#x}   :  {{ {operations} }}\n" for index, operations in enumerate(bundles)
    )
    return BlockCode(write(folder, text), Addresses(512), PLAYED_CHIPS["v5e"], frozenset())


@pytest.mark.parametrize("name", ["vpop.sfrf", "spop.sfrf"])
def test_the_value_of_a_semaphore_is_popped_by_either_name(tmp_path, name):
    """libtpu 0.0.50 begins the name with the letter of vector operations, and later versions with
    that of scalars.
    """
    registers, predicates = [7] * 4, [False] * 4
    machine = SimpleNamespace(semaphore_values=deque([0, 5]))
    block = code_of(tmp_path, f"%s9_s3 = {name} %8", f"%s11_s2 = {name} %10").block(0)
    block.run(registers, predicates, machine)
    assert registers == [7, 7, 5, 0]


@pytest.mark.parametrize(
    "operation", ["vpop.trf %v1_v0", "vadd.f32 %v1_v0, %v2_v1", "snew.u32 1, 2"]
)
def test_an_operation_that_writes_a_scalar_register_is_computed_or_refused(tmp_path, operation):
    """Whatever its name: a register that keeps an old value would let a program halt, or wait, that
    does neither.
    """
    with pytest.raises(
        UnknownOperationError, match=f"{operation.split()[0]}' is unknown to the player"
    ):
        code_of(tmp_path, f"%s3_s0 = {operation}").block(0)


def test_a_sparse_core_is_refused_before_anything_that_depends_on_it(tmp_path):
    with pytest.raises(UnknownOperationError, match="sparse_core_sflag drives a SparseCore"):
        code_of(tmp_path, "%5 = shalt.err (%p1_p0)", "%s1_s0 = int_to_ptr.sparse_core_sflag %s2_s1")


# The time of matrix operations: what holds a unit, and what waits for a result.


@pytest.mark.parametrize(("comment", "pops", "read"), [
    (" /* kDivAndRem */", 2, [2, 1]),
    (" /* kDiv */", 1, [2]),
    (" /* kRem */", 1, [1]),
    ("", 2, [2, 1]),
    ("", 1, None),  # of a version that does not say which of the two it is
])  # fmt: skip
def test_what_a_program_reads_of_a_division(tmp_path, comment, pops, read):
    popped = "".join(f"%s{n}_s{n} = spop.drf %7  ;;  " for n in range(3, 3 + pops))
    program = write(
        tmp_path,
        f"     0   :  {{ %7 = sdivrem.u32 %s1_s1, %s2_s2{comment} }}\n   0x1   :  {{ {popped}}}\n",
    )
    code = BlockCode(program, Addresses(512), played_chip("v5e"), frozenset())
    if read is None:
        with pytest.raises(
            UnknownOperationError,
            match="does not say whether the quotient or the remainder is meant",
        ):
            code.block(0)
        return
    registers = [0, 7, 3, *[99] * 61]
    code.block(0).run(registers, [False] * 32, SimpleNamespace(divided=deque()))
    assert registers[3 : 3 + pops] == read


def matrix(text, chip="v5e"):
    (operation,) = matrix_unit.matrix_operations(parse_operation(text), PLAYED_CHIPS[chip])
    return operation


def test_a_multiply_holds_its_unit():
    multiply = matrix("%1 = vmatmul.bf16.gmra.mxu2 %v1_v0")
    cost = matrix_unit.cost(2, [(0, (multiply,)), (1, (multiply,))], matrix_unit.IDLE, latency=100)
    assert (multiply.unit, cost.cycles, cost.stall, cost.busy) == (2, 17, 15, 32)
    other = matrix("%1 = vmatmul.bf16.gmra.mxu1 %v1_v0")
    assert (
        matrix_unit.cost(2, [(0, (multiply,)), (1, (other,))], matrix_unit.IDLE, latency=100).stall
        == 0
    )


def test_a_pop_waits_for_its_result_and_less_after_other_waits():
    multiply, pop = (
        matrix("%1 = vmatmul.f32.gmra.mxu0 %v1_v0"),
        matrix("%v2_v1 = vpop.f32.mrf.mxu0"),
    )
    cost = matrix_unit.cost(1, [(0, (multiply,))], matrix_unit.IDLE, latency=100)
    assert matrix_unit.cost(1, [(0, (pop,))], cost.state, latency=100).stall == 99
    assert (
        matrix_unit.cost(1, [(0, (pop,))], matrix_unit.aged(cost.state, 60), latency=100).stall
        == 39
    )
    nothing_to_wait_for = ((0, 0, 0, (0,)),)  # but one result to pop
    assert matrix_unit.aged(cost.state, 1000) == nothing_to_wait_for


def test_a_multiply_of_bytes_takes_as_long_as_one_of_bfloat16_and_has_twice_the_rows():
    """So libtpu counts too: in its programs for int8, each multiply has this many pops, and none of
    them stalls.
    """
    for chip, name in (("v5e", "s8"), ("v6e", "s8"), ("v5p", "s8"), ("tpu7x", "f8e4m3fn")):
        eight, wide = (
            matrix(f"%1 = vmatmul.{kind}.gmra.mxu0 %v1_v0", chip) for kind in (name, "bf16")
        )
        assert (eight.cycles, eight.results) == (wide.cycles, 2 * wide.results)
    pops = matrix_unit.matrix_operations(
        parse_operation("%v2_v1 = vpop.add.s32.mrf.mxu0.mxu1"), PLAYED_CHIPS["v6e"]
    )
    assert [(pop.kind, pop.unit) for pop in pops] == [(matrix_unit.POP, 0), (matrix_unit.POP, 1)]


# How transfers share HBM and links.


def run_network(flows):
    """Returns when flows (start, size, uses) end. An HBM moves 10 bytes per cycle, a link 1."""
    network, ends, pending = (
        Network({"hbm": 10.0, "link": 1.0}),
        {},
        sorted(enumerate(flows), key=lambda f: f[1][0]),
    )
    while pending or network.next < math.inf:
        if pending and pending[0][1][0] <= network.next:
            number, (start, size, uses) = pending.pop(0)
            network.start(
                start, size, uses, lambda now, flow, number=number: ends.update({number: now})
            )
        else:
            network.finish()
    return [ends[n] for n in range(len(flows))]


HBM, LINK, OTHER = ("hbm", 0), ("link", 0, 1), ("link", 1, 2)


@pytest.mark.parametrize(
    ("flows", "ends"),
    [
        (
            [(0, 100, ((HBM, 1.0),)), (0, 100, ((HBM, 2.0),))],
            [10, 30],
        ),  # within a chip: one at a time
        # between chips: as fast as the link
        ([(0, 100, ((HBM, 1.0),)), (0, 10, ((LINK, 1.0), (HBM, 1.0)))], [11, 10]),
        # a chip sends one at a time over a link
        ([(0, 10, ((LINK, 1.0),)), (0, 10, ((LINK, 1.0),))], [10, 20]),
        # two chips share a link
        ([(0, 10, ((LINK, 1.0), (OTHER, 1.0))), (0, 10, ((OTHER, 1.0),))], [20, 20]),
    ],
)
def test_what_shares_hbm_and_links(flows, ends):
    assert run_network(flows) == pytest.approx(ends)


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 100)), min_size=1, max_size=8))
def test_no_byte_is_lost_and_no_transfer_is_faster_than_its_link(flows):
    ends = run_network([(start, size, ((LINK, 1.0),)) for start, size in flows])
    for (start, size), end in zip(flows, ends, strict=True):
        assert end - start >= size * (1 - 1e-6)
    busy = sum(size for _, size in flows)
    assert max(ends) <= max(start for start, _ in flows) + busy + 1e-3


# What devices know about each other, through messages and meetings.


def test_a_message_carries_what_its_sender_knew():
    clocks = VectorClocks(3)
    for device in range(3):
        clocks.enter(device, "start")
    message = clocks.known_to(1)
    assert not clocks.knows_to_have_entered(0, 1, "start")
    clocks.learn(0, message)
    assert clocks.knows_to_have_entered(0, 1, "start")
    assert not clocks.knows_to_have_entered(0, 2, "start")
    clocks.learn(2, clocks.known_to(0))  # what device 0 has learned goes on
    assert clocks.knows_to_have_entered(2, 1, "start")
    clocks.enter(0, "start")  # an old message says nothing about the next kernel
    assert not clocks.knows_to_have_entered(0, 1, "start")


def test_devices_that_meet_know_the_same_though_one_skipped_a_branch():
    """Device 1 skips the product of a branch, as in causal ring attention."""
    clocks = VectorClocks(3)
    clocks.enter(0, "product")
    for device in range(2):
        clocks.enter(device, "start")
    assert not clocks.knows_to_have_entered(0, 1, "start")
    clocks.synchronize((0, 1))
    assert clocks.knows_to_have_entered(0, 1, "start")
    assert (clocks.known_to(0), clocks.known_to(2)) == ([2, 1, 0], [0, 0, 0])


def test_the_kind_of_a_wait_is_that_of_what_raised_the_semaphore():
    """The second of two tiles is there already when the first wait is over and the core has lowered
    the semaphore.
    """
    kinds = []
    recorder = SimpleNamespace(wait=lambda start, end, name, cause, kind: kinds.append(kind))
    machine = SimpleNamespace(device=0, semaphores=Counter(), now=0.0, recorder=recorder)
    semaphores = Semaphores(SimpleNamespace(machines=[machine]), lambda machine: None)
    wait = SimpleNamespace(operation=SimpleNamespace(unit="dma", name="dma.done.wait"))
    semaphores.add(machine, 5, 20, 0.0, "hbm to vmem", None)
    for _ in range(2):
        assert semaphores.wait(machine, wait, (5, 10))
        semaphores.add(machine, 5, -10, 0.0, SIGNAL, None)
    assert kinds == ["hbm to vmem"] * 2


# The chip table and the routes between chips.


@pytest.mark.parametrize("chip", PLAYED_CHIPS.values(), ids=lambda chip: chip.name)
def test_occupancy_agrees_with_the_data_sheet(chip):
    """A multiply takes 16 packed rows, or 8 of another type at the same rate, on units of 128 x 128
    or 256 x 256.

    The clock on the data sheet of tpu7x is above that of libtpu, so its tolerance is larger.
    """
    side, units = (128, 4) if chip.name in ("v5e", "v5p") else (256, 2)
    rate = 2 * 16 * side * side / chip.occupancy["bf16"] * units * chip.clock * chip.cores
    assert rate == pytest.approx(chip.sheet.flops, rel=0.15 if chip.name == "tpu7x" else 0.005)
    assert 2 * chip.occupancy[""] == chip.occupancy["bf16"]
    eight = chip.sheet.int8 or chip.sheet.fp8
    assert 32 / chip.occupancy["8 bits"] / (16 / chip.occupancy["bf16"]) == eight / chip.sheet.flops


def test_routes():
    grid = chip_grid("v5e:2x4")
    assert (grid.devices, grid.coords(grid.chip_id((1, 3, 0)))) == (8, (1, 3, 0))
    path = [(0, 0, 0), (1, 0, 0), (1, 1, 0), (1, 2, 0)]
    assert grid.route(path[0], path[-1]) == tuple(
        ("link", *ends) for ends in itertools.pairwise(path)
    )
    assert chip_grid("v5e:16x16").route((0, 0, 0), (15, 0, 0)) == (("link", (0, 0, 0), (15, 0, 0)),)


@pytest.mark.parametrize(("name", "coords", "message"), [
    ("v5e:2x4", (), "compiled for 4 devices, but v5e:2x4 has 8"),
    ("v5e:2x2", ((0, 0), (1, 0)), "each chip of v5e:2x2 1 time"),
    ("v5e:2x2", ((0, 0), (1, 0), (0, 1), (0, 2)), "each chip of v5e:2x2 1 time"),
    ("v5e:2x2", ((0, 0), (1, 0), (0, 1), (0, 1)), "each chip of v5e:2x2 1 time"),
])  # fmt: skip
def test_meshes_that_do_not_fit(name, coords, message):
    with pytest.raises(MeshMismatchError, match=message):
        places_of_partitions(chip_grid(name), 4, coords)


def test_the_devices_of_a_chip_have_the_cores_that_the_mesh_gives_them():
    """On tpu7x `make_mesh` goes through some chips from the second core to the first."""
    grid, pair = chip_grid("tpu7x:1x2x1"), ((0, 0, 0), (0, 1, 0))
    given = (*pair[0], 0), (*pair[0], 1), (*pair[1], 1), (*pair[1], 0)
    assert places_of_partitions(grid, 4, given) == (
        (pair[0], 0),
        (pair[0], 1),
        (pair[1], 1),
        (pair[1], 0),
    )
    in_order = (pair[0], 0), (pair[0], 1), (pair[1], 0), (pair[1], 1)
    assert places_of_partitions(grid, 4, (pair[0], pair[0], pair[1], pair[1])) == in_order
    assert places_of_partitions(grid, 4, ()) == in_order


@pytest.mark.parametrize(("read", "name", "message"), [
    (chip_grid, "v5e:2x4*2", r"simulates one slice: got 'v5e:2x4\*2'; compile for 'v5e:2x4'"),
    (chip_grid, "v5e:2x", "topology must be a chip and its grid"),
    (chip_grid, "v4:2x2x1", "topology must be a chip and its grid"),
    (played_chip, "v4:2x2x1", "topology must be of one of v5e.*: got 'v4:2x2x1'"),
])  # fmt: skip
def test_what_is_not_a_topology(read, name, message):
    with pytest.raises(PlayerError, match=message):
        read(name)
