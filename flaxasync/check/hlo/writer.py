"""Writes a module as HLO text.

`parse` reads the text back to an equal module, and jaxlib's own parser accepts it.
"""

from flaxasync.check.hlo.module import Computation, HloModule, Instruction


def format_module(module: HloModule) -> str:
    """Returns the text of a module."""
    attributes = "".join(f", {key}={value}" for key, value in module.attributes.items())
    blocks = [f"HloModule {module.name}{attributes}"]
    if module.tables:
        blocks.append(module.tables)
    blocks += [_format_computation(computation) for computation in module.computations.values()]
    return "\n\n".join(blocks) + "\n"


def _format_computation(computation: Computation) -> str:
    """Returns the text of one computation: its signature, its instructions and its execution thread."""
    parameters = [computation.parameters[n] for n in sorted(computation.parameters)]
    signature = ", ".join(f"{p.name}: {p.shape.without_layout()}" for p in parameters)
    root = computation.root
    result = root.shape.without_layout() if root is not None else "()"
    head = f"{'ENTRY ' if computation.is_entry else ''}%{computation.name} ({signature}) -> {result} {{"
    lines = [head, *(f"  {_format_instruction(i)}" for i in computation.instructions)]
    thread = computation.execution_thread
    lines.append("}" if thread == "main" else f'}}, execution_thread="{thread}"')
    return "\n".join(lines)


def _format_instruction(instruction: Instruction) -> str:
    """Returns the line of one instruction: its name, shape, opcode, operands and attributes."""
    inside = instruction.literal or ", ".join(f"%{operand}" for operand in instruction.operands)
    attributes = "".join(f", {key}={value}" for key, value in instruction.attributes.items())
    root = "ROOT " if instruction.is_root else ""
    return f"{root}%{instruction.name} = {instruction.shape} {instruction.opcode}({inside}){attributes}"
