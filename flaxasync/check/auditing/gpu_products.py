"""Why a transfer of a ring has no product beside it on a GPU: two things that XLA for GPUs does to
the products of a ring.

* It joins products that share an operand. Those of two blocks of a ring share the weight, and the
  one product of both blocks waits for the later one (`merged-products`).
* It makes what is added to a product the accumulator of the call. A product that is added to what
  arrives waits for it (`accumulates-arrival`).
"""

from collections.abc import Iterable

from flaxasync.check.auditing.findings import Finding, Pair, finding
from flaxasync.check.estimate.costs import Costs
from flaxasync.check.hlo import gpu_calls
from flaxasync.check.hlo.async_operations import AsyncOperation
from flaxasync.check.hlo.module import Instruction
from flaxasync.check.hlo.value_flow import nearest
from flaxasync.check.units import time_text
from flaxasync.hardware import Gpu

_PERMUTE = "collective-permute"
_DONE = "collective-permute-done"
# what may stand between a transfer and the product that reads what arrived
_PASSES = frozenset(
    {"bitcast", "concatenate", "convert", "copy", "fusion", "get-tuple-element", "reshape", "tuple"}
)


def held_up_products(
    costs: Costs,
    pairs: Iterable[tuple[AsyncOperation, Pair]],
    holding: Iterable[tuple[Instruction, Instruction]],
) -> list[Finding]:
    """Returns a finding for each permute without a product beside it for one of these two reasons.

    `holding` are the collectives without a start.
    """
    if not isinstance(costs.chip, Gpu):
        return []
    found = []
    for op, pair in pairs:
        if op.kind == _PERMUTE and not _has_product(costs, pair):
            for window in op.windows:
                found += _cause(costs, op.start, window.done, pair.transfer)
    for _, collective in holding:
        if collective.opcode == _PERMUTE:
            found += _cause(costs, collective, collective, costs.seconds(collective))
    return found


def _has_product(costs: Costs, pair: Pair) -> bool:
    computations = costs.module.computations
    return any(
        _is_product(computations[work.computation].by_name[work.instruction]) for work in pair.work
    )


def _is_product(i: Instruction) -> bool:
    return gpu_calls.product_of(i) is not None or i.contains_matmul


def _cause(costs: Costs, start: Instruction, done: Instruction, transfer: float) -> list[Finding]:
    """Returns what holds up the first product that reads what a permute brings."""
    readers = nearest(done, _is_product, _PASSES, forward=True)
    if not readers:
        return []
    product = min(readers, key=lambda one: one.position)
    gain = min(transfer, costs.seconds(product))
    waits = f"{product.name} waits for {start.name} ({time_text(transfer)})"
    if _reaches(product, done, _accumulated(product)):
        message = f"{waits}, because it is added to what arrives as it computes"
        return [finding("accumulates-arrival", message, start, gain=gain)]
    blocks = _blocks_of(product)
    if done in blocks and len(blocks) > 1:
        message = f"{waits}, because it multiplies {len(blocks)} blocks of the ring at once"
        return [finding("merged-products", message, start, gain=gain)]
    return []


def _accumulated(product: Instruction) -> list[Instruction]:
    """Returns the operands that a product is added to as it computes: one, or none."""
    call = gpu_calls.product_of(product)
    operand = call and gpu_calls.accumulated_operand(call)
    if operand is None:
        return []
    if call is product:
        return [operand]
    # of a fusion, the operands are those of its parameters
    parameters = [operand]
    if operand.opcode != "parameter":
        parameters = nearest(operand, lambda one: one.opcode == "parameter", _PASSES, forward=False)
    numbers = [parameter.parameter_number for parameter in parameters]
    return [product.inputs[number] for number in numbers if number is not None]


def _reaches(product: Instruction, done: Instruction, operands: list[Instruction]) -> bool:
    """Says whether what arrived is, or is made into, one of some operands of a product."""
    return any(
        operand is done or nearest(operand, lambda one: one is done, _PASSES, forward=False)
        for operand in operands
    )


def _blocks_of(product: Instruction) -> list[Instruction]:
    """Returns the blocks of a ring that one operand of a product consists of: what permutes brought,
    and what they send.
    """

    def is_block(one: Instruction) -> bool:
        sent = any(user.opcode.startswith(_PERMUTE) for user in one.users)
        return one.opcode in (_DONE, _PERMUTE) or (sent and one.opcode != _DONE)

    found: list[Instruction] = []
    for operand in product.inputs[:2]:
        if is_block(operand):
            blocks = [operand]
        else:
            blocks = nearest(operand, is_block, _PASSES, forward=False)
        if len(blocks) > len(found):
            found = blocks
    return found
