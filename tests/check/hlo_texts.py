"""Small HLO programs as text, with the examples of XLA's "Async HLO Instructions" proposal as
complete modules.
"""

# ruff: noqa: E501, because an instruction of HLO text is one line

ADD = """%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}
"""
ASYNC_OP = """%async_op (param0: f32[64]) -> f32[32] {
  %param0 = f32[64] parameter(0)
  ROOT %op = f32[32] custom-call(%param0), custom_call_target="foo"
}
"""
TWO_RESULTS = """%async_op (param0: f32[64], param1: f32[64]) -> (f32[32], f32[32]) {
  %param0 = f32[64] parameter(0)
  %param1 = f32[64] parameter(1)
  ROOT %op = (f32[32], f32[32]) custom-call(%param0, %param1), custom_call_target="foo"
}
"""


def module(
    *lines: str, wrapped: str = "", inputs: tuple[str, ...] = ("f32[64]",), partitions: int = 1
) -> str:
    """Returns a scheduled module. Its entry has the parameters operand0, operand1, ... and these
    lines.
    """
    parameters = [f"  %operand{n} = {shape} parameter({n})" for n, shape in enumerate(inputs)]
    body = "\n".join([*parameters, *(f"  {line}" for line in lines)])
    head = f"HloModule m, is_scheduled=true, num_partitions={partitions}"
    return f"{head}\n\n{wrapped}\nENTRY %e {{\n{body}\n}}\n"


def changed(text: str, *changes: tuple[str, str]) -> str:
    """Returns a text with others replaced, each of which it must have."""
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    return text


FUTURE = "((f32[64]), f32[32], s32[])"
START = f"%async-start = {FUTURE} async-start(f32[64] %operand0), calls=%async_op"
DONE = f"ROOT %async-done = f32[32] async-done({FUTURE} %async-start)"
EXAMPLES = {
    "single": module(START, DONE, wrapped=ASYNC_OP),
    "multiple": module(
        "%s = ((f32[64], f32[64]), (f32[32], f32[32]), s32[]) async-start(%operand0, %operand1), "
        "calls=%async_op",
        "ROOT %d = (f32[32], f32[32]) async-done(%s)",
        wrapped=TWO_RESULTS,
        inputs=("f32[64]", "f32[64]"),
    ),
    "updates": module(
        START,
        f"%async-update0 = {FUTURE} async-update({FUTURE} %async-start)",
        f"%async-update1 = {FUTURE} async-update({FUTURE} %async-update0)",
        f"ROOT %async-done = f32[32] async-done({FUTURE} %async-update1)",
        wrapped=ASYNC_OP,
    ),
    "short form": module(
        f'%op-start = {FUTURE} custom-call-start(%operand0), custom_call_target="foo"',
        f"%op-update0 = {FUTURE} custom-call-update({FUTURE} %op-start)",
        f"%op-update1 = {FUTURE} custom-call-update({FUTURE} %op-update0)",
        f"ROOT %op-done = f32[32] custom-call-done({FUTURE} %op-update1)",
    ),
    "custom-call": module(
        f'%cc-start = {FUTURE} custom-call-start(%operand0), custom_call_target="foo"',
        f"%cc-update = {FUTURE} custom-call-update(%cc-start)",
        "ROOT %result = f32[32] custom-call-done(%cc-update)",
    ),
    "late operand": module(
        "%call-start = ((f32[]), (), s32[]) call-start(%operand0), to_apply=%add",
        "%call-update = ((f32[], f32[]), f32[], s32[]) call-update(%call-start, %operand1)",
        "ROOT %result = f32[] call-done(%call-update)",
        wrapped=ADD,
        inputs=("f32[]", "f32[]"),
    ),
    "late output": module(
        "%call-start = ((f32[64]), (), s32[]) call-start(%operand0), to_apply=%async_op",
        f"%call-update = {FUTURE} call-update(%call-start, %operand1)",
        "ROOT %result = f32[32] call-done(%call-update)",
        wrapped=ASYNC_OP,
        inputs=("f32[64]", "f32[32]"),
    ),
    "late output at the done": module(
        "%call-start = ((f32[64]), (), s32[]) call-start(%operand0), to_apply=%async_op",
        "ROOT %result = f32[32] call-done(%call-start)",
        wrapped=ASYNC_OP,
    ),
}
TWO_STEPS = ASYNC_OP.replace(
    "ROOT %op = f32[32] custom-call(%param0)",
    "%more = f32[64] negate(%param0)\n  ROOT %op = f32[32] custom-call(%more)",
)
COPIES = ASYNC_OP.replace(
    'f32[32] custom-call(%param0), custom_call_target="foo"', "f32[64] copy(%param0)"
)
# Texts that break a rule of the proposal, by what docs/check.md says of them.
WRONG = {
    "two dones of one start": module(
        START, "%done.1 = f32[32] async-done(%async-start)", DONE, wrapped=ASYNC_OP
    ),
    "a done that names another opcode": module(
        START, "ROOT %d = f32[32] negate-done(%async-start)", wrapped=ASYNC_OP
    ),
    "a start without a done": module(
        START, "ROOT %r = f32[64] negate(%operand0)", wrapped=ASYNC_OP
    ),
    "a start that the entry returns in a tuple": module(
        START, f"ROOT %t = ({FUTURE}) tuple(%async-start)", wrapped=ASYNC_OP
    ),
    "the done of an array": module("ROOT %async-done = f32[32] async-done(%operand0)"),
    "a first part of another shape than the operand": module(
        START.replace("((f32[64])", "((f32[63])"), DONE, wrapped=ASYNC_OP
    ),
    "a first part that is no tuple": module(
        START.replace("((f32[64])", "(f32[64]"), DONE, wrapped=ASYNC_OP
    ),
    "a second part of another shape than the done": module(
        START.replace("f32[32]", "f32[31]"), DONE, wrapped=ASYNC_OP
    ),
    "no `calls=`": module(START.replace(", calls=%async_op", ""), DONE, wrapped=ASYNC_OP),
    "a computation of two instructions": module(START, DONE, wrapped=TWO_STEPS),
    "a computation that copies": module(
        START.replace("f32[32]", "f32[64]"),
        DONE.replace("f32[32]", "f32[64]"),
        wrapped=COPIES.replace("f32[32]", "f32[64]"),
    ),
    "a computation with a parameter of another shape": module(
        START, DONE, wrapped=ASYNC_OP.replace("f32[64]", "f32[128]")
    ),
}

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
WIDE_SUM = module(
    "%y = f32[2048,4096]{1,0} dot(%operand0, %operand1), lhs_contracting_dims={1}, "
    "rhs_contracting_dims={0}",
    "%r = f32[512,4096]{1,0} reduce-scatter(%y), dimensions={0}, replica_groups=[1,4]<=[4], "
    "to_apply=%add",
    "ROOT %f = (bf16[512,4096]{1,0}, bf16[512,4096]{1,0}) fusion(%r), kind=kLoop, calls=%rounded",
    wrapped=ADD
    + """
%rounded (p: f32[512,4096]) -> (bf16[512,4096], bf16[512,4096]) {
  %p = f32[512,4096]{1,0} parameter(0)
  %c = bf16[512,4096]{1,0} convert(%p)
  %n = bf16[512,4096]{1,0} negate(%c)
  ROOT %t = (bf16[512,4096]{1,0}, bf16[512,4096]{1,0}) tuple(%c, %n)
}
""",
    inputs=("bf16[2048,1024]{1,0}", "bf16[1024,4096]{1,0}"),
    partitions=4,
)

