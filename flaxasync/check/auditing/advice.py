"""What to change about a collective that holds the chip, and the predicted gain.

These changes are known, and the one with the largest predicted gain is advised.
tests/check/auditing/test_remedies.py compiles a program of each with and without it, and the
estimate of the second one is shorter.

* A collective that a backward pass computes again: save its result. The gain is the time of the
  collective and of the work that only it needs, less the traffic of the saved result.
* A collective that feeds matmuls, or that sums the product of one: send blocks around a ring while
  others are multiplied. The gain is the sum of both times, less the time of the ring.
* A collective of a matmul whose operands split the contraction over two mesh axes: `mesh_matmul`,
  in which the matmul hides it. The gain is the shorter of the two times.
* An all-reduce that a backward pass makes of gradients of weights: sum them beside the rest of the
  backward pass. The gain is the shorter of the two times, as for a collective that a SparseCore
  runs beside independent work.

The ring of R devices takes M/R + (R-1) max(C/(R-1), M/R) for a collective of C seconds and matmuls
of M seconds. A ring that gathers a dimension over which a matmul sums makes R partial sums instead
of one product, and writes and reads R-1 of them more. This alone can make it slower than the gather
that it replaces.

XLA's own flags for collective matmuls are not advised, because the same flag shortens one program
and lengthens another: the step of an MLP on v5e:2x4 takes 40.2 ms in a loop over three layers, and
36.6 with xla_tpu_all_gather_collective_matmul_mode=post_spmd; without the loop it takes 33.6, and
41.8 with it.
"""

import dataclasses
import heapq
import math
import re
from collections.abc import Sequence, Set

from flaxasync.check.auditing import mesh_product
from flaxasync.check.auditing.independent_work import IndependentWork
from flaxasync.check.estimate.costs import Costs
from flaxasync.check.hlo.gpu_calls import product_of
from flaxasync.check.hlo.module import Instruction
from flaxasync.check.hlo.shapes import Shape
from flaxasync.check.hlo.value_flow import nearest
from flaxasync.check.units import size_text
from flaxasync.hardware import SCHEDULER, Gpu

# XLA's flags, by what they move to a SparseCore; tests/check/auditing/test_advice.py checks that
# libtpu knows them.
OFFLOAD_FLAGS = {
    "all-gather": "xla_tpu_enable_sparse_core_collective_offload_all_gather=true",
    "reduce-scatter": "xla_tpu_enable_sparse_core_collective_offload_reduce_scatter=true",
    "all-reduce": "xla_tpu_enable_sparse_core_collective_offload_all_reduce=true",
}
# those with SparseCores on which docs/async.md found the flags to work
OFFLOADING_CHIPS = ("v6e", "tpu7x")
_OPS = {
    "all-gather": "all_gather_matmul",
    "reduce-scatter": "matmul_reduce_scatter",
    "all-reduce": "matmul_all_reduce",
}
_PASSES = frozenset(
    {"bitcast", "copy", "convert", "get-tuple-element", "reshape", "transpose", "tuple"}
)
_MOVES = _PASSES | {"parameter"}
_IN_BACKWARD = "transpose("  # in the name of an operation that JAX made of the transpose of another
_WINDOW = re.compile(r"size=([\dx]{1,99})")


@dataclasses.dataclass(frozen=True)
class Advice:
    """What to do, and the seconds that one run of the computation is predicted to gain."""

    text: str
    gain: float


def advise(work: IndependentWork, i: Instruction, collective: Instruction) -> Advice:
    """Returns the advice on a collective that holds the chip, alone or within the fusion `i`."""
    costs = work.costs
    kind = costs.collective_kind(i, collective)
    ways = []
    if kind in _OPS:
        matmuls = nearest(i, _is_matmul, _PASSES, kind == "all-gather", passes=_only_moves)
    else:
        matmuls = []
    if matmuls and kind == "all-reduce" and _IN_BACKWARD in i.op_name:
        ways.append(_sum_gradients_beside(work, i))
    elif matmuls:
        ways.append(_ring(costs, i, kind, matmuls, max(2, costs.group_size(collective))))
    text, gain = mesh_product.remedy(costs, i, costs.seconds(i))
    if text:
        ways.append(Advice(text, gain))
    if "rematted_computation" in i.op_name:
        ways.append(_save(costs, i))
    if not any(way.gain for way in ways) or _offload_flag(costs, kind):
        ways.append(_beside(work, i, kind))
    return max(ways, key=lambda advice: advice.gain)


