"""The times of instructions on a GPU: products, other work, and transfers within and between
hosts.
"""

import dataclasses

import pytest

from flaxasync.check import GPUS, parse, summarize, timeline
from flaxasync.check.compile.program import CompiledProgram
from flaxasync.check.estimate.gpu_costs import NETWORK, NVLINK, GpuCosts, sent_on_switch

H100 = GPUS["h100"]
REACHED = H100.flops * H100.product_share
HBM = H100.hbm_bandwidth * H100.hbm_efficiency
NUMBERS = '{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"]}'
NOTES = f'{{"gemm_backend_config":{{"beta":0,"dot_dimension_numbers":{NUMBERS}}}}}'


ADD = """a {
  l = bf16[] parameter(0)
  r = bf16[] parameter(1)
  ROOT s = bf16[] add(l, r)
}
"""


def entry(lines, devices=8):
    header = f"HloModule m, is_scheduled=true, num_partitions={devices}"
    return parse(f"{header}\n{ADD}ENTRY e {{\n{lines}\n}}\n").entry


def costs(lines, devices=8, hosts=(), gpu=H100):
    computation = entry(lines, devices)
    return GpuCosts(computation.module, gpu, hosts=hosts), computation.by_name


def product(kind, rows=4096):
    return f"""x = {kind}[{rows},4096] parameter(0)
w = {kind}[4096,2048] parameter(1)
ROOT p = (bf16[{rows},2048], s8[33554432]) custom-call(x, w), custom_call_target="__cublas$lt$matmul", \
backend_config={NOTES}"""


@pytest.mark.parametrize(
    ("kind", "rate"),
    [
        ("bf16", H100.flops),
        ("f16", H100.flops),
        ("f32", H100.flops / 2),
        ("f64", 67e12),
        ("f8e4m3fn", H100.fp8),
        ("s8", H100.int8),
    ],
)
def test_a_large_product_takes_its_flops_at_the_rate_of_its_type(kind, rate):
    found, by_name = costs(product(kind))
    seconds = 2 * 4096 * 4096 * 2048 / (rate * H100.product_share) + H100.kernel_latency
    assert found.explained(by_name["p"]) == (pytest.approx(seconds), "flops", 0.0)


def test_a_float32_product_that_is_not_rounded_takes_the_rate_of_float32():
    precise = NOTES.replace(
        f"{NUMBERS}", f'{NUMBERS},"precision_config":{{"operand_precision":["HIGHEST","HIGHEST"]}}'
    )
    found, by_name = costs(product("f32").replace(NOTES, precise))
    seconds = 2 * 4096 * 4096 * 2048 / (67e12 * H100.product_share) + H100.kernel_latency
    assert found.seconds(by_name["p"]) == pytest.approx(seconds)


def test_a_product_of_few_rows_takes_its_bytes_and_its_workspace_counts_nothing():
    found, by_name = costs(product("bf16", rows=1))
    moved = 2 * (4096 + 4096 * 2048 + 2048)
    assert found.seconds(by_name["p"]) == pytest.approx(moved / HBM + H100.kernel_latency)


def test_other_work_takes_its_bytes():
    found, by_name = costs("x = bf16[1024,1024] parameter(0)\nROOT y = bf16[1024,1024] negate(x)")
    seconds = 2 * 2 * 1024 * 1024 / HBM + H100.kernel_latency
    assert found.explained(by_name["y"]) == (pytest.approx(seconds), "bytes", 0.0)
    assert found.seconds(by_name["x"]) == 0


COLLECTIVES = {
    "all-gather": ("bf16[8192]", "all-gather(x), dimensions={0}", 2 * 8192 * 7 / 8),
    "reduce-scatter": ("bf16[128]", "reduce-scatter(x), dimensions={0}, to_apply=a", 2048 * 7 / 8),
    "all-reduce": ("bf16[1024]", "all-reduce(x), to_apply=a", 2 * 2048 * 7 / 8),
    "all-to-all": ("bf16[1024]", "all-to-all(x), dimensions={0}", 2048 * 7 / 8),
}


