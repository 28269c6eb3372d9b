"""What XLA's compiler for GPUs makes of the layers: every transfer of their rings has a product
beside it, and the audit notices where one has not.

The shapes are those of a layer of llama_8b. benchmarks/gpu.py compiles them; nothing is run.
"""

import functools

import pytest

from benchmarks import gpu
from flaxasync import check, hardware
from flaxasync.check.hlo import gpu_calls
from flaxasync.check.hlo.participants import permute_pairs
from flaxasync.ops.matmul import api, switch
from flaxasync.ops.matmul.products import dot

pytestmark = pytest.mark.slow

OURS = gpu.OURS
# Without this flag, which is off on A100 by default, XLA places no transfer beside work.
SCHEDULER = {hardware.SCHEDULER: True}
ROWS = 4 * 4096
WIDTH = 4096
HIDDEN = 14336
RINGS = [("h100:2", 2), ("h100:4", 4), ("h100:8", 8), ("b200:8", 8), ("a100:4", 4)]


def case(topology, part="MLP", **changes):
    return gpu.Case(topology, part, 4, 4096, **({"backend": "xla"} | changes))


@functools.cache
def compiled(which):
    return gpu.compiled(which, OURS)


@pytest.fixture(autouse=True)
def flags(request, monkeypatch):
    name = request.node.name
    monkeypatch.setitem(gpu.FORMS, OURS, SCHEDULER if "a100" in name else {})


def permutes(program):
    """Returns how many permutes the rings have, and those without a product beside them."""
    module = check.parse(program.text)
    products = {
        i.name for i in module.instructions if gpu_calls.product_of(i) or gpu_calls.is_attention(i)
    }
    report = check.audit(program)
    moving = [pair for pair in report.pairs if pair.kind == "collective-permute"]
    alone = [
        pair.name for pair in moving if products.isdisjoint(work.instruction for work in pair.work)
    ]
    held = [i.name for i in module.instructions if i.opcode == "collective-permute"]
    return len(moving) + len(held), alone + held


@pytest.mark.parametrize("part", ["MLP", "attention"])
@pytest.mark.parametrize(("topology", "ring"), RINGS)
def test_every_permute_of_every_ring_has_a_product_beside_it(topology, ring, part):
    program = compiled(case(topology, part))
    count, alone = permutes(program)
    assert alone == []
    # forward x and sums, backward dy, sums, and x once more: its first hop is that of before
    assert count == 5 * (ring - 1) - 1
    report = check.audit(program)
    assert not report.lost_overlap
    assert report.codes().isdisjoint({"merged-products", "accumulates-arrival", "loop-copies"})


@pytest.mark.parametrize("part", ["MLP", "attention"])
def test_on_two_hosts_each_has_rings_of_its_own(part):
    program = compiled(case("h100:2x8", part, fsdp=2))
    module = check.parse(program.text)
    crossing = [
        i.name
        for i in module.instructions
        if i.opcode.startswith("collective-permute-start")
        and any(source // 8 != target // 8 for source, target in permute_pairs(i))
    ]
    assert crossing == []
    count, alone = permutes(program)
    assert count >= 30
    assert len(alone) <= 1  # nothing can be multiplied before the weights are gathered


@pytest.mark.parametrize("topology", ["h100:2", "h100:8"])
def test_the_products_are_those_of_the_model(topology):
    devices = int(topology.partition(":")[2])
    mlp = 3 * 2 * ROWS * 3 * WIDTH * HIDDEN / devices
    found = check.timeline(compiled(case(topology))).flops
    assert found == pytest.approx(mlp, rel=0.01)
    projections = 3 * 2 * ROWS * WIDTH * (2 * WIDTH + 2 * 1024) / devices
    scores = (2 + 5) * 2 * 4 * 32 * 4096 * 4096 * 128 / 2 / devices
    found = check.timeline(compiled(case(topology, "attention"))).flops
    assert found == pytest.approx(projections + scores, rel=0.01)


def without_barrier(executor, x, w, dtype, *, transposed=False):
    return dot(x, w, executor.precision, transposed=transposed, dtype=dtype)


def without_tie(executor, made, block):
    return made, executor.permute(block, 1)


@pytest.mark.parametrize(
    ("method", "replacement"), [("product", without_barrier), ("beside", without_tie)]
)
def test_a_barrier_that_is_taken_away_is_noticed(method, replacement, monkeypatch):
    monkeypatch.setattr(switch.SwitchExecutor, method, replacement)
    program = gpu.compiled(case("h100:8"), OURS)
    _, alone = permutes(program)
    assert alone
    assert "synchronous-collective" in check.audit(program).codes()


@pytest.mark.parametrize(
    ("topology", "code", "reason"),
    [
        ("h100:8", "merged-products", "blocks of the ring at once"),
        ("h100:4", "accumulates-arrival", "is added to what arrives as it computes"),
    ],
)
def test_what_xla_does_to_the_ring_of_other_devices_is_found(topology, code, reason, monkeypatch):
    faster = check.timeline(compiled(case(topology)))
    monkeypatch.setattr(api, "LARGEST", 1)
    program = gpu.compiled(case(topology), OURS)
    report = check.audit(program)
    found = [f for f in report.findings if f.code == code]
    assert found
    assert reason in found[0].message
    assert "optimization_barrier" in found[0].remedy
    assert found[0].gain > 0
    assert report.lost_overlap
    assert faster.seconds < 0.9 * check.timeline(program).seconds


@pytest.mark.parametrize(
    ("batch", "faster", "exposed"), [((4, 4096), 1.4, 0.25), ((1, 8192), 1.3, 0.35)]
)
def test_a_layer_is_faster_than_with_automatic_sharding(batch, faster, exposed):
    which = gpu.Case("h100:8", "layer", *batch)
    ours = check.timeline(compiled(which))
    others = [check.timeline(gpu.compiled(which, form)) for form in gpu.FORMS if form != OURS]
    best = min(others, key=lambda one: one.seconds)
    assert best.seconds > faster * ours.seconds
    assert ours.exposed < exposed * best.exposed
