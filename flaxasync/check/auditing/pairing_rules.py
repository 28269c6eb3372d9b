"""The rules of XLA's "Async HLO Instructions" proposal (openxla.org/xla/async_ops), each with a code of its own.

`check_async_rules` checks all rules for generic and sugared operations. For first-class pairs it checks the rules that
apply to them: a start has one user and a done. Compilers verify these rules when they build a program, but not
when they read its text.
"""

from flaxasync.check.auditing.findings import Finding, finding
from flaxasync.check.hlo.async_operations import FIRST_CLASS, spelling_of_opcode, step_of_opcode
from flaxasync.check.hlo.module import Computation, HloModule, Instruction
from flaxasync.check.hlo.shapes import Shape

# Opcodes that only regroup values. Beside the wrapped instruction, a wrapped computation may contain these.
_REGROUPING = ("tuple", "get-tuple-element", "bitcast")


def check_async_rules(module: HloModule) -> tuple[Finding, ...]:
    """Returns a finding for every rule that an asynchronous operation of the module breaks."""
    found: list[Finding] = []
    for computation in module.computations.values():
        for instruction in computation.instructions:
            if spelling := spelling_of_opcode(instruction.opcode):
                found += _check_start(module, computation, instruction, spelling)
            elif step_of_opcode(instruction.opcode):
                found += _check_step(module, computation, instruction)
    return tuple(found)


def _check_start(module: HloModule, computation: Computation, start: Instruction, spelling: str) -> list[Finding]:
    found = list(_check_users(module, computation, start))
    if spelling == "first-class":
        return found
    chain = _chain(computation, start)
    found += _check_aliases(module, computation, chain)
    for name in start.called_computations:
        inner = module.computations.get(name)
        if inner is not None and start.opcode == "async-start":
            found += _check_wrapped(module, computation, start, chain, inner)
    return found


def _check_users(module: HloModule, computation: Computation, step: Instruction) -> list[Finding]:
    """Checks that a step has one user, which is an update or the done.

    A tuple, loop, branch or call that passes the future on also counts as such a user.
    """
    users = computation.users.get(step.name, [])
    source = module.source(step)
    if not users:
        if step.is_root:
            return []  # the caller of this computation finishes it
        return [finding("async-unfinished", f"{step.name} has no done", computation.name, step.name, source=source)]
    carried = [u for u in users if u.opcode in ("tuple", "while", "conditional", "call")]
    wrong = [u for u in users if not _continues(step, u) and u not in carried]
    if len(users) > 1 or wrong:
        names = ", ".join(u.name for u in users)
        message = f"{step.name} is used by {names}"
        return [finding("async-one-user", message, computation.name, step.name, source=source)]
    return []


def _continues(step: Instruction, user: Instruction) -> bool:
    """Says whether an instruction is an update or a done of the spelling in which a step is written."""
    if step.opcode in ("send", "recv"):
        return user.opcode == f"{step.opcode}-done"
    stem = step.opcode.removesuffix("-start").removesuffix("-update")
    return user.opcode in (f"{stem}-done", f"{stem}-update")


def _check_step(module: HloModule, computation: Computation, step: Instruction) -> list[Finding]:
    """Checks that an update or a done continues a start, which may reach it through a loop, branch or call."""
    found: list[Finding] = []
    source = module.source(step)
    before = computation.by_name.get(step.operands[0]) if step.operands else None
    carriers = ("get-tuple-element", "parameter", "while", "conditional", "call")
    carried = before is not None and before.shape.is_tuple and before.opcode in carriers
    if before is None or not (carried or _continues(before, step)):
        what = f"{step.name} continues {before.name if before else 'nothing'}"
        found.append(finding("async-no-start", what, computation.name, step.name, source=source))
    if step_of_opcode(step.opcode) == "update":
        found += _check_users(module, computation, step)
    return found


def _chain(computation: Computation, start: Instruction) -> list[Instruction]:
    """Returns the start, the updates and the done that are in one computation."""
    chain, seen = [start], {start.name}
    while True:
        following = [u for u in computation.users.get(chain[-1].name, []) if _continues(chain[-1], u)]
        if not following or following[0].name in seen:
            return chain
        chain.append(following[0])
        seen.add(following[0].name)


