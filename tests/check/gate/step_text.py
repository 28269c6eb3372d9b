"""The text of a small scheduled training step for eight devices, with a loop, for tests without a compiler."""

# ruff: noqa: E501, because an instruction of HLO text is one line

STEP = """HloModule jit_step, is_scheduled=true, num_partitions=8

%add (a: bf16[], b: bf16[]) -> bf16[] {
  %a = bf16[] parameter(0)
  %b = bf16[] parameter(1)
  ROOT %s = bf16[] add(%a, %b)
}

%more (p: (s32[], bf16[1024,1024])) -> pred[] {
  %p = (s32[], bf16[1024,1024]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %n = s32[] constant(4)
  ROOT %lt = pred[] compare(%i, %n), direction=LT
}

%forward (p: (s32[], bf16[1024,1024])) -> (s32[], bf16[1024,1024]) {
  %p = (s32[], bf16[1024,1024]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one)
  %x = bf16[1024,1024]{1,0} get-tuple-element(%p), index=1
  %start = (bf16[1024,1024]{1,0}, bf16[1024,1024]{1,0}, u32[], u32[]) collective-permute-start(%x), \
source_target_pairs={{0,1},{1,2},{2,3},{3,0},{4,5},{5,6},{6,7},{7,4}}, metadata={op_name="jit(step)/jvp()/while/body/permute" \
source_file="/home/me/model.py" source_line=20}
  %work = bf16[1024,1024]{1,0} dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}, \
backend_config={"window_config":{"estimated_cycles":"400000"}}
  %done = bf16[1024,1024]{1,0} collective-permute-done(%start)
  %sum = bf16[1024,1024]{1,0} add(%work, %done)
  %copy = bf16[1024,1024]{1,0} copy(%sum), metadata={op_name="jit(step)/jvp()/while/body/copy" \
source_file="/home/me/model.py" source_line=22}
  ROOT %t = (s32[], bf16[1024,1024]{1,0}) tuple(%next, %copy)
}

ENTRY %main (x: bf16[1024,1024]) -> bf16[1024,1024] {
  %x = bf16[1024,1024]{1,0} parameter(0)
  %zero = s32[] constant(0)
  %t = (s32[], bf16[1024,1024]{1,0}) tuple(%zero, %x)
  %w = (s32[], bf16[1024,1024]{1,0}) while(%t), condition=%more, body=%forward, metadata={op_name="jit(step)/jvp()/while"}
  %y = bf16[1024,1024]{1,0} get-tuple-element(%w), index=1
  ROOT %r = bf16[1024,1024]{1,0} all-reduce(%y), replica_groups={{0,4},{1,5},{2,6},{3,7}}, to_apply=%add, \
metadata={op_name="jit(step)/transpose(jvp())/dot_general" source_file="/home/me/model.py" source_line=30}
}
"""
AXES = {"data": 2, "model": 4}