_KERNEL = 'custom_call_target="tpu_custom_call", output_to_operand_aliasing'
_BLOCK = "f32[4096]{0:T(1024)}"
_PAIR = f"(s32[]{{:S(2)}}, {_BLOCK}, {_BLOCK})"


def _sent(n: int, source: str) -> tuple[str, ...]:
    """Returns the start of a kernel pair that sends a buffer: semaphore %s, the source %x, and the
    destination %y.
    """
    return (
        f"%st{n} = {_PAIR} custom-call({source}), {_KERNEL}={{{{1}}: (0, {{}})}}",
        f"%s{n} = s32[]{{:S(2)}} get-tuple-element(%st{n}), index=0",
        f"%x{n} = {_BLOCK} get-tuple-element(%st{n}), index=1",
        f"%y{n} = {_BLOCK} get-tuple-element(%st{n}), index=2",
    )


# A kernel pair that sends one buffer, with work between its start and its done.
KERNELS = module(
    f"%z = {_BLOCK} negate(%operand0)", *_sent(1, "%z"),
    f"%w = {_BLOCK} negate(%x1)",
    f"ROOT %d = {_BLOCK} custom-call(%x1, %y1, %s1), {_KERNEL}={{{{}}: (1, {{}})}}",
    inputs=(_BLOCK,),
)  # fmt: skip
# Two kernel pairs that send the same buffer at the same time.
TWO_SENDS = module(
    f"%z = {_BLOCK} negate(%operand0)",
    *_sent(1, "%z"),
    *_sent(2, "%x1"),
    f"%w = {_BLOCK} negate(%x2)",
    f"%d2 = ({_BLOCK}, {_BLOCK}) custom-call(%x2, %y2, %s2), {_KERNEL}={{{{0}}: (0, {{}}), {{1}}: "
    f"(1, {{}})}}",
    f"%x3 = {_BLOCK} get-tuple-element(%d2), index=0",
    f"ROOT %d = {_BLOCK} custom-call(%x3, %y1, %s1), {_KERNEL}={{{{}}: (1, {{}})}}",
    inputs=(_BLOCK,),
)

# A small training step for eight devices, with a loop. AXES are those of its mesh.
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