def _operand_shapes(computation: Computation, chain: list[Instruction]) -> list[Shape] | None:
    """Returns the shapes of all operands that a chain of steps binds; None if the text does not define them all."""
    shapes: list[Shape] = []
    for step in chain:
        if step_of_opcode(step.opcode) == "done":
            break
        for operand in step.operands[1 if step is not chain[0] else 0 :]:
            made = computation.by_name.get(operand)
            if made is None:
                return None
            shapes.append(made.shape)
    return shapes


def _check_aliases(module: HloModule, computation: Computation, chain: list[Instruction]) -> list[Finding]:
    """Checks that a step begins with its operands, and that the second element of the last one is the done's result."""
    found: list[Finding] = []
    for n, step in enumerate(chain):
        if step_of_opcode(step.opcode) == "done":
            break
        first = step.shape.at((0,))
        bound = _operand_shapes(computation, chain[: n + 1])
        if bound is None:
            continue
        flat = first is not None and not first.is_tuple and len(bound) == 1 and first.same_array(bound[0])
        # An update may bind output buffers late, as further operands. The first element then ends before them.
        prefix = first is not None and first.is_tuple and len(first.elements) <= len(bound) and all(
            a.same_array(b) for a, b in zip(first.elements, bound, strict=False)
        )  # fmt: skip
        shorter = prefix and len(first.elements) < len(bound)  # type: ignore[union-attr]
        if not (flat or prefix) or (shorter and (n == 0 or not _binds_output(chain, n))):
            message = f"{step.name} begins with {first or 'nothing'}, its operands are ({', '.join(map(str, bound))})"
            message = message if len(message) < 300 else f"{step.name} does not begin with the shapes of its operands"
            found.append(
                finding("async-operand-alias", message, computation.name, step.name, source=module.source(step))
            )
    done = chain[-1]
    if step_of_opcode(done.opcode) == "done" and len(chain) > 1:
        result = chain[-2].shape.at((1,))
        late = result is not None and result.is_tuple and not result.elements
        if result is None or not (late or result.same_array(done.shape)):
            message = f"{chain[-2].name} holds {result or 'nothing'}, {done.name} returns {done.shape}"
            found.append(
                finding("async-result-alias", message, computation.name, done.name, source=module.source(done))
            )
    return found


def _binds_output(chain: list[Instruction], n: int) -> bool:
    """Says whether the second element is empty in the first step and holds a result in step n."""
    results = [step.shape.at((1,)) for step in chain[: n + 1]]
    first, last = results[0], results[-1]
    return first is not None and first.is_tuple and not first.elements and last is not None and last != first


def _check_wrapped(
    module: HloModule, computation: Computation, start: Instruction, chain: list[Instruction], inner: Computation
) -> list[Finding]:
    """Checks that an async-start wraps one instruction, and that the wrapped shapes are those of start and done."""
    found: list[Finding] = []
    source = module.source(start)
    work = [i for i in inner.instructions if i.opcode != "parameter" and i.opcode not in _REGROUPING]
    root = inner.root
    if len(work) != 1 and root is not None:
        message = f"{start.name} wraps {inner.name}, which holds {len(work)} instructions"
        found.append(finding("async-wrapped-one", message, computation.name, start.name, source=source))
    for i in work:
        if i.opcode in FIRST_CLASS and inner.execution_thread == "main":
            message = f"{start.name} wraps {i.name}, a {i.opcode}"
            found.append(finding("async-wrapped-first-class", message, computation.name, start.name, source=source))
    bound = _operand_shapes(computation, chain)
    declared = [inner.parameters[n].shape for n in sorted(inner.parameters)]
    late = bound is not None and len(bound) < len(declared)
    if bound is not None and not late:
        agree = all(a.same_array(b) for a, b in zip(declared, bound, strict=False))
        if not agree or (len(bound) > len(declared) and not _binds_output(chain, len(chain) - 1)):
            message = f"{start.name} and the parameters of {inner.name} differ"
            found.append(finding("async-shape", message, computation.name, start.name, source=source))
    elif late and step_of_opcode(chain[-1].opcode) == "done":
        message = f"{start.name} binds {len(bound or [])} of the {len(declared)} parameters of {inner.name}"
        found.append(finding("async-shape", message, computation.name, start.name, source=source))
    done = chain[-1]
    if step_of_opcode(done.opcode) == "done" and root is not None and not root.shape.same_array(done.shape):
        message = f"{inner.name} makes {root.shape}, {done.name} returns {done.shape}"
        found.append(finding("async-shape", message, computation.name, start.name, source=source))
    return found