def _is_matmul(i: Instruction) -> bool:
    return i.contains_matmul or product_of(i) is not None


def _only_moves(i: Instruction) -> bool:
    """Says whether a fusion computes nothing: XLA for GPUs puts a transposition into one."""
    return i.opcode == "fusion" and all(one.opcode in _MOVES for one in i.inside)


def _offload_flag(costs: Costs, kind: str) -> str | None:
    if costs.chip.name in OFFLOADING_CHIPS:
        return OFFLOAD_FLAGS.get(kind)
    return None


def _beside(work: IndependentWork, i: Instruction, kind: str) -> Advice:
    """Advises to run a collective beside work that does not depend on it, where a flag does that:
    on a TPU in a SparseCore, and on a GPU without XLA's scheduler by that.
    """
    chip = work.costs.chip
    flag = _offload_flag(work.costs, kind)
    does = f"the XLA flag {flag} moves it to the SparseCore"
    if isinstance(chip, Gpu) and not chip.schedules:
        flag = SCHEDULER
        does = f"the XLA flag {flag}=true does that, which is off on {chip.name}"
    if flag is None:
        return Advice(f"nothing that is known shortens it on {chip.name} where it is", 0.0)
    free, gain = _hidden(work, i)
    if not free:
        return Advice(f"nothing independent is there to run beside it; {does}", 0.0)
    text = f"run it beside {free[0].name}, on which it does not depend: {does}"
    return Advice(text, gain)


def _sum_gradients_beside(work: IndependentWork, i: Instruction) -> Advice:
    """Advises to sum the gradients of weights beside the backward pass of the other layers."""
    text = (
        "it sums gradients: flaxasync.nn.scan_with_prefetch, in place of nnx.scan over layers, "
        "sums those of each layer beside the backward pass of the others"
    )
    return Advice(text, _hidden(work, i)[1])


def _hidden(work: IndependentWork, i: Instruction) -> tuple[list[Instruction], float]:
    """Returns work beside which a collective could run, and the seconds of it that this hides."""
    seconds = work.costs.seconds(i)
    free = work.beside(i, [i], seconds)
    return [one for _, one in free], min(seconds, sum(s for s, _ in free))


def _ring(
    costs: Costs,
    i: Instruction,
    kind: str,
    matmuls: Sequence[Instruction],
    ring: int,
) -> Advice:
    """Advises to send blocks around a ring while others are multiplied.

    An all-reduce is a reduce-scatter, which the matmul before it can hide, and a gather, which it
    cannot.
    """
    collective = costs.seconds(i)
    product = sum(costs.seconds(m) for m in matmuls)
    if kind == "all-reduce":
        hidden = collective / 2
    else:
        hidden = collective
    overlapped = (
        product / ring
        + (ring - 1) * max(hidden / (ring - 1), product / ring)
        + (collective - hidden)
    )
    gathered = i.attributes.get("dimensions", "").strip("{}")
    if kind == "all-gather" and gathered.isascii() and gathered.isdecimal() and len(gathered) < 4:
        sums = sum(partial_sum_bytes(m, i, int(gathered)) for m in matmuls)
        overlapped += costs.memory_seconds(2 * (ring - 1) * sums)
    names = ", ".join(m.name for m in matmuls)
    if len(matmuls) == 1:
        verb = "multiplies"
    else:
        verb = "multiply"
    text = f"send blocks while {names} {verb} others: {_ways(costs, kind)}"
    return Advice(text, max(0.0, collective + product - overlapped))