@pytest.mark.parametrize("name", COLLECTIVES)
def test_a_collective_sends_through_the_switch_at_the_rate_of_all_links(name):
    shape, call, sent = COLLECTIVES[name]
    groups = "channel_id=1, use_global_device_ids=true, replica_groups={{0,1,2,3,4,5,6,7}}"
    found, by_name = costs(f"x = bf16[1024] parameter(0)\nROOT y = {shape} {call}, {groups}")
    rate = H100.link_bandwidth * H100.link_share
    assert found.seconds(by_name["y"]) == pytest.approx(H100.hop_latency + sent / rate)


def permute(pairs, devices=8, hosts=()):
    text = ",".join(f"{{{source},{target}}}" for source, target in pairs)
    lines = f"""x = bf16[1048576] parameter(0)
s = (bf16[1048576], bf16[1048576]) collective-permute-start(x), source_target_pairs={{{text}}}
ROOT d = bf16[1048576] collective-permute-done(s)"""
    found, _ = costs(lines, devices, hosts)
    return found


def test_a_permute_that_crosses_hosts_takes_the_network():
    size = 2 * 1048576
    ring = [(n, (n + 1) % 8) for n in range(8)]
    for hosts, bandwidth, lane in (
        ((0,) * 8, H100.link_bandwidth, NVLINK),
        ((0,) * 4 + (1,) * 4, H100.network_bandwidth, NETWORK),
    ):
        found = permute(ring, hosts=hosts)
        (operation,) = operations(found)
        seconds = H100.hop_latency + size / (bandwidth * H100.link_share)
        assert found.transfer_seconds(operation) == pytest.approx(seconds)
        assert found.lane(operation) == lane


def operations(found):
    from flaxasync.check import async_operations

    return async_operations(found.module)


def test_eight_gpus_are_on_a_host_where_the_program_does_not_say():
    ring = [(n, (n + 1) % 16) for n in range(16)]
    found = permute(ring, devices=16)
    assert found.lane(operations(found)[0]) == NETWORK
    within = [(n, n ^ 1) for n in range(16)]
    found = permute(within, devices=16)
    assert found.lane(operations(found)[0]) == NVLINK


def test_the_cards_of_a_host_share_what_a_gather_brings_from_another():
    """Two GPUs on each of two hosts: half of the result crosses, by two cards."""
    lines = """x = bf16[262144] parameter(0)
ROOT y = bf16[1048576] all-gather(x), dimensions={0}, channel_id=1, use_global_device_ids=true, \
replica_groups={{0,1,8,9},{2,3,10,11},{4,5,12,13},{6,7,14,15}}"""
    found, by_name = costs(lines, 16)
    between = 2 * 1048576 / 2 / 2 / H100.network_bandwidth
    assert between > 2 * 1048576 * 3 / 4 / H100.link_bandwidth
    seconds = H100.hop_latency + between / H100.link_share
    assert found.seconds(by_name["y"]) == pytest.approx(seconds)


def test_a_collective_of_one_device_takes_no_time():
    groups = "channel_id=1, use_global_device_ids=true, replica_groups=[8,1]<=[8]"
    lines = f"x = bf16[8] parameter(0)\nROOT y = bf16[8] all-gather(x), dimensions={{0}}, {groups}"
    found, by_name = costs(lines)
    assert found.seconds(by_name["y"]) == 0


