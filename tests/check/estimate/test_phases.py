"""Which part of a training step an instruction belongs to, and which instructions count as matmuls."""

from flaxasync.check.estimate.phases import Phases, part_of, phase_of

TEXT = """HloModule step, is_scheduled=true

%fused (p: bf16[128,128]) -> bf16[128,128] {
  %p = bf16[128,128]{1,0} parameter(0)
  ROOT %convolution = bf16[128,128]{1,0} convolution(%p, %p), dim_labels=bf_io->bf
}

ENTRY %main (x: bf16[128,128]) -> bf16[128,128] {
  %x = bf16[128,128]{1,0} parameter(0)
  %fusion = bf16[128,128]{1,0} fusion(%x), kind=kOutput, calls=%fused
  %flash_attention = bf16[128,128]{1,0} custom-call(%fusion), custom_call_target="tpu_custom_call", backend_config={"custom_call_config":{"body":"","cost_estimate":{"flops":"4194304","transcendentals":"0","bytes_accessed":"98304"}}}
  %all_gather = bf16[128,128]{1,0} custom-call(%flash_attention), custom_call_target="tpu_custom_call", backend_config={"custom_call_config":{"body":"","cost_estimate":{"flops":"0","transcendentals":"0","bytes_accessed":"98304"}}}
  %unknown = bf16[128,128]{1,0} custom-call(%all_gather), custom_call_target="tpu_custom_call", backend_config={"custom_call_config":{"body":""}}
  ROOT %add = bf16[128,128]{1,0} add(%unknown, %unknown)
}
"""  # noqa: E501


def test_matmuls_are_fusions_that_contain_one_and_kernels_that_say_so():
    phases = Phases(TEXT)
    names = ("x", "fusion", "flash_attention", "all_gather", "unknown", "add")
    assert [name for name in names if phases.multiplies(name)] == ["fusion", "flash_attention"]


def test_operations_are_named_by_their_paths():
    ring = (
        "jit(_train_step)/transpose(jvp())/while/body/eval_jaxpr/checkpoint/shard_map/all_gather_matmul_dx/window/dot"
    )
    again = ring.replace("checkpoint/", "checkpoint/rematted_computation/")
    attention = "jit(_train_step)/jvp()/while/body/eval_jaxpr/shard_map/ring_attention/dot_general"
    assert (phase_of(ring), part_of(ring)) == ("backward", "all_gather_matmul_dx")
    assert phase_of(again) == "forward again"
    assert (phase_of(attention), part_of(attention)) == ("forward", "ring_attention")
    assert (phase_of("jit(_train_step)/optimizer/mul"), part_of("jit(_train_step)/optimizer/mul")) == ("optimizer", "")
    assert (phase_of(""), part_of("jit(_train_step)/jvp()/shard_map/mul")) == ("", "")