def _save(costs: Costs, i: Instruction) -> Advice:
    """Advises to save what a backward pass computes again. What others need, too, does not count as
    gained.
    """
    dead = {i.name}
    # The latest first, so that all users of an instruction have been looked at before it.
    pending = [-made.position for made in i.inputs]
    heapq.heapify(pending)
    while pending:
        earlier = i.computation.instructions[-heapq.heappop(pending)]
        if (
            earlier.name not in dead
            and not earlier.is_root
            and all(user.name in dead for user in earlier.users)
        ):
            dead.add(earlier.name)
            for made in earlier.inputs:
                heapq.heappush(pending, -made.position)
    work = sum(costs.seconds(i.computation.by_name[name]) for name in dead)
    # it is read and written as it is saved, and as it is fetched
    traffic = costs.memory_seconds(4 * i.shape.bytes)
    text = (
        "the backward pass computes it again: name its result, checkpoint_name(y, 'saved') of "
        "jax.ad_checkpoint, and keep it, jax.checkpoint(..., "
        "policy=jax.checkpoint_policies.save_only_these_names('saved')), for "
        f"{size_text(i.shape.bytes)} of memory in each layer"
    )
    return Advice(text, max(0.0, work - traffic))


def _ways(costs: Costs, kind: str) -> str:
    """Says how a collective and a matmul become a ring."""
    if "/flaxasync/ops/" in costs.module.tables or "/flaxasync/nn/" in costs.module.tables:
        return (
            "where flaxasync made it, backend='none' was named or predicted to be faster: "
            "backend='xla' rings"
        )
    if kind == "all-gather":
        return f"flaxasync.{_OPS[kind]} does it where it is the rows that are gathered"
    return f"flaxasync.{_OPS[kind]} does it"


def partial_sum_bytes(matmul: Instruction, made: Instruction, axis: int) -> int:
    """Returns the bytes of the product of a matmul that sums over a dimension of what `made` makes;
    0 for any other.
    """
    names = _same_elements([made], made.shape, _PASSES)
    while matmul.opcode == "fusion":
        computation = matmul.called[0]
        entered = [
            p for n, p in computation.parameters.items() if names & {*matmul.operands[n : n + 1]}
        ]
        names = _same_elements(entered, made.shape)
        inside = [
            i
            for i in computation.instructions
            if i.contains_matmul and not names.isdisjoint(i.operands)
        ]
        if not inside:
            return 0
        matmul = inside[0]
    if _sums_over(matmul, names, made.shape, axis):
        return matmul.shape.bytes
    return 0


def _same_elements(
    holders: Sequence[Instruction], array: Shape, opcodes: Set[str] | None = None
) -> set[str]:
    """Returns the names of what holds an array, and of what is made of it, by opcodes if given, and
    has as many elements.
    """
    found = {i.name for i in holders}
    pending = list(holders)
    while pending:
        for user in pending.pop().users:
            passes = opcodes is None or user.opcode in opcodes
            same = passes and math.prod(user.shape.dimensions) == math.prod(array.dimensions)
            if same and user.name not in found:
                found.add(user.name)
                pending.append(user)
    return found


def _sums_over(product: Instruction, names: set[str], array: Shape, axis: int) -> bool:
    """Says whether a dot or a convolution sums over a dimension; False if reshapes have split or
    merged dimensions.
    """
    number = next((n for n, operand in enumerate(product.operands[:2]) if operand in names), None)
    if number is None or axis >= len(array.dimensions) or array.dimensions[axis] == 1:
        return False
    made = product.inputs[number].shape.dimensions
    # Reshapes that only add and remove dimensions of size one keep the order of the others.
    kept = [n for n, size in enumerate(made) if size != 1]
    if [made[n] for n in kept] != [size for size in array.dimensions if size != 1]:
        return False
    at = kept[sum(size != 1 for size in array.dimensions[:axis])]
    if product.opcode == "dot":
        text = product.attributes.get(
            "rhs_contracting_dims" if number else "lhs_contracting_dims", ""
        )
        return str(at) in re.findall(r"\d+", text)
    sides = product.attributes.get("dim_labels", "").split("->")[0].split("_")
    if len(sides) == 2:
        label = sides[number][at : at + 1]
    else:
        label = ""
    # a dimension along which a window moves: a sum if it covers all of it
    if label.isascii() and label.isdigit():
        window = _WINDOW.search(product.attributes.get("window", ""))
        if window:
            sizes = window[1].split("x")
        else:
            sizes = []
        return int(label) < len(sizes) and sizes[int(label)] == str(made[at])
    return label == ("i" if number else "f")
