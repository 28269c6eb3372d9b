"""The audit of a decoder in plain JAX, tensor-parallel and fully sharded, compiled for v5e:4x4.

The decoder asks for the products of two projections in float32 and rounds them after their sum over
the devices, as many do. That is the worst finding, and a test mends it. The expected figures are
computed by hand. A program takes a minute or more to compile on two idle cores.
"""

import dataclasses
import functools

import jax
import pytest

from flaxasync.check import (
    HLO_ONLY,
    CompiledProgram,
    Finding,
    audit,
    compile_for,
    parse,
    timeline,
    topology_mesh,
)
from flaxasync.check.hlo.participants import replica_groups
from flaxasync.hardware import chip
from tests.check.auditing.test_advice import in_memory, on_links
from tests.check.plain_decoder import Decoder, training_step

pytestmark = pytest.mark.slow

CHIP, RING, LAYERS, MIB = chip("v5e"), 4, 4, 2**20
# No finding is about the vocabulary, and the sums of the first decoder have the rows of all its
# sequences, however long each is. So it compiles in a third of the time. The second decoder keeps
# the sequences with which the prediction was made.
WRITTEN = Decoder(vocabulary=2048, batch=32, length=1024, float32_sums=True)
NARROWER = Decoder(
    vocabulary=2048, width=2048, hidden=8192, heads=16, kv_heads=4, float32_sums=True
)


@functools.cache
def compiled(decoder: Decoder) -> CompiledProgram:
    """Compiles the training step with JAX's own promotion of dtypes, on which
    jax.nn.dot_product_attention relies.
    """
    mesh = topology_mesh("v5e:4x4", (4, RING), ("fsdp", "tensor"))
    with jax.set_mesh(mesh), jax.numpy_dtype_promotion("standard"):
        step = training_step(decoder, mesh)
        return compile_for("v5e:4x4", step, *decoder.arguments(mesh), compiler_options=HLO_ONLY)


@pytest.fixture(scope="module")
def written():
    """The time of a fixture does not count as that of a test."""
    return compiled(WRITTEN)


@pytest.fixture(scope="module")
def before_and_after():
    """The step of a narrower decoder as it is written, and mended."""
    return compiled(NARROWER), compiled(dataclasses.replace(NARROWER, float32_sums=False))


def findings(program: CompiledProgram) -> list[Finding]:
    return sorted(audit(program).findings, key=lambda f: -f.gain)


def test_the_estimate_and_the_three_worst_findings(written):
    """All are about the projections whose sums travel in float32, in loops of four layers.

    The first is that type. The second is the sum of 128 MiB over "tensor" that the backward pass
    computes again. The third is a permute of 32 MiB, a quarter of the sum of the down projection,
    with nearly nothing to hide it.
    """
    t = timeline(written)
    assert audit(written).ok
    # The FLOPs of the matmuls at the peak of the chip, with the forward pass of the layers computed
    # twice.
    d = WRITTEN
    per_token = d.width * (2 * d.heads * d.head_size + 2 * d.kv_heads * d.head_size + 3 * d.hidden)
    flops = 2 * d.batch * d.length * (4 * d.layers * per_token + 3 * d.width * d.vocabulary) / 16
    assert t.compute > flops / CHIP.flops
    # the scores of attention, vector work and transfers are the rest
    assert t.seconds < 2.5 * flops / CHIP.flops

    wide, recomputed, permute = findings(written)[:3]
    assert all("plain_decoder.py" in found.source for found in (wide, recomputed, permute))
    assert wide.source == recomputed.source == permute.source

    # In each layer, these take half as long: the sums of the output projection, forward and again
    # (128 MiB each), those of both weight gradients (56 and 16 MiB), and the exposed permute.
    # Traffic and hidden permutes gain the rest.
    assert wide.code == "wide-transfer"
    links = LAYERS * (on_links((2 * 128 + 56 + 16) * MIB) + 32 * MIB / CHIP.link_bandwidth) / 2
    assert links < wide.gain < 1.3 * links

    # The gain of saving it is the time of the sum, less writing and reading a block of 32 MiB
    # twice.
    assert recomputed.code == "synchronous-collective"
    assert "128 MiB" in recomputed.message
    assert "save_only_these_names" in recomputed.remedy
    assert recomputed.gain == pytest.approx(
        LAYERS * (on_links(128 * MIB) - in_memory(4 * 32 * MIB)), rel=0.02
    )
    module = parse(written.as_text())
    instruction = module.computations[recomputed.computation].by_name[recomputed.instruction]
    (groups,) = (replica_groups(i, 16) for i in instruction.inside if i.opcode == "all-reduce")
    assert groups == tuple(tuple(range(n, n + RING)) for n in range(0, 16, RING))

    assert permute.code == "exposed"
    assert "32 MiB" in permute.message
    alone = 32 * MIB / CHIP.link_bandwidth + CHIP.hop_latency
    assert 0.9 * LAYERS * alone < permute.gain < LAYERS * alone


def test_mending_the_worst_finding_gains_what_was_predicted(before_and_after):
    """This decoder was not looked at while the prediction was written. XLA sends its sums in
    another way.
    """
    before, after = before_and_after
    wide = findings(before)[0]
    assert wide.code == "wide-transfer"
    assert "wide-transfer" not in audit(after).codes()
    gain = timeline(before).seconds - timeline(after).seconds
    assert gain == pytest.approx(wide.gain, rel=0.2)
