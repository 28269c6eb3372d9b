"""The examples of XLA's "Async HLO Instructions" proposal, each as a complete module."""

OP = """%async_op (param0: f32[64]) -> f32[32] {
  %param0 = f32[64] parameter(0)
  ROOT %op = f32[32] custom-call(%param0), custom_call_target="foo"
}
"""
TWO = """%async_op (param0: f32[64], param1: f32[64]) -> (f32[32], f32[32]) {
  %param0 = f32[64] parameter(0)
  %param1 = f32[64] parameter(1)
  ROOT %op = (f32[32], f32[32]) custom-call(%param0, %param1), custom_call_target="foo"
}
"""
FOO = """%foo (p0: f32[], p1: f32[]) -> f32[] {
  %p0 = f32[] parameter(0)
  %p1 = f32[] parameter(1)
  ROOT %add = f32[] add(%p0, %p1)
}
"""


def module(*lines: str, wrapped: str = "", inputs: tuple[str, ...] = ("f32[64]",)) -> str:
    """Returns a scheduled module. Its entry has the parameters operand0, operand1, ... and these lines."""
    parameters = [f"  %operand{n} = {shape} parameter({n})" for n, shape in enumerate(inputs)]
    body = [*parameters, *(f"  {line}" for line in lines)]
    return f"HloModule m, is_scheduled=true\n\n{wrapped}\nENTRY %e {{\n" + "\n".join(body) + "\n}\n"


SINGLE = module(
    "%async-start = ((f32[64]), f32[32], s32[]) async-start(f32[64] %operand0), calls=%async_op",
    "ROOT %async-done = f32[32] async-done(((f32[64]), f32[32], s32[]) %async-start)",
    wrapped=OP,
)
MULTIPLE = module(
    "%async-start = ((f32[64], f32[64]), (f32[32], f32[32]), s32[]) async-start(%operand0, %operand1), calls=%async_op",
    "ROOT %async-done = (f32[32], f32[32]) async-done(%async-start)",
    wrapped=TWO,
    inputs=("f32[64]", "f32[64]"),
)
UPDATES = module(
    "%async-start = ((f32[64]), f32[32], s32[]) async-start(%operand0), calls=%async_op",
    "%async-update0 = ((f32[64]), f32[32], s32[]) async-update(((f32[64]), f32[32], s32[]) %async-start)",
    "%async-update1 = ((f32[64]), f32[32], s32[]) async-update(((f32[64]), f32[32], s32[]) %async-update0)",
    "ROOT %async-done = f32[32] async-done(((f32[64]), f32[32], s32[]) %async-update1)",
    wrapped=OP,
)
SUGAR = module(
    '%cc-start = ((f32[64]), f32[32], s32[]) custom-call-start(%operand0), custom_call_target="foo"',
    "%cc-update = ((f32[64]), f32[32], s32[]) custom-call-update(%cc-start)",
    "ROOT %result = f32[32] custom-call-done(%cc-update)",
)
LATE_OPERAND = module(
    "%call-start = ((f32[]), (), s32[]) call-start(%operand0), to_apply=%foo",
    "%call-update = ((f32[], f32[]), f32[], s32[]) call-update(%call-start, %operand1)",
    "ROOT %result = f32[] call-done(%call-update)",
    wrapped=FOO,
    inputs=("f32[]", "f32[]"),
)
LATE_OUTPUT = module(
    "%call-start = ((f32[64]), (), s32[]) call-start(%operand0), to_apply=%async_op",
    "%call-update = ((f32[64]), f32[32], s32[]) call-update(%call-start, %operand1)",
    "ROOT %result = f32[32] call-done(%call-update)",
    wrapped=OP,
    inputs=("f32[64]", "f32[32]"),
)
LATE_OUTPUT_AT_DONE = module(
    "%call-start = ((f32[64]), (), s32[]) call-start(%operand0), to_apply=%async_op",
    "ROOT %result = f32[32] call-done(%call-start)",
    wrapped=OP,
)
EXAMPLES = {
    "single": SINGLE,
    "multiple": MULTIPLE,
    "updates": UPDATES,
    "sugar": SUGAR,
    "late operand": LATE_OPERAND,
    "late output": LATE_OUTPUT,
    "late output at the done": LATE_OUTPUT_AT_DONE,
}
