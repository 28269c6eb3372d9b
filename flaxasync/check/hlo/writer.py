"""`format_module`, which writes a module as HLO text."""

from typing import Literal

from flaxasync.check.hlo.async_forms import to_short
from flaxasync.check.hlo.module import Computation, HloModule, Instruction


def format_module(module: HloModule, form: Literal["generic", "short"] = "generic") -> str:
    """Returns the HLO text of a module, which `parse` reads back to an equal module, and jaxlib's
    parser accepts.

    Args:
      module: The module.
      form: How asynchronous operations are written: "generic" as async-start, async-update and
        async-done; "short" as custom-call-start and the like, without a computation for what is
        wrapped, where that can be written so.
    """
    if form not in ("generic", "short"):
        raise ValueError(f"form must be 'generic' or 'short': got {form!r}")
    written = module
    if form == "short":
        written = to_short(module)
    attributes = "".join(f", {key}={value}" for key, value in written.attributes.items())
    blocks = [f"HloModule {written.name}{attributes}"]
    if written.tables:
        blocks.append(written.tables)
    blocks += [_format_computation(computation) for computation in written.computations.values()]
    return "\n\n".join(blocks) + "\n"


def _format_computation(computation: Computation) -> str:
    parameters = [computation.parameters[n] for n in sorted(computation.parameters)]
    signature = ", ".join(f"{p.name}: {p.shape.without_layout()}" for p in parameters)
    result = computation.root.shape.without_layout()
    entry = "ENTRY " if computation.is_entry else ""
    head = f"{entry}%{computation.name} ({signature}) -> {result} {{"
    lines = [head, *(f"  {_format_instruction(i)}" for i in computation.instructions)]
    thread = computation.execution_thread
    lines.append("}" if thread == "main" else f'}}, execution_thread="{thread}"')
    return "\n".join(lines)


def _format_instruction(instruction: Instruction) -> str:
    inside = instruction.literal or ", ".join(f"%{operand}" for operand in instruction.operands)
    attributes = "".join(f", {key}={value}" for key, value in instruction.attributes.items())
    root = "ROOT " if instruction.is_root else ""
    return (
        f"{root}%{instruction.name} = {instruction.shape} "
        f"{instruction.opcode}({inside}){attributes}"
    )