def test_an_update_on_a_second_stream_moves_the_slice_alone():
    lines = """stack = bf16[32,1048576] parameter(0)
row = bf16[1,1048576] parameter(1)
at = s32[] parameter(2)
zero = s32[] constant(0)
s = ((bf16[32,1048576], bf16[1,1048576], s32[], s32[]), bf16[32,1048576], u32[]) \
dynamic-update-slice-start(stack, row, at, zero)
ROOT d = bf16[32,1048576] dynamic-update-slice-done(s)"""
    found, _ = costs(lines)
    (operation,) = operations(found)
    expected = 2 * 2 * 1048576 / HBM + H100.kernel_latency
    assert found.transfer_seconds(operation) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("topology", "apart"),
    [("h100:2", False), ("h100:8", False), ("h100:2x1", True), ("h100", False)],
)
def test_the_hosts_of_a_text_are_those_of_the_named_topology(topology, apart):
    lines = """x = bf16[1048576] parameter(0)
s = (bf16[1048576], bf16[1048576]) collective-permute-start(x), source_target_pairs={{0,1},{1,0}}
ROOT d = bf16[1048576] collective-permute-done(s)"""
    text = f"HloModule m, is_scheduled=true, num_partitions=2\nENTRY e {{\n{lines}\n}}\n"
    bandwidth = H100.network_bandwidth if apart else H100.link_bandwidth
    seconds = 2 * 1048576 / (bandwidth * H100.link_share) + H100.hop_latency
    assert timeline(text, topology).seconds == pytest.approx(seconds)


def test_a_program_for_tpus_says_nothing_of_hosts_of_gpus():
    """The coordinates of chips are no hosts, though they may be as many numbers."""
    lines = "x = bf16[1048576] parameter(0)\nROOT y = bf16[1048576] negate(x)"
    text = f"HloModule m, is_scheduled=true, num_partitions=2\nENTRY e {{\n{lines}\n}}\n"
    for coords in (((0, 0), (0, 1)), ((0, 0, 0), (0, 1, 0))):
        program = CompiledProgram(text, "v5e:1x2", {}, {}, coords)
        assert timeline(program, "h100").seconds > 0


def test_what_is_sent_on_a_switch():
    for kind in ("send", "recv"):
        assert sent_on_switch(kind, 80, 80, 2) == 80
    assert sent_on_switch("collective-permute", 80, 80, 8) == 80
    assert sent_on_switch("all-gather", 10, 80, 8) == 70
    assert sent_on_switch("all-reduce", 80, 80, 8) == 140


def test_the_timeline_says_what_it_assumes_and_where_it_stops():
    text = "HloModule m, is_scheduled=true\nENTRY e {\n" + product("bf16") + "\n}\n"
    found = timeline(text, "h100:8")
    assert found.chip == "h100"
    assert "products at 80% of 989.4 TFLOP/s in bfloat16" in found.basis
    assert "NVLink of 450 GB/s and a network of 50 GB/s" in found.basis
    assert "measure the one that you take" in found.preference
    assert found.known_error == "none measured on h100"
    on_tpu = timeline(text, "v5e")
    assert any("this is a program for GPUs" in note for note in on_tpu.notes)


def test_the_hosts_of_a_program_are_those_of_its_places():
    lines = """x = bf16[1048576] parameter(0)
s = (bf16[1048576], bf16[1048576]) collective-permute-start(x), source_target_pairs={{0,1},{1,0}}
ROOT d = bf16[1048576] collective-permute-done(s)"""
    text = f"HloModule m, is_scheduled=true, num_partitions=2\nENTRY e {{\n{lines}\n}}\n"
    program = CompiledProgram(text, "h100:2x1", {}, {}, ((0, 0, 0), (0, 1, 0)))
    apart = timeline(program).seconds
    together = timeline(dataclasses.replace(program, coords=((0, 0, 0), (0, 0, 1)))).seconds
    assert apart - H100.hop_latency == pytest.approx(9 * (together - H100.hop_latency))
    summary = summarize(program)
    assert summary.seconds == pytest.approx(apart)
    waits = [total.amount for row, total in summary.rows.items() if row.startswith("seconds of")]
    assert waits == pytest.approx([apart, apart])  # of the transfer, and of all
