"""Recognises a matmul whose operands split the contraction over two axes of the mesh, which
`mesh_matmul` overlaps.

XLA makes three steps of LHS[M_X, K_Y] . RHS[K_X, N]: rows of RHS arrive, a device multiplies, and
an all-reduce sums the products around the mesh row. The rows arrive in one of two ways:

* in a permute by which some devices send to themselves, because they hold the rows that they need
  (X <= Y). No hop of a ring does that;
* in an all-gather around the mesh column, of which a device multiplies a slice (X > Y). The weights
  of fully sharded layers are gathered, too, and multiplied whole.
"""

import functools
import math

from flaxasync.check.estimate.costs import Costs
from flaxasync.check.hlo.module import Instruction
from flaxasync.check.hlo.participants import Groups, groups_in, permute_pairs
from flaxasync.check.hlo.value_flow import nearest

# What may stand between a step and the next one.
_PASSES = frozenset(
    {
        "bitcast",
        "copy",
        "convert",
        "get-tuple-element",
        "reshape",
        "transpose",
        "tuple",
        "all-gather-done",
        "all-reduce-done",
        "collective-permute-done",
        "copy-start",
        "copy-done",
    }
)
_SUMS = ("all-reduce", "all-reduce-start")
_GATHERS = ("all-gather", "all-gather-start")
_PERMUTES = ("collective-permute", "collective-permute-start")
_TYPES = ("bf16", "f32")  # of the kernels of `mesh_matmul`
_COLLECTIVES = frozenset((*_SUMS, *_GATHERS, *_PERMUTES))


def remedy(costs: Costs, step: Instruction, seconds: float) -> tuple[str, float]:
    """Says what does all three steps at once, if a collective that takes so many seconds is the
    first or the last of them, and what a run then gains; "" and 0 if it is not.

    Both transfers can hide behind one matmul, because they use links of different axes.
    """
    matmul = _find(step)
    if matmul is None:
        return "", 0.0
    does = (
        "flaxasync.mesh_matmul in a shard_map, or the layer flaxasync.nn.MeshLinear, does it in one "
        "kernel"
    )
    if "/flaxasync/ops/mesh_matmul.py" in matmul.computation.module.tables:
        does = (
            "backend='overlapped' of flaxasync.mesh_matmul and flaxasync.nn.MeshLinear does it in "
            "one kernel"
        )
    text = (
        f"its operands split the contraction over two mesh axes, and {matmul.name} can hide both "
        f"transfers: {does}"
    )
    return text, min(seconds, costs.seconds(matmul))


def _find(step: Instruction) -> Instruction | None:
    """Returns the matmul of the product that a collective is the first or the last step of; None if
    there is no such product.
    """
    if len(step.computation.opcodes & _COLLECTIVES) < 2:
        return None  # it has a sum and what arrives before it
    if step.opcode in _SUMS:
        for matmul in _nearest(step, forward=False):
            for arrival in _nearest(matmul, forward=False):
                if _arrives_for(arrival, matmul, step):
                    return matmul
    if step.opcode in (*_PERMUTES, *_GATHERS):
        for matmul in _nearest(step, forward=True):
            for sum_ in _nearest(matmul, forward=True):
                if _arrives_for(step, matmul, sum_):
                    return matmul
    return None


def _nearest(step: Instruction, *, forward: bool) -> list[Instruction]:
    """Returns the matmuls and collectives that follow a step, or precede it."""
    return nearest(step, lambda i: i.opcode in _COLLECTIVES or i.contains_matmul, _PASSES, forward)


def _arrives_for(arrival: Instruction, matmul: Instruction, sum_: Instruction) -> bool:
    """Says whether these are the three steps."""
    if sum_.opcode not in _SUMS or not matmul.contains_matmul:
        return False
    if not {leaf.element_type for _, leaf in arrival.shape.leaves() if leaf.dimensions} <= {
        *_TYPES
    }:
        return False
    summed = groups_in(sum_)
    if arrival.opcode in _PERMUTES:
        return _leaves_its_group(permute_pairs(arrival), summed)
    if arrival.opcode not in _GATHERS:
        return False
    return _crosses(groups_in(arrival), summed) and _is_sliced(arrival, matmul)


@functools.lru_cache(64)  # a program repeats few pairs and groups
def _leaves_its_group(pairs: tuple[tuple[int, int], ...], summed: Groups) -> bool:
    """Says whether some devices keep their rows in a permute, and others send them out of the group
    of their sum.
    """
    group_of = _groups_by_device(summed)
    kept = any(source == target for source, target in pairs)
    return kept and any(group_of.get(source) != group_of.get(target) for source, target in pairs)


@functools.lru_cache(64)
def _crosses(gathered: Groups, summed: Groups) -> bool:
    """Says whether all devices that gather from each other are in groups of their own when they
    sum.
    """
    group_of = _groups_by_device(summed)
    return all(
        len({group_of.get(device) for device in group}) == len(group) > 1 for group in gathered
    )


def _groups_by_device(groups: Groups) -> dict[int, int]:
    """Returns the number of the group of each device."""
    return {device: number for number, group in enumerate(groups) for device in group}


def _is_sliced(arrival: Instruction, matmul: Instruction) -> bool:
    """Says whether a matmul takes a slice, at an index of the device, of what has arrived."""
    whole = math.prod(list(arrival.shape.leaves())[-1][1].dimensions)
    return any(
        i.opcode == "dynamic-slice" and math.prod(i.inputs[0].shape.dimensions) == whole
        for i in matmul.nested()
        if i is not matmul
    )
