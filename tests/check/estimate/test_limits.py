"""What an audit and a timeline say about programs whose times they do not know."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from flaxasync.check import HLO_ONLY, audit, compile_for, timeline, topology_mesh
from tests.check.hlo_texts import changed, module

# As XLA prints programs for GPUs: a matmul of cuBLAS in a command buffer, beside an all-gather on a stream of its own.
GPU = """HloModule jit_step, is_scheduled=true, num_partitions=4

%command_buffer (a: bf16[4096,4096], b: bf16[4096,4096]) -> bf16[4096,4096] {
  %a = bf16[4096,4096]{1,0} parameter(0)
  %b = bf16[4096,4096]{1,0} parameter(1)
  %gemm = (bf16[4096,4096]{1,0}, s8[4194304]{0}) custom-call(%a, %b), custom_call_target="__cublas$gemm", \
backend_config={"operation_queue_id":"0","force_earliest_schedule":false,"gemm_backend_config":{"alpha_real":1}}
  ROOT %product = bf16[4096,4096]{1,0} get-tuple-element(%gemm), index=0
}

ENTRY %main (x: bf16[1024,4096], w: bf16[4096,4096]) -> (bf16[4096,4096], bf16[4096,4096]) {
  %x = bf16[1024,4096]{1,0} parameter(0)
  %w = bf16[4096,4096]{1,0} parameter(1)
  %start = (bf16[1024,4096]{1,0}, bf16[4096,4096]{1,0}) all-gather-start(%x), replica_groups=[1,4]<=[4], \
dimensions={0}, backend_config={"operation_queue_id":"0","collective_backend_config":{"is_sync":false}}
  %call = bf16[4096,4096]{1,0} call(%w, %w), to_apply=%command_buffer
  %done = bf16[4096,4096]{1,0} all-gather-done(%start)
  ROOT %t = (bf16[4096,4096]{1,0}, bf16[4096,4096]{1,0}) tuple(%done, %call)
}
""".replace("\\\n", "")


def test_a_program_for_gpus():
    """The window is a fact of the text: the command buffer runs while rows are gathered. The times are no GPU's."""
    report = audit(GPU)
    assert report.ok
    assert "empty-window" not in report.codes()
    (pair,) = report.pairs
    assert (pair.kind, [w.instruction for w in pair.work]) == ("all-gather", ["call"])
    for notes in (report.notes, timeline(GPU, "v5e").notes):
        assert "this is a program for GPUs, whose times are not known" in notes[-1]
    call, done = (next(line for line in GPU.splitlines() if f" %{name} =" in line) for name in ("call", "done"))
    swapped = changed(GPU, (f"{call}\n{done}\n", f"{done}\n{call}\n"))
    (found,) = (f for f in audit(swapped).findings if f.code == "empty-window")
    assert "call" in found.message


NOTHING = GPU.replace("__cublas$gemm", "x").replace("operation_queue_id", "y")
# XLA also prints a matmul as a fusion for Triton, of which only the backend_config says so.
TRITON = NOTHING.replace('"gemm_backend_config":{"alpha_real":1}', '"fusion_backend_config":{"kind":"__triton_gemm"}')


@pytest.mark.parametrize(
    ("text", "noted"),
    [
        (GPU.replace("operation_queue_id", "y"), True),
        (GPU.replace("__cublas$gemm", "x"), True),
        (TRITON, True),
        (TRITON.replace("__triton_gemm", "__custom"), False),
        (NOTHING, False),
    ],
    ids=["cublas", "queue", "triton", "other", "nothing"],
)
def test_each_sign_of_a_gpu_is_enough(text, noted):
    assert any("GPU" in note for note in audit(text).notes) == noted


def test_memory_of_the_host():
    mesh = topology_mesh("v5e:2x2", (4,), ("data",))
    on_host = NamedSharding(mesh, P("data"), memory_kind="pinned_host")
    on_device = NamedSharding(mesh, P("data"))
    x = jax.ShapeDtypeStruct((4096, 4096), jnp.float32, sharding=on_host)
    fn = jax.jit(lambda x: jnp.sin(jax.device_put(x, on_device)), out_shardings=on_device)
    report = audit(compile_for("v5e:2x2", fn, x, compiler_options=HLO_ONLY))
    assert report.ok
    assert "1 transfer goes to or from the memory of the host" in " ".join(report.notes)


def test_a_text_without_cycles():
    assert any("no cycle estimates" in note for note in audit(module("ROOT %a = f32[64] negate(%operand0)")).notes)
