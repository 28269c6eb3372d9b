"""Tests of which instructions of a step count as matmuls, and so have their colour in the picture of a dry run."""

import types

from train.dry_run.picture import COLOURS, LABELS
from train.dry_run.step_phases import Phases

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
    phases = Phases(types.SimpleNamespace(as_text=lambda: TEXT))
    multiply = [name for name in ("x", "fusion", "flash_attention", "all_gather", "unknown", "add")
                if phases.multiplies(name)]  # fmt: skip
    assert multiply == ["fusion", "flash_attention"]


def test_every_colour_has_a_label():
    assert COLOURS.keys() == LABELS.keys()
