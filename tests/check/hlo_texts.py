"""Small HLO programs, as text, that several tests change in one place."""

from tests.check import proposal

# A loop that counts 0, 3, 6, 9 and carries one array.
LOOP = """HloModule m, is_scheduled=true

%cond (p: (s32[], f32[65536])) -> pred[] {
  %p = (s32[], f32[65536]{0}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %n = s32[] constant(12)
  ROOT %lt = pred[] compare(%i, %n), direction=LT
}

%body (p: (s32[], f32[65536])) -> (s32[], f32[65536]) {
  %p = (s32[], f32[65536]{0}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %one = s32[] constant(3)
  %next = s32[] add(%i, %one)
  %g = f32[65536]{0} get-tuple-element(%p), index=1
  %c = f32[65536]{0} negate(%g)
  ROOT %t = (s32[], f32[65536]{0}) tuple(%next, %c)
}

ENTRY %e (x: f32[65536]) -> f32[65536] {
  %x = f32[65536]{0} parameter(0)
  %zero = s32[] constant(0)
  %t = (s32[], f32[65536]{0}) tuple(%zero, %x)
  %w = (s32[], f32[65536]{0}) while(%t), condition=%cond, body=%body
  ROOT %r = f32[65536]{0} get-tuple-element(%w), index=1
}
"""

# A product in float32 whose sum over four devices is rounded by the fusion that follows.
WIDE_SUM = """HloModule m, is_scheduled=true, num_partitions=4

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %s = f32[] add(%a, %b)
}

%rounded (p: f32[512,4096]) -> (bf16[512,4096], bf16[512,4096]) {
  %p = f32[512,4096]{1,0} parameter(0)
  %c = bf16[512,4096]{1,0} convert(%p)
  %n = bf16[512,4096]{1,0} negate(%c)
  ROOT %t = (bf16[512,4096]{1,0}, bf16[512,4096]{1,0}) tuple(%c, %n)
}

ENTRY %e {
  %x = bf16[2048,1024]{1,0} parameter(0)
  %w = bf16[1024,4096]{1,0} parameter(1)
  %y = f32[2048,4096]{1,0} dot(%x, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %r = f32[512,4096]{1,0} reduce-scatter(%y), dimensions={0}, replica_groups=[1,4]<=[4], to_apply=%add
  ROOT %f = (bf16[512,4096]{1,0}, bf16[512,4096]{1,0}) fusion(%r), kind=kLoop, calls=%rounded
}
"""

# A kernel pair that sends one buffer, with work between its start and its done.
KERNELS = proposal.module(
    "%z = f32[4096]{0:T(1024)} negate(%operand0)",
    "%st = (s32[]{:S(2)}, f32[4096]{0:T(1024)}, f32[4096]{0:T(1024)}) custom-call(%z), "
    'custom_call_target="tpu_custom_call", output_to_operand_aliasing={{1}: (0, {})}',
    "%s = s32[]{:S(2)} get-tuple-element(%st), index=0",
    "%x2 = f32[4096]{0:T(1024)} get-tuple-element(%st), index=1",
    "%y = f32[4096]{0:T(1024)} get-tuple-element(%st), index=2",
    "%w = f32[4096]{0:T(1024)} negate(%x2)",
    "ROOT %d = f32[4096]{0:T(1024)} custom-call(%x2, %y, %s), "
    'custom_call_target="tpu_custom_call", output_to_operand_aliasing={{}: (1, {})}',
    inputs=("f32[4096]{0:T(1024)}",),
)

# Two kernel pairs that send the same buffer at the same time.
TWO_SENDS = proposal.module(
    "%z = f32[4096]{0} negate(%operand0)",
    "%st = (s32[]{:S(2)}, f32[4096]{0}, f32[4096]{0}) custom-call(%z), "
    'custom_call_target="tpu_custom_call", output_to_operand_aliasing={{1}: (0, {})}',
    "%s = s32[]{:S(2)} get-tuple-element(%st), index=0",
    "%x2 = f32[4096]{0} get-tuple-element(%st), index=1",
    "%y = f32[4096]{0} get-tuple-element(%st), index=2",
    "%st2 = (s32[]{:S(2)}, f32[4096]{0}, f32[4096]{0}) custom-call(%x2), "
    'custom_call_target="tpu_custom_call", output_to_operand_aliasing={{1}: (0, {})}, second={}',
    "%s2 = s32[]{:S(2)} get-tuple-element(%st2), index=0",
    "%x3 = f32[4096]{0} get-tuple-element(%st2), index=1",
    "%y2 = f32[4096]{0} get-tuple-element(%st2), index=2",
    "%w = f32[4096]{0} negate(%x3)",
    "%d2 = (f32[4096]{0}, f32[4096]{0}) custom-call(%x3, %y2, %s2), "
    'custom_call_target="tpu_custom_call", output_to_operand_aliasing={{0}: (0, {}), {1}: (1, {})}',
    "%x4 = f32[4096]{0} get-tuple-element(%d2), index=0",
    "ROOT %d = f32[4096]{0} custom-call(%x4, %y, %s), "
    'custom_call_target="tpu_custom_call", output_to_operand_aliasing={{}: (1, {})}',
    inputs=("f32[4096]{0}",),
)
